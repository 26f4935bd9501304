"""Gated MLPs and rotary attentions in fewer calls: the same to the bit, seen and not guessed, or the stock forward."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

import tapernorm as tn
from families import FAMILIES
from family import arithmetic, build, inputs_of
from folders import taper_row, to_gate
from fusing import fused
from tapernorm import fuse, fused_tapernorm
from tapernorm.shorten import lengthen_, shorten_
from zoo import BY_NAME, IDS, D, X, assert_same, logits, randomise, relative, snapshot, tapered

torch.set_num_threads(1)
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
BY_FAMILY = {row.name: row for row in FAMILIES}


def short_and_long(name="llama", dtype=torch.float64, **changes):
    """(a fused model, the same with the stock forwards)."""
    model = randomise(BY_NAME[name].build(**changes).double()).to(dtype)
    report = fuse.fuse_(model)
    assert len(report.shortened) == 4
    return model, lengthen_(copy.deepcopy(model))


def stock_calls(monkeypatch, module):
    """How often the stock forward of a module's class runs."""
    calls, original = [], type(module).forward

    def forward(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(module), "forward", forward)
    return calls


# The same to the bit


CASES = [{}, {"name": "llama-bias"}, GROUPED, {"dtype": torch.float32}, {"dtype": torch.bfloat16}]


@pytest.mark.parametrize("case", CASES, ids=["plain", "bias", "grouped", "float32", "bfloat16"])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_every_step_is_that_of_the_stock_forward(case, padding, static, monkeypatch):
    short, long = short_and_long(**case)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0 if padding else 1
    found = []
    for model in (short, long):
        own = {"config": model.config} | ({"max_cache_len": 16} if static else {})
        cache, seen, made = (StaticCache if static else DynamicCache)(**own), mask, []
        calls = stock_calls(monkeypatch, model.model.layers[0].self_attn)
        for step in (IDS, IDS[:, :1], IDS[:, 1:2], IDS[:, 2:5]):  # the last: several tokens after others
            more = {"cache": cache, "use_cache": True}
            if padding:  # a row of positions for each text
                more["position_ids"] = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            made.append(model(input_ids=step, attention_mask=seen, **more).logits)
            seen = torch.cat([seen, torch.ones_like(step)], dim=1)
        assert len(calls) == (0 if model is short else 8)
        monkeypatch.undo()
        found.append(made)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(logits(short), logits(long))


def test_gradients_in_evaluation_mode():
    found = []
    for model in short_and_long("llama-bias"):
        model(input_ids=IDS, labels=IDS).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert all(relative(found[0][name], wanted) < 1e-12 for name, wanted in found[1].items())


# Seen, not guessed


KINDS = {
    "mistral": {"attention", "mlp"},
    "qwen2": {"attention", "mlp"},
    "gemma": {"attention", "mlp"},
    "olmo": {"attention", "mlp"},
    "mixtral": {"attention"},  # the experts are no MLP of this kind
    "qwen3": {"mlp"},  # norms on queries and keys
    "gemma2": {"mlp"},  # softcapping
    "cohere": {"mlp"},  # turned in pairs of neighbours
    "stablelm": {"mlp"},  # turned in part
    "phi": set(),
    "opt": set(),  # no rotary positions
    "t5-untied": {"mlp"},
}


@pytest.mark.parametrize("name", KINDS)
def test_families(name):
    row = BY_FAMILY[name]
    model = build(row)
    with arithmetic(row):
        taper_row(row, model, inputs_of(row))
        report = tn.fold_(to_gate(model), example=inputs_of(row), fuse=True)
    kinds = {vars(model.get_submodule(name))["short"]["kind"] for name in report.shortened}
    assert kinds == KINDS[name]


class Gated(nn.Module):
    """down(act(gate(x)) · up(x)), or nearly."""

    def __init__(self, function, act=None):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.other, self.function = act or nn.SiLU(), function

    def forward(self, x):
        return self.function(self, x)


ALIKE = {
    "as it is": lambda m, x: m.three(m.other(m.one(x)) * m.two(x)),
    "the second acted on": lambda m, x: m.three(m.one(x) * m.other(m.two(x))),
    "called up first": lambda m, x: m.three(m.two(x) * m.other(m.one(x))),
}
UNLIKE = {
    "a sum": lambda m, x: m.three(m.other(m.one(x)) + m.two(x)),
    "a factor": lambda m, x: m.three(m.other(m.one(x)) * m.two(x) * 1.0001),
    "a factor before": lambda m, x: m.three(m.other(1.0001 * m.one(x)) * m.two(x)),
    "a factor after": lambda m, x: 1.0001 * m.three(m.other(m.one(x)) * m.two(x)),
    "acted on twice": lambda m, x: m.three(m.other(m.other(m.one(x))) * m.two(x)),
    "both acted on": lambda m, x: m.three(m.other(m.one(x)) * m.other(m.two(x))),
    "a residual": lambda m, x: x + m.three(m.other(m.one(x)) * m.two(x)),
    "a tuple": lambda m, x: (m.three(m.other(m.one(x)) * m.two(x)),),
}


@pytest.mark.parametrize("case", [*ALIKE, *UNLIKE])
def test_what_is_an_mlp(case):
    model = Gated((ALIKE | UNLIKE)[case]).double()
    wanted = model(X.double())
    report = fuse.fuse_(model, X.double())
    assert report.shortened == (("",) if case in ALIKE else ())
    found = model(X.double())
    assert relative(*(y[0] if isinstance(y, tuple) else y for y in (found, wanted))) < 1e-12


