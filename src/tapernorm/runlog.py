"""log.jsonl of an arm in training: a row every few steps, with a look inside the model on some of them."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tapernorm.adapters import unwrapped
from tapernorm.board import Board
from tapernorm.controller import TaperController
from tapernorm.distill import Teacher
from tapernorm.losses import diagnose
from tapernorm.packing import Blocks
from tapernorm.page import plain
from tapernorm.sites import NormSite
from tapernorm.verify import evaluate

_WATCHED = 256  # tokens of validation text that the diagnostics look at
_QUICK = 16_384  # tokens for the validation losses along the way


class Diverged(RuntimeError):
    """The loss of an arm is not a finite number any more."""


class RunLog(TrainerCallback):
    """Writes log.jsonl: a row every `every` steps, with the diagnostics, and the validation loss on every fifth.

    With `events`, a folder, the same rows go there for TensorBoard. With a teacher, `divergence` is the mean KL to it
    of the tokens since the last row. What is not finite is null there.
    """

    def __init__(
        self,
        folder: Path,
        validation: Blocks,
        sites: list[NormSite],
        controller: TaperController | None,
        every: int,
        advance: Callable[..., None],
        events: Path | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.path = folder / "log.jsonl"
        self.controller = controller
        self.teacher = teacher
        self.every = every
        self.advance = advance
        self.events = events
        self.board: Board | None = None
        quick = max(1, _QUICK // validation.shape[1])
        self.quick = validation[:quick]
        self.watched = validation.ids[:1, :_WATCHED]
        self.sites = {s.name: (s.kind, s.eps) for s in sites if s.role in ("internal", "final")}
        self.final = next((s.name for s in sites if s.role == "final"), None)
        self.tokens = 0
        self.told = 0
        self.clock = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        kept = [row for row in rows if _step_of(row) <= state.global_step]  # later ones belong to lost steps
        self.path.write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")
        # the guard's events that are in the log already
        self.told = max((e["step"] for e in (self.controller.events if self.controller is not None else ())), default=0)
        self.advance(state.global_step)
        if self.events is not None and state.is_world_process_zero:
            self.board = Board(self.events, first_step=state.global_step + 1)
        self.tokens_a_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.tokens_a_step *= kwargs["train_dataloader"].dataset[0]["input_ids"].numel()
        self.clock = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tokens += self.tokens_a_step
        self.advance()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        if "loss" not in (logs or {}) or not state.is_world_process_zero:
            return
        row = {
            "step": state.global_step,
            "loss": float(logs["loss"]),
            "lr": float(logs["learning_rate"]),
            "grad_norm": float(logs.get("grad_norm") or 0.0),
            "tokens_per_second": self.tokens / (time.perf_counter() - self.clock),
            "gate": self.controller.gate if self.controller else 1.0,
        }
        if self.teacher is not None:
            row["divergence"] = self.teacher.mean()
        last, model = state.global_step >= state.max_steps, unwrapped(model)
        if self.controller is not None:
            row["c"] = self.controller.scales
            if self.controller.config.stagger:
                row["gates"] = self.controller.gates
        if state.global_step % (2 * self.every) == 0 or last:
            device = next(model.parameters()).device
            found = dataclasses.asdict(diagnose(model, self.watched.to(device), self.sites, self.final))
            row |= found
        if state.global_step % (10 * self.every) == 0 or last:
            row["eval_loss"] = evaluate(model, self.quick.ids, labels=self.quick.labels).loss
        events = self.controller.events if self.controller is not None else []
        if new := [event for event in events if event["step"] > self.told]:
            row["events"], self.told = new, max(event["step"] for event in new)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(row), allow_nan=False) + "\n")
        if self.board is not None:
            self.board.write(row)
        # A guard has its own way with that: it holds the gate, and keeps the step from the weights.
        if not math.isfinite(row["loss"]) and (self.controller is None or self.controller.guard is None):
            raise Diverged(
                f"{self.path.parent.name}: the loss is {row['loss']} at step {state.global_step}, "
                f"gate {row['gate']:.2f}; give the scales more time to settle (warmup_steps), a slower taper "
                "(taper_steps), or a lower learning rate"
            )
        self.tokens, self.clock = 0, time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.board is not None:
            self.board.close()


def _step_of(row: str) -> float:
    try:
        return float(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that a kill cut short
