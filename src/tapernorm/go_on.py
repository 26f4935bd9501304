"""After a removal without training: train the rest of the norms away, in the minutes that there are.

RUN/trained/    the run of the training, as `tapernorm taper` writes it

Its settings come from what the removal measured: the norms go one after another, those that cost least first, and there
are as many steps as the minutes hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tapernorm import forecast, hub, runs
from tapernorm.fold import FoldError
from tapernorm.guard import GuardStop
from tapernorm.material import device
from tapernorm.page import plain
from tapernorm.record import Run
from tapernorm.removal import RemovalConfig
from tapernorm.report import write_report
from tapernorm.run_config import RunConfig
from tapernorm.statistics import MassiveTokenError

LEAST = 20  # steps: with fewer, a warm-up of one step measures the scales
_TOKENS = 1024  # in one step
_SHARE = 0.75  # of the minutes: the rest is for measuring before and after


def train_the_rest(settings: RemovalConfig, record: dict[str, Any], minutes: float) -> dict[str, Any]:
    """Train away what `tapernorm.removal.execute` left. Returns its record with "trained" in it, as it is in run.json.

    record["trained"] is {"minutes", "out", "steps", "seconds_per_step", "folded", "losses"}, or has "stopped", why
    there is nothing more, in a sentence. The folder of the removal is complete whatever comes of the training.
    """
    told: dict[str, Any] = {"minutes": minutes}
    order = _order(record)
    try:
        if not order:
            told["stopped"] = "There is nothing left to train away."
        else:
            config = _config(settings, record, minutes, order, told)
            if config is not None:
                trained = runs.execute(config, overwrite=True)
                told |= {"folded": trained["fold"]["folded"], "losses": trained["losses"][config.arm]}
                told |= {"model": trained["norm_free_model"], "verified": trained["verify"]["passed"]}
                told["out"] = config.out
    except (ValueError, GuardStop, FoldError, MassiveTokenError) as error:
        told["stopped"] = f"The training did not come to its end: {error}"
    run = Run(settings, record)
    run.update(trained=plain(told))
    write_report(run.folder)
    return run.record


def _order(record: dict[str, Any]) -> dict[str, float]:
    """When each norm that is left starts, from 0 to 1: by what it cost alone."""
    fold, costs = record["fold"], record["removal"]["costs"]
    left = [name for name in fold["kept"] if name not in fold["reasons"]]
    # What is not finite is JSON's null in a record.
    left.sort(key=lambda name: torch.inf if costs.get(name) is None else costs[name])
    return {name: place / max(1, len(left) - 1) for place, name in enumerate(left)}


def _config(
    settings: RemovalConfig, record: dict[str, Any], minutes: float, order: dict[str, float], told: dict[str, Any]
) -> RunConfig | None:
    """The taper that fits; None, and why in `told`, where too few steps do."""
    out = Path(settings.out)
    block = record["data"]["block"]
    batch = max(1, _TOKENS // block)
    seconds = _seconds_per_step(record["norm_free_model"], batch, block)
    steps = int(_SHARE * 60 * minutes / seconds)
    told |= {"seconds_per_step": seconds, "steps": steps}
    if steps < LEAST:
        wanted = LEAST * seconds / _SHARE / 60
        told["stopped"] = (
            f"No norm was trained away: a step takes {seconds:.1f} s, so {minutes:g} minutes hold {steps} of them, and "
            f"{LEAST} are the least; --minutes {wanted:.0f} would hold these, and more are better."
        )
        return None
    named = settings.data or ()
    data = [named] if isinstance(named, str) else [*named]
    # Column and split are of the texts that were named; what the model wrote has its own.
    usual = not named or (settings.text_column == "text" and settings.split is None)
    data += [str(out / "text")] if usual and record["data"].get("self_generated") else []
    return RunConfig(
        kind="taper",
        model=record["norm_free_model"],
        data=tuple(data),
        out=str(out / "trained"),
        baseline=False,
        steps=steps,
        batch=batch,
        block=block,
        keep=settings.keep,
        fixed="linear",
        uniformity_weight=0.01,
        stagger=0.5 if len(order) > 1 else 0.0,
        order=order,
        text_column=settings.text_column if named else "text",
        split=settings.split if named else None,
        eval_tokens=settings.eval_tokens,
    )


def _seconds_per_step(folder: str, batch: int, block: int) -> float:
    """How long a step of the taper is going to take."""
    model, _ = hub.from_pretrained(folder, device=device())
    return forecast.TAPER * forecast.seconds_per_step(model, batch, block)
