"""What is gathered in warm-up: the three calibrations, and what may not change them."""

import copy

import pytest
import torch

from tapernorm import TaperConfig
from tapernorm.modules import taper_norms
from tapernorm.statistics import FIELDS, Average, pending, scale, stride, token_scale
from tiny_models import ids
from warmup import scales, tapered, warm

# family -> (the norm's kind, what its gain adds to the weight)
FAMILIES = {"llama": ("rms", 0.0), "gemma": ("rms", 1.0), "gpt2": ("layer", 0.0)}
CALIBRATIONS = ("robust", "lstsq", "log")


def record(model):
    """{site: [inputs since the last clear]} filled by hooks of the test's own."""
    seen = {name: [] for name in taper_norms(model)}
    for name, module in taper_norms(model).items():
        module.register_forward_pre_hook(lambda m, args, name=name: seen[name].append(args[0].detach().clone()))
    return seen


def means(h, gamma, kind, eps, calibration):
    """(numerator, denominator) of c for tokens h [N, D], as in the paper, in float64."""
    h, gamma = h.double(), gamma.double()
    if kind == "layer":
        h = h - h.mean(-1, keepdim=True)
    r = (h.pow(2).mean(-1) + eps).sqrt()
    if calibration == "log":
        return float(r.log().mean()), 1.0
    if calibration == "lstsq":
        energy = (h * gamma).pow(2).sum(-1)
    else:
        energy = (h / r[:, None] * gamma).pow(2).sum(-1)
    return float((energy / r).mean()), float(energy.mean())


# The calibrations


