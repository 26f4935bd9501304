"""What the figures of several studies share: dots by group, and curves over training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tapernorm import canvas
from tapernorm.canvas import ACCENT, FOURTH, GREY, MUTED, THIRD, WIDE, Draw
from tapernorm.figures import step_axis

COLOURS = (GREY, ACCENT, THIRD, FOURTH)
Points = Sequence[tuple[float, float]]


def dots(
    groups: Mapping[str, Mapping[str, Sequence[float]]],
    title: str,
    bands: Mapping[str, tuple[float, float]] | None = None,
    colours: Sequence[str] = COLOURS,
) -> Draw:
    """A dot for each value and a line at the mean, by kind and by group.

    Args:
        groups: group (its own place on the x axis) -> kind (a colour) -> values.
        bands: kind -> (low, high), shaded behind it: what another source reports.
    """
    kinds = list(dict.fromkeys(kind for values in groups.values() for kind in values))
    step = 0.8 / max(1, len(kinds))

    def draw(width: int) -> Figure:
        head = 56 + 20 * ((len(kinds) - 1) // (4 if width == WIDE else 2))
        fig = canvas.new_figure(width, head + 290)
        ax = canvas.place_axes(fig, 46, head, width - 62, 240)
        ax.axhline(0, color=MUTED, linewidth=1)
        for place, values in enumerate(groups.values()):
            for number, kind in enumerate(kinds):
                x, colour = place + step * (number - (len(kinds) - 1) / 2), colours[number % len(colours)]
                if bands and kind in bands:
                    low, high = bands[kind]
                    ax.bar(x, high - low, 0.8 * step, bottom=low, color=canvas.BAR, zorder=0)
                found = list(values.get(kind, ()))
                spread = np.linspace(-0.2, 0.2, len(found)) * step if len(found) > 1 else [0.0]
                ax.plot(x + np.array(spread[: len(found)]), found, "o", color=colour, markersize=4, clip_on=False)
                if found:
                    mean = statistics.fmean(found)
                    ax.plot([x - 0.4 * step, x + 0.4 * step], [mean, mean], color=colour, linewidth=2)
                ax.plot([], [], "o", color=colour, label=kind if place == 0 else None)
        ax.set(xlim=(-0.5, len(groups) - 0.5), xticks=range(len(groups)), xticklabels=list(groups))
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+.3g}".replace("-", "−") if v else "0"))
        ax.set_title(title)
        canvas.legend_above(fig, ax, width)
        return fig

    return draw


def panels(curves: Mapping[str, Mapping[str, Sequence[Points]]], last: float, marks: Sequence[float] = ()) -> Draw:
    """A panel for each quantity, a colour for each kind, a line for each run.

    Args:
        curves: title of the panel -> kind -> one list of (step, value) for each run.
        last: the last step; marks: steps at which a phase ends.
    """
    kinds = list(dict.fromkeys(kind for each in curves.values() for kind in each))
    colour = dict(zip(kinds, (ACCENT, FOURTH, THIRD, GREY), strict=False))

    def draw(width: int) -> Figure:
        fig, axes = canvas.place_grid(width, len(curves), 180, 40)
        for ax, (title, each) in zip(axes, curves.items(), strict=True):
            _panel(ax, each, colour, last, marks)
            ax.set_title(title)
        canvas.legend_above(fig, axes[0], width)
        return fig

    return draw


def _panel(
    ax: Axes, each: Mapping[str, Sequence[Points]], colour: Mapping[str, Any], last: float, marks: Sequence[float]
) -> None:
    everything = []
    for kind, runs in each.items():
        for number, points in enumerate(runs):
            x, y = np.array(points, dtype=float).reshape(-1, 2).T
            ax.plot(x, y, color=colour[kind], linewidth=1.2, alpha=0.85, label=None if number else kind)
            everything.append(y)
    for mark in marks:
        ax.axvline(mark, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
    step_axis(ax, last)
    if everything:
        canvas.scale_y(ax, np.concatenate(everything))
