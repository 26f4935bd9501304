"""Folding: the same function without norms."""

import collections
import copy
import json

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tapernorm as tn
from folding import ARM, GPT2, LLAMA, ROW
from tapernorm.modules import FixedScale, TaperNorm, taper_norms
from zoo import IDS, REMOVABLE, D, PlainNorm, Toy, X, decibels, logits, randomise, relative, tapered


def readers(row, arm):
    """The names of the weights that folding may change."""
    return {w for name, weights in row.sites.items() if arm == "all" or name != row.final for w in weights}


# The same function


def check_that_the_model_is_hard(model):
    """The residual has a mean about its deviation, and no gain, bias or c is what a fresh model has."""
    seen = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args[0]}))
        for name, module in taper_norms(model).items()
    ]
    logits(model)
    for handle in handles:
        handle.remove()
    for name, module in taper_norms(model).items():
        h, fixed = seen[name].double(), module.fixed_norm
        assert h.mean(-1).abs().mean() > 0.3 * h.std(-1).mean(), name
        assert fixed.weight.std() > 0.1
        assert abs(float(fixed.c) - 1) > 0.1
        assert fixed.bias is None or fixed.bias.abs().mean() > 0.1
    cs = [float(module.fixed_norm.c) for module in taper_norms(model).values()]
    assert len(set(cs)) == len(cs)


