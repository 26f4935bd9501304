"""The figures and the page of the study `tinystories`."""

from __future__ import annotations

import math
from pathlib import Path

from tapernorm.canvas import ACCENT, FOURTH, GREY, THIRD, save
from tapernorm.studies.base import Row
from tapernorm.studies.drawing import dots
from tapernorm.studies.rows import distinct, mean_and_error, table
from tapernorm.studies.tinystories import ARMS, LOST, gap_percent, same_setting

PAPER = {"internal+aux": (0.7, 1.5), "all+aux": (0.8, 1.8)}  # percent above RMS norm, over its sizes
ENOUGH = 3  # seeds, to say anything
GOAL = {"internal+aux": 0.5, "all+aux": 1.0}
TAPERED = [arm for arm in ARMS if arm != "rms"]
COLOURS = dict(zip(TAPERED, (GREY, ACCENT, THIRD, FOURTH), strict=True))

HEAD = """\
# Pretrained without norms

Llamas of the paper's four shapes, pretrained five times from the same weights on the same batches:

| arm | norms | scale loss |
| --- | --- | --- |
| `rms` | all stay | |
| `internal` | the final one stays | |
| `internal+aux` | the final one stays | λ = 0.01 |
| `all+aux` | none is left | λ = 0.01 |
| `all` | none is left | |

A gap is by how many percent the validation loss lies above that of the `rms` run **of the same seed**; that of a
tapered arm is the loss of the folded model. After ± stands the standard error over seeds. Lost is a run whose loss was
not finite, whose gate did not reach 0, or which ended more than {lost} above the mean of `rms`; lost runs are in no
mean. Shaded is what the paper reports over its sizes.

    tapernorm study tinystories --data D
    tapernorm study tinystories --data D --only recipe=early,uniformity --only seed=0,1,2
"""

RECIPES_TEXT = """\
`paper`: least squares, no guard. `long-taper`: the gate is 1 for an eighth of the steps and falls for three quarters.
`early`: 1 for an eighth, falling for a quarter, 0 for the rest. `uniformity`: tokens are pulled to one scale, weight
0.01. `stagger`: norms go one after another over half of the taper, the easiest first. `gain-lr`: the fixed branch's
gains learn five times as fast. `heavy`: the scale loss with λ = 0.1. `relative`: (s/s_tgt − 1)² in place of
(s − s_tgt)², with λ = 0.1.
"""

DIFFERENT = """\
## What differs from the paper

- **Trainings at scale `small` are too short to measure the paper's gap.** 0.4 M tokens are less than one for each
  parameter of the smallest size, and all losses are still falling fast. A gap there tells how soon an arm learns, not
  where it ends; without a final norm the logits may grow at once, which so short a training rewards, and gaps can be
  negative. What they do tell is whether a run is lost. `--scale paper`, or `--set steps=N`, is for the gap.
- The paper trains on all of TinyStories, longer than is done at scale `small`; its numbers of steps and tokens, its
  tokenizer and its λ are not known to us. λ is 0.01 here, which did better than 0.1 (recipe `heavy`).
- The default recipe calibrates with the robust rule and guards the taper; recipe `paper` has the paper's least
  squares and no guard. The gate is 1 for a quarter of the steps, falls for half of them and is 0 for a quarter.
- `rms` and the tapered arms are trained with the same learning rate, decay and batches; nothing is tuned by arm.
"""


def settings_of(rows: list[Row]) -> list[list[Row]]:
    """The rows in groups that may be compared over arms, by size and budget."""
    groups: list[list[Row]] = []
    for row in rows:
        group = next((group for group in groups if same_setting(group[0], row)), None)
        groups.append([row]) if group is None else group.append(row)
    return groups


def gaps(rows: list[Row], group: list[Row], arm: str, recipe: str = "default") -> list[tuple[int, float]]:
    """(seed, gap) of the runs of an arm that were not lost."""
    own = [row for row in group if row["arm"] == arm and row["recipe"] == recipe and not row["diverged"]]
    return [(row["seed"], gap) for row in own if (gap := gap_percent(row, rows)) is not None]


def figures(rows: list[Row], folder: Path) -> list[Path]:
    """gap.svg: a dot for each seed."""
    drawn = {}
    for group in settings_of(rows):
        found = {arm: [gap for _, gap in gaps(rows, group, arm)] for arm in TAPERED}
        if any(found.values()):
            drawn[_short(group[0], rows)] = found
    if not drawn:
        return []
    title = "validation loss above RMS norm, in percent"
    colours = [COLOURS[arm] for arm in TAPERED]
    return [save(dots(drawn, title, PAPER, colours), folder / "gap.svg", "Gap to RMS norm by size, arm and seed")]