@pytest.mark.parametrize("calibration", CALIBRATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_c_is_the_average_of_what_was_recorded(family, calibration):
    kind, one = FAMILIES[family]
    model, controller = tapered(TaperConfig(warmup_steps=4, ema_decay=0.8, calibration=calibration), family)
    seen = record(model)
    eps = model.config.layer_norm_epsilon if family == "gpt2" else model.config.rms_norm_eps
    totals = {name: [0.0, 0.0, 0.0] for name in seen}  # num, den, weight, in plain Python
    for step in range(4):
        for part in range(2):
            model(input_ids=ids(2, seed=10 * step + part))
        for name, module in taper_norms(model).items():
            gamma = module.norm.weight.detach() + one
            h = torch.cat([h.reshape(-1, 16) for h in seen[name]])
            assert len(h) == 32
            values = (*means(h, gamma, kind, eps, calibration), 1.0)
            totals[name] = [0.8 * old + 0.2 * new for old, new in zip(totals[name], values, strict=True)]
            seen[name].clear()
            assert torch.equal(module.fixed_norm.weight, gamma) == (step == 0), "γ and γ̃ move apart in warm-up"
        controller.step()
        for name, (num, den, weight) in totals.items():
            wanted = (num / weight) / (den / weight + 1e-12)
            if calibration == "log":
                wanted = torch.tensor(-num / weight).double().exp()
            assert controller.scales[name] == pytest.approx(float(wanted), rel=2e-6)
        if step < 3:
            with torch.no_grad():  # what an optimizer would do
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
    assert controller.phase == "taper"
    for module in taper_norms(model).values():
        torch.testing.assert_close(module.fixed_norm.weight, module.norm.weight + one, rtol=0, atol=0)
        if kind == "layer":
            assert torch.equal(module.fixed_norm.bias, module.norm.bias)
    frozen = scales(controller)
    for _ in range(2):
        model(input_ids=ids(2, seed=99))
        controller.step()
    assert torch.equal(scales(controller), frozen)
    assert len(set(frozen.tolist())) == len(frozen)  # each site its own


def test_the_calibrations_differ_and_robust_shrugs_off_a_large_token():
    found = {}
    for calibration in CALIBRATIONS:
        config = TaperConfig(warmup_steps=1, calibration=calibration, allow_massive=True)
        for factor in (1.0, 1e3):
            model, controller = tapered(config)
            with torch.no_grad():
                model.model.embed_tokens.weight[7] *= factor
            rows = ids(2, 32)
            rows[0, 5] = 7
            warm(model, controller, [rows], steps=1)
            found[calibration, factor] = controller.scales["model.layers.0.input_layernorm"]
    assert len({round(found[c, 1.0], 5) for c in CALIBRATIONS}) == 3
    assert found["lstsq", 1e3] < 0.05 * found["lstsq", 1.0]
    assert found["robust", 1e3] == pytest.approx(found["robust", 1.0], rel=0.15)  # 1 token in 64, or a few


def test_average_is_bias_corrected_and_skips_invalid_rows():
    average, reference, weight = Average(2, 1, 0.9), 0.0, 0.0
    assert torch.isnan(average.value()).all()
    for step, value in enumerate((3.0, 5.0, -1.0)):
        average.update(torch.tensor([[value], [float("nan")]]), valid=torch.tensor([True, step == 99]))
        reference, weight = 0.9 * reference + 0.1 * value, 0.9 * weight + 0.1
        assert float(average.value()[0]) == pytest.approx(reference / weight, rel=1e-6)
    assert torch.isnan(average.value()[1])
    average.update(torch.tensor([[0.0], [4.0]]), valid=torch.tensor([False, True]))
    assert average.value().flatten().tolist() == pytest.approx([reference / weight, 4.0], rel=1e-6)


def test_scale_survives_a_zero_denominator():
    assert float(scale(torch.zeros(1, len(FIELDS)), "robust")) == 0.0


@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_token_scale(kind):
    h = torch.randn(2, 3, 16, dtype=torch.float64) + 0.7
    wanted = (h.var(-1, unbiased=False) if kind == "layer" else h.pow(2).mean(-1)).add(1e-3).sqrt()
    torch.testing.assert_close(token_scale(h, kind, 1e-3), wanted, rtol=1e-14, atol=0)
    assert token_scale(h.bfloat16(), kind, 1e-3).dtype == torch.float32


# What may not change them


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_accumulation(family):
    rows, found = ids(8), []
    for parts in (1, 2, 8):
        model, controller = tapered(TaperConfig(warmup_steps=3), family)
        found.append(warm(model, controller, rows.chunk(parts)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[2], found[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ("llama", "gpt2"))
@pytest.mark.parametrize("multiple", (8, 64))
def test_padding(family, multiple):
    texts = [ids(1, length, seed=length)[0] for length in (5, 13, 16)]
    model, controller = tapered(TaperConfig(warmup_steps=2), family)
    wanted = warm(model, controller, [text[None] for text in texts], steps=2)
    length = -(-16 // multiple) * multiple
    padded, mask = torch.full((3, length), 2), torch.zeros(3, length, dtype=torch.long)
    for row, text in enumerate(texts):
        padded[row, : len(text)], mask[row, : len(text)] = text, 1
    model, controller = tapered(TaperConfig(warmup_steps=2), family)
    found = warm(model, controller, [padded], steps=2, attention_mask=mask)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    model, controller = tapered(TaperConfig(warmup_steps=2), family)
    assert not torch.allclose(warm(model, controller, [padded], steps=2), wanted, rtol=1e-3)  # the mask matters


@pytest.mark.parametrize("reentrant", (True, False))
@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_gradient_checkpointing(family, reentrant):
    states = []
    for checkpointing in (False, True):
        model, controller = tapered(TaperConfig(warmup_steps=3, calibration="lstsq"), family)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()  # reentrant checkpointing needs an input with gradient
        runs = []
        list(taper_norms(model).values())[1].register_forward_pre_hook(lambda *args, runs=runs: runs.append(1))
        for step in range(2):
            rows = ids(2, seed=step)
            model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
            model(input_ids=ids(2, seed=9), use_cache=False)  # if the other was counted twice, this one weighs less
            controller.step()
        assert len(runs) == (6 if checkpointing else 4)  # two ran once more in the backward pass
        states.append(controller.state_dict())
    for key, value in states[0].items():
        same = torch.equal(value, states[1][key]) if isinstance(value, torch.Tensor) else value == states[1][key]
        assert same, key


def test_evaluation_and_generation_change_nothing():
    found = []
    for disturbed in (False, True):
        model, controller = tapered(TaperConfig(warmup_steps=3))
        for step in range(3):
            model(input_ids=ids(2, seed=step))
            if disturbed:
                model.eval()
                model(input_ids=ids(4, seed=77))
                model.generate(ids(1, seed=78), max_new_tokens=3, do_sample=False)
                model.train()
            controller.step()
        found.append(controller.state_dict())
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]) if isinstance(value, torch.Tensor) else value == found[1][key], key


def test_a_forward_without_gradients_is_not_one_of_training():
    """Also in training mode, as where a loss is measured on the way; reentrant checkpointing still counts."""
    found = []
    for disturbed in (False, True):
        model, controller = tapered(TaperConfig(arm="all", warmup_steps=3))
        for step in range(3):
            model(input_ids=ids(2, seed=step))
            if disturbed:
                with torch.no_grad():
                    model(input_ids=ids(4, seed=77))
            controller.auxiliary_loss()
            controller.step()
            if disturbed:  # nothing is pending
                with torch.no_grad():
                    model(input_ids=ids(4, seed=77))
        found.append(controller.state_dict())
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]) if isinstance(value, torch.Tensor) else value == found[1][key], key


