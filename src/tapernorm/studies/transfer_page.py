"""The figures and the page of the study `transfer`."""

from __future__ import annotations

import math
from pathlib import Path

from tapernorm.canvas import ACCENT, GREY, THIRD, save
from tapernorm.studies.base import Row
from tapernorm.studies.drawing import dots
from tapernorm.studies.rows import distinct, mean_and_error, table, with_error
from tapernorm.studies.transfer import ARMS, SHAPES, TASKS, TEST

COLOURS = (GREY, ACCENT, THIRD)

HEAD = """\
# Beyond text: digits

A vision transformer (transformers' `ViTForImageClassification`, layer norms) on scikit-learn's handwritten digits,
8 × 8 pixels in patches of 2 × 2, trained from scratch: once to tell the class, once to tell the digit as a number,
where the loss is a squared error and larger outputs are no better.

| arm | norms |
| --- | --- |
| `norm` | all stay |
| `internal` | tapered, all but the final one |
| `all` | tapered, with the scale loss, λ = 0.1: none is left |

All arms of a seed start from the same weights and see the same batches. What is measured is the folded model, on {test}
of 1,797 images that were not trained on; another split for each seed. The squared error is in units of the digits'
variance: 1 is the mean for every image. After ± stands the standard error over seeds.

    pip install 'tapernorm[digits]'
    tapernorm study transfer
"""

SETTING = """\
## What was chosen

- {layers} blocks of width {width}. AdamW with a learning rate of 2e-3, decay 0.05, batches of 64, in all arms.
- The gate is 1 for a quarter of the steps, falls for half of them and is 0 for a quarter, with the robust calibration
  and the guard.
- Chance alone moves an accuracy of 0.87 on {test} images by 0.016, so a single seed shows no smaller difference.
- Diverged is a run whose loss was not finite, whose gate did not reach 0, or that is no better than a guess.
- The paper has no such table that is known to us, so none stands beside this one.
"""


def figures(rows: list[Row], folder: Path) -> list[Path]:
    """classes.svg and value.svg: a dot for each seed."""
    made = []
    for task, title in (("classes", "images told wrong, in percent"), ("value", "squared error of the digit")):
        own = [row for row in rows if row["task"] == task and not row["diverged"]]
        groups = {arm: {arm: [_score(row) for row in own if row["arm"] == arm]} for arm in ARMS}
        if own:
            made.append(save(dots(groups, title, colours=COLOURS), folder / f"{task}.svg", title))
    return made


def _score(row: Row) -> float:
    """What is better when it is smaller."""
    return 100 * (1 - row["accuracy"]) if row["task"] == "classes" else row["mse"]


def text(rows: list[Row]) -> str:
    """The page."""
    width, layers, _, _ = SHAPES[rows[0]["scale"]]
    parts = [HEAD.format(test=TEST)]
    for task, head in zip(TASKS, ("Classes", "A number"), strict=True):
        own = [row for row in rows if row["task"] == task]
        if not own:
            continue
        parts.append(f"## {head}\n")
        if any(not row["diverged"] for row in own):
            parts.append(f"![{head} by arm and seed]({task}.svg)\n")
        first = own[0]
        parts.append(f"{first['steps']:,} steps; {first['device']}, torch {first['torch']}.\n")
        parts.append(_arms(own, task))
    lost = [f"- {row['task']}, {row['arm']}, seed {row['seed']}: {row['why']}" for row in rows if row["diverged"]]
    parts.append("## Diverged\n\n" + "\n".join(lost or ["None."]) + "\n")
    return "\n".join([*parts, SETTING.format(width=width, layers=layers, test=TEST)])


def _arms(rows: list[Row], task: str) -> str:
    lines = []
    column = "accuracy" if task == "classes" else "mse"
    for arm in [arm for arm in ARMS if arm in distinct(rows, "arm")]:
        own = [row for row in rows if row["arm"] == arm]
        kept = [row for row in own if not row["diverged"]]
        score = with_error([row[column] for row in kept])
        base = {row["seed"]: row[column] for row in rows if row["arm"] == "norm" and not row["diverged"]}
        change = [row[column] - base[row["seed"]] for row in kept if row["seed"] in base]
        mean, error = mean_and_error(change)
        moved = "" if arm == "norm" or not change else f"{mean:+.4f}"
        moved += "" if not moved or math.isnan(error) else f" ± {error:.4f}"
        left = kept[0]["norms"] if kept else ""
        lines.append([f"`{arm}`", left, len(own), score, moved, f"{len(own) - len(kept)} of {len(own)}"])
    name = "accuracy" if task == "classes" else "squared error"
    return table(("arm", "norms left", "seeds", name, "against `norm`, same seed", "diverged"), lines)
