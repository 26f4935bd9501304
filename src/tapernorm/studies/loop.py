"""A plain training loop for what the Trainer of a run does not know: other ways to go without norms, other tasks.

All arms of a study go through it: the same optimizer, learning rate, clipping and order of batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from tapernorm.controller import TaperController
from tapernorm.guard import GuardStop
from tapernorm.statistics import MassiveTokenError

_BETAS = (0.9, 0.95)
_CLIP = 1.0  # of the gradient's norm


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained, whatever its norms.

    Args:
        steps: optimizer steps; batch: rows in one; parts: forwards in which a step is done.
        rate: the learning rate after a warm-up of a twentieth of the steps, from where it falls along a cosine to a
            fiftieth.
        decay: weight decay of matrices; gains, biases and single numbers have none.
        bf16: bfloat16 autocast, on a GPU.
    """

    steps: int
    batch: int
    rate: float
    decay: float = 0.0
    parts: int = 1
    bf16: bool = False


class Driver(Protocol):
    """What moves once per optimizer step: a `TaperController`, a `FakeLNController`."""

    def auxiliary_loss(self) -> Tensor: ...
    def step(self, skipped: bool = False, loss: Any = None) -> None: ...


def order(rows: int, recipe: Recipe, seed: int) -> Tensor:
    """Which rows are in which step: all of them once in a random order, then again in another. [steps, batch]"""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-recipe.steps * recipe.batch // rows)
    numbers = torch.cat([torch.randperm(rows, generator=generator) for _ in range(epochs)])
    return numbers[: recipe.steps * recipe.batch].view(recipe.steps, recipe.batch)


def train(
    model: Any,
    batches: Tensor,
    inputs: Callable[[Tensor], dict[str, Tensor]],
    recipe: Recipe,
    driver: Driver | None = None,
) -> str:
    """Train in place. Returns why the training diverged, "" where it did not.

    Args:
        model: whose output on `inputs` has a `loss`.
        batches: [steps, batch] numbers of rows, from `order`.
        inputs: row numbers -> keyword arguments of the model.
        driver: of the arm's norms, None for a model that stays as it is.
    """
    device = next(model.parameters()).device
    optimizer = _optimizer(model, recipe)
    if isinstance(driver, TaperController):
        driver.attach_optimizer(optimizer)
    warmup = max(1, recipe.steps // 20)
    rates = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, recipe.steps, min_lr_rate=0.02)
    half = torch.autocast(device.type, torch.bfloat16) if recipe.bf16 else contextlib.nullcontext()
    model.train()
    for number, rows in enumerate(batches, start=1):
        total = torch.zeros((), device=device)
        for part in rows.chunk(recipe.parts):
            with half:
                loss = model(**{name: value.to(device) for name, value in inputs(part).items()}).loss / recipe.parts
            total += loss.detach()
            if driver is not None:
                loss = loss + driver.auxiliary_loss() / recipe.parts
            loss.backward()
        size = nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        if not torch.isfinite(total) or not torch.isfinite(size):
            return f"loss {float(total):.4g}, gradient {float(size):.4g} at step {number}"
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        try:
            if driver is not None:
                driver.step(loss=total)
        except (GuardStop, MassiveTokenError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    gate = driver.gate if isinstance(driver, TaperController) else 0.0
    model.eval()
    return f"the taper did not come to its end: the gate is {gate:.2f}" if gate > 0 else ""


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=_BETAS)
