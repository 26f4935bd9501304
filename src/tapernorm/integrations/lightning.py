"""Lightning (`pip install tapernorm[lightning]`): a callback that moves the controller with Lightning's loop.

    module.model = ...                                   # anything; taper it before the Trainer is made
    controller = tapernorm.taper_(module.model, config)
    Trainer(callbacks=[TaperCallback(controller)])

and in `training_step`: `return loss + controller.auxiliary_loss()`. Lightning divides that by
`accumulate_grad_batches`, and scales it, as it does the loss.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tapernorm.controller import TaperController


class TaperCallback(Callback):
    """Calls `controller.step()` once per optimizer step, and keeps the controller's state in Lightning's checkpoints.

    The optimizer is attached when training begins. A step that a GradScaler skipped is not counted. With a guard, the
    loss of a step is the mean of what `training_step` returned for its micro-batches, so it should not hold much
    beside the cross-entropy.

    Raises:
        ValueError: more than one optimizer: nobody can say which step counts.
    """

    def __init__(self, controller: TaperController) -> None:
        self.controller = controller
        self._losses: list[Tensor] = []
        self._counted = 0
        self._scale: float | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(f"one optimizer is needed, and there are {len(trainer.optimizers)}")
        if self.controller.step_count and not trainer.global_step:
            warnings.warn(
                f"the taper goes on where it is, at step {self.controller.step_count} with gate "
                f"{self.controller.gate:.3g}; it does not begin again with this fit()",
                stacklevel=2,
            )
        self.controller.attach_optimizer(trainer.optimizers[0])
        self._counted = trainer.global_step
        self._scale = self._scaler_scale(trainer)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            # Lightning hands over what training_step returned, divided by the number of micro-batches
            self._losses.append(loss.detach().float())
        if trainer.global_step == self._counted:
            return  # a micro-batch, and no step yet
        self._counted = trainer.global_step
        total = torch.stack(self._losses).sum() if self._losses else None
        self._losses = []
        before, self._scale = self._scale, self._scaler_scale(trainer)
        # a scaler that found infinities steps nothing and lowers its scale
        skipped = before is not None and self._scale is not None and self._scale < before
        self.controller.step(skipped=skipped, loss=total)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["tapernorm"] = self.controller.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if "tapernorm" in checkpoint:
            self.controller.load_state_dict(checkpoint["tapernorm"])

    @staticmethod
    def _scaler_scale(trainer: lightning.Trainer) -> float | None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None else None
