"""Which norms whole models have, who reads them, and which can go, told from one traced forward on an example."""

import copy

import pytest
import torch
import transformers
from torch import nn

import tapernorm as tn
from sites import by_name, refusals
from tapernorm.sites import default_example, find_sites
from zoo import IDS, REMOVABLE, ROWS, D, Toy, X, assert_same, snapshot

ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
SHAPE = {"vocab_size": D, "hidden_size": D, "intermediate_size": D, "num_hidden_layers": 1, "num_attention_heads": 2}


# Whole models


@ROW
def test_names_roles_and_readers_in_the_order_of_execution(row):
    sites = find_sites(row.build())
    assert {site.name: site.consumers for site in sites} == row.sites
    assert [site.name for site in sites] == list(row.sites)
    assert {site.name: site.role for site in sites} == {
        name: "final" if name == row.final else "internal" for name in row.sites
    }
    for site in sites:
        assert (site.kind, site.removable, site.reason, site.width) == (row.kind, True, "", D)
        assert (site.zero_centered, site.eps) == (False, 1e-6 if row.kind == "rms" else 1e-5)
        assert isinstance(site.consumers, tuple)


@ROW
def test_axes_and_biases(row):
    model = row.build()
    for site in find_sites(model):
        for link in site.links:
            owner = model.get_submodule(link.owner)
            assert getattr(owner, link.weight.rpartition(".")[2]) is model.get_parameter(link.weight)
            assert link.axis == (1 if isinstance(owner, nn.Linear) else 0)
            assert link.bias == (f"{link.owner}.bias" if owner.bias is not None else None)


@ROW
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(row, training):
    model = row.build().train(training)
    next(model.children()).eval()  # a mixture of flags
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    before, state = snapshot(model), torch.get_rng_state()
    find_sites(model)
    assert_same(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@ROW
def test_a_failing_forward_leaves_the_model_as_it_was(row):
    model = row.build().train()
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError)):
        find_sites(model, {"nonsense": 1})
    assert_same(before, snapshot(model))


@ROW
def test_a_model_on_meta(row):
    model = row.build()
    wanted = find_sites(model)
    assert find_sites(model.to("meta")) == wanted


@ROW
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_does_not_matter(row, dtype):
    model = row.build()
    assert find_sites(copy.deepcopy(model).to(dtype)) == find_sites(model)


@ROW
def test_a_tapered_model_has_the_same_sites(row):
    model = row.build()
    wanted = find_sites(model)
    tn.taper_(model, tn.TaperConfig(arm="all"))
    for gate in (1.0, 0.5, 0.0):
        for name in row.sites:
            model.get_submodule(name).set_gate(gate)
        assert find_sites(model) == wanted


@ROW
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_kind_of_attention_does_not_matter(row, attention):
    assert len(refusals(row.build(attn_implementation=attention))) == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_bare_backbone_keeps_its_final_norm(family):
    row = next(row for row in ROWS if row.name == family)
    model = row.build().base_model
    sites = find_sites(model)
    assert [site.role for site in sites] == ["internal"] * 4 + ["final"]
    assert {site.name: site.reason for site in sites if site.reason} == {
        row.final.partition(".")[2]: "its output is an output of the model"
    }


def test_hidden_states_as_outputs():
    model = ROWS[0].build(output_hidden_states=True)
    sites = by_name(model)
    assert sites["model.norm"].reason == "its output is an output of the model"
    assert sites["model.layers.0.input_layernorm"].removable


def test_a_classifier_has_a_final_norm():
    config = transformers.LlamaConfig(**SHAPE, num_labels=3, pad_token_id=0)
    sites = by_name(transformers.LlamaForSequenceClassification(config))
    assert (sites["model.norm"].role, sites["model.norm"].consumers) == ("final", ("score.weight",))
    assert sites["model.norm"].removable


@pytest.mark.parametrize("kind", [transformers.BertModel, transformers.BertForMaskedLM], ids=lambda kind: kind.__name__)
def test_a_post_norm_model_is_refused(kind):
    sites = by_name(kind(transformers.BertConfig(**SHAPE, max_position_embeddings=32)))
    assert len(sites) >= 3
    assert not [name for name, site in sites.items() if site.removable]
    assert all(site.reason for site in sites.values())
    attention = next(site for name, site in sites.items() if name.endswith("attention.output.LayerNorm"))
    assert attention.role == "post"
    assert next(site for name, site in sites.items() if name.endswith("embeddings.LayerNorm")).role == "embedding"
    with pytest.raises(ValueError, match="none of the model's"):
        tn.taper_(kind(transformers.BertConfig(**SHAPE, max_position_embeddings=32)))


def test_qk_norms_and_gains_with_one_added():
    config = transformers.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=D // 2)
    sites = by_name(transformers.Qwen3ForCausalLM(config))
    for name in ("q_norm", "k_norm"):
        site = sites[f"model.layers.0.self_attn.{name}"]
        assert (site.role, site.removable) == ("qk", False)
        assert site.reason
    assert sites["model.layers.0.input_layernorm"].removable
    config = transformers.Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=D // 2)
    sites = by_name(transformers.Gemma2ForCausalLM(config))
    assert all(site.zero_centered for site in sites.values())
    roles = {name.rpartition(".")[2]: (site.role, site.removable) for name, site in sites.items()}
    assert roles == {
        "input_layernorm": ("internal", True),
        "post_attention_layernorm": ("post", False),
        "pre_feedforward_layernorm": ("internal", True),
        "post_feedforward_layernorm": ("post", False),
        "norm": ("final", True),
    }


# Examples


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, scale=None):
        return x + self.down(self.up(self.norm(x)).relu()) * scale


@pytest.mark.parametrize(
    "example",
    [{"x": X, "scale": 2}, {"scale": X, "x": X}, (X, 2.0), (X, X)],
    ids=["mapping", "named", "tuple", "tensors"],
)
def test_examples(example):
    (site,) = find_sites(TwoInputs(), example)
    assert (site.name, site.removable) == ("norm", True)


def test_an_example_of_one_tensor():
    (site,) = find_sites(Toy(REMOVABLE["linear"][0]), X)
    assert site.removable
    (site,) = find_sites(Toy(REMOVABLE["linear"][0]), X[0])
    assert site.removable


def test_an_example_that_is_missing():
    with pytest.raises(ValueError, match="TwoInputs does not say what inputs it takes; pass example="):
        find_sites(TwoInputs())


@ROW
def test_the_default_example_is_that_of_the_model(row):
    model = row.build()
    state = torch.get_rng_state()
    example = default_example(model, batch=2, length=7)
    assert example["input_ids"].shape == (2, 7)
    assert 0 <= example["input_ids"].min() <= example["input_ids"].max() < D
    assert torch.equal(example["input_ids"], default_example(model, batch=2, length=7)["input_ids"])
    assert torch.equal(torch.get_rng_state(), state)
    assert default_example(model.to("meta"))["input_ids"].is_meta
    assert find_sites(row.build(), {"input_ids": IDS}) == find_sites(row.build())


def test_the_default_example_fits_a_short_context():
    row = next(row for row in ROWS if row.name == "gpt2")
    assert default_example(row.build(n_positions=3))["input_ids"].shape == (1, 3)
    assert len(find_sites(row.build(n_positions=3))) == len(row.sites)