def text(rows: list[Row]) -> str:
    """The page."""
    parts = [HEAD.format(lost=f"{LOST:.0%}".replace("%", " %"))]
    groups = settings_of(rows)
    if any(gaps(rows, group, arm) for group in groups for arm in TAPERED):
        parts.append("![Gap to RMS norm by size, arm and seed](gap.svg)\n")
    parts.append("## By size and arm\n")
    for group in groups:
        parts += [_setting(group[0]), _arms(rows, group)]
    parts += [_verdicts(rows, groups), *_recipes(rows, groups), DIFFERENT]
    return "\n".join(parts)


def _short(row: Row, rows: list[Row]) -> str:
    budgets = {(each["steps"], each["batch"], each["block"]) for each in rows if each["size"] == row["size"]}
    return row["size"] if len(budgets) == 1 else f"{row['size']}, {row['steps']} steps"


def _setting(row: Row) -> str:
    tokens = row["tokens"] / 1e6
    return (
        f"**{row['size']}** on {row['data']}: {row['steps']:,} steps of {row['batch']} × {row['block']} tokens "
        f"({tokens:.3g} M in all); {row['device']}, torch {row['torch']}\n"
    )


def _arms(rows: list[Row], group: list[Row]) -> str:
    lines = []
    for arm in ARMS:
        own = [row for row in group if row["arm"] == arm and row["recipe"] == "default"]
        if not own:
            continue
        kept = [row["val_loss"] for row in own if not row["diverged"]]
        found = [gap for _, gap in gaps(rows, group, arm)]
        low, high = PAPER.get(arm, (None, None))
        lines.append(
            [
                f"`{arm}`", len(own), _loss(kept), "" if arm == "rms" else percent(found),
                f"{max(found):+.2f} %" if found and arm != "rms" else "", f"{sum(map(_lost, own))} of {len(own)}",
                f"{low} to {high} %" if low is not None else "",
            ]
        )  # fmt: skip
    return table(("arm", "seeds", "validation loss", "gap", "largest gap", "lost", "paper's gap"), lines)


def _loss(values: list[float]) -> str:
    mean, error = mean_and_error(values)
    return "" if math.isnan(mean) else f"{mean:.4f}" if math.isnan(error) else f"{mean:.4f} ± {error:.4f}"


def percent(values: list[float]) -> str:
    """The mean gap and its standard error."""
    mean, error = mean_and_error(values)
    return "" if math.isnan(mean) else f"{mean:+.2f} %" if math.isnan(error) else f"{mean:+.2f} ± {error:.2f} %"


def _lost(row: Row) -> bool:
    return bool(row["diverged"])


def _verdicts(rows: list[Row], groups: list[list[Row]]) -> str:
    """What was aimed at, and whether it was reached."""
    lines = []
    for arm, goal in GOAL.items():
        for group in groups:
            found = [gap for _, gap in gaps(rows, group, arm)]
            if not found:
                continue
            mean, _ = mean_and_error(found)
            said = "reached" if mean <= goal else "**not reached**"
            if len(found) < ENOUGH:
                said = f"not to be told from fewer than {ENOUGH} seeds"
            lines.append(f"- `{arm}` at {_short(group[0], rows)}: at most {goal} % on the mean was aimed at; {said}, "
                         f"{percent(found)} over {len(found)} seed{'s' * (len(found) > 1)}.")  # fmt: skip
    anchored = [row for row in rows if row["arm"] == "all+aux" and row["recipe"] == "default"]
    if anchored:
        lost = sum(map(_lost, anchored))
        lines.append(f"- `all+aux` lost {lost} of {len(anchored)} runs; none of 20 was aimed at.")
    return "## What was aimed at\n\n" + "\n".join(lines or ["No runs yet."]) + "\n"


def _recipes(rows: list[Row], groups: list[list[Row]]) -> list[str]:
    """Each recipe beside the default, over the seeds that both have."""
    parts: list[str] = []
    for group in groups:
        lines = []
        for recipe in distinct(group, "recipe"):
            for arm in TAPERED:
                tried = dict(gaps(rows, group, arm, recipe))
                usual = dict(gaps(rows, group, arm))
                both = [seed for seed in tried if seed in usual]
                if recipe == "default" or not both:
                    continue
                change = [tried[seed] - usual[seed] for seed in both]
                lines.append([f"`{recipe}`", f"`{arm}`", len(both), percent([tried[s] for s in both]),
                              percent([usual[s] for s in both]), percent(change)])  # fmt: skip
        if lines:
            head = ("recipe", "arm", "seeds", "gap", "default's, same seeds", "difference")
            parts += [f"**{_short(group[0], rows)}**\n", table(head, lines, left=2)]
    return ["## Other recipes\n", RECIPES_TEXT, *parts] if parts else []
