"""taper_ and restore_: checked before anything is touched, and taken back without a trace."""

import copy
import fnmatch

import pytest
import torch
from torch import nn

import tapernorm as tn
from tapernorm.modules import TaperNorm, taper_norms
from tapernorm.sites import find_sites
from zoo import IDS, REFUSED, REMOVABLE, ROWS, D, PlainNorm, Toy, X, assert_same, logits, randomise, snapshot

ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
GPT2 = next(row for row in ROWS if row.name == "gpt2")
SHORT = {"warmup_steps": 1, "taper_steps": 2}


@ROW
@pytest.mark.parametrize("arm", ["internal", "all"])
def test_what_each_arm_tapers(row, arm):
    model = row.build()
    controller = tn.taper_(model, tn.TaperConfig(arm=arm))
    wanted = [name for name in row.sites if arm == "all" or name != row.final]
    assert list(taper_norms(model)) == sorted(wanted, key=list(dict(model.named_modules())).index)
    assert set(controller.sites) == set(wanted)
    assert tn.get_controller(model) is controller
    assert controller.gate == 1.0
    assert (controller.step_count, controller.phase) == (0, "warmup")
    assert (controller.anchor is not None) == (arm == "all")


def test_the_default_is_the_internal_arm():
    model = GPT2.build()
    assert tn.taper_(model).config == tn.TaperConfig()
    assert not isinstance(model.get_submodule(GPT2.final), TaperNorm)


@ROW
def test_the_weights_that_were_there_are_the_same_objects(row):
    model = row.build()
    before = {id(p) for p in model.parameters()}
    norms = {name: model.get_submodule(name) for name in row.sites}
    tn.taper_(model, tn.TaperConfig(arm="all"))
    assert before < {id(p) for p in model.parameters()}
    for name, norm in norms.items():
        assert model.get_submodule(name).norm is norm


@ROW
@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("{final}", 1),
        ("*.0.*", 2),
        ("{first}", 1),
        ("*{norm}", 2),
    ],
)
def test_keep(row, pattern, kept):
    first = next(iter(row.sites))
    pattern = pattern.format(final=row.final, first=first, norm=first.rpartition(".")[2])
    model = row.build()
    tn.taper_(model, tn.TaperConfig(arm="all", keep=(pattern,)))
    gone = set(taper_norms(model))
    assert len(gone) == len(row.sites) - kept
    assert not fnmatch.filter(gone, pattern)
    assert len(set(row.sites) - gone) == kept


def no_head(model):
    return model.base_model


