"""The guard, first on numbers alone, then on a model into which outliers are put."""

import dataclasses
import itertools
import json
import math

import pytest
import torch

from tapernorm import TaperConfig, schedule, taper_
from tapernorm.guard import Guard, GuardStop
from tapernorm.modules import taper_norms
from zoo import BY_NAME, randomise

CONFIG = TaperConfig(
    arm="all", anchor_weight=0.0, warmup_steps=5, taper_steps=20, ema_decay=0.5, allow_massive=True, guard_margin=0.5,
    guard_patience=3, guard_rewinds=2,
)  # fmt: skip


def run(guard, losses, clock=0.0, step=0):
    clocks = []
    for loss in losses:
        step += 1
        clock = guard.judge(loss, clock, step)
        clocks.append(clock)
    return clocks


def kinds(guard):
    return [event["kind"] for event in guard.events]


def test_a_sound_run_is_left_alone():
    guard = Guard(CONFIG)
    assert run(guard, [2.0] * 30) == list(range(1, 31))
    assert guard.events == [] and guard.baseline == pytest.approx(2.0)


def test_the_baseline_is_the_average_of_warm_up():
    guard = Guard(CONFIG)
    run(guard, [4.0, 3.0, 2.0, 1.0, 1.0])
    total = weight = 0.0
    for loss in (4.0, 3.0, 2.0, 1.0, 1.0):
        total, weight = 0.5 * total + 0.5 * loss, 0.5 * weight + 0.5
    assert guard.baseline == pytest.approx(total / weight)
    run(guard, [0.1] * 5, clock=5.0)
    assert guard.baseline == pytest.approx(total / weight)  # of warm-up alone


@pytest.mark.parametrize("bad", (2.51, math.inf, math.nan))
def test_it_holds_and_goes_on(bad):
    guard = Guard(CONFIG)
    clocks = run(guard, [2.0] * 8 + [bad, bad, 2.4, 2.4])
    assert clocks == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 9, 10]
    assert kinds(guard) == ["hold", "recovered"]
    assert guard.events[0]["step"] == 9 and guard.events[1]["step"] == 11


def test_it_goes_back_and_slows_down_and_stops():
    guard = Guard(CONFIG)
    clocks = run(guard, [2.0] * 14 + [9.0] * 3)
    assert clocks[-4:] == [14, 14, 14, 11]  # sound at 13, and a tenth of 20 steps back
    clocks = run(guard, [2.0] * 4, clocks[-1])
    assert clocks == [11.5, 12, 12.5, 13]
    clocks = run(guard, [9.0] * 3, clocks[-1])
    assert clocks == [13, 13, 8]  # sound at 12.5, two tenths back, down to a whole number
    assert run(guard, [2.0] * 2, 8.0) == [8.25, 8.5]
    assert kinds(guard) == ["hold", "rewind", "hold", "rewind"]
    with pytest.raises(GuardStop, match=r"unsound for 3 steps, after 2 rewinds: give"):
        run(guard, [9.0] * 3, 8.5)
    assert kinds(guard)[-1] == "stop"


def test_it_never_goes_back_into_warm_up():
    guard = Guard(CONFIG)
    assert run(guard, [2.0] * 6 + [9.0] * 3)[-1] == 5


def test_warm_up_has_no_gate_to_move():
    guard = Guard(CONFIG)
    with pytest.raises(GuardStop, match="in warm-up, where all norms are in place"):
        run(guard, [2.0, math.nan, math.nan, math.nan])
    guard = Guard(CONFIG)
    assert run(guard, [2.0, 99.0, 2.0]) == [1, 2, 3]  # a loss that is high there is the average's business


def test_every_slowness_ends_exactly():
    guard = Guard(CONFIG)
    guard.slowness = 8
    clock = run(guard, [1.0] * (20 * 8), clock=5.0)[-1]
    assert clock == CONFIG.total_steps and schedule.gate(clock, CONFIG) == 0.0


@pytest.mark.parametrize("scale", (10.1, math.inf, math.nan))
def test_a_residual_that_runs_away_is_unsound_though_the_loss_is_not(scale):
    guard = Guard(CONFIG)
    clock = 0.0
    for step in range(1, 16):
        clock = guard.judge(2.0, clock, step, scale if step in (9, 10) else 1.0)
    assert clock == 13 and kinds(guard) == ["hold", "recovered"]
    assert "the residual's scale" in guard.events[0]["text"] and "usually 1" in guard.events[0]["text"]
    assert guard.usual_scale == pytest.approx(1.0)  # an unsound step is not what is usual


