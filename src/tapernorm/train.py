"""transformers' Trainer, with a controller that moves once per optimizer step.

`TaperTrainer` is for most; `TaperMixin` goes in front of a Trainer subclass of your own (`class Mine(TaperMixin,
SFTTrainer)`), and `TaperCallback` alone is enough for a run without the scale loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from tapernorm import hub
from tapernorm.controller import TaperController
from tapernorm.convert import get_controller


class TaperCallback(TrainerCallback):
    """Calls `controller.step()` after every optimizer step, and hands it the optimizer when training begins.

    A stock Trainer restores the model and not the controller: before `trainer.train(resume_from_checkpoint=folder)`
    call `controller.load_state_dict(tapernorm.hub.read_taper_state(Path(folder)))`. `TaperMixin` does it itself.

    Raises:
        ValueError: training goes on from a checkpoint, and the controller is at its beginning.
    """

    def __init__(self, controller: TaperController) -> None:
        self.controller = controller

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step and not self.controller.step_count:
            raise ValueError(
                f"training goes on from step {state.global_step}, but the controller is at step 0, and the taper would "
                "begin again; use TaperTrainer or TaperMixin, or call controller.load_state_dict(tapernorm.hub."
                "read_taper_state(checkpoint)) before trainer.train()"
            )
        if kwargs.get("optimizer") is not None:
            self.controller.attach_optimizer(kwargs["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # accelerate's wrapper knows whether a gradient scaler skipped the step
        self.controller.step(skipped=bool(getattr(kwargs.get("optimizer"), "step_was_skipped", False)))


class TaperMixin:
    """Adds the scale loss and the controller's state to a Trainer. Put it before the Trainer class.

    The loss is λ times the mean over all real tokens of an optimizer step, over micro-batches and processes, however
    the Trainer scales its own loss.

    Args:
        controller: the controller of the model; found on the model if None.

    Raises:
        ValueError: the model is not tapered.
    """

    def __init__(self, *args: Any, controller: TaperController | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        found = controller or get_controller(trainer.model)
        if found is None:
            raise ValueError("the model is not tapered: call tapernorm.taper_(model, config) before making the trainer")
        self.controller = found
        self._step_tokens = 1.0
        trainer.add_callback(TaperCallback(found))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As the Trainer's; counts the real tokens of the step, for the mean of the scale loss."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if self.controller.anchor is not None:
            trainer: Any = self
            local = torch.tensor(float(sum(_tokens(s) for s in samples)), device=trainer.accelerator.device)
            # Each process's gradients are averaged with the others', so its share is measured by the mean.
            self._step_tokens = float(trainer.accelerator.reduce(local, reduction="mean"))
        return samples, items

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the Trainer's, plus the scale loss in training; never in evaluation."""
        trainer: Any = self
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        anchor, _ = self.controller.take_anchor() if model.training else (None, None)
        if anchor is not None:
            share = anchor / self._step_tokens
            # training_step() will divide by the number of micro-batches unless the loss is normalised already
            scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
            if scaled is None:
                scaled = (trainer.model_accepts_loss_kwargs and num_items_in_batch is not None) or (
                    trainer.compute_loss_func is not None
                )
            loss = loss + (share if scaled else share * trainer.current_gradient_accumulation_steps)
        return (loss, outputs) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """A checkpoint that cannot be taken for a stock model, with the controller's state in it."""
        trainer: Any = self
        if not trainer.args.should_save:  # every process comes here
            return
        folder = Path(output_dir or trainer.args.output_dir)
        model = trainer.accelerator.unwrap_model(trainer.model)
        hub.save_pretrained(model, folder, tokenizer=trainer.processing_class, overwrite=True)
        # For the reader; transformers would write a pickle, and nothing here reads one.
        (folder / "training_args.json").write_text(trainer.args.to_json_string(), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        self.controller.load_state_dict(hub.read_taper_state(Path(resume_from_checkpoint)))

    def _load_best_model(self) -> None:
        trainer: Any = self
        super()._load_best_model()  # type: ignore[misc]
        self.controller.load_state_dict(hub.read_taper_state(Path(trainer.state.best_model_checkpoint)))


class TaperTrainer(TaperMixin, Trainer):
    """transformers' Trainer for a tapered model: `TaperTrainer(model=model, args=args, controller=controller, ...)`."""


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run that was written to its end, or None.

    The Trainer writes trainer_state.json last: a checkpoint without a readable one is a save that was killed.
    """
    steps = []
    for path in folder.glob("checkpoint-*"):
        try:
            state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            steps.append((int(state["global_step"]), path))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return max(steps)[1] if steps else None


def _tokens(sample: Any) -> int:
    """Real tokens of a micro-batch: those of the attention mask, or all."""
    mask = sample.get("attention_mask") if hasattr(sample, "get") else None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return int((mask != 0).sum())
    ids = sample.get("input_ids") if hasattr(sample, "get") else None
    return int(ids.numel()) if isinstance(ids, Tensor) else 1
