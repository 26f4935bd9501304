"""The figures of several runs beside each other: a line for each run, in the same colour everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tapernorm.canvas import (
    ACCENT,
    FOURTH,
    GREY,
    MUTED,
    PAGE,
    THIRD,
    WIDE,
    Draw,
    Rows,
    legend_above,
    new_figure,
    place_axes,
    scale_y,
    shortened,
)
from tapernorm.figures import binned, series, step_axis

Style = Mapping[str, Any]
_COLOURS = (ACCENT, THIRD, FOURTH, GREY)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A colour for each run; where there are more runs than colours, dashes tell them apart."""
    many = len(_COLOURS)
    return {
        name: {"color": _COLOURS[i % many], "linestyle": _DASHES[i // many % len(_DASHES)]}
        for i, name in enumerate(names)
    }


def losses(runs: Sequence[tuple[str, Rows]], style: Mapping[str, Style]) -> Draw:
    """Training loss as a line, validation loss as dots."""

    def fill(ax: Axes) -> None:
        everything = []
        for name, rows in runs:
            x, y, _, _ = binned(*series(rows, "loss"), bins=160)
            ax.plot(x, y, label=shortened(name), linewidth=1.4, **style[name])
            ex, ey = series(rows, "eval_loss")
            ax.plot(ex, ey, "o", color=style[name]["color"], markersize=5, markeredgecolor=PAGE, clip_on=False)
            everything += [y, ey]
        scale_y(ax, np.concatenate(everything))

    return _panel([name for name, _ in runs], _last(rows for _, rows in runs), 240, "loss, nats per token", fill)


def gates(runs: Sequence[tuple[str, Rows]], style: Mapping[str, Style]) -> Draw:
    """From 1, norms as they were, to 0, norms gone."""

    def fill(ax: Axes) -> None:
        for name, rows in runs:
            ax.plot(*series(rows, "gate"), label=shortened(name), **style[name])
        ax.set(ylim=(-0.03, 1.08), yticks=(0, 0.5, 1), yticklabels=("0", "½", "1"))

    return _panel([name for name, _ in runs], _last(rows for _, rows in runs), 130, "gate", fill)


def gaps(runs: Sequence[tuple[str, Sequence[tuple[float, float]]]], style: Mapping[str, Style]) -> Draw:
    """Validation loss above that of the run's own arm with its norms, in percent."""

    def fill(ax: Axes) -> None:
        ax.axhline(0, color=MUTED, linewidth=1)
        for name, pairs in runs:
            x, y = zip(*pairs, strict=True)
            ax.plot(x, y, label=shortened(name), marker="o", markersize=5, clip_on=False, **style[name])
        ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+.3g}".replace("-", "−") if v else "0"))

    last = max(step for _, pairs in runs for step, _ in pairs)
    return _panel([name for name, _ in runs], last, 150, "validation loss above norms kept, in percent", fill)


def _panel(names: Sequence[str], last: float, height: int, title: str, fill: Callable[[Axes], None]) -> Draw:
    """One panel under its legend, which takes the lines it needs."""

    def draw(width: int) -> Figure:
        head = 20 * math.ceil(len(names) / (4 if width == WIDE else 2)) + 36
        fig = new_figure(width, head + height + 42)
        ax = place_axes(fig, 46, head, width - 62, height)
        fill(ax)
        step_axis(ax, last)
        ax.set_title(title)
        legend_above(fig, ax, width)
        return fig

    return draw


def _last(runs: Any) -> float:
    return float(max((row["step"] for rows in runs for row in rows), default=1))