@ROW
@ARM
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_folded_is_unfolded(row, arm, dtype):
    model = tapered(row, arm, dtype=dtype)
    check_that_the_model_is_hard(model)
    wanted = logits(model)
    assert wanted.std() > 0.1
    report = tn.fold_(model)
    found = logits(model)
    assert found.dtype == wanted.dtype == dtype
    if dtype == torch.bfloat16:
        assert decibels(found, wanted) > 30
    else:
        assert relative(found, wanted) < {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    assert not taper_norms(model)
    assert not any(isinstance(m, TaperNorm | FixedScale) for m in model.modules())
    assert set(report.folded) == {n for n in row.sites if arm == "all" or n != row.final}
    assert report.kept == (() if arm == "all" else (row.final,))
    assert 0 <= report.relative_error <= report.bound


@pytest.mark.parametrize("name", REMOVABLE)
@pytest.mark.parametrize("norm", [nn.LayerNorm, PlainNorm, lambda d: nn.LayerNorm(d, bias=False)])
def test_every_reader_that_is_followed_folds(name, norm):
    """What find_sites calls removable is removable."""
    model = Toy(REMOVABLE[name][0], norm).double().eval()
    x = X.double()
    tn.taper_(model, tn.TaperConfig(arm="all", anchor_weight=0), example=x)
    randomise(model)
    (module,) = taper_norms(model).values()
    module.set_gate(0.0)
    with torch.no_grad():
        outputs = [model(x)]
        report = tn.fold_(model, example=x)
        outputs.append(model(x))
    wanted, found = (o["a"][0] if isinstance(o, dict) else o for o in outputs)
    assert relative(found, wanted) < 1e-13
    assert report.folded == ("norm",)
    assert isinstance(model.norm, nn.Identity)


@ROW
def test_gains_biases_and_c_count(row):
    """Were any of them left out, the tests above could not tell."""
    stock = tapered(row)
    reference = logits(stock)
    names = [n for n in stock.state_dict() if ".fixed_norm." in n]
    assert len(names) == len(row.sites) * (2 if row.kind == "rms" else 3)
    for name in names:
        model = copy.deepcopy(stock)
        model.state_dict()[name][0] += 0.25
        wanted = logits(model)
        assert relative(wanted, reference) > 1e-3, name
        tn.fold_(model)
        assert relative(logits(model), wanted) < 1e-10, name


@ROW
@ARM
def test_everything_else_is_bit_identical(row, arm):
    model = tapered(row, arm)
    before = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    objects = dict(model.named_parameters(remove_duplicate=False))
    report = tn.fold_(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    changed = readers(row, arm)
    biases = {w.replace(".weight", ".bias") for w in changed} if row.kind == "layer" else set()
    assert set(after) - set(before) == set(report.new_biases)
    assert set(report.new_biases) <= biases
    gone = set(before) - set(after)
    assert all(any(name.startswith(f"{site}.") for site in report.folded) for name in gone)
    for name, parameter in after.items():
        assert parameter.requires_grad
        if name in changed:
            assert not torch.equal(parameter, before[name]), name
        elif name not in biases:
            assert torch.equal(parameter, before[name]), name
        if name in before and name not in report.untied:
            assert parameter is objects[name], name
    assert torch.equal(after[row.embedding], before[row.embedding])


@ROW
def test_a_head_that_is_tied_is_cut_loose(row):
    model = tapered(row, "all")
    assert (model.lm_head.weight is model.get_parameter(row.embedding)) == row.tied
    report = tn.fold_(model)
    wanted = logits(model)
    assert report.untied == (("lm_head.weight",) if row.tied else ())
    head, embedding = model.lm_head.weight, model.get_parameter(row.embedding)
    assert head is not embedding
    assert head.data_ptr() != embedding.data_ptr()
    assert not torch.equal(head, embedding)
    assert model.config.tie_word_embeddings is False
    model.tie_weights()
    assert model.lm_head.weight is not model.get_parameter(row.embedding)
    assert torch.equal(logits(model), wanted)
    assert "lm_head.weight" in model.state_dict()
    assert type(model)._tied_weights_keys  # the class is left alone
    assert row.build().config.tie_word_embeddings == row.tied


@ROW
def test_the_internal_arm_leaves_the_head_tied(row):
    model = tapered(row, "internal")
    report = tn.fold_(model)
    assert report.untied == ()
    assert (model.lm_head.weight is model.get_parameter(row.embedding)) == row.tied
    assert model.config.tie_word_embeddings == row.tied
    assert type(model.get_submodule(row.final)) is type(row.build().get_submodule(row.final))


def test_new_biases():
    model = tapered(GPT2, "all")
    assert model.lm_head.bias is None
    report = tn.fold_(model)
    assert report.new_biases == ("lm_head.bias",)  # every other reader of GPT-2's norms has a bias
    assert model.lm_head.bias.shape == (D,)
    assert model.lm_head.bias.abs().max() > 0
    assert tn.fold_(tapered(LLAMA, "all")).new_biases == ()
    # a bias of zero makes none
    model = tapered(GPT2, "all")
    nn.init.zeros_(model.transformer.ln_f.fixed_norm.bias)
    assert tn.fold_(model).new_biases == ()
    assert model.lm_head.bias is None


@ROW
@ARM
def test_generation(row, arm):
    model = tapered(row, arm)
    folded = copy.deepcopy(model)
    tn.fold_(folded)
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    runs = [
        m.generate(IDS, attention_mask=torch.ones_like(IDS), use_cache=cache, **options)
        for m in (model, folded)
        for cache in (True, False)
    ]
    for run in runs[1:]:
        assert torch.equal(run.sequences, runs[0].sequences)
        assert relative(torch.stack(run.logits), torch.stack(runs[0].logits)) < 1e-6  # Llama's final norm is float32
    assert runs[0].sequences.shape == (2, IDS.shape[1] + 8)


class Count(TorchDispatchMode):
    """Counts the operations that reach the backend."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


STATISTICS = {"aten::rsqrt", "aten::mean", "aten::var_mean", "aten::native_layer_norm", "aten::_fused_rms_norm"}


def statistics(model):
    with Count() as count:
        logits(model)
    return sum(number for name, number in count.seen.items() if name in STATISTICS)


@ROW
def test_no_statistics_are_computed_where_a_norm_was(row):
    a_norm = 2 if row.kind == "rms" else 1  # mean and rsqrt, or one fused layer norm
    assert statistics(row.build()) == a_norm * len(row.sites)
    for arm, left in (("internal", 1), ("all", 0)):
        model = tapered(row, arm)
        if row.kind == "rms":
            assert statistics(model) == a_norm * left  # the fixed path has none either
        tn.fold_(model)
        assert statistics(model) == a_norm * left


@ROW
def test_a_folded_model_trains(row):
    model = tapered(row, "all").train()
    tn.fold_(model)
    assert all(module.training for module in model.modules())
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert tn.get_controller(model) is None


@ROW
def test_a_folded_model_keeps_its_flags(row):
    model = tapered(row, "all").eval()
    tn.fold_(model)
    assert not any(module.training for module in model.modules())


def test_a_model_that_was_trained_through_the_phases():
    model = randomise(GPT2.build()).double().train()
    controller = tn.taper_(model, tn.TaperConfig(arm="all", warmup_steps=2, taper_steps=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    controller.attach_optimizer(optimizer)
    for _ in range(5):
        loss = model(input_ids=IDS, labels=IDS).loss + controller.auxiliary_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    assert controller.phase == "done"
    wanted = logits(model.eval())
    report = tn.fold_(model)
    assert relative(logits(model), wanted) < 1e-10
    assert report.c.keys() == set(report.folded)


def test_the_products_are_rounded_once():
    """float32 weights are those of float64 arithmetic, to the last bit."""
    model = tapered(LLAMA, "internal", dtype=torch.float32)
    site, weight = "model.layers.1.input_layernorm", model.model.layers[1].self_attn.q_proj.weight
    fixed = model.get_submodule(site).fixed_norm
    wanted = (weight.double() * (fixed.c.double() * fixed.weight.double())).float()
    tn.fold_(model)
    assert torch.equal(weight, wanted)
    model = tapered(GPT2, "internal", dtype=torch.float32)
    linear, fixed = model.transformer.h[1].mlp.c_fc, model.transformer.h[1].ln_2.fixed_norm
    w = linear.weight.detach().double()  # [in, out]
    scaled = w * (fixed.c.double() * fixed.weight.detach().double())[:, None]
    wanted = (scaled - scaled.mean(0)).float()
    bias = (linear.bias.detach().double() + fixed.bias.detach().double() @ w).float()
    tn.fold_(model)
    torch.testing.assert_close(linear.weight.detach(), wanted, rtol=0, atol=1e-8)
    torch.testing.assert_close(linear.bias.detach(), bias, rtol=0, atol=1e-7)


@ROW
def test_the_report(row):
    model = tapered(row, "all")
    cs = {name: float(module.fixed_norm.c) for name, module in taper_norms(model).items()}
    report = tn.fold_(model)
    assert report.c == cs
    assert set(report.kinds.values()) == {row.kind}
    assert report.roles[row.final] == "final"
    assert report.prefix == ()
    assert report.bound == 1e-10
    assert report.max_abs_logit_error < 1e-9
    written = json.loads(json.dumps(report.to_dict()))
    assert written["folded"] == list(report.folded)
    assert report.reasons == {}
    internal = tn.fold_(tapered(row, "internal"))
    assert internal.reasons == {row.final: "it was not tapered"}


def test_an_example_of_the_users_own():
    model = tapered(LLAMA)
    report = tn.fold_(model, example={"input_ids": IDS})
    assert report.max_abs_logit_error >= 0
    assert not taper_norms(model)
