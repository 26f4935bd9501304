"""Linear maps that read one tensor are one product: the same function, or refused."""

import copy
import json

import pytest
import torch
from torch import nn

import tapernorm as tn
from families import FAMILIES
from family import arithmetic, build, error, inputs_of
from folders import taper_row, to_gate
from fusing import QKV, fused, parts_of
from tapernorm import fuse, fused_tapernorm
from tapernorm.sites import run
from tapernorm.trace import tensors
from zoo import BY_NAME, ROWS, D, X, assert_same, logits, randomise, relative, snapshot, tapered

torch.set_num_threads(1)
LLAMAS = [row.name for row in ROWS if row.model_type == "llama"]
FOLDABLE = {row.name: row for row in FAMILIES if row.goes}


# The same function


@pytest.mark.parametrize("arm", ["internal", "all"])
@pytest.mark.parametrize("name", BY_NAME)
def test_fused_is_folded(name, arm):
    folded, model, report = fused(name, arm)
    assert relative(logits(model), logits(folded)) < 1e-12
    wanted = 4 if name in LLAMAS else 0  # GPT-2's queries, keys and values are one map already
    assert len(report.fused) == wanted and report.unfused == {}
    assert len([m for m in model.modules() if isinstance(m, nn.Linear)]) == (9 if wanted else 1)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in folded.parameters())
    if wanted:
        assert report.fused[0] == tuple(f"model.layers.0.self_attn.{part}" for part in QKV)
        assert json.loads(json.dumps(report.to_dict()))["fused"][1] == [
            "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj",
        ]  # fmt: skip


@pytest.mark.parametrize("name", LLAMAS)
def test_every_part_counts_and_has_its_own_rows(name):
    folded, model, report = fused(name)
    reference = logits(model)
    for group in report.fused:
        for part in group:
            linear, old = model.get_submodule(part), folded.get_submodule(part)
            assert torch.equal(linear.weight, old.weight) and linear.weight.shape == (D, D)
            assert (linear.bias is None) == (old.bias is None)
            with torch.no_grad():
                linear.weight[3] *= 1.5  # a view of the fused weight
            assert relative(logits(model), reference) > 1e-6
            with torch.no_grad():
                linear.weight[3] /= 1.5


def test_the_tensors_lie_once_and_nothing_is_left_behind():
    _, model, _ = fused("llama")
    assert all(part.left.held is None for part in parts_of(model))
    logits(model)
    assert all(part.left.held is None for part in parts_of(model))
    assert {p.untyped_storage().nbytes() for p in model.parameters()} == {p.nbytes for p in model.parameters()}
    assert not [name for name, _ in model.named_parameters() if "q_proj" in name]


def test_every_norm_stays_where_it_was_not_removed():
    """Readers of a kept norm are fused as well."""
    model = randomise(BY_NAME["llama"].build().double())
    wanted = logits(model)
    report = fuse.fuse_(model)
    assert relative(logits(model), wanted) < 1e-12
    assert len(report.fused) == 4 and report.relative_error <= report.bound


@torch.no_grad()
def outputs(row, model):
    with arithmetic(row):
        return [t.clone() for t in tensors(run(model, inputs_of(row))) if t.is_floating_point()]