def test_a_mask_may_be_given_by_place():
    rows, mask = ids(3), torch.ones(3, 8, dtype=torch.long)
    mask[1, 5:] = 0
    found = []
    for by_name in (True, False):
        model, controller = tapered(TaperConfig(warmup_steps=1))
        model(rows, attention_mask=mask) if by_name else model(rows, mask)
        controller.step()
        found.append(scales(controller))
    assert torch.equal(*found)


@pytest.mark.parametrize("length", (64, 96, 1000, 2048))
def test_a_large_forward_is_sampled_evenly(length):
    for rows in (1, 3, 16):
        every = stride(rows * length, length)
        picked = torch.arange(rows * length)[::every]
        assert len(picked) <= 1024 and (every == 1) == (rows * length <= 1024)
        positions = torch.bincount(picked % length, minlength=length)
        assert int(positions.max() - positions.min()) <= 1  # no position is seen more often than another


def test_a_sample_stands_for_all():
    """Within the noise of a sample: about 820 of 4,096 tokens, whose 1/r spreads by 0.25 or less, so that four
    standard errors are 0.035. And a micro-batch that is sampled weighs as much as all of its tokens."""
    rows, found = ids(64, 64), []
    for parts in (1, 2, 64):
        model, controller = tapered(TaperConfig(warmup_steps=1))
        found.append(warm(model, controller, rows.chunk(parts), steps=1))
    torch.testing.assert_close(found[0], found[2], rtol=0.035, atol=0)
    torch.testing.assert_close(found[1], found[2], rtol=0.035, atol=0)
    assert not torch.equal(found[0], found[2])
    others = torch.full_like(rows, 7)
    model, controller = tapered(TaperConfig(warmup_steps=1))
    whole = warm(model, controller, [*rows.split(1), *others.split(1)], steps=1)
    assert not torch.allclose(whole, found[2], rtol=0.1)
    model, controller = tapered(TaperConfig(warmup_steps=1))
    uneven = warm(model, controller, [rows, *others.split(1)], steps=1)
    torch.testing.assert_close(uneven, whole, rtol=0.035, atol=0)


def test_a_batch_that_is_not_finite_is_reported(caplog):
    model, controller = tapered(TaperConfig(warmup_steps=4))
    model(inputs_embeds=torch.full((1, 4, 16), float("nan")))
    controller.step()
    assert "1 batches were not finite" in caplog.text