def test_in_warm_up_a_residual_may_grow_at_any_pace():
    guard = Guard(CONFIG)
    clock = 0.0
    for step in range(1, 6):
        clock = guard.judge(2.0, clock, step, 20.0**step)
    assert clock == 5 and not guard.events
    guard.judge(2.0, 4.0, 6, math.inf)
    assert kinds(guard) == ["hold"]


def test_a_residual_that_grows_slowly_is_sound():
    guard = Guard(CONFIG)
    clock = 0.0
    for step in range(1, 31):
        clock = guard.judge(2.0, clock, step, 1.3**step)
    assert clock == 30 and not guard.events


def test_the_state_is_json_and_goes_on():
    losses = [2.0] * 14 + [9.0] * 3 + [2.0] * 3 + [9.0] * 2 + [2.0]
    for stop in range(len(losses)):
        whole, first = Guard(CONFIG), Guard(CONFIG)
        clocks = run(whole, losses)
        before = run(first, losses[:stop])
        state = json.loads(json.dumps(first.state()))
        second = Guard(CONFIG)
        second.load(state)
        after = run(second, losses[stop:], before[-1] if before else 0.0, stop)
        assert before + after == clocks and second.state() == whole.state()


# On a model


def tapered(**changes):
    model = randomise(BY_NAME["llama"].build()).train()
    return model, taper_(model, dataclasses.replace(CONFIG, **changes))


