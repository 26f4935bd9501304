"""Folding: all of it or none of it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tapernorm as tn
from folding import ARM, LLAMA, ROW
from tapernorm import fold
from tapernorm.modules import taper_norms
from zoo import REMOVABLE, ROWS, D, PlainNorm, Toy, X, assert_same, logits, relative, snapshot, tapered


def refused(model, match, error=fold.FoldError, example=None):
    before = snapshot(model)
    with pytest.raises(error, match=match):
        tn.fold_(model, example=example)
    assert_same(before, snapshot(model))
    assert tn.get_controller(model) is not None


@ROW
@ARM
@pytest.mark.parametrize("training", [False, True])
def test_a_failed_check_undoes_everything(row, arm, training, monkeypatch):
    model = tapered(row, arm).train(training)
    wanted = logits(model.eval())
    model.train(training)

    def fail(before, after, narrowed):
        assert not taper_norms(model)  # it is folded at this moment
        raise fold.FoldError("no")

    monkeypatch.setattr(fold, "compare_outputs", fail)
    refused(model, "^no$")
    assert torch.equal(logits(model.eval()), wanted)
    monkeypatch.undo()
    tn.fold_(model)  # and nothing hinders the next attempt
    assert relative(logits(model), wanted) < 1e-10


@ROW
@pytest.mark.parametrize(("error", "at"), [(RuntimeError, 0), (KeyboardInterrupt, 4), (fold.FoldError, -1)])
def test_an_exception_in_the_middle_undoes_everything(row, error, at, monkeypatch):
    model = tapered(row, "all", dtype=torch.bfloat16)
    original, calls = fold.rounded, []
    monkeypatch.setattr(fold, "rounded", lambda *args: calls.append(args) or original(*args))
    tn.fold_(copy.deepcopy(model))
    at = at % len(calls)
    calls.clear()

    def fail(*args):
        if len(calls) == at:
            raise error("in the middle")
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(fold, "rounded", fail)
    refused(model, "in the middle", error)


@ROW
@pytest.mark.parametrize("where", ["untie_configs", "outputs_of"])
def test_an_exception_at_the_end_undoes_everything(row, where, monkeypatch):
    if where == "untie_configs" and not row.tied:
        where = "compare_outputs"
    model = tapered(row, "all")
    original = getattr(fold, where)

    def fail(*args):
        if not taper_norms(model):
            original(*args)
            raise MemoryError("at the end")
        return original(*args)

    monkeypatch.setattr(fold, where, fail)
    refused(model, "at the end", MemoryError)


@ROW
def test_a_wrong_fold_is_noticed(row, monkeypatch):
    """The check is a real one: every way to get it wrong is refused and undone."""
    model = tapered(row, "all")
    original = fold._fixed_branch
    for wrong in (
        lambda scale, bias: (scale * 1.001, bias),
        lambda scale, bias: (scale.flip(0), bias),
        lambda scale, bias: (scale, None if bias is not None else scale),
    ):
        monkeypatch.setattr(fold, "_fixed_branch", lambda module, wrong=wrong: wrong(*original(module)))
        refused(model, "the folded model's output differs by .* more than the 1e-10 .*put back as it was")


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "rms"], ids=lambda row: row.name)
def test_an_overflow_in_half_precision(row):
    """In the last block, when all before it is folded. The channel that overflows is empty, so the output is finite."""
    model = tapered(row, "internal", dtype=torch.float32)
    name = [n for n in row.sites if n != row.final][-1]
    target = row.sites[name][-1]
    with torch.no_grad():
        model.get_parameter(row.embedding)[:, 0] = 0
        for key, parameter in model.named_parameters():
            if key.rpartition(".")[0].endswith(("o_proj", "down_proj")):
                parameter[0] = 0
        site = model.get_submodule(name)
        site.fixed_norm.weight[0] = 3e4
        site.fixed_norm.c.fill_(0.5)
        model.get_parameter(target)[:, 0] = 1e2
    model.half()
    assert torch.isfinite(logits(model)).all()
    refused(model, f"{target} does not fit torch.float16 after scaling")


def test_subnormal_values_in_half_precision_are_warned_of(caplog):
    model = tapered(LLAMA, "internal", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:, 0] = 1e-4
        model.model.layers[0].post_attention_layernorm.fixed_norm.weight[0] = 0.1
    model.half()
    with caplog.at_level("WARNING"):
        tn.fold_(model)
    assert any("up_proj.weight" in m and "subnormal in torch.float16" in m for m in caplog.messages)


def test_folding_twice_is_refused():
    model = tapered(LLAMA)
    tn.fold_(model)
    before = snapshot(model)
    with pytest.raises(fold.FoldError, match=r"nothing to fold.*folded already"):
        tn.fold_(model)
    assert_same(before, snapshot(model))
    with pytest.raises(fold.FoldError, match="nothing to fold"):
        tn.fold_(LLAMA.build())


@ROW
@pytest.mark.parametrize("gate", [1.0, 0.5, 1e-6])
def test_a_gate_that_is_not_zero_is_refused(row, gate):
    refused(tapered(row, gate=gate), "the gate is .* at step 0 of 800; fold when the taper is done")
    model = tapered(row, gate=0.0)
    last = list(row.sites)[-1]
    model.get_submodule(last).set_gate(gate)
    refused(model, f"{last}: the gate is")


@ROW
def test_meta_weights_are_refused(row):
    refused(tapered(row).to("meta"), "meta device")
    model = tapered(row)
    name = next(iter(row.sites.values()))[0]
    owner = model.get_submodule(name.rpartition(".")[0])
    owner.weight = nn.Parameter(owner.weight.to("meta"))
    before = snapshot(model)
    with pytest.raises((fold.FoldError, RuntimeError, NotImplementedError), match="meta"):
        tn.fold_(model)
    assert_same(before, snapshot(model))


class Wrapped(torch.Tensor):
    """As a quantization library would wrap a weight."""


@ROW
def test_wrapped_weights_are_refused(row):
    model = tapered(row)
    name = next(iter(row.sites.values()))[0]
    owner = model.get_submodule(name.rpartition(".")[0])
    owner.weight = nn.Parameter(owner.weight.detach().as_subclass(Wrapped))
    refused(model, f"{name} \\(Wrapped\\) is sharded or wrapped")


@ROW
def test_sharded_weights_are_refused(row):
    model = tapered(row)
    name = next(iter(row.sites.values()))[0]
    model.get_parameter(name).ds_id = 3
    refused(model, f"{name} .*is sharded or wrapped")


@pytest.mark.parametrize("parametrize", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_parametrized_weights_are_refused(parametrize):
    model = tapered(LLAMA)
    parametrize(model.model.layers[1].mlp.up_proj)
    refused(model, "post_attention_layernorm: it can no longer be folded: .*whose weight is not a parameter")


def test_quantized_weights_are_refused():
    class Int8(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype)) * 0.01

    model = tapered(LLAMA)
    quantized = Int8(D, D, bias=False, dtype=torch.float64)
    quantized.weight = nn.Parameter((quantized.weight * 100).to(torch.int8), requires_grad=False)
    model.model.layers[1].mlp.up_proj = quantized.eval()
    refused(model, "post_attention_layernorm: it can no longer be folded: .*quantized")


def test_a_reader_that_came_later_is_refused():
    model = tapered(LLAMA)
    norm, block = model.model.layers[0].input_layernorm, model.model.layers[0]
    block.self_attn.register_forward_hook(lambda m, args, out: (out[0] + norm.last, *out[1:]))
    norm.register_forward_hook(lambda m, args, out: setattr(m, "last", out))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(fold.FoldError, match=r"input_layernorm: it can no longer be folded: .*also read by"):
        tn.fold_(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_norm_that_does_not_run_is_refused():
    model = Toy(lambda m, x: x + m.down((m.up(m.norm(x)) + (m.head(m.other(x)) if m.both else 0)).relu()), PlainNorm)
    model.both = True
    tn.taper_(model, tn.TaperConfig(arm="all", anchor_weight=0), example=X)
    assert set(taper_norms(model)) == {"norm", "other"}
    for module in taper_norms(model).values():
        module.set_gate(0.0)
    model.both = False
    refused(model, "other: it did not run on the example", example=X)


def test_an_output_that_is_not_finite_is_refused():
    model = tapered(LLAMA)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    refused(model, "is not finite; nothing was folded")


def test_an_output_that_cannot_be_compared_is_refused():
    class Opaque:
        def __init__(self, value):
            self.value = value

    function = REMOVABLE["linear"][0]
    model = Toy(lambda m, x: Opaque(function(m, x)))
    tn.taper_(model, tn.TaperConfig(arm="all", anchor_weight=0), example=X)
    next(iter(taper_norms(model).values())).set_gate(0.0)
    refused(model, "nothing to compare", example=X)
