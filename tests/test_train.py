"""transformers' Trainer: the same weights as the plain loop, and the same anchor however it accumulates."""

import pytest
import torch
from transformers import Trainer

from tapernorm import TaperCallback, TaperConfig, TaperMixin, TaperTrainer, get_controller, hub, schedule, taper_
from tapernorm.modules import taper_norms
from trainers import CONFIG, STEPS, arguments, blocks, make, masked_blocks, same, step_gradients, tiny


class Recording(TaperTrainer):
    """Keeps the micro-batches of every step."""

    def get_batch_samples(self, *args):
        samples, items = super().get_batch_samples(*args)
        self.__dict__.setdefault("seen", []).append([dict(s) for s in samples])
        return samples, items


@pytest.mark.parametrize("accumulate", (1, 2))
def test_the_trainer_and_the_plain_loop_agree(tmp_path, accumulate):
    trainer, controller, _ = make(tmp_path, kind=Recording, gradient_accumulation_steps=accumulate)
    trainer.train()
    assert controller.phase == "done"

    model = tiny()
    mine = taper_(model, CONFIG)
    decayed = trainer.get_decay_parameter_names(model)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    mine.attach_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    model.train()
    for batches in trainer.seen:
        assert len(batches) == accumulate
        for batch in batches:
            loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss + mine.auxiliary_loss()
            (loss / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mine.step()
    for (name, theirs), ours in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)
    assert mine.scale_target == pytest.approx(controller.scale_target, rel=1e-5)
    unanchored = make(tmp_path, config=TaperConfig(arm="all", warmup_steps=3, taper_steps=4, anchor_weight=0.0))[0]
    unanchored.train()
    far = max(
        float((a - b).detach().abs().max())
        for a, b in zip(unanchored.model.parameters(), model.parameters(), strict=True)
    )
    assert far > 1e-3  # the anchor made a difference


def test_the_controller_follows_the_schedule(tmp_path):
    trainer, controller, watch = make(tmp_path, gradient_accumulation_steps=2)
    trainer.train()
    assert [row[0] for row in watch.rows] == [row[1] for row in watch.rows] == list(range(1, STEPS + 1))
    assert [row[2] for row in watch.rows] == pytest.approx([schedule.gate(k, CONFIG) for k in range(1, STEPS + 1)])
    assert [row[3] for row in watch.rows] == ["warmup"] * 2 + ["taper"] * 4 + ["done"] * 3
    assert trainer.controller is controller is get_controller(trainer.model)
    state = trainer.optimizer.state
    assert all(m.fixed_norm.weight in state for m in taper_norms(trainer.model).values())


def anchor_gradient(folder, batch, accumulate, rows, **overrides):
    """What the anchor adds to the first step's gradient after the target was frozen, over 8 rows."""
    found = []
    for weight in (0.0, 0.5):
        config = TaperConfig(arm="all", warmup_steps=1, taper_steps=4, anchor_weight=weight)
        found.append(step_gradients(folder, config, rows, batch, accumulate, steps=2, **overrides)[1])
    return [b - a for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("overrides", ({}, {"model_accepts_loss_kwargs": False}, {"loss_is_scaled_for_ga": False}))
def test_the_anchor_is_the_same_for_one_batch_and_eight(tmp_path, overrides):
    """However the Trainer scales its own loss, and with rows of different lengths."""
    rows = masked_blocks()
    whole = anchor_gradient(tmp_path, 8, 1, rows)
    largest = max(float(g.abs().max()) for g in whole)
    assert largest > 1e-3
    model = tiny()
    controller = taper_(model, TaperConfig(arm="all", warmup_steps=1, taper_steps=4, anchor_weight=0.5))
    model.train()
    for step in range(2):
        model(**{k: torch.stack([row[k] for row in rows]) for k in ("input_ids", "attention_mask")})
        loss = controller.auxiliary_loss()
        if step == 0:
            controller.step()
    direct = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    for ours, wanted in zip(whole, direct, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-4 * largest)
    parts = anchor_gradient(tmp_path, 1, 8, rows, **overrides)
    for ours, wanted in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-4 * largest)


