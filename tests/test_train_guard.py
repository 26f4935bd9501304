"""transformers' Trainer and the guard: which loss it sees, and what it stops."""

import dataclasses

import pytest
import torch
from transformers import Trainer

from tapernorm import GuardStop, TaperCallback, TaperTrainer, get_controller, hub
from trainers import CONFIG, STEPS, blocks, make, same

GUARDED = dataclasses.replace(
    CONFIG, warmup_steps=3, taper_steps=12, guard_margin=0.5, guard_patience=2, guard_rewinds=1, allow_massive=True
)


class Spoiled(TaperTrainer):
    """Makes the loss what `spoil` says, from a step on or below a gate."""

    spoil = staticmethod(lambda trainer, loss: loss)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            old = loss
            loss = self.spoil(self, loss)
            if loss is not old and self.controller.guard is not None:
                self._taper_callback.losses[-1] = loss.detach()
        return (loss, outputs) if return_outputs else loss


def test_the_guard_sees_the_loss_of_the_step(tmp_path):
    """The mean over micro-batches, without the controller's own losses."""
    seen = []
    for accumulate in (1, 4):
        trainer, controller, _ = make(
            tmp_path, config=dataclasses.replace(GUARDED, uniformity_weight=1.0), learning_rate=0.0,
            per_device_train_batch_size=8 // accumulate, gradient_accumulation_steps=accumulate,
        )  # fmt: skip
        judge = controller.guard.judge
        losses = []
        controller.guard.judge = lambda loss, *rest, judge=judge, losses=losses: (
            losses.append(loss), judge(loss, *rest))[1]  # fmt: skip
        trainer.train()
        seen.append(losses)
        plain, *_ = make(
            tmp_path, config=dataclasses.replace(GUARDED, guard_margin=None, anchor_weight=0.0), learning_rate=0.0,
            per_device_train_batch_size=8 // accumulate, gradient_accumulation_steps=accumulate, logging_steps=1,
            logging_strategy="steps",
        )  # fmt: skip
        plain.train()
        wanted = [row["loss"] for row in plain.state.log_history if "loss" in row]
        assert losses == pytest.approx(wanted, rel=1e-3)
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path):
    class Once(Spoiled):
        @staticmethod
        def spoil(trainer, loss):
            return loss * torch.nan if trainer.state.global_step == 6 else loss

    trainer, controller, watch = make(tmp_path, config=GUARDED, kind=Once)
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert controller.step_count == STEPS - 1  # the step that was dropped did not happen
    assert [event["kind"] for event in controller.events] == ["hold", "recovered"]
    assert watch.rows[5][2] == watch.rows[6][2]
    unguarded, *_ = make(tmp_path, config=dataclasses.replace(GUARDED, guard_margin=None), kind=Once)
    unguarded.train()
    assert not all(torch.isfinite(p).all() for p in unguarded.model.parameters())


def test_the_guard_stops_with_a_sound_checkpoint(tmp_path):
    class Below(Spoiled):
        @staticmethod
        def spoil(trainer, loss):
            return loss + 100 if trainer.controller.gate < 0.7 else loss

    trainer, controller, watch = make(
        tmp_path, config=GUARDED, kind=Below, max_steps=60, save_strategy="steps", save_steps=1, save_total_limit=2
    )
    with pytest.raises(GuardStop, match=r"after 1 rewinds.* The last sound model, at gate 0\.7.* is in .*sound"):
        trainer.train()
    assert [event["kind"] for event in controller.events] == ["hold", "rewind", "hold", "stop"]
    model, _ = hub.from_pretrained(tmp_path / "sound")
    saved = get_controller(model)
    assert saved.events == controller.events
    assert saved.guard.unsound == 0 and saved.gate >= 0.7 and saved.gate == controller.gate
    assert saved.step_count == max(row[1] for row in watch.rows if row[2] < 1 and row[0] < 16)
    same(model.state_dict(), trainer.model.state_dict())
    steps = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert steps == [14, 15]  # none of an unsound step


def test_no_checkpoint_of_an_unsound_step_whatever_asks_for_it(tmp_path):
    """At the end of an epoch, the Trainer asks past the end of the step."""

    class Twice(Spoiled):
        @staticmethod
        def spoil(trainer, loss):
            return loss + 100 if trainer.state.global_step in (7, 11) else loss  # the last steps of epochs 2 and 3

    trainer, controller, _ = make(
        tmp_path, config=GUARDED, kind=Twice, data=blocks(16), max_steps=16, save_strategy="epoch"
    )
    trainer.train()
    assert [event["kind"] for event in controller.events] == ["hold", "recovered"] * 2
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-16", "checkpoint-4"]


def test_the_callback_alone_cannot_guard(tmp_path):
    trainer, controller, _ = make(tmp_path, config=dataclasses.replace(GUARDED, anchor_weight=0.0), kind=Trainer)
    trainer.add_callback(TaperCallback(controller))
    with pytest.raises(ValueError, match="use TaperTrainer or TaperMixin"):
        trainer.train()
