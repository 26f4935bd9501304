"""Every invariant on every family: what is found, gate 1, folding, saving, and that a gain counts.

float64 throughout; the rows and their expectations are in families.py.
"""

import copy
import functools
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import tapernorm as tn
from families import FAMILIES
from family import arithmetic, build, error, inputs_of
from folders import to_gate
from tapernorm.modules import taper_norms
from tapernorm.sites import find_sites, run
from tapernorm.trace import tensors

FOLDABLE = [row for row in FAMILIES if row.goes]
BY_NAME = {row.name: row for row in FAMILIES}
ROW = pytest.mark.parametrize("name", [row.name for row in FOLDABLE])
PARTLY = pytest.mark.parametrize("partly", [False, True], ids=["all", "partly"])


class Choices(TorchFunctionMode):
    """Which experts were chosen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk":
            self.seen.append(output[1])
        return output


@torch.no_grad()
def outputs(row, model, inputs=None):
    """Everything that the model puts out, and the experts that were chosen."""
    with arithmetic(row), Choices() as choices:
        output = run(model, inputs_of(row) if inputs is None else inputs)
    return [t.clone() for t in tensors(output) if t.is_floating_point()], choices.seen


def taper(row, model, partly=False, inputs=None):
    """All that can go, or all but one norm of the first block."""
    with arithmetic(row):
        inputs = inputs_of(row) if inputs is None else inputs
        sites = find_sites(model, inputs)
        keep = [site.name for site in sites if site.role == "final" and not site.removable]
        keep += [next(site.name for site in sites if site.removable)] if partly else []
        if partly and row.goes == keep[-1]:
            pytest.skip("it has one norm that can go, and that is kept")
        config = tn.TaperConfig(arm="all", keep=tuple(keep), post=row.post, anchor_weight=0)
        tn.taper_(model, config, example=inputs)
    return model


class Folded(NamedTuple):
    before: list
    after: list
    experts: tuple
    parameters: tuple  # before and after
    touched: set  # parameters that folding may change
    report: tn.FoldReport
    model: nn.Module


@functools.cache
def folded(name, partly):
    row = BY_NAME[name]
    model = to_gate(taper(row, build(row), partly))
    parameters = {k: p.detach().clone() for k, p in model.named_parameters(remove_duplicate=False)}
    before, experts = outputs(row, model)
    with arithmetic(row):
        sites = [site for site in find_sites(model, inputs_of(row)) if site.name in taper_norms(model)]
        links = [link for site in sites for link in (site.links if site.removable else (site.producer,))]
        report = tn.fold_(model, example=inputs_of(row))
    after, chosen = outputs(row, model)
    now = dict(model.named_parameters(remove_duplicate=False))
    touched = {link.weight for link in links} | {link.bias or f"{link.owner}.bias" for link in links}
    return Folded(before, after, (experts, chosen), (parameters, now), touched, report, model)


@pytest.mark.parametrize("name", BY_NAME)
def test_what_can_go_and_why_not(name):
    row = BY_NAME[name]
    sites = find_sites(row.build(), row.example)
    expected = row.expected([site.name for site in sites])
    assert set(expected) == {site.name for site in sites}
    for site in sites:
        assert site.removable == (not expected[site.name]), (site.name, site.reason)
        assert site.removable == (not site.reason)
        assert expected[site.name] in site.reason, site.name
        assert (site.kind == "unknown") == (site.probed is None)


@pytest.mark.parametrize("name", [row.name for row in FAMILIES if row.model_type != "timm"])
def test_weights_are_not_needed(name):
    """The same on the meta device, with inputs that the config tells."""
    row = BY_NAME[name]
    with arithmetic(row):
        wanted = find_sites(row.build(), row.example)
        model = row.build().to("meta")
        config = copy.deepcopy(model.config)
        found = {site.name: (site.role, site.consumers, bool(site.reason)) for site in find_sites(model)}
    assert found == {site.name: (site.role, site.consumers, bool(site.reason)) for site in wanted}
    assert model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == config._attn_implementation


@pytest.mark.parametrize("name", [row.name for row in FAMILIES if not row.goes])
def test_post_norm_models_are_refused(name):
    row = BY_NAME[name]
    with pytest.raises(ValueError, match=r"none of the model's .* norms can be removed|cannot go"):
        tn.taper_(row.build(), tn.TaperConfig(arm="all", anchor_weight=0), example=row.example)
    with pytest.raises(ValueError, match=r"none of the model's .* norms can be removed"):
        tn.taper_(row.build(), tn.TaperConfig(post=True), example=row.example)


@ROW
def test_the_residual_has_a_mean_and_gains_differ(name):
    """Otherwise the tests below could not tell a right fold from a wrong one."""
    row = BY_NAME[name]
    model = to_gate(taper(row, build(row)))
    seen = {}
    for site, module in taper_norms(model).items():
        module.register_forward_pre_hook(lambda m, args, site=site: seen.update({site: args[0]}))
    outputs(row, model)
    means = [float((h.mean(-1).abs() / h.std(-1)).mean()) for h in seen.values()]
    assert min(means) > 0.05 and max(means) > 0.3, means
    assert len({float(m.fixed_norm.c) for m in taper_norms(model).values()}) == len(taper_norms(model))


@ROW
def test_gate_one_is_the_same_model(name):
    row = BY_NAME[name]
    model = build(row)
    wanted, experts = outputs(row, model)
    taper(row, model)
    found, chosen = outputs(row, model)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(chosen, experts, strict=True))


@ROW
@PARTLY
def test_folded_is_unfolded(name, partly):
    row, result = BY_NAME[name], folded(name, partly)
    assert error(result.after, result.before) < (1e-6 if row.float32 else 1e-10)
    assert result.report.relative_error <= result.report.bound
    if not partly:
        assert result.report.bound == (1e-6 if row.float32 else 1e-10)
        stay = {site for site, role in result.report.roles.items() if role == "post"} if row.post else set()
        kept = {site for site in result.report.kept if site not in stay}
        assert all(result.report.reasons[site] for site in kept)
        assert not stay & set(result.report.kept)
    else:
        assert "it was not tapered" in result.report.reasons.values()
    assert not taper_norms(result.model)
    experts, chosen = result.experts
    assert len(experts) == len(chosen)
    assert all(torch.equal(a, b) for a, b in zip(experts, chosen, strict=True))
    assert bool(experts) == row.is_moe


@ROW
@PARTLY
def test_nothing_else_has_changed(name, partly):
    result = folded(name, partly)
    before, after = result.parameters
    for key in before.keys() | after.keys():
        if key in result.touched:
            continue
        gone = any(key.startswith(f"{site}.") for site in result.report.folded)
        assert (key in after) != gone, key
        assert gone or torch.equal(after[key], before[key]), key
    changed = [key for key in result.touched if key in before and not torch.equal(before[key], after[key])]
    assert changed
    assert {key for key in result.touched if key in after and key not in before} == set(result.report.new_biases)


@ROW
@PARTLY
def test_reloaded_is_folded(name, partly, tmp_path):
    row, result = BY_NAME[name], folded(name, partly)
    if row.model_type == "timm":
        pytest.skip("not a model of transformers")
    tn.save_pretrained(result.model, tmp_path / "out")
    model, tokenizer = tn.from_pretrained(tmp_path / "out")
    assert tokenizer is None
    if row.is_moe:
        model.set_experts_implementation("eager")
    state = result.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():  # DeepSeek's router comes back as float32, as which it is used
        assert torch.equal(value, state[key].to(value.dtype)), key
    found, _ = outputs(row, model)
    # The same weights; where they lie in memory decides on the last bit, and that on the rounding to float32.
    assert error(found, result.after) < (1e-6 if row.float32 else 1e-13)


@ROW
def test_every_gain_and_bias_counts(name):
    row = BY_NAME[name]
    model = to_gate(taper(row, build(row)))
    reference, _ = outputs(row, model)
    for site, module in taper_norms(model).items():
        for parameter in module.fixed_norm.parameters():
            old = parameter.detach().clone()
            with torch.no_grad():
                parameter.mul_(1.3).add_(torch.linspace(-0.3, 0.3, len(old)))
            assert error(outputs(row, model)[0], reference) > 1e-5, site
            with torch.no_grad():
                parameter.copy_(old)


@pytest.mark.parametrize("name", [row.name for row in FOLDABLE if row.is_moe])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_every_way_to_multiply_with_experts(name, experts):
    row = BY_NAME[name]
    inputs = inputs_of(row, torch.float32)
    model = to_gate(taper(row, row.build(experts_implementation=experts), inputs=inputs))
    before, _ = outputs(row, model, inputs)
    report = tn.fold_(copy.deepcopy(model), example=inputs)
    assert set(report.folded) == set(folded(name, False).report.folded)
    tn.fold_(model, example=inputs)
    assert error(outputs(row, model, inputs)[0], before) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-post", "mixtral", "t5", "vit"])
def test_a_wrong_fold_is_seen(name, monkeypatch):
    """Every family's check is a real one."""
    from tapernorm import fold

    row = BY_NAME[name]
    original = fold._fixed_branch
    model = to_gate(taper(row, build(row)))
    monkeypatch.setattr(fold, "_fixed_branch", lambda module: (original(module)[0].flip(0), original(module)[1]))
    with pytest.raises(tn.FoldError, match="put back as it was"):
        tn.fold_(model, example=inputs_of(row))
