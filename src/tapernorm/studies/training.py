"""Trainings of a study: arms that start from the same weights and see the same batches, without checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from tapernorm import data
from tapernorm.arm import arm_trainer, log_every
from tapernorm.controller import TaperController
from tapernorm.convert import taper_
from tapernorm.fold import fold_
from tapernorm.guard import GuardStop
from tapernorm.material import pretrain_model
from tapernorm.packing import Blocks
from tapernorm.run_config import RunConfig
from tapernorm.runlog import Diverged, RunLog
from tapernorm.sites import find_sites
from tapernorm.statistics import MassiveTokenError
from tapernorm.verify import evaluate

_WATCHED = 16  # blocks of validation text that the log looks at on the way


@dataclasses.dataclass(frozen=True)
class Text:
    """Text as token ids, [N, block] each, and the tokenizer that was trained on it."""

    tokenizer: Any
    train: Tensor
    validation: Tensor


@functools.lru_cache(maxsize=2)
def tokens(source: str, vocabulary: int, block: int, blocks: int, eval_tokens: int) -> Text:
    """Text with a tokenizer of its own, made once for all runs of a process.

    Args:
        source: what `tapernorm.data.load_text` reads.
        blocks: that the longest training needs; less where the text is shorter, which is then read again.
    """
    text = data.load_text(source)
    tokenizer = data.train_tokenizer(text.train, vocabulary)
    train = data.pack(text.train, tokenizer, block, limit=blocks)
    return Text(tokenizer, train, data.pack(text.validation, tokenizer, block, limit=max(1, eval_tokens // block)))


@dataclasses.dataclass
class Trained:
    """A run that ended. why: it diverged, empty where it did not; log: the rows of its log."""

    model: Any
    controller: TaperController | None
    log: list[dict[str, Any]]
    why: str

    def folded_loss(self, validation: Tensor) -> float:
        """The loss on validation text, of the folded model where norms were removed; NaN where the run diverged."""
        if self.why:
            return math.nan
        if self.controller is not None:
            ids = validation[:1].to(next(self.model.parameters()).device)
            fold_(self.model.eval(), example={"input_ids": ids, "labels": ids})
        losses = evaluate(self.model, validation)
        if losses.nonfinite:
            self.why = f"{losses.nonfinite} tokens of validation text have a loss that is not finite"
        return math.nan if self.why else losses.loss


def pretrain(config: RunConfig, text: Text, gain_rate: float = 1.0) -> Trained:
    """Train one arm from random weights; arms of the same seed are paired.

    Args:
        config: its arm is `"baseline"` for the model with its norms.
        gain_rate: the learning rate of the fixed branch's gains γ̃, in multiples of the others'.

    Never raises where the training diverges: `Trained.why` says so.
    """
    model = pretrain_model(config.size, text.tokenizer, config.seed)
    sites = find_sites(model)
    controller = taper_(model, config.taper) if config.arm != "baseline" else None
    with tempfile.TemporaryDirectory(prefix="tapernorm-study-") as folder:
        rows = Blocks(text.train, text.train).rows()
        trainer = arm_trainer(config, model, controller, rows, Path(folder), checkpoints=False)
        if controller is not None and gain_rate != 1.0:
            _raise_gain_rate(trainer, controller, gain_rate)
        watched = text.validation[:_WATCHED]
        log = RunLog(Path(folder), Blocks(watched, watched), sites, controller, log_every(config), _nothing)
        trainer.add_callback(log)
        why = ""
        try:
            trainer.train()
        except (Diverged, GuardStop, MassiveTokenError) as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        told = [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]
    if not why and controller is not None and controller.gate > 0:
        why = f"the guard slowed the taper: the gate ended at {controller.gate:.2f}"
    return Trained(model, controller, told, why)


def _raise_gain_rate(trainer: Any, controller: TaperController, factor: float) -> None:
    gains = {id(module.fixed_norm.weight): module.fixed_norm.weight for module in controller.sites.values()}
    optimizer = trainer.create_optimizer()
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in gains]
    settings = {"lr": factor * trainer.args.learning_rate, "weight_decay": 0.0}
    optimizer.add_param_group({"params": list(gains.values()), **settings})


def _nothing(*_: Any) -> None:
    pass
