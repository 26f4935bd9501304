"""Steps, gates and phases, the optimizer's state, and a run that is stopped and goes on."""

import copy
import dataclasses
import json
import math

import pytest
import torch

import tapernorm.controller as controller_module
from tapernorm import TaperConfig, fold_, get_controller, restore_, schedule, taper_
from tapernorm.modules import taper_norms
from tiny_models import ids, tiny

torch.set_num_threads(1)

CONFIG = TaperConfig(arm="all", warmup_steps=3, taper_steps=4, ema_decay=0.8)


def adam(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def train(model, controller, optimizer, steps, log=None):
    """The loop of the README, two micro-batches a step; batches depend on the step's number alone."""
    for _ in range(steps):
        total = 0.0
        for part in range(2):
            rows = ids(seed=2 * controller.step_count + part)
            loss = (model(input_ids=rows, labels=rows).loss + controller.auxiliary_loss()) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        if log is not None:
            log.append((total, controller.gate, controller.scales, controller.scale_target, controller.phase))


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        equal = torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key]
        assert equal, key


# Steps, gates, phases


def test_a_whole_run_follows_the_schedule():
    model = tiny()
    controller = taper_(model, CONFIG)
    optimizer = adam(model)
    for clock in range(CONFIG.total_steps + 3):
        wanted = schedule.gate(clock, CONFIG)
        assert controller.step_count == controller.taper_clock == clock
        assert controller.gates == {name: pytest.approx(wanted, abs=1e-7) for name in taper_norms(model)}
        assert controller.gate == max(controller.gates.values())
        assert controller.phase == ("warmup" if clock < 3 else "taper" if clock < 7 else "done")
        path = "exact" if clock <= 3 else "mixed" if clock < 7 else "fixed"
        assert {m.path for m in taper_norms(model).values()} == {path}
        assert {m.observer is not None for m in taper_norms(model).values()} == {clock < 3}
        train(model, controller, optimizer, 1)
    assert controller.gate == 0.0


def test_a_gate_that_rounds_to_one_is_one():
    """Else a resumed run, which reads the rounded gate, would take another path than one that was never stopped."""
    config = TaperConfig(warmup_steps=1, taper_steps=100_000)
    model = tiny(layers=1)
    controller = taper_(model, config)
    model(input_ids=ids())
    controller.step()
    controller.step()
    assert schedule.gate(2, config) < 1
    module = next(iter(taper_norms(model).values()))
    assert (float(module.gate), module.path) == (1.0, "exact")
    fresh = tiny(layers=1)
    taper_(fresh, config).load_state_dict(controller.state_dict())
    assert next(iter(taper_norms(fresh).values())).path == module.path


def test_a_skipped_step_moves_nothing_and_drops_its_sums():
    states = []
    for skips in (0, 2):
        model = tiny()
        controller = taper_(model, CONFIG)
        for step in range(4):
            for skip in range(skips):  # forwards whose gradients a scaler threw away
                model(input_ids=ids(seed=100 + skip))
                before = controller.state_dict()
                controller.step(skipped=True)
                same(before, controller.state_dict())
                assert float(controller.auxiliary_loss()) == 0.0
            model(input_ids=ids(seed=step))
            controller.auxiliary_loss()
            controller.step()
        states.append(controller.state_dict())
    same(*states)


@pytest.mark.parametrize("loss", [1.0, math.inf])
def test_ranks_confer_about_a_skipped_step_whatever_each_one_saw(loss, monkeypatch):
    """A rank whose own loss is not finite must not skip the exchange that the others wait in."""
    model = tiny()
    controller = taper_(model, TaperConfig(warmup_steps=2, taper_steps=4, guard_margin=1.0))
    other = 1.0 if loss == math.inf else math.inf
    asked = []
    monkeypatch.setattr(
        controller_module, "gather", lambda x: asked.append(x) or torch.stack([x, torch.full_like(x, other)])
    )
    controller.step(skipped=True, loss=loss)
    assert len(asked) == 1 and controller.guard.unsound == 1


def test_an_anchor_that_was_not_consumed_is_refused():
    for steps in (0, 4):  # in warm-up and after
        model = tiny()
        controller = taper_(model, CONFIG)
        train(model, controller, adam(model), steps)
        rows = ids()
        model(input_ids=rows)
        model(input_ids=rows)
        with pytest.raises(RuntimeError, match=r"auxiliary_loss\(\) was not added .* 2 training forward"):
            controller.step()
        assert controller.step_count == steps
        controller.auxiliary_loss()
        controller.step()
        assert controller.step_count == steps + 1
    model = tiny()
    controller = taper_(model, TaperConfig())  # no anchor, nothing to consume
    model(input_ids=ids())
    controller.step()


