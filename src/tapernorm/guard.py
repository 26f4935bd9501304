"""The guard: a run that goes wrong while its norms go is held, taken back, and in the end stopped.

A step is unsound when its loss or gradient is not finite (gradients are looked at by `TaperTrainer`; a loop of one's
own gives a loss of NaN), when its loss lies more than `guard_margin` nats above the moving average that warm-up ended
with, or when, after warm-up, the residual stream as it reaches the final norm has ten times the scale of the sound
steps before: it runs away before the loss tells, and slow growth is no concern of the guard.

    unsound                                  the taper clock is held
    sound again                              it goes on
    unsound `guard_patience` times in a row  rewind: the clock goes back to where a step was last sound, and a tenth of
                                             the taper further for every rewind so far; it then runs half as fast
    more than `guard_rewinds` rewinds        GuardStop

Only the taper clock moves: the count of optimizer steps, the weights and the optimizer are left alone. In warm-up
there is no gate to move, and an unsound stretch stops the run.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.config import TaperConfig
from tapernorm.modules import first_input, in_backward, uncompiled
from tapernorm.statistics import Inputs, token_scale

_BACK = 0.1  # of taper_steps, for every rewind
_GROWTH = 10.0  # times the residual's usual scale

logger = logging.getLogger("tapernorm")


class GuardStop(RuntimeError):
    """The run did not recover, and goes on no further."""


class ResidualScale:
    """Σ of r (σ before a layer norm) and the number of real tokens at the final norm, over the forwards of a step."""

    def __init__(self, kind: str, eps: float, inputs: Inputs) -> None:
        self.kind, self.eps, self.inputs = kind, eps, inputs
        self._sums = torch.zeros(2)

    @uncompiled
    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook on the final norm, whose one argument is h, [B, T, D]."""
        if not (module.training and self.inputs.training) or in_backward():
            return
        r = token_scale(first_input(args, kwargs).detach(), self.kind, self.eps).reshape(-1)
        mask = self.inputs.mask_for(r.numel())
        r = r if mask is None else r[mask]
        self._sums = self._sums.to(r.device) + torch.stack([r.sum().float(), r.new_tensor(r.numel()).float()])

    def take(self) -> Tensor:
        """(Σ, tokens) since the last call. [2], float32"""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums


class Guard:
    """Judges every step. Plain numbers only: every process of a run must come to the same verdict.

    Args:
        config: `guard_margin` (nats, not None), `guard_patience`, `guard_rewinds`, and the schedule.
    """

    def __init__(self, config: TaperConfig) -> None:
        self.config = config
        self.margin = float(config.guard_margin or 0.0)
        self.total = self.weight = 0.0  # of the loss in warm-up, a bias-corrected moving average
        self.scale_total = self.scale_weight = 0.0  # of the residual's scale in sound steps, likewise
        self.unsound = 0  # steps in a row
        self.sound_clock = 0.0
        self.slowness = 1  # the clock moves 1 / slowness a step; a power of 2, so that its fractions are exact
        self.rewinds = 0
        self.events: list[dict[str, Any]] = []

    @property
    def baseline(self) -> float:
        """The warm-up's loss; NaN before there was one."""
        return self.total / self.weight if self.weight else math.nan

    @property
    def usual_scale(self) -> float:
        """The residual's scale in sound steps; NaN before there was one."""
        return self.scale_total / self.scale_weight if self.scale_weight else math.nan

    def judge(self, loss: float, clock: float, step: int, scale: float | None = None) -> float:
        """The clock after a step that was made at `clock` and had this loss. Notes what happened in `events`.

        scale: of the residual stream at the final norm in this step, or None where it is not known.

        Raises:
            GuardStop: there is nothing left to try.
        """
        warming = clock < self.config.warmup_steps
        limit = (
            math.inf if warming else _GROWTH * self.usual_scale
        )  # a fresh model's residual may grow tenfold at first
        runs_away = scale is not None and not (math.isfinite(scale) and not scale > limit)
        if math.isfinite(loss) and (warming or not loss > self.baseline + self.margin) and not runs_away:
            decay = self.config.ema_decay
            if scale is not None:
                self.scale_total = decay * self.scale_total + (1 - decay) * scale
                self.scale_weight = decay * self.scale_weight + (1 - decay)
            if self.unsound:
                self._note(step, "recovered", f"the loss is {loss:.4g} again; the gate goes on")
            self.unsound, self.sound_clock = 0, clock
            if warming:
                self.total = decay * self.total + (1 - decay) * loss
                self.weight = decay * self.weight + (1 - decay)
            return clock + 1 / self.slowness
        self.unsound += 1
        above = "" if math.isnan(self.baseline) else f" (warm-up's: {self.baseline:.4g}, margin {self.margin:g})"
        if runs_away:
            above += f", the residual's scale {scale:.3g} (usually {self.usual_scale:.3g})"
        if self.unsound == 1:
            self._note(step, "hold", f"the loss is {loss:.4g}{above}; the gate is held")
        if self.unsound < self.config.guard_patience:
            return clock
        if warming or self.rewinds >= self.config.guard_rewinds:
            why = "in warm-up, where all norms are in place: lower the learning rate, or look at the data"
            if not warming:
                why = (
                    f"after {self.rewinds} rewinds: give the scales more time to settle (warmup_steps), a slower taper "
                    "(taper_steps), a lower learning rate, or keep some norms (keep)"
                )
            text = f"the loss is {loss:.4g} at step {step}{above}, unsound for {self.unsound} steps, {why}"
            self._note(step, "stop", text)
            raise GuardStop(text)
        self.rewinds += 1
        self.slowness *= 2
        self.unsound = 0
        back = math.floor(self.sound_clock - self.rewinds * _BACK * self.config.taper_steps)
        target = float(max(self.config.warmup_steps, back))
        self.sound_clock = min(self.sound_clock, target)
        self._note(
            step,
            "rewind",
            f"the loss is {loss:.4g}{above} after {self.config.guard_patience} steps; the taper goes back from "
            f"{clock:g} to {target:g} and on at 1/{self.slowness} of its pace (rewind {self.rewinds} of "
            f"{self.config.guard_rewinds})",
        )
        return target

    def state(self) -> dict[str, Any]:
        """JSON scalars."""
        state = {key: getattr(self, key) for key in _STATE}
        return {f"guard.{key}": value for key, value in state.items()} | {"guard.events": json.dumps(self.events)}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; what is missing (written without a guard) starts afresh."""
        for key in _STATE:
            setattr(self, key, state.get(f"guard.{key}", getattr(self, key)))
        self.events = json.loads(state.get("guard.events", "[]"))

    def _note(self, step: int, kind: str, text: str) -> None:
        self.events.append({"step": step, "kind": kind, "text": text})
        logger.warning("step %d: %s: %s", step, kind, text)


_STATE = ("total", "weight", "scale_total", "scale_weight", "unsound", "sound_clock", "slowness", "rewinds")
