"""transformers' Trainer, with a controller that moves once per optimizer step.

`TaperTrainer` is for most; `TaperMixin` goes in front of a Trainer subclass of your own (`class Mine(TaperMixin,
SFTTrainer)`), and `TaperCallback` alone is enough for a run without losses of the controller's and without a guard.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainerCallback

from tapernorm import hub
from tapernorm.controller import TaperController
from tapernorm.convert import get_controller
from tapernorm.distill import Teacher
from tapernorm.guard import GuardStop
from tapernorm.statistics import gather

_NORMS = "taper_norms.safetensors"  # of a PEFT checkpoint


class TaperCallback(TrainerCallback):
    """Calls `controller.step()` after every optimizer step, and hands it the optimizer when training begins.

    A stock Trainer restores the model and not the controller: before `trainer.train(resume_from_checkpoint=folder)`
    call `controller.load_state_dict(tapernorm.hub.read_taper_state(Path(folder)))`. `TaperMixin` does it itself.

    A second `trainer.train()` goes on with the taper where the first one left it, and warns: the norms are not put
    back, and nothing is tapered twice.

    Raises:
        ValueError: training goes on from a checkpoint, and the controller is at its beginning; or there is a guard,
            and nobody who tells it the loss (`TaperMixin` does).
    """

    def __init__(self, controller: TaperController) -> None:
        self.controller = controller
        self.losses: list[Tensor] | None = None  # of the micro-batches of a step; TaperMixin makes it a list
        self._spoiled = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        controller = self.controller
        if state.global_step and not controller.step_count:
            raise ValueError(
                f"training goes on from step {state.global_step}, but the controller is at step 0, and the taper would "
                "begin again; use TaperTrainer or TaperMixin, or call controller.load_state_dict(tapernorm.hub."
                "read_taper_state(checkpoint)) before trainer.train()"
            )
        if controller.step_count and not state.global_step:
            warnings.warn(
                f"the taper goes on where it is, at step {controller.step_count} in phase {controller.phase!r} with "
                f"gate {controller.gate:.3g}; it does not begin again with this train(). For a fresh one, taper a "
                "fresh model",
                stacklevel=2,
            )
        if controller.guard is not None and self.losses is None:
            raise ValueError("guard_margin needs the loss of every step: use TaperTrainer or TaperMixin")
        if kwargs.get("optimizer") is not None:
            controller.attach_optimizer(kwargs["optimizer"])

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Where there is a guard, a gradient that is not finite never reaches the weights."""
        self._spoiled = False
        if self.controller.guard is None or getattr(optimizer, "scaler", None) is not None:  # which looks itself
            return
        self._spoiled = not gradients_are_finite(model)
        if self._spoiled:
            model.zero_grad(set_to_none=True)  # and the optimizer finds nothing to do

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loss = None
        if self.losses is not None:
            loss = torch.stack(self.losses).sum() if self.losses else None
            self.losses.clear()
        # accelerate's wrapper knows whether a gradient scaler skipped the step
        skipped = bool(getattr(kwargs.get("optimizer"), "step_was_skipped", False))
        if self._spoiled:
            loss = torch.tensor(torch.nan)
        self.controller.step(skipped=skipped or self._spoiled, loss=loss)