# Whatever is unlike what was seen takes the stock forward


def other_attention(model):
    model.set_attn_implementation("eager")


def training(model):
    model.train()


def hooked(model):
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)


def replaced(model):
    model.model.layers[0].self_attn.k_proj = nn.Linear(D, D).double()


@pytest.mark.parametrize("change", [other_attention, training, hooked, replaced])
def test_the_stock_forward(change, monkeypatch):
    model, _ = short_and_long()
    change(model)
    calls = stock_calls(monkeypatch, model.model.layers[0].self_attn)
    logits(model)
    assert model.model.layers[0].self_attn in calls


def test_a_cache_of_another_kind_and_unknown_arguments(monkeypatch):
    class Own(DynamicCache):
        pass

    model, _ = short_and_long()
    calls = stock_calls(monkeypatch, model.model.layers[0].self_attn)
    for cache, more, count in ((DynamicCache(), {}, 0), (Own(), {}, 2), (DynamicCache(), {"something": 1}, 2)):
        calls.clear()
        model(input_ids=IDS, cache=cache, use_cache=True, **more)
        assert len(calls) == count


def test_an_attention_function_of_somebody_else_is_called():
    model, _ = short_and_long()
    called = []

    def own(*args, **kwargs):
        called.append(1)
        return fused_tapernorm.sdpa_attention_forward(*args, **kwargs)

    fused_tapernorm.ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        logits(model)
    finally:
        del fused_tapernorm.ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert len(called) == 2


@pytest.mark.parametrize("name", ["act_fn", "down_proj", "gate_up_proj", "gate_proj"])
def test_hooks_within_run(name):
    model, _ = short_and_long()
    ran = []
    model.model.layers[0].mlp.get_submodule(name).register_forward_hook(lambda *_: ran.append(1))
    logits(model)
    assert ran == [1]


def test_wrapped_maps_are_the_ones_that_run():
    for place, name in (("mlp", "down_proj"), ("self_attn", "o_proj"), ("mlp", "gate_up_proj")):
        model, long = short_and_long()
        for one in (model, long):
            owner = one.model.layers[1].get_submodule(place)
            owner.set_submodule(name, nn.Sequential(owner.get_submodule(name), nn.Softsign()))
        assert relative(logits(model), logits(long)) < 1e-12


# All or nothing, copies, folders


def test_a_wrong_step_after_a_cache_is_seen(monkeypatch):
    """The comparison of the fold runs without a cache and would not see it."""
    original = fused_tapernorm.short_attention

    def wrong(module, *args, **kwargs):
        output, weights = original(module, *args, **kwargs)
        return (output * 1.01 if output.shape[1] == 1 else output), weights

    model = tapered(BY_NAME["llama"])
    before = snapshot(model)
    monkeypatch.setitem(fused_tapernorm.SHORT, "attention", wrong)
    with pytest.raises(tn.FoldError, match="put back as it was"):
        tn.fold_(model, fuse=True)
    assert_same(before, snapshot(model))
    assert not [m for m in model.modules() if {"short", "forward"} & vars(m).keys()]
    monkeypatch.undo()
    assert len(tn.fold_(model, fuse=True).shortened) == 4


def test_nothing_is_left_of_the_watching():
    model, _ = short_and_long()
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert "sdpa" not in fused_tapernorm.ALL_ATTENTION_FUNCTIONS._local_mapping
    assert shorten_(model, {"input_ids": IDS}) == ()  # all of them are short already


def test_copied_and_pickled():
    model, _ = short_and_long()
    wanted = logits(model)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for twin in twins:
        assert torch.equal(logits(twin), wanted)
        assert twin.model.layers[1].mlp.forward.args == (twin.model.layers[1].mlp,)


def test_folders(tmp_path):
    _, model, report = fused("llama", dtype=torch.float32)
    tn.save_pretrained(model, tmp_path / "out")
    loaded, _ = tn.from_pretrained(tmp_path / "out")
    short = loaded.config.short_forwards
    assert set(short) == {"model.layers.*.mlp", "model.layers.*.self_attn"}
    assert short["model.layers.*.mlp"] == {
        "kind": "mlp", "act": "act_fn", "acted": 0, "out": "down_proj", "whole": "gate_up_proj",
    }  # fmt: skip
    assert all("forward" in vars(loaded.get_submodule(name)) for name in report.shortened)
    assert torch.equal(logits(loaded), logits(model))
    fuse.unfuse_(loaded)
    assert not [m for m in loaded.modules() if "forward" in vars(m)]
    tn.save_pretrained(loaded, tmp_path / "apart")
    again, _ = tn.from_pretrained(tmp_path / "apart")
    assert not again.config.short_forwards and relative(logits(again), logits(model)) < 1e-6


@pytest.mark.parametrize("wrong", [{"kind": "other"}, {"out": "nothing"}, {"whole": "nothing"}, {"act": "nothing"}])
def test_a_config_that_asks_for_nonsense_is_refused(wrong):
    model, _ = short_and_long()
    mlp = model.model.layers[0].mlp
    with pytest.raises(ValueError, match="has no forward such as"):
        fused_tapernorm.shorten(mlp, mlp.short["saved"] | wrong)
