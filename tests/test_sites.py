"""Which norms there are, who reads them, and which can go, told from one traced forward."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import tapernorm as tn
from tapernorm.sites import default_example, find_sites
from zoo import (
    IDS,
    REFUSED,
    REFUSED_SQUARE,
    REMOVABLE,
    ROWS,
    SQUARE,
    D,
    PlainNorm,
    Quark,
    Toy,
    X,
    assert_same,
    snapshot,
)

ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
SHAPE = {"vocab_size": D, "hidden_size": D, "intermediate_size": D, "num_hidden_layers": 1, "num_attention_heads": 2}


def by_name(model, example=None):
    return {site.name: site for site in find_sites(model, example)}


def refusals(model, example=None):
    return {name: site.reason for name, site in by_name(model, example).items() if not site.removable}


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


# Hand-made modules


@pytest.mark.parametrize("name", REMOVABLE)
def test_linear_readers_are_followed(name):
    function, readers = REMOVABLE[name]
    sites = find_sites(Toy(function), X)
    assert [(site.name, site.reason, site.consumers) for site in sites] == [("norm", "", readers)]
    assert (sites[0].role, sites[0].removable) == ("internal", True)


@pytest.mark.parametrize("name", REFUSED)
def test_other_readers_are_refused(name):
    function, reason = REFUSED[name]
    found = refusals(Toy(function), X)
    assert "norm" in found
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found["norm"])


@pytest.mark.parametrize("name", REFUSED_SQUARE)
def test_a_transpose_of_a_square_is_seen(name):
    function, reason = REFUSED_SQUARE[name]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refusals(Toy(function), SQUARE).get("norm"))


def test_the_reason_says_where():
    class Strange(nn.Module):
        def forward(self, x):
            return x.sin()

    model = Toy(lambda m, x: x + m.strange(m.norm(x)))
    model.strange = Strange()
    assert refusals(model, X) == {"norm": "its output is also read by sin in strange (Strange)"}


@pytest.mark.parametrize("kind", [PlainNorm, Quark])
def test_the_name_of_the_class_does_not_matter(kind):
    (site,) = find_sites(Toy(REMOVABLE["linear"][0], norm=kind), X)
    assert (site.kind, site.eps, site.removable) == ("rms", pytest.approx(1e-5), True)


def test_a_class_called_norm_that_is_none():
    class CubeNorm(nn.Module):
        def __init__(self, width):
            super().__init__()

        def forward(self, x):
            return x**3

    (site,) = find_sites(Toy(REMOVABLE["linear"][0], norm=CubeNorm), X)
    assert (site.kind, site.removable) == ("unknown", False)
    assert site.reason == "what it computes (CubeNorm) is neither an RMS norm nor a layer norm"


def test_norms_inside_a_container_that_is_called_norm():
    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fn = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

        def forward(self, x):
            return self.fn(self.norm(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = PreNorm()

        def forward(self, x):
            return x + self.block(x)

    (site,) = find_sites(Net(), X)
    assert (site.name, site.consumers, site.removable) == ("block.norm", ("block.fn.0.weight",), True)


def test_a_model_without_norms():
    model = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))
    assert find_sites(model, X) == []
    with pytest.raises(ValueError, match="no normalization layers"):
        tn.taper_(model, example=X)


def test_two_modules_that_share_a_weight():
    model = Toy(lambda m, x: x + m.down((m.up(m.norm(x)) + m.head(m.norm.weight * x)).relu()))
    model.head.weight = model.up.weight
    assert "up.weight" in refusals(model, X)["norm"]
    model = Toy(REMOVABLE["linear"][0])
    model.unused = nn.Linear(D, D)
    model.unused.weight = model.up.weight
    assert refusals(model, X)["norm"] in (
        "up.weight is shared with unused.weight",
        "unused.weight is shared with up.weight",
    )


def test_a_norm_that_is_registered_twice():
    model = Toy(lambda m, x: x + m.up(m.norm(x)).relu() + m.head(m.other(x)).relu())
    model.other = model.norm
    assert "runs 2 times" in refusals(model, X)["norm"]


def test_quantized_weights_are_refused():
    class Int8(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-9, 9, (D, D), dtype=torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(D, 1))

        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype) * self.scale)

    model = Toy(REMOVABLE["linear"][0])
    model.up = Int8()
    assert "whose weight is not a parameter" in refusals(model, X)["norm"]
    Int8.forward = lambda self, x: F.linear(x, self.weight.to(x.dtype)) * self.scale.T
    assert "whose weight is quantized (torch.int8)" in refusals(model, X)["norm"]


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_parametrized_weights_are_refused(wrap):
    model = Toy(REMOVABLE["linear"][0])
    wrap(model.up)
    assert "whose weight is not a parameter" in refusals(model, X)["norm"]


def test_a_bias_that_has_nowhere_to_go():
    """A LayerNorm's bias becomes a bias of its readers; a bare matrix cannot be given one. Known before training."""
    model = Toy(lambda m, x: x + m.down((m.norm(x) @ m.matrix).relu()))
    assert "matrix" in refusals(model, X)["norm"]
    assert "bias" in refusals(model, X)["norm"]
    model = Toy(model.function, norm=PlainNorm)
    assert refusals(model, X) == {}


def test_a_bias_that_two_maps_share():
    model = Toy(lambda m, x: x + m.down((m.up(m.norm(x)) + m.head(x)).relu()))
    model.head.bias = model.up.bias
    assert "up.bias" in refusals(model, X)["norm"]