# by family: (first parts of some group, parts of a group that no family has by accident)
EXPECTED = {
    "qwen2": {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")},
    "gemma": {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")},
    "gpt2": set(),
    "phi3": set(),
    "gpt_neox": set(),
    "phi": {("q_proj", "k_proj", "v_proj")},
    "t5": {("q", "k", "v"), ("k", "v")},
    "t5-untied": {("q", "k", "v"), ("k", "v"), ("wi_0", "wi_1")},
    "mixtral": {("q_proj", "k_proj", "v_proj")},
    "olmo2": {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")},
}


@pytest.mark.parametrize("name", FOLDABLE)
def test_every_family(name, tmp_path):
    row = FOLDABLE[name]
    model = build(row)
    with arithmetic(row):
        taper_row(row, model, inputs_of(row))
        folded = to_gate(model)
        model = copy.deepcopy(folded)
        tn.fold_(folded, example=inputs_of(row))
        report = tn.fold_(model, example=inputs_of(row), fuse=True)
    wanted, found = outputs(row, folded), outputs(row, model)
    assert error(found, wanted) < (1e-6 if row.float32 else 1e-12)
    groups = {tuple(part.rpartition(".")[2] for part in group) for group in report.fused}
    assert groups == EXPECTED.get(name, groups)
    assert all(len({part.rpartition(".")[0] for part in group}) == 1 for group in report.fused)
    if row.model_type == "timm":
        return
    tn.save_pretrained(model, tmp_path / "out")
    loaded, _ = tn.from_pretrained(tmp_path / "out")
    if row.is_moe:
        loaded.set_experts_implementation("eager")
    state = model.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    assert all(torch.equal(v, state[k].to(v.dtype)) for k, v in loaded.state_dict().items())
    assert len(parts_of(loaded)) == len(parts_of(model)) == sum(map(len, report.fused))
    assert error(outputs(row, loaded), found) < (1e-6 if row.float32 else 1e-13)


# What is not fused, and why


class Reads(nn.Module):
    """Two linear maps or more of one tensor."""

    def __init__(self, function, **more):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Linear(D, 2 * D)
        self.function = function
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def plain(m, x):
    return torch.cat([m.q(x) * m.k(x), m.v(x)], -1)


def shared(m):
    m.k.weight = m.q.weight


def hooked(m):
    m.k.register_forward_hook(lambda *_: None)


def frozen(m):
    m.k.requires_grad_(False)


def parametrized(m):
    torch.nn.utils.parametrizations.weight_norm(m.k)


WHY = {
    "twice": (lambda m, x: plain(m, x) + m.v(2 * x).repeat(1, 1, 1)[..., :1], None, "v", "runs 2 times"),
    "shared": (plain, shared, "q", "shared with another module"),
    "hooked": (plain, hooked, "k", "it has hooks"),
    "frozen": (plain, frozen, "k", "requires_grad"),
    "parametrized": (plain, parametrized, "k", "not a plain linear map"),
}


@pytest.mark.parametrize("case", WHY)
def test_what_is_not_fused_and_why(case):
    function, change, name, reason = WHY[case]
    model = Reads(function).double()
    if change:
        change(model)
    _, unfused = fuse.find_groups(model, X.double())
    assert reason in unfused[name]


def test_a_tensor_written_to_in_between_is_another():
    model = Reads(lambda m, x: torch.cat([m.q(y := x.clone()), m.k(y.add_(1)), m.v(y)], -1)).double()
    groups, _ = fuse.find_groups(model, X.double())
    assert [group.parts for group in groups] == [("k", "v")]


def test_maps_of_unlike_size_and_bias_and_any_order():
    model = Reads(lambda m, x: torch.cat([m.k(x) * m.q(x), m.v(x)], -1)).double()
    wanted = model(X.double())
    report = fuse.fuse_(model, X.double())
    assert report.fused == (("k", "q", "v"),)
    assert relative(model(X.double()), wanted) < 1e-12
    assert model.kqv.weight.shape == (4 * D, D) and not model.kqv.bias[:D].any()
    model.function = plain  # another order than the one that was seen
    other = Reads(plain).double()
    for _ in range(2):
        assert relative(model(X.double()), other(X.double())) < 1e-12
        model.function = lambda m, x: torch.cat([m.q(x) * m.k(2 * x), m.v(x)], -1)
        other.function = model.function


def test_refusals():
    with pytest.raises(tn.FoldError, match="nothing to fuse"):
        fuse.fuse_(randomise(BY_NAME["gpt2"].build()))
    with pytest.raises(tn.FoldError, match="tapered and not folded"):
        fuse.fuse_(tapered(BY_NAME["llama"]))
    _, model, _ = fused("llama")
    with pytest.raises(tn.FoldError, match="nothing to fuse"):
        fuse.fuse_(model)
    with pytest.raises(ValueError, match="nothing to take apart"):
        fuse.unfuse_(BY_NAME["llama"].build())
    with pytest.raises(ValueError, match="no linear maps"):
        fused_tapernorm.fuse_linears(BY_NAME["llama"].build().model.layers[0], "both", ["mlp", "self_attn"])


NAMES = {
    "qkv": ("q", "k", "v"),
    "qkv_proj": QKV,
    "gate_up_proj": ("gate_proj", "up_proj"),
    "wi_0_1": ("wi_0", "wi_1"),
    "fc_in_gate": ("fc_in", "fc_gate"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    assert fuse.fused_name(NAMES[name]) == name


# All or nothing


def swapped(monkeypatch):
    """The second slice and the last in each other's place: every matrix is square, so nothing is raised."""
    original = fused_tapernorm.fuse_linears

    def fuse_linears(owner, whole, parts):
        made = original(owner, whole, parts)
        second, last = owner.get_submodule(parts[1]), owner.get_submodule(parts[-1])
        vars(second)["index"], vars(last)["index"] = last.index, second.index
        return made

    monkeypatch.setattr(fused_tapernorm, "fuse_linears", fuse_linears)


def test_a_wrong_slice_is_seen_and_the_model_put_back(monkeypatch):
    model = tapered(BY_NAME["llama-bias"])
    before = snapshot(model)
    swapped(monkeypatch)
    with pytest.raises(tn.FoldError, match="put back as it was"):
        tn.fold_(model, fuse=True)
    assert_same(before, snapshot(model))
    monkeypatch.undo()
    tn.fold_(model, fuse=True)


def test_a_wrong_slice_is_seen_by_fuse_too(monkeypatch):
    model = tapered(BY_NAME["llama-bias"])
    tn.fold_(model)
    before = snapshot(model)
    swapped(monkeypatch)
    with pytest.raises(tn.FoldError, match="put back as it was"):
        fuse.fuse_(model)
    assert_same(before, snapshot(model))


def test_taken_apart_again():
    folded, model, _ = fused("llama-bias")
    fuse.unfuse_(model)
    assert_same_state(model, folded)
    assert relative(logits(model), logits(folded)) < 1e-12


def assert_same_state(model, other):
    state = other.state_dict()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
