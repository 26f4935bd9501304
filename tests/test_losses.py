"""The scale loss against its formula, its gradient under accumulation and checkpointing, and what it averages."""

import pytest
import torch

from anchors import FAMILIES, LAMBDA, anchored, past_warm_up, residual, s_of
from tiny_models import ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arm", ("all", "internal"))
@pytest.mark.parametrize("anchor", ("absolute", "relative"))
def test_value_and_gradient(family, arm, anchor):
    model, controller = past_warm_up(family, torch.float64, arm=arm, anchor=anchor)
    target = controller.scale_target
    first = s_of(residual(model, family, input_ids=ids(4, seed=50)), family).detach()
    assert target == pytest.approx(float(first.mean()))
    controller.step()
    assert 0 < controller.gate < 1
    rows = ids(3, seed=1)
    s = s_of(residual(model, family, input_ids=rows), family)
    deviation = s - target if anchor == "absolute" else s / target - 1
    wanted = LAMBDA * deviation.pow(2).mean()
    assert float(wanted.detach()) > 1e-4
    gradients = torch.autograd.grad(wanted, list(model.parameters()), allow_unused=True, materialize_grads=True)
    assert sum(float(g.abs().sum()) for g in gradients) > 0
    model(input_ids=rows)
    loss = controller.auxiliary_loss()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    for ours, reference in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-12)


def test_the_final_norm_of_the_internal_arm_is_the_stock_one():
    model, controller = past_warm_up(arm="internal")
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"
    model(input_ids=ids(2))
    assert float(controller.auxiliary_loss()) > 0


@pytest.mark.parametrize(("arm", "weight", "wanted"), (("all", None, 0.1), ("internal", None, 0.0), ("all", 0.0, 0.0)))
def test_default_weight(arm, weight, wanted):
    model, controller = past_warm_up(arm=arm, anchor_weight=weight)
    model(input_ids=ids(2))
    loss = controller.auxiliary_loss()
    assert (float(loss) > 0) == (wanted > 0)
    assert (controller.scale_target is None) == (wanted == 0)
    if wanted:
        s = s_of(residual(model, "llama", input_ids=ids(2)), "llama")
        assert float(loss) == pytest.approx(wanted * float((s - controller.scale_target).pow(2).mean()), rel=1e-5)


def test_a_second_call_gives_nothing_and_the_first_all_forwards():
    model, controller = past_warm_up()
    parts = []
    for seed in (1, 2):
        model(input_ids=ids(2, seed=seed))
        parts.append(float(controller.auxiliary_loss()))
        assert float(controller.auxiliary_loss()) == 0.0
    for seed in (1, 2):
        model(input_ids=ids(2, seed=seed))
    assert float(controller.auxiliary_loss()) == pytest.approx(sum(parts) / 2, rel=1e-6)


def test_never_in_evaluation():
    model, controller = past_warm_up()
    model.eval()
    model(input_ids=ids(2))
    model.generate(ids(1), max_new_tokens=3, do_sample=False)
    assert float(controller.auxiliary_loss()) == 0.0
    controller.step()  # nothing is pending
    model.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_tokens_weigh_nothing(family):
    texts = [ids(1, length, seed=length)[0] for length in (3, 9, 12)]
    padded, mask = torch.full((3, 16), 2), torch.zeros(3, 16, dtype=torch.long)
    for row, text in enumerate(texts):
        padded[row, : len(text)], mask[row, : len(text)] = text, 1
    model, controller = anchored(family, torch.float64)
    model(input_ids=padded, attention_mask=mask)
    controller.auxiliary_loss()
    controller.step()
    singly = torch.cat([s_of(residual(model, family, input_ids=t[None]), family)[0] for t in texts])
    target = controller.scale_target
    assert target == pytest.approx(float(singly.mean()), rel=1e-6)
    model(input_ids=padded, attention_mask=mask)
    wanted = LAMBDA * float((singly - target).pow(2).mean())
    assert float(controller.auxiliary_loss()) == pytest.approx(wanted, rel=1e-9)


def test_a_micro_batch_of_padding_alone_is_nothing():
    model, controller = past_warm_up()
    model(input_ids=ids(2), attention_mask=torch.zeros(2, 8))
    assert float(controller.auxiliary_loss()) == 0.0


def test_the_target_is_the_average_of_the_mean_scale():
    model, controller = anchored(warmup_steps=4, ema_decay=0.7)
    total = weight = 0.0
    for step in range(4):
        rows = [ids(2, seed=10 * step + part) for part in range(2)]
        s = torch.cat([s_of(residual(model, "llama", input_ids=r), "llama") for r in rows])
        total, weight = 0.7 * total + 0.3 * float(s.mean()), 0.7 * weight + 0.3
        for part in rows:
            model(input_ids=part)
            assert float(controller.auxiliary_loss()) == 0.0  # before the end of warm-up
        assert controller.scale_target is None
        controller.step()
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.3)
    assert controller.scale_target == pytest.approx(total / weight, rel=1e-6)
    frozen = controller.scale_target
    model(input_ids=ids(2))
    controller.auxiliary_loss()
    controller.step()
    assert controller.scale_target == frozen


def test_a_batch_that_is_not_finite_leaves_the_target_alone():
    targets = []
    for spoiled in (False, True):
        model, controller = anchored(warmup_steps=2)
        for seed in (1, 2):
            model(input_ids=ids(2, seed=seed))
            if spoiled:
                model(inputs_embeds=torch.full((1, 4, 16), float("inf")))
            controller.auxiliary_loss()
            controller.step()
        targets.append(controller.scale_target)
    assert targets[0] == targets[1]


@pytest.mark.parametrize("anchor", ("absolute", "relative"))
def test_accumulation_gives_the_same_gradient(anchor):
    rows, found = ids(8, seed=3), []
    for parts in (1, 2, 8):
        model, controller = past_warm_up(anchor=anchor)
        for part in rows.chunk(parts):
            model(input_ids=part)
            (controller.auxiliary_loss() / parts).backward()
        found.append((controller.scales, [p.grad for p in model.parameters()]))
    largest = max(float(g.abs().max()) for g in found[0][1] if g is not None)
    assert largest > 1e-3
    for scales, gradients in found[1:]:
        assert scales == found[0][0]
        for ours, reference in zip(gradients, found[0][1], strict=True):
            assert (ours is None) == (reference is None)
            if ours is not None:
                torch.testing.assert_close(ours, reference, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("reentrant", (True, False))
def test_gradient_checkpointing_gives_the_same_gradient(reentrant):
    found = []
    for checkpointing in (False, True):
        model, controller = past_warm_up()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        for seed in range(2):
            rows = ids(2, seed=seed)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss + controller.auxiliary_loss()
            loss.backward()
            controller.step()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None)


def test_the_loss_is_float32_in_a_bfloat16_model():
    model, controller = past_warm_up(dtype=torch.bfloat16)
    model(input_ids=ids(2))
    loss = controller.auxiliary_loss()
    assert loss.dtype == torch.float32
    loss.backward()
    assert torch.isfinite(model.model.embed_tokens.weight.grad).all()