def test_the_final_norm_of_a_hand_made_model():
    """Known by where its readers' outputs go, for a model that does not say which its head is."""
    model = Toy(lambda m, x: m.head(m.other(x + m.down(m.up(m.norm(x)).relu()))))
    assert [(site.name, site.role) for site in find_sites(model, X)] == [("norm", "internal"), ("other", "final")]
    model = Toy(lambda m, x: {"logits": m.head(m.other(x + m.down(m.up(m.norm(x)).relu()))[:, -1]).float()[..., :3]})
    assert [(site.name, site.role) for site in find_sites(model, X)] == [("norm", "internal"), ("other", "final")]


def test_no_internal_norm_is_final_because_a_value_is_put_out():
    model = Toy(lambda m, x: (x + m.down((m.up(y := m.norm(x)) * (v := m.conv(y))).relu()), v))
    assert [(site.name, site.role) for site in find_sites(model, X)] == [("norm", "internal")]


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


# Readers that one forward may not show


class Experts(nn.Module):
    """A list of linear maps, of which a token takes one."""

    def __init__(self, container=nn.ModuleList):
        super().__init__()
        torch.manual_seed(0)
        self.norm = PlainNorm(D)
        maps = [nn.Linear(D, D) for _ in range(3)]
        self.experts = container({str(i): m for i, m in enumerate(maps)} if container is nn.ModuleDict else maps)
        self.down = nn.Linear(D, D)

    def forward(self, x, which=(0, 1)):
        y = self.norm(x)
        items = list(self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts)
        return x + self.down(torch.stack([items[i](y) for i in which]).sum(0).relu())


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_an_expert_that_did_not_run(container):
    (site,) = find_sites(Experts(container), {"x": X})
    assert not site.removable
    assert site.reason == ("experts.2 did not run on the example, and may read it too: pass an example that reaches it")
    (site,) = find_sites(Experts(container), {"x": X, "which": (2, 0, 1)})
    assert site.removable
    assert len(site.consumers) == 3


def test_unknown_readers_are_refused_by_their_type():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, D))

        def forward(self, x):
            return torch.fft.rfft(x @ self.weight).real

    model = Toy(lambda m, x: x.sum() + m.spectral(m.norm(x)).sum())
    model.spectral = Spectral()
    assert "matmul" not in refusals(model, X)["norm"]  # it has a bias, for which there is no place
    assert "spectral.weight (Spectral) has none that could take it up" in refusals(model, X)["norm"]
    model = Toy(lambda m, x: x + m.conv1(m.norm(x).mT).mT)
    model.conv1 = nn.Conv1d(D, D, 1)
    assert "takes the features apart" in refusals(model, X)["norm"]
    model = Toy(lambda m, x: x + m.bilinear(m.norm(x), x))
    model.bilinear = nn.Bilinear(D, D, D)
    assert "bilinear in bilinear (Bilinear)" in refusals(model, X)["norm"]


def test_a_stack_of_experts():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.weight = PlainNorm(D), nn.Parameter(torch.randn(3, D, D))
            self.down = nn.Linear(D, D)

        def forward(self, x):
            y = self.norm(x).flatten(0, 1)
            return x + self.down(self.read(y).relu()).view_as(x)

    ways = {
        "loop": (lambda m, y: sum(F.linear(y, m.weight[i]) for i in range(3)), 2),
        "loop-transposed": (lambda m, y: sum(y @ m.weight[torch.tensor(i)] for i in range(3)), 1),
        "unbound": (lambda m, y: sum(y @ w.mT for w in m.weight.unbind(0)), 2),
        "batched": (lambda m, y: torch.bmm(y.unsqueeze(0).expand(3, -1, -1), m.weight).sum(0), 1),
        "batched-transposed": (lambda m, y: (y.unsqueeze(0) @ m.weight.transpose(1, 2)).sum(0), 2),
        "chosen": (lambda m, y: torch.bmm(m.weight[torch.arange(len(y)) % 3], y.unsqueeze(-1)).squeeze(-1), 2),
    }
    for name, (read, axis) in ways.items():
        model = Stack()
        model.read = lambda y, read=read, model=model: read(model, y)
        (site,) = find_sites(model, X)
        assert (site.reason, [link.axis for link in site.links]) == ("", [axis]), name
    model.read = lambda y: torch.bmm(model.weight[:1], y.unsqueeze(-1)[:1]).squeeze(-1) * y
    assert find_sites(model, X)[0].reason


def test_a_number_on_the_way():
    """T5 scales the last norm's output down before its head."""
    model = Toy(lambda m, x: x + m.down(m.up(m.norm(x) * 0.5 / 3).relu()))
    (site,) = find_sites(model, X)
    assert site.removable and site.links[0].factor == pytest.approx(0.5 / 3)
    model = Toy(lambda m, x: x + m.down((m.up(y := m.norm(x)) + m.up(2 * y)).relu()))
    assert "reads it in two ways" in refusals(model, X)["norm"]
    model = Toy(lambda m, x: x + m.down(m.up(m.norm(x) + 1).relu()))
    assert "also read by add" in refusals(model, X)["norm"]
    model = Toy(lambda m, x: x + m.down(m.up(1 / m.norm(x)).relu()))
    assert "norm" in refusals(model, X)


def test_a_mean_over_tokens():
    (site,) = find_sites(Toy(lambda m, x: m.head(m.norm(x).mean(1))), X)
    assert (site.role, site.removable) == ("final", True)
    assert "mean" in refusals(Toy(lambda m, x: m.head(m.norm(x).mean(-1))), SQUARE)["norm"]