def test_restore_and_fold_leave_no_hook():
    model = tiny()
    controller = taper_(model, CONFIG)
    train(model, controller, adam(model), CONFIG.total_steps)
    twin = copy.deepcopy(model)
    fold_(twin)
    restore_(model)
    for changed in (model, twin):
        assert get_controller(changed) is None
        assert not any(module._forward_pre_hooks for module in changed.modules())


def test_a_copy_has_a_controller_of_its_own():
    model = tiny()
    controller = taper_(model, CONFIG)
    train(model, controller, adam(model), 1)
    twin = copy.deepcopy(model)
    other = get_controller(twin)
    assert other is not controller and set(other.sites.values()) == set(taper_norms(twin).values())
    before = controller.state_dict()
    train(twin, other, adam(twin), CONFIG.total_steps)
    assert (other.phase, controller.phase) == ("done", "warmup")
    same(before, controller.state_dict())
    assert {m.path for m in taper_norms(model).values()} == {"exact"}


@pytest.mark.parametrize("weight", (0.0, 0.1))
def test_a_copy_while_losses_wait(weight):
    """A deep copy cannot take a graph along; it has no part in forwards that it did not see."""
    model = tiny()
    controller = taper_(model, dataclasses.replace(CONFIG, uniformity_weight=weight))
    train(model, controller, adam(model), 4)
    model(input_ids=ids())
    twin = get_controller(copy.deepcopy(model))
    assert float(controller.auxiliary_loss()) > 0
    assert float(twin.auxiliary_loss()) == 0.0
    twin.step()
    assert (twin.step_count, controller.step_count) == (5, 4)


# The optimizer


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_the_state_of_the_gain_is_copied_at_the_end_of_warm_up(family):
    model = tiny(family)
    controller = taper_(model, CONFIG)
    optimizer = adam(model)
    controller.attach_optimizer(optimizer)
    assert len(optimizer.param_groups) == 1  # nothing was missing
    train(model, controller, optimizer, 2)
    for module in taper_norms(model).values():
        assert not optimizer.state[module.fixed_norm.weight]["exp_avg"].any()
    train(model, controller, optimizer, 1)
    assert controller.phase == "taper"
    for module in taper_norms(model).values():
        pairs = [(module.norm.weight, module.fixed_norm.weight)]
        if family == "gpt2":
            pairs.append((module.norm.bias, module.fixed_norm.bias))
        for source, target in pairs:
            theirs, ours = optimizer.state[source], optimizer.state[target]
            assert theirs["exp_avg"].any()
            same(dict(theirs), dict(ours))
            assert ours["exp_avg"].data_ptr() != theirs["exp_avg"].data_ptr()
            assert torch.equal(source, target)


def test_without_attaching_the_state_stays_idle():
    model = tiny()
    controller = taper_(model, CONFIG)
    optimizer = adam(model)
    train(model, controller, optimizer, 3)
    assert not any(optimizer.state[m.fixed_norm.weight]["exp_avg"].any() for m in taper_norms(model).values())


@pytest.mark.parametrize("decay", (0.0, 0.1))
def test_an_optimizer_built_before_is_completed(decay):
    model = tiny("gpt2")
    group = {"params": list(model.parameters()), "lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": decay}
    optimizer = torch.optim.AdamW([group], lr=1.0)
    controller = taper_(model, CONFIG)
    controller.attach_optimizer(optimizer)
    controller.attach_optimizer(optimizer)  # twice is once
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) and set(held) == {id(p) for p in model.parameters()}
    added = {id(p) for m in taper_norms(model).values() for p in m.fixed_norm.parameters()}
    for group in optimizer.param_groups:
        if added & {id(p) for p in group["params"]}:
            assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-3, (0.8, 0.9), 0.0)
    before = {n: m.fixed_norm.weight.detach().clone() for n, m in taper_norms(model).items()}
    train(model, controller, optimizer, CONFIG.total_steps)
    assert not any(torch.equal(m.fixed_norm.weight, before[n]) for n, m in taper_norms(model).items())


def test_a_scheduler_that_cannot_take_another_group():
    """torch's schedulers count the groups that they were made with."""
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    controller = taper_(model, CONFIG)
    with pytest.raises(ValueError, match="build both after"):
        controller.attach_optimizer(optimizer)

    model = tiny()
    norms = [p for p in model.parameters() if p.ndim == 1]
    rest = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    controller = taper_(model, CONFIG)
    controller.attach_optimizer(optimizer)  # into the group of the norms, which has no decay
    for _ in range(2):
        train(model, controller, optimizer, 1)
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3 / 4] * 2
    assert len(optimizer.param_groups[1]["params"]) == 2 * len(norms)