def train(model, controller, steps, spoil=lambda controller: False, log=None):
    """A step is a training step whose residual gets a giant token where `spoil` says so."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(3))
    layer = model.model.layers[0].mlp

    def outlier(module, args, output):
        output = output.clone()
        output[:, 2] *= 1e4
        return output

    for _ in range(steps):
        handle = layer.register_forward_hook(outlier) if spoil(controller) else None
        loss = model(input_ids=rows, labels=rows).loss
        if handle is not None:
            handle.remove()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step(loss=loss)
        if log is not None:
            log.append((float(loss.detach()), controller.taper_clock, controller.gate, controller.step_count))


def test_outliers_hold_the_gate_and_it_recovers():
    model, controller = tapered()
    log = []
    train(model, controller, 30, lambda c: c.step_count in (14, 15), log)
    assert kinds(controller.guard) == ["hold", "recovered"]
    assert [row[3] for row in log] == list(range(1, 31))  # the count of optimizer steps never stops
    assert log[13][1] == log[14][1] == log[15][1] == 14 and log[16][1] == 15
    assert log[13][2] == log[15][2] > log[16][2]
    assert controller.phase == "done"


def test_outliers_below_a_gate_take_it_back_and_stop():
    """A model that cannot do without its norms: below gate 0.6 it always fails."""
    model, controller = tapered()
    log = []
    with pytest.raises(GuardStop, match="after 2 rewinds"):
        train(model, controller, 200, lambda c: c.gate < 0.6, log)
    events = kinds(controller.guard)
    assert events.count("rewind") == 2 and events[-1] == "stop"
    gates = [row[2] for row in log]
    assert any(b > a for a, b in itertools.pairwise(gates))  # it went back up
    assert controller.guard.slowness == 4
    assert len({row[3] for row in log}) == len(log)
    assert controller.events == controller.guard.events and controller.events[-1]["step"] == controller.step_count + 1
    assert {m.path for m in taper_norms(model).values()} == {"mixed"}
    # the message is one for a person
    assert "warm-up's" in controller.events[0]["text"] and "the gate is held" in controller.events[0]["text"]


def test_the_scale_is_that_of_the_final_norms_input_over_the_micro_batches_of_a_step():
    model, controller = tapered()
    seen, told = [], []
    final = model.get_submodule(controller.final)
    final.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    judge = controller.guard.judge
    controller.guard.judge = lambda *args: told.append(args[3]) or judge(*args)
    for width in (5, 8):
        rows = torch.randint(16, (2, width), generator=torch.Generator().manual_seed(width))
        mask = torch.ones_like(rows)
        mask[0, :2] = 0
        model(input_ids=rows, attention_mask=mask)
        seen[-1] = seen[-1][mask.bool()]
        with torch.no_grad():
            model(input_ids=rows)  # an evaluation along the way
        seen.pop()
    controller.step(loss=2.0)
    h = torch.cat(seen).double()
    assert told == [pytest.approx(float((h.pow(2).mean(-1) + final.probed.eps).sqrt().mean()), rel=1e-5)]
    controller.step(loss=2.0)
    assert told[1] is None  # no forward, no scale


def test_a_guard_needs_the_loss():
    model, controller = tapered()
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="guard_margin needs the loss"):
        controller.step()
    assert controller.step_count == 0
    controller.step(loss=2.0)
    controller.step(skipped=True)  # a GradScaler that looks for its scale is no reason for alarm
    controller.step(skipped=True, loss=2.0)
    assert (controller.step_count, controller.taper_clock, controller.events) == (1, 1, [])
    controller.step(skipped=True, loss=math.nan)
    assert kinds(controller.guard) == ["hold"] and (controller.step_count, controller.taper_clock) == (1, 1)


def test_a_guarded_run_resumes():
    def spoil(controller):
        return controller.step_count in (14, 15, 16, 20)

    whole, ends, states, models = [], [], {}, {}
    for stop in (None, 15, 16, 18):
        torch.manual_seed(0)
        model, controller = tapered()
        log = []
        if stop is not None:
            state = dict(states[stop])
            model.load_state_dict(models[stop])
            controller.load_state_dict(state)
            train(model, controller, 24 - stop, spoil, log)
            assert [row[1:] for row in log] == [row[1:] for row in whole[stop:]]
        else:
            for step in range(24):
                states[step] = controller.state_dict()
                models[step] = {k: v.clone() for k, v in model.state_dict().items()}
                train(model, controller, 1, spoil, whole)
        ends.append(controller.state_dict()["guard.events"])
    assert len(json.loads(ends[0])) >= 4
    assert [len(json.loads(end)) for end in ends] == [len(json.loads(ends[0]))] * 4


# Staggered sites


@pytest.mark.parametrize("order", ("depth", "reverse", "difficulty", ("*post_attention_layernorm", "*")))
def test_staggered_sites_start_one_after_another(order):
    model, controller = tapered(stagger=0.5, order=order, guard_margin=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(3))
    starts = {}
    for step in range(1, CONFIG.total_steps + 2):
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        assert controller.gates == pytest.approx(
            {n: schedule.gate(step, controller.config, controller.places[n]) for n in controller.sites}
        )
        for name, gate in controller.gates.items():
            if gate < 1:
                starts.setdefault(name, step)
        assert controller.phase == ("warmup" if step < 5 else "taper" if step < 25 else "done")
    assert controller.gate == 0.0 and len(set(starts.values())) > 1
    ranked = sorted(starts, key=starts.__getitem__)
    if order == "depth":
        assert ranked == list(controller.sites)
    elif order == "reverse":
        assert starts["model.norm"] == min(starts.values())
    elif order == "difficulty":
        spreads = controller.spreads
        assert ranked == sorted(spreads, key=spreads.__getitem__) and len({round(v, 6) for v in spreads.values()}) == 5
    else:
        assert {starts[n] for n in starts if "post_attention" in n} == {6}


def test_the_spread_is_that_of_log_r():
    model, controller = tapered(guard_margin=None, calibration="log")
    seen = {}
    for name, module in taper_norms(model).items():
        module.register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args[0].detach()}))
    model(input_ids=torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(3)))
    controller.step()
    for name, h in seen.items():
        log = (h.double().pow(2).mean(-1) + controller.sites[name].probed.eps).sqrt().log()
        assert controller.spreads[name] == pytest.approx(float(log.std(unbiased=False)), rel=1e-3)


def test_places_are_saved():
    """Measured difficulty is not measured again by a process that goes on."""
    model, controller = tapered(stagger=0.5, order="difficulty", guard_margin=None)
    rows = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(3))
    for _ in range(12):
        model(input_ids=rows)
        controller.step()
    fresh, again = tapered(stagger=0.5, order="difficulty", guard_margin=None)
    fresh.load_state_dict(model.state_dict())
    again.load_state_dict(json_round_trip(controller.state_dict()))
    for _ in range(13):
        assert again.gates == controller.gates and again.places == controller.places
        again.step()
        controller.step()
    assert controller.phase == "done"


def json_round_trip(state):
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    return json.loads(json.dumps({k: v for k, v in state.items() if k not in tensors})) | tensors


def test_an_order_that_does_not_fit_leaves_the_model_alone():
    model = BY_NAME["llama"].build()
    with pytest.raises(ValueError, match="order"):
        taper_(model, TaperConfig(order=("nothing.*", "*")))
    assert not taper_norms(model)