# (model, config, message)
REFUSALS = {
    "keep-matches-nothing": (GPT2.build, {"keep": ("transformer.h.0.ln_3",)}, "matches none.*did you mean.*ln_"),
    "one-of-two-keeps": (GPT2.build, {"keep": ("*.ln_1", "nothing")}, "keep='nothing' matches none"),
    "all-are-kept": (GPT2.build, {"keep": ("*",)}, "none of the model's 5 norms can be removed"),
    "all-but-the-final": (GPT2.build, {"keep": ("*.h.*",)}, "none of the model's 5 norms can be removed.*arm"),
    "bare-backbone": (lambda: no_head(GPT2.build()), {"arm": "all"}, "ln_f cannot go: its output is an output"),
    "no-norms": (lambda: nn.Sequential(nn.Linear(D, D)), {}, "no normalization layers"),
    "no-final-norm": (lambda: Toy(REMOVABLE["linear"][0]), {"arm": "all"}, "anchor_weight=0.1 needs a final norm"),
    "unreadable": (lambda: Toy(REFUSED["activated"][0]), {}, r"none of the model's 1 norms .*norm: its output is also"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("training", [False, True])
def test_a_refusal_leaves_the_model_untouched(name, training):
    build, config, message = REFUSALS[name]
    model = build().train(training)
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        tn.taper_(model, tn.TaperConfig(**config), example=None if hasattr(model, "config") else X)
    assert_same(before, snapshot(model))
    assert tn.get_controller(model) is None


def test_tapering_twice_is_refused():
    model = GPT2.build()
    controller = tn.taper_(model)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"tapered already.*restore_"):
        tn.taper_(model)
    assert_same(before, snapshot(model))
    assert tn.get_controller(model) is controller


def test_a_missing_example_is_refused():
    model = Toy(REMOVABLE["linear"][0])
    before = snapshot(model)
    with pytest.raises(ValueError, match="pass example="):
        tn.taper_(model)
    assert_same(before, snapshot(model))


def test_a_folded_internal_arm_has_nothing_left_but_the_final_norm():
    model = randomise(GPT2.build())
    tn.taper_(model)
    for module in taper_norms(model).values():
        module.set_gate(0.0)
    tn.fold_(model)
    with pytest.raises(ValueError, match=r"none of the model's 1 norms can be removed.*arm"):
        tn.taper_(model)
    assert tn.taper_(model, tn.TaperConfig(arm="all")).sites.keys() == {GPT2.final}


@pytest.mark.parametrize("arm", ["internal", "all"])
def test_a_hand_made_model(arm):
    """The final norm is known by where its readers' outputs go."""
    model = Toy(lambda m, x: m.head(m.other(x + m.down(m.up(m.norm(x)).relu()))), norm=PlainNorm)
    wanted = model(X)
    controller = tn.taper_(model, tn.TaperConfig(arm=arm), example=X)
    assert set(taper_norms(model)) == ({"norm"} if arm == "internal" else {"norm", "other"})
    assert controller.final == "other"
    assert torch.equal(model(X), wanted)


@ROW
def test_restore_gives_back_the_very_same_modules(row):
    model = randomise(row.build())
    before, wanted = snapshot(model), logits(model)
    tn.taper_(model, tn.TaperConfig(arm="all"))
    assert tn.restore_(model) is model
    assert_same(before, snapshot(model))
    assert torch.equal(logits(model), wanted)
    assert tn.get_controller(model) is None
    with pytest.raises(ValueError, match="not tapered"):
        tn.restore_(model)
    assert len(tn.taper_(model).sites) == len(row.sites) - 1  # and it can be tapered again


@ROW
def test_restore_in_the_middle_of_a_taper(row):
    model = randomise(row.build()).train()
    controller = tn.taper_(model, tn.TaperConfig(arm="all", warmup_steps=1, taper_steps=4))
    for _ in range(3):
        controller.auxiliary_loss()
        model(input_ids=IDS)
        controller.auxiliary_loss()
        controller.step()
    assert 0 < controller.gate < 1
    fixed = logits(model.eval())
    tn.restore_(model.train())
    assert all(module.training for module in model.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    wanted = randomise(row.build())
    assert torch.equal(logits(model.eval()), logits(wanted))
    assert not torch.equal(fixed, logits(wanted))


def test_restore_refuses_a_model_that_was_never_tapered():
    with pytest.raises(ValueError, match="not tapered"):
        tn.restore_(GPT2.build())


@ROW
@pytest.mark.parametrize("arm", ["internal", "all"])
def test_a_deepcopy_has_a_controller_of_its_own(row, arm):
    model = randomise(row.build()).train()
    controller = tn.taper_(model, tn.TaperConfig(arm=arm, **SHORT))
    twin = copy.deepcopy(model)
    other = tn.get_controller(twin)
    assert other is not None
    assert other is not controller
    assert {id(m) for m in other.sites.values()} == {id(m) for m in taper_norms(twin).values()}
    before = logits(model.eval())
    model.train()
    for _ in range(3):
        twin(input_ids=IDS)
        other.auxiliary_loss()
        other.step()
    assert (other.gate, other.phase, other.step_count) == (0.0, "done", 3)
    assert all(m.path == "fixed" for m in taper_norms(twin).values())
    assert all(float(m.fixed_norm.c) != 1 for m in taper_norms(twin).values())
    # nothing happened to the model
    assert (controller.gate, controller.phase, controller.step_count) == (1.0, "warmup", 0)
    assert all(float(m.fixed_norm.c) == 1 for m in taper_norms(model).values())
    assert torch.equal(logits(model.eval()), before)
    assert tn.fold_(twin).folded
    assert len(taper_norms(model)) == len(controller.sites)


@ROW
def test_a_deepcopy_outlives_a_restored_original(row):
    model = randomise(row.build())
    tn.taper_(model, tn.TaperConfig(arm="all", **SHORT))
    twin = copy.deepcopy(model)
    tn.restore_(model)
    twin.train()(input_ids=IDS)
    controller = tn.get_controller(twin)
    assert controller is not None
    controller.auxiliary_loss()
    controller.step()
    assert all(float(m.fixed_norm.c) != 1 for m in taper_norms(twin).values())


@ROW
def test_a_model_on_meta_can_be_tapered(row):
    model = row.build().to("meta")
    tn.taper_(model, tn.TaperConfig(arm="all"))
    assert all(p.is_meta for p in model.parameters())
    assert len(taper_norms(model)) == len(row.sites)
    assert {site.name for site in find_sites(model)} == set(row.sites)