def gradients_are_finite(model: nn.Module) -> bool:
    """Whether all gradients are, on every rank. The same answer on each."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    if not local:
        return True
    total = torch.nn.utils.get_total_norm(local).float()
    return bool(torch.isfinite(gather(total)).all())


class TaperMixin:
    """Adds the controller's losses and its state to a Trainer. Put it before the Trainer class.

    The scale loss is λ times the mean over all real tokens of an optimizer step, over micro-batches and processes,
    however the Trainer scales its own loss; the uniformity loss and a teacher's likewise.

    Args:
        controller: the controller of the model; found on the model if None.
        teacher: a model with its norms, to hold the tapered one to (`tapernorm.distill`).

    Raises:
        ValueError: the model is not tapered.
    """

    def __init__(
        self, *args: Any, controller: TaperController | None = None, teacher: Teacher | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        found = controller or controller_of(trainer.model)
        if found is None:
            raise ValueError("the model is not tapered: call tapernorm.taper_(model, config) before making the trainer")
        self.controller = found
        self.teacher = teacher
        self._step_tokens = 1.0
        self._taper_callback = TaperCallback(found)
        self._taper_callback.losses = []
        trainer.add_callback(self._taper_callback)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. Where the guard gives up, the last sound model is put into `<output_dir>/sound`.

        Raises:
            GuardStop: naming that folder.
        """
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except GuardStop as stop:
            raise GuardStop(f"{stop}. {self._keep_sound()}") from stop

    def _keep_sound(self) -> str:
        trainer: Any = self
        checkpoint = last_checkpoint(Path(trainer.args.output_dir))  # none is written while steps are unsound
        if checkpoint is None:
            return "No checkpoint was written before"
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return f"The last sound checkpoint is {checkpoint}"
        events = self.controller.events
        self._load_from_checkpoint(str(checkpoint))
        self.controller.back_to_sound(events)
        folder = Path(trainer.args.output_dir) / "sound"
        self._save(str(folder))
        return f"The last sound model, at gate {self.controller.gate:.2f}, is in {folder}"

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As the Trainer's; counts the real tokens of the step, for the mean of the losses beside its own."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        parts = (self.controller.anchor, self.controller.uniformity, self.teacher)
        if any(part is not None for part in parts):
            trainer: Any = self
            local = torch.tensor(float(sum(_tokens(s) for s in samples)), device=trainer.accelerator.device)
            # Each process's gradients are averaged with the others', so its share is measured by the mean.
            self._step_tokens = float(trainer.accelerator.reduce(local, reduction="mean"))
        return samples, items

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the Trainer's, plus the controller's losses and the teacher's in training; never in evaluation."""
        trainer: Any = self
        if model.training and self.teacher is not None and self.teacher.match:
            inputs = {**inputs, "output_hidden_states": True}
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if not model.training:
            return (loss, outputs) if return_outputs else loss
        # training_step() will divide by the number of micro-batches unless the loss is normalised already
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = (trainer.model_accepts_loss_kwargs and num_items_in_batch is not None) or (
                trainer.compute_loss_func is not None
            )
        parts = 1 if scaled else trainer.current_gradient_accumulation_steps
        if self.controller.guard is not None:
            self._taper_callback.losses.append(loss.detach().float() / parts)  # type: ignore[union-attr]
        added, _ = self.controller.take_losses()
        if self.teacher is not None:
            taught = self.teacher.loss(_logits(outputs), inputs, getattr(outputs, "hidden_states", None))
            added = taught if added is None else added + taught
        if added is not None:
            loss = loss + added / self._step_tokens * parts
        return (loss, outputs) if return_outputs else loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the Trainer's, but none is written while steps are unsound: the last checkpoint is always a sound one."""
        guard = self.controller.guard
        if guard is None or not guard.unsound:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """A checkpoint that cannot be taken for a stock model, with the controller's state in it."""
        trainer: Any = self
        if not trainer.args.should_save:  # every process comes here
            return
        folder = Path(output_dir or trainer.args.output_dir)
        model = trainer.accelerator.unwrap_model(trainer.model)
        if isinstance(model, PreTrainedModel):
            hub.save_pretrained(
                model, folder, tokenizer=trainer.processing_class, overwrite=True, state_dict=state_dict or None
            )
        else:  # a PEFT model, whose checkpoint is its adapter: the tapered norms go beside it
            model.save_pretrained(folder, state_dict=state_dict or None)
            norms = {f"{n}.{k}": v.contiguous() for n, m in self.controller.sites.items() for k, v in _whole(m)}
            save_file(norms, folder / _NORMS)
            hub.write_taper_state(self.controller, folder)
        # For the reader; transformers would write a pickle, and nothing here reads one.
        (folder / "training_args.json").write_text(trainer.args.to_json_string(), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        self._load_taper(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        trainer: Any = self
        super()._load_best_model()  # type: ignore[misc]
        self._load_taper(Path(trainer.state.best_model_checkpoint))

    def _load_taper(self, checkpoint: Path) -> None:
        if not (checkpoint / "taper.json").is_file():
            raise ValueError(f"{checkpoint} holds no taper state: it was not written by a TaperTrainer or TaperMixin")
        if (checkpoint / _NORMS).is_file():
            norms = load_file(checkpoint / _NORMS)
            for name, module in self.controller.sites.items():
                own = {k.removeprefix(f"{name}."): v for k, v in norms.items() if k.startswith(f"{name}.")}
                module.load_state_dict(own)
        self.controller.load_state_dict(hub.read_taper_state(checkpoint))


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


def controller_of(model: nn.Module) -> TaperController | None:
    """The controller of a model or of the model inside it, as in a PEFT model that was made of a tapered one."""
    return next((found for m in model.modules() if (found := get_controller(m)) is not None), None)


def _whole(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state of a module, sharded parameters gathered."""
    for name, value in module.state_dict().items():
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def _logits(outputs: Any) -> Tensor:
    """What a teacher's tokens are compared with."""
    logits = outputs.get("logits") if hasattr(outputs, "get") else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(
            "a teacher needs the logits of the model, and its output has none; turn off what computes the loss without "
            "them (use_liger_kernel), or train without a teacher"
        )
    return logits


def _tokens(sample: Any) -> int:
    """Real tokens of a micro-batch: those of the attention mask, or all."""
    mask = sample.get("attention_mask") if hasattr(sample, "get") else None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return int((mask != 0).sum())
    ids = sample.get("input_ids") if hasattr(sample, "get") else None
    return int(ids.numel()) if isinstance(ids, Tensor) else 1