# State


@pytest.mark.parametrize("config", (CONFIG, TaperConfig(warmup_steps=3, taper_steps=4)))
def test_the_state_is_flat_and_plain(config):
    model = tiny()
    controller = taper_(model, config)
    train(model, controller, adam(model), 4)
    state = controller.state_dict()
    assert all(isinstance(key, str) for key in state)
    scalars = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
    assert json.loads(json.dumps(scalars)) == scalars
    assert {type(v) for v in scalars.values()} <= {int, float, str, bool, type(None)}
    assert not any(v.requires_grad for v in state.values() if isinstance(v, torch.Tensor))
    before = copy.deepcopy(state)
    train(model, controller, adam(model), 1)
    same(state, before)  # a snapshot, not a view


@pytest.mark.parametrize("stop", (1, 2, 3, 5, 7, 8))
@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_a_fresh_process_goes_on_as_if_nothing_had_happened(family, stop, tmp_path):
    """Before, in and after the taper; gpt2 has dropout, so the generator's state goes with the rest."""
    total = 9
    model = tiny(family)
    controller, log = taper_(model, CONFIG), []
    optimizer = adam(model)
    controller.attach_optimizer(optimizer)
    torch.manual_seed(7)
    train(model, controller, optimizer, stop, log)
    parts = {"model": model, "controller": controller, "optimizer": optimizer}
    torch.save({k: v.state_dict() for k, v in parts.items()} | {"rng": torch.get_rng_state()}, tmp_path / "state.pt")
    train(model, controller, optimizer, total - stop, log)

    saved = torch.load(tmp_path / "state.pt")
    fresh = tiny(family, seed=99)
    resumed = taper_(fresh, CONFIG)
    again = adam(fresh)
    resumed.attach_optimizer(again)
    fresh.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["controller"])
    same(resumed.state_dict(), saved["controller"])
    torch.set_rng_state(saved["rng"])
    second = []
    train(fresh, resumed, again, total - stop, second)
    assert second == log[stop:]
    same(fresh.state_dict(), model.state_dict())
    same(resumed.state_dict(), controller.state_dict())


def test_the_gate_comes_back_with_the_model_alone():
    model = tiny()
    controller = taper_(model, CONFIG)
    train(model, controller, adam(model), 5)
    fresh = tiny(seed=9)
    taper_(fresh, CONFIG)
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh.eval()(input_ids=ids()).logits, model.eval()(input_ids=ids()).logits)


def test_loading_forgets_what_was_gathered_since():
    """Back to a state of warm-up in the same process: sums, pending anchors and massive tokens of later are gone."""
    model = tiny()
    controller = taper_(model, CONFIG)
    state = controller.state_dict()
    with torch.no_grad():
        model.model.embed_tokens.weight[17] *= 1e4
    rows = ids()
    rows[0, 3] = 17
    model(input_ids=rows)
    controller.load_state_dict(state)
    with torch.no_grad():
        model.model.embed_tokens.weight[17] /= 1e4
    other = tiny()
    reference = taper_(other, CONFIG)
    for part in ((model, controller), (other, reference)):
        for step in range(3):
            part[0](input_ids=torch.where(ids(seed=step) == 17, 18, ids(seed=step)))
            part[1].auxiliary_loss()
            part[1].step()
    same(controller.state_dict(), reference.state_dict())


def test_going_back_from_the_taper_to_warm_up():
    model = tiny()
    controller = taper_(model, CONFIG)
    optimizer, log, again = adam(model), [], []
    saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
    state = controller.state_dict()
    train(model, controller, optimizer, 6, log)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    controller.load_state_dict(state)
    assert controller.scale_target is None and controller.phase == "warmup"
    train(model, controller, optimizer, 6, again)
    assert log == again


def test_a_state_of_other_norms_is_refused():
    controller = taper_(tiny(), CONFIG)
    before = controller.state_dict()
    with pytest.raises(ValueError, match=r"other norms than this model's: model\.layers\.1"):
        controller.load_state_dict(taper_(tiny(layers=1), CONFIG).state_dict())
    with pytest.raises(ValueError, match="other norms"):
        controller.load_state_dict(taper_(tiny("gpt2"), CONFIG).state_dict())
    unanchored = taper_(tiny(), TaperConfig(arm="all", anchor_weight=0.0))
    with pytest.raises(ValueError, match="anchor_weight"):
        controller.load_state_dict(unanchored.state_dict())
    with pytest.raises(ValueError, match="anchor_weight"):
        unanchored.load_state_dict(before)
    same(before, controller.state_dict())