def test_evaluation_never_contains_the_anchor(tmp_path):
    trainer, controller, _ = make(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.train()
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluated) == STEPS
    trainer.model.eval()
    with torch.no_grad():
        rows = torch.stack([row["input_ids"] for row in blocks(8, seed=5)])
        plain = float(trainer.model(input_ids=rows, labels=rows).loss)
    assert trainer.evaluate()["eval_loss"] == evaluated[-1] == pytest.approx(plain, rel=1e-6)
    quiet, other, _ = make(tmp_path)
    quiet.train()
    same(controller.state_dict(), other.state_dict())  # and evaluating disturbs nothing
    same(trainer.model.state_dict(), quiet.model.state_dict())


def test_gains_take_no_weight_decay(tmp_path):
    for family in ("llama", "gpt2"):
        trainer, *_ = make(tmp_path, family)
        trainer.create_optimizer()
        decay = {id(p): g["weight_decay"] for g in trainer.optimizer.param_groups for p in g["params"]}
        for module in taper_norms(trainer.model).values():
            assert {decay[id(p)] for p in module.parameters()} == {0.0}
        assert 0.1 in decay.values()


def test_a_model_that_is_not_tapered_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not tapered"):
        TaperTrainer(model=tiny(), args=arguments(tmp_path), train_dataset=blocks())


def test_the_mixin_goes_in_front_of_a_trainer_of_ones_own(tmp_path):
    class Doubled(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss, outputs = super().compute_loss(*args, **(kwargs | {"return_outputs": True}))
            return (2 * loss, outputs) if kwargs.get("return_outputs") else 2 * loss

    class Mine(TaperMixin, Doubled):
        pass

    trainer, controller, _ = make(tmp_path, kind=Mine)
    trainer.train()
    assert controller.phase == "done" and controller.scale_target is not None


def test_a_second_train_goes_on_and_says_so(tmp_path):
    trainer, controller, watch = make(tmp_path)
    trainer.train()
    assert controller.phase == "done"
    state = controller.state_dict()
    with pytest.warns(UserWarning, match=r"at step 9 in phase 'done' with gate 0; it does not begin again"):
        trainer.train()
    assert (controller.step_count, controller.gate, controller.phase) == (2 * STEPS, 0.0, "done")
    assert controller.scales == {k.removeprefix("c."): float(v) for k, v in state.items() if k.startswith("c.")}
    assert [row[1] for row in watch.rows] == list(range(1, 2 * STEPS + 1))


# The callback alone


def test_the_callback_alone(tmp_path):
    config = TaperConfig(warmup_steps=3, taper_steps=4)
    found = []
    for kind in (Trainer, TaperTrainer):
        trainer, controller, watch = make(tmp_path, config=config, kind=kind)
        if kind is Trainer:
            trainer.add_callback(TaperCallback(controller))
        trainer.train()
        assert controller.gate == 0.0
        found.append((watch.rows, trainer.model.state_dict()))
    same(found[0][1], found[1][1])
    assert found[0][0] == found[1][0]


def test_the_callback_alone_does_not_drop_an_anchor_in_silence(tmp_path):
    trainer, controller, _ = make(tmp_path, kind=Trainer)
    trainer.add_callback(TaperCallback(controller))
    with pytest.raises(RuntimeError, match="auxiliary_loss"):
        trainer.train()


@pytest.mark.parametrize("stop", (2, 5))
def test_the_callback_alone_never_begins_again_in_silence(tmp_path, stop):
    config = TaperConfig(warmup_steps=3, taper_steps=4)

    def run(folder, seed=0, **settings):
        trainer, controller, watch = make(folder, config=config, kind=Trainer, seed=seed, **settings)
        trainer.add_callback(TaperCallback(controller))
        return trainer, controller, watch

    whole, _, rows = run(tmp_path, save_strategy="steps", save_steps=stop)
    whole.train()
    checkpoint = tmp_path / f"checkpoint-{stop}"
    trainer, controller, watch = run(tmp_path / "resumed", seed=99)
    with pytest.raises(ValueError, match=r"read_taper_state\(checkpoint\)"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    controller.load_state_dict(hub.read_taper_state(checkpoint))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert watch.rows == rows.rows[stop:]
    same(trainer.model.state_dict(), whole.model.state_dict())


def test_a_step_that_the_scaler_skipped():
    calls = []

    class Optimizer:
        step_was_skipped = False

    class Controller:
        guard = None

        def step(self, skipped, loss):
            assert loss is None
            calls.append(skipped)

    callback, optimizer = TaperCallback(Controller()), Optimizer()
    callback.on_optimizer_step(None, None, None, optimizer=optimizer)
    optimizer.step_was_skipped = True
    callback.on_optimizer_step(None, None, None, optimizer=optimizer)
    assert calls == [False, True]
