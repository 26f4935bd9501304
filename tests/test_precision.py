"""Whole runs in lower precision: the clocks of steps that happened, float32 state, and stated distances to float32."""

import copy

import pytest
import torch

from tapernorm import TaperConfig, fold_, schedule, taper_
from tapernorm.modules import taper_norms
from zoo import BY_NAME, D, randomise

torch.set_num_threads(1)

NAMES = ("llama", "gpt2-untied")
CONFIG = TaperConfig(
    arm="all", warmup_steps=3, taper_steps=5, ema_decay=0.5, anchor="relative", uniformity_weight=0.01, cap=4.0,
    allow_massive=True,
)  # fmt: skip


def rows(step):
    return torch.randint(D, (4, 8), generator=torch.Generator().manual_seed(step))


def ready(name, dtype=torch.float32):
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name.startswith("gpt2") else {}
    model = randomise(BY_NAME[name].build(**off)).to(dtype).train()
    controller = taper_(model, CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, controller, optimizer


def train(model, controller, optimizer, steps=10, autocast=None):
    losses = []
    for step in range(steps):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(input_ids=rows(step), labels=rows(step)).loss
        (loss + controller.auxiliary_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses), torch.tensor(list(controller.scales.values()))


def float32_state(model, controller):
    for module in taper_norms(model).values():
        assert module.gate.dtype == module.fixed_norm.c.dtype == torch.float32
    tensors = [v for v in controller.state_dict().values() if isinstance(v, torch.Tensor)]
    assert {v.dtype for v in tensors} == {torch.float32} and all(torch.isfinite(v).all() for v in tensors)


# (dtype of the model, of autocast, largest relative distance of c and of a step's loss from the run in float32);
# bfloat16 has 8 bits, float16 has 11: a rounding is 0.4 % and 0.05 %, and there are dozens on the way.
PRECISIONS = {
    "float64": (torch.float64, None, 1e-5, 1e-5),
    "autocast-bf16": (torch.float32, torch.bfloat16, 1e-2, 2e-2),
    "autocast-fp16": (torch.float32, torch.float16, 2e-3, 2e-3),
    "bf16": (torch.bfloat16, None, 2e-2, 5e-2),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_in_another_precision(name, precision):
    dtype, autocast, bound_c, bound_loss = PRECISIONS[precision]
    wanted_losses, wanted_c = train(*ready(name))
    model, controller, optimizer = ready(name, dtype)
    losses, c = train(model, controller, optimizer, autocast=autocast)
    assert controller.phase == "done" and controller.gate == 0.0
    float32_state(model, controller)
    torch.testing.assert_close(c, wanted_c, rtol=bound_c, atol=0)
    torch.testing.assert_close(losses, wanted_losses, rtol=bound_loss, atol=0)
    if precision != "float64":
        assert not torch.equal(losses, wanted_losses)  # it was another precision
    fold_(model)


@pytest.mark.parametrize("name", NAMES)
def test_a_scaler_that_skips_steps(name):
    """float16 with a GradScaler that begins far too high: both clocks count the steps that happened."""
    model, controller, optimizer = ready(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**45, growth_interval=10**6)
    happened = skipped = 0
    while happened < CONFIG.total_steps + 1:
        with torch.autocast("cpu", torch.float16):
            loss = model(input_ids=rows(happened), labels=rows(happened)).loss
        scaler.scale(loss + controller.auxiliary_loss()).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        did_skip = scaler.get_scale() < before
        controller.step(skipped=did_skip)
        skipped, happened = skipped + did_skip, happened + (not did_skip)
        assert controller.step_count == controller.taper_clock == happened
        assert controller.gate == pytest.approx(schedule.gate(happened, CONFIG), abs=1e-7)
        assert skipped < 60
    assert skipped > 3 and controller.phase == "done"
    float32_state(model, controller)

    # the same as a run that had the right scale from the beginning
    other, reference, optimizer = ready(name)
    for step in range(CONFIG.total_steps + 1):
        with torch.autocast("cpu", torch.float16):
            loss = other(input_ids=rows(step), labels=rows(step)).loss
        scale = scaler.get_scale()
        ((loss + reference.auxiliary_loss()) * scale).backward()
        for parameter in other.parameters():
            parameter.grad /= scale
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    assert controller.scales == reference.scales
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
@pytest.mark.parametrize("steps", (1, 5, 9))
def test_gate_and_c_survive_a_conversion(dtype, steps):
    """In warm-up, in the taper and after; a run can go on in the other dtype."""
    model, controller, optimizer = ready("llama")
    train(model, controller, optimizer, steps)
    before = copy.deepcopy(controller.state_dict())
    model.to(dtype)
    for key, value in controller.state_dict().items():
        assert torch.equal(value, before[key]) if isinstance(value, torch.Tensor) else value == before[key], key
    if dtype != torch.float16:  # which has no optimizer step without a scaler
        train(model, controller, optimizer, 1)
        float32_state(model, controller)
