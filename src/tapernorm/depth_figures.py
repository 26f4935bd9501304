"""Figures over the depth of a model: scales of tokens, costs of norms, and the search for what goes.

As in `tapernorm.figures`: drawn for two widths, in colours that are CSS variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from tapernorm.canvas import (
    ACCENT,
    GREY,
    INK,
    MUTED,
    PAGE,
    THIRD,
    WIDE,
    Draw,
    legend_above,
    new_figure,
    place_axes,
    tick_text,
)
from tapernorm.page import number

_BANDS = ((0, 5, 0.14, "1 to 99 %"), (1, 4, 0.22, "5 to 95 %"), (2, 3, 0.34, "25 to 75 %"))  # indices of quantiles
_FLOOR = 1e-4  # nats: less is drawn here, being less than what two texts differ by
_MARKS = {"attention": (ACCENT, "o"), "MLP": (THIRD, "s"), "other": (GREY, "D")}


def scale_bands(panels: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Draw:
    """r / median over depth, one panel for each (title, rows). A row: {"quantiles": six, "dots": [...]}, by site."""

    def draw(width: int) -> Figure:
        body, head, cell = 190, 46 if width == WIDE else 66, 262
        fig = new_figure(width, head + cell * len(panels) - 8)
        first = None
        tops = [
            max([row["quantiles"][-1] for row in rows] + [d for row in rows for d in row["dots"]]) for _, rows in panels
        ]
        lows = [min(row["quantiles"][0] for row in rows) for _, rows in panels]
        low, top = max(1e-3, min(0.5, *lows, 1)), min(1e6, max(2.0, *tops, 1))
        for i, (title, rows) in enumerate(panels):
            ax = place_axes(fig, 46, head + i * cell, width - 62, body)
            first = first or ax
            x = np.arange(1, len(rows) + 1)
            table = np.array([row["quantiles"] for row in rows], dtype=float).reshape(len(rows), -1)
            for a, b, alpha, label in _BANDS:
                ax.fill_between(x, table[:, a], table[:, b], color=ACCENT, alpha=alpha, linewidth=0, label=label)
            ax.axhline(1, color=INK, linewidth=1)
            dots = [(n, dot) for n, row in zip(x, rows, strict=True) for dot in row["dots"]]
            if dots:
                ax.plot(*zip(*dots, strict=True), "o", color=THIRD, markersize=3.6, alpha=0.75, markeredgewidth=0,
                        label="tokens above 4", clip_on=False)  # fmt: skip
            ax.set_ylim(low * 0.9, top * 1.15)
            _log_axis(ax)
            _depth_axis(ax, len(rows), last=i == len(panels) - 1)
            ax.set_title(title)
        assert first is not None
        busiest = max(fig.axes, key=lambda ax: len(ax.get_legend_handles_labels()[1]))
        handles, labels = busiest.get_legend_handles_labels()
        fig.legend(  # not in the bands' own colours, which are faint
            handles, labels, loc="upper left", bbox_to_anchor=(0, 1), ncols=4 if width == WIDE else 2,
            labelcolor=MUTED, handlelength=1.4, columnspacing=1.6, handletextpad=0.5,
        )  # fmt: skip
        return fig

    return draw


def cost_by_depth(rows: Sequence[Mapping[str, Any]], budget: float | None = None) -> Draw:
    """The cost of each norm taken out alone, in nats, on a logarithmic axis; what is not finite lies on the top edge.

    Args:
        rows: in order of execution, {"number", "part", "cost": nats or None, "removed": bool, or absent}.
        budget: nats, drawn as a line.
    """
    marked = any("removed" in row for row in rows)

    def draw(width: int) -> Figure:
        fig = new_figure(width, 326)
        ax = place_axes(fig, 54, 56, width - 70, 222)
        costs = [number(row.get("cost")) for row in rows]
        known = [c for c in costs if c is not None]
        top = max([*known, budget or 0, 0.01]) * 1.6
        least = min([c for c in known if c > 0], default=_FLOOR)
        floor = (
            _FLOOR if least < _FLOOR or min(known, default=1) <= 0 else 10 ** math.floor(math.log10(min(least, 0.009)))
        )
        series: dict[str, list[tuple[float, float, bool]]] = {}
        for row, cost in zip(rows, costs, strict=True):
            part = row["part"] if row["part"] in ("attention", "MLP") else "other"
            height = top if cost is None else max(cost, floor)
            series.setdefault(part, []).append((row["number"], height, bool(row.get("removed"))))
            if cost is None:
                ax.plot([row["number"]], [top], "x", color=_MARKS[part][0], markersize=9, clip_on=False, zorder=4)
        for part in _MARKS:
            if part not in series:
                continue
            colour, mark = _MARKS[part]
            x, y, gone = (np.array(column) for column in zip(*series[part], strict=True))
            ax.plot(x, y, "-", color=colour, linewidth=0.9, alpha=0.55)
            ax.plot([], [], mark, color=colour, markersize=6, label=f"{part} norms" if part != "other" else "others")
            for filled in (True, False):
                chosen = ((gone == filled) if marked else np.full(len(x), filled)) & (y < top)  # no mark under a cross
                face = colour if filled else PAGE
                ax.plot(x[chosen], y[chosen], mark, color=colour, markersize=5.5, markerfacecolor=face, clip_on=False)
        if budget:
            ax.axhline(budget, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            ax.annotate("the whole budget", (0, budget), xycoords=("axes fraction", "data"), xytext=(0, 4),
                        textcoords="offset points", color=MUTED, fontsize=12)  # fmt: skip
        ax.set_ylim(floor, top)
        _log_axis(ax)
        ticks = ax.yaxis.get_major_formatter()
        ax.yaxis.set_major_formatter(
            FuncFormatter(lambda v, p: "≤ 10⁻⁴" if v <= _FLOOR * 1.01 and least < _FLOOR else ticks(v, p))
        )
        _depth_axis(ax, max((int(row["number"]) for row in rows), default=1), last=True)
        ax.set_title("cost alone, nats per token" + (" (filled: removed)" if marked else ""))
        legend_above(fig, ax, width)
        return fig

    return draw


def search_curve(tried: Sequence[Sequence[Any]], before: float, budget: float, removed: int) -> Draw:
    """Every set of norms that was tried: how many, and the held-out loss above the original's in percent."""

    def draw(width: int) -> Figure:
        fig = new_figure(width, 300)
        ax = place_axes(fig, 54, 34, width - 70, 216)
        points = [(int(n), number(loss)) for n, loss in tried]
        gaps = [(n, 100 * (loss / before - 1)) for n, loss in points if loss is not None]
        limit = 100 * budget
        # One trial that went far over would press all others onto the axis.
        top = max([limit * 1.3, *(min(gap, 5 * limit) for _, gap in gaps)])
        low = min([0.0, *(gap for _, gap in gaps)])
        ax.axhspan(limit, top * 1.08, color=MUTED, alpha=0.10, linewidth=0)
        ax.axhline(limit, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        if low < 0:
            ax.axhline(0, color=MUTED, linewidth=1)
        for n, gap in gaps:
            within = gap <= top
            chosen = n == removed and gap <= limit
            face = ACCENT if chosen else PAGE
            mark, colour = ("o", ACCENT) if within else ("^", THIRD)
            size = 8 if chosen else 6
            ax.plot(
                [n],
                [min(gap, top)],
                mark,
                color=colour,
                markerfacecolor=face if within else colour,
                markersize=size,
                clip_on=False,
            )
        for n, loss in points:
            if loss is None:
                ax.plot([n], [top], "x", color=THIRD, markersize=9, clip_on=False)
        ax.annotate("above the budget", (0, limit), xycoords=("axes fraction", "data"), xytext=(0, 5),
                    textcoords="offset points", color=MUTED, fontsize=12)  # fmt: skip
        ax.set_ylim(min(low * 1.1, -0.04 * top), top * 1.08)
        ax.set_xlim(-0.5, max([n for n, _ in points] + [removed, 1]) + 0.5)
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        ax.yaxis.set_major_formatter(
            FuncFormatter(lambda v, _: f"{v:+.3g}".replace("-", "−") if abs(v) > 1e-9 else "0")
        )
        ax.xaxis.set_major_locator(MaxNLocator(8 if width == WIDE else 6, integer=True))
        ax.set_xlabel("norms removed", loc="right")
        ax.set_title("held-out loss above the original's, in percent")
        return fig

    return draw


def _log_axis(ax: Axes) -> None:
    low, high = ax.get_ylim()
    ax.set_yscale("log")
    decades = math.log10(high / low)
    subs = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
    ax.yaxis.set_major_locator(LogLocator(10, subs=subs, numticks=10))
    ax.yaxis.set_major_formatter(FuncFormatter(tick_text))
    ax.minorticks_off()
    ax.set_ylim(low, high)


def _depth_axis(ax: Axes, count: int, last: bool) -> None:
    ax.set_xlim(0.5, count + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    if last:
        ax.set_xlabel("norm, numbered in order of execution", loc="right")
