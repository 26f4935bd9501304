"""DyT, Derf and no norms: what they compute, that no channel looks at another, and where a fresh model begins."""

import copy
import math

import pytest
import torch

import tiny_models
from norms import ROW
from tapernorm.baselines import pointwise
from tapernorm.sites import find_sites
from zoo import IDS, D, logits, randomise

KINDS = {"dyt": pointwise.dyt_, "derf": pointwise.derf_}
KIND = pytest.mark.parametrize("kind", KINDS)


def llama(dtype=torch.float64):
    """A fresh Llama of four blocks, in evaluation mode: gains are 1."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**tiny_models.LLAMA, num_hidden_layers=4, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


@KIND
@ROW
def test_every_norm_is_replaced_with_its_gain_and_bias(row, kind):
    model = randomise(row.build().double())
    norms = {site.name: copy.deepcopy(model.get_submodule(site.name)) for site in find_sites(model)}
    names = KINDS[kind](model, 0.7)
    assert names == list(norms) == list(row.sites) and not find_sites(model)
    h = torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    squash = torch.tanh if kind == "dyt" else torch.erf
    for name, norm in norms.items():
        bias = getattr(norm, "bias", None)
        wanted = squash(0.7 * h) * norm.weight + (0 if bias is None else bias)
        assert torch.allclose(model.get_submodule(name)(h), wanted, rtol=1e-12, atol=1e-12), name
    assert torch.isfinite(logits(model)).all()


def test_norms_of_queries_and_keys_are_replaced_too():
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**tiny_models.LLAMA, num_hidden_layers=1, head_dim=8)
    model = transformers.Qwen3ForCausalLM(config).eval()
    names = pointwise.dyt_(model)
    assert "model.layers.0.self_attn.q_norm" in names and len(names) == 5
    assert torch.isfinite(logits(model)).all()


@KIND
def test_no_channel_looks_at_another(kind):
    model = randomise(llama())
    KINDS[kind](model)
    module, h = model.model.norm, torch.randn(D, dtype=torch.float64)
    jacobian: torch.Tensor = torch.autograd.functional.jacobian(module, h)  # type: ignore[assignment]
    assert torch.equal(jacobian, torch.diag(jacobian.diag())) and (jacobian.diag() != 0).all()


def test_derf_is_shifted_and_everything_learns():
    model = randomise(llama())
    pointwise.derf_(model, 0.5, shift=0.25)
    h = torch.randn(D, dtype=torch.float64)
    norm = model.model.norm
    assert torch.allclose(norm(h), torch.erf(0.5 * h + 0.25) * norm.weight + norm.bias, rtol=1e-12, atol=1e-12)
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    for name in ("alpha", "shift", "weight", "bias"):
        for module in (norm, model.model.layers[0].input_layernorm):
            assert getattr(module, name).grad.abs().max() > 0, name


def test_without_norms_the_model_begins_as_the_identity():
    model = llama()
    names = pointwise.no_norms_(model)
    assert len(names) == 9 and not find_sites(model)
    with torch.no_grad():
        wanted = model.lm_head(model.model.embed_tokens(IDS))
    assert torch.equal(logits(model), wanted)
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    scales = [p for n, p in model.named_parameters() if n.endswith(".scale")]
    assert len(scales) == 8 and all(p.grad.abs() > 0 for p in scales)  # it can leave it


def test_learned_numbers_go_into_the_weights():
    model = llama()
    pointwise.no_norms_(model)
    for number, module in enumerate(m for m in model.modules() if isinstance(m, pointwise.Scaled)):
        module.scale.data.fill_(0.3 + 0.1 * number)
    before, names = logits(model), {n for n, _ in llama().named_parameters() if "norm" not in n}
    assert pointwise.merge_(model) == 8
    assert torch.allclose(logits(model), before, rtol=1e-10, atol=1e-12)
    assert {n for n, _ in model.named_parameters()} == names
    assert not torch.allclose(before, logits(llama()), rtol=1e-3)


def test_weights_divided_by_depth():
    model, plain = llama(), llama()
    pointwise.no_norms_(model, residual="depth")
    ours, theirs = (each.model.layers[1] for each in (model, plain))
    assert torch.allclose(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight / math.sqrt(8), rtol=1e-12)
    assert torch.allclose(ours.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight / math.sqrt(8), rtol=1e-12)
    assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert not any(isinstance(module, pointwise.Scaled) for module in model.modules())


def test_the_embedding_s_scale():
    for start, value in (("unit", None), ("sqrt", 4.0)):
        model = llama()
        began = pointwise.scale_embedding_(model, start)
        embedding = model.get_input_embeddings()
        assert value is None or began == value
        assert torch.allclose(embedding(IDS), began * embedding.weight[IDS], rtol=1e-12)
        if value is None:
            everything = embedding(torch.arange(embedding.num_embeddings))
            assert float(everything.detach().pow(2).mean()) == pytest.approx(1, rel=1e-6)
    assert model.lm_head.weight is embedding.weight
    h = torch.randn(2, D, dtype=torch.float64)
    assert torch.equal(model.lm_head(h), h @ embedding.weight.T)  # the head is not multiplied
    again = copy.deepcopy(model)
    again.get_input_embeddings().scale.data.mul_(2)
    assert torch.allclose(again.get_input_embeddings()(IDS), 2 * embedding(IDS), rtol=1e-12)
    with pytest.raises(ValueError, match="already"):
        pointwise.scale_embedding_(model)


def test_refusals_leave_the_model_alone():
    trained, fresh = randomise(llama()), llama()
    for model, options, said in (
        (trained, {}, r"model\.layers\.0\.input_layernorm has been trained"),
        (fresh, {"branches": ("*.nothing",)}, r"no module matches \*\.nothing"),
    ):
        before = logits(model)
        with pytest.raises(ValueError, match=said):
            pointwise.no_norms_(model, **options)
        assert torch.equal(logits(model), before)
    pointwise.dyt_(fresh)
    with pytest.raises(ValueError, match="nothing to replace"):
        pointwise.derf_(fresh)