def test_a_batch_that_is_not_finite_is_left_out():
    states = []
    for spoiled in (False, True):
        model, controller = tapered(TaperConfig(warmup_steps=4))
        for step in range(3):
            model(input_ids=ids(2, seed=step))
            if spoiled and step == 1:
                embeddings = model.get_input_embeddings()(ids(2)).detach()
                embeddings[1, 3, 2] = float("inf")
                model(inputs_embeds=embeddings)
            controller.step()
        if spoiled:  # and a step of nothing else
            model(inputs_embeds=torch.full((1, 4, 16), float("nan")))
            before = scales(controller)
            controller.step()
            assert torch.equal(scales(controller), before)
        states.append(controller.state_dict())
    assert states[0]["dropped_batches"] == 0
    assert states[1]["dropped_batches"] == 2
    assert torch.equal(states[0]["average.total"], states[1]["average.total"])
    assert torch.isfinite(states[1]["average.total"]).all()


def test_padding_may_hold_anything():
    """At the first norm; further on, attention spreads an infinity in spite of its mask."""
    first, found = "model.layers.0.input_layernorm", []
    for padding in (None, float("inf"), float("nan")):
        model, controller = tapered(TaperConfig(warmup_steps=2))
        embeddings = model.get_input_embeddings()(ids(1)).detach()
        mask = torch.ones(1, 8)
        if padding is not None:
            embeddings = torch.cat([embeddings, torch.full_like(embeddings, padding)], dim=1)
            mask = torch.cat([mask, torch.zeros(1, 8)], dim=1)
        model(inputs_embeds=embeddings, attention_mask=mask)
        controller.step()
        found.append(controller.scales[first])
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-6)


def test_bfloat16_models_keep_float32_statistics():
    model, controller = tapered(TaperConfig(warmup_steps=3), dtype=torch.bfloat16)
    seen = record(model)
    warm(model, controller, [ids(4)], steps=3)
    state = controller.state_dict()
    assert {v.dtype for v in state.values() if isinstance(v, torch.Tensor)} == {torch.float32}
    for name, module in taper_norms(model).items():
        h = torch.cat([h.reshape(-1, 16) for h in seen[name]])
        num, den = means(h, module.norm.weight.detach(), "rms", model.config.rms_norm_eps, "robust")
        assert h.dtype == module.norm.weight.dtype == torch.bfloat16
        assert controller.scales[name] == pytest.approx(num / den, rel=1e-5)  # bfloat16 would be off by 1e-3


def test_conversion_in_warm_up_keeps_what_was_gathered():
    model, controller = tapered(TaperConfig(warmup_steps=3))
    before = warm(model, controller, [ids(4)], steps=1)
    model.bfloat16()
    assert torch.equal(scales(controller), before)
    warm(model, controller, [ids(4)], steps=2)
    assert all(m.fixed_norm.c.dtype == m.gate.dtype == torch.float32 for m in taper_norms(model).values())
    torch.testing.assert_close(scales(controller), before, rtol=2e-2, atol=0)


def test_without_training_forwards_warm_up_cannot_end():
    model, controller = tapered(TaperConfig(warmup_steps=2))
    model.eval()
    model(input_ids=ids(2))
    controller.step()
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.input_layernorm: no finite statistics"):
        controller.step()
    assert (controller.step_count, controller.taper_clock, controller.gate) == (1, 1, 1.0)
    model.train()
    model(input_ids=ids(2))
    controller.step()
    assert controller.phase == "taper"


def test_of_very_many_micro_batches_the_sums_are_kept(monkeypatch):
    """What is kept for a step's end is bounded; the statistics are the same."""
    found = []
    for kept in (64, 2):
        monkeypatch.setattr("tapernorm.statistics._KEPT", kept)
        model, controller = tapered(TaperConfig(warmup_steps=3, allow_massive=True))
        for seed in range(5):
            model(input_ids=ids(2, seed=seed))
        assert all(len(site.forwards) == (5 if kept == 64 else 1) for site in controller._statistics.values())
        found.append(pending(list(controller._statistics.values())))
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)
    assert found[0][:, 0].tolist() == [float(5 * ids(2).numel())] * len(found[0])


def test_a_copy_gathers_for_itself():
    model, controller = tapered(TaperConfig(warmup_steps=3))
    twin = copy.deepcopy(model)
    model(input_ids=ids(2))
    controller.step()
    before = scales(controller)
    twin(input_ids=ids(4, seed=5))
    controller.step()
    assert torch.equal(scales(controller), before)
