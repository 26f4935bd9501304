"""The figures of a training run, from its log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tapernorm.canvas import (
    ACCENT,
    BAR,
    INK,
    MUTED,
    PAGE,
    WIDE,
    Draw,
    Rows,
    depth_colour,
    legend_above,
    new_figure,
    place_axes,
    place_grid,
    scale_y,
    shortened,
)
from tapernorm.page import number
from tapernorm.reading import gap_so_far


def series(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which `key` was measured and is finite, and its values there."""
    pairs = [(row["step"], value) for row in rows if (value := number(row.get(key))) is not None]
    data = np.array(pairs, dtype=float).reshape(-1, 2)
    return data[:, 0], data[:, 1]


def by_site(rows: Rows, key: str, sites: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """`key` ("scale" or "c") of every site over time: steps [S] and values [sites, S], NaN where missing."""
    found = [row for row in rows if isinstance(row.get(key), Mapping) and row[key]]
    values = [[number(row[key].get(site)) for row in found] for site in sites]
    table = np.array(values, dtype=float).reshape(len(sites), len(found))
    table[~(table > 0)] = np.nan  # drawn on logarithmic axes
    return np.array([row["step"] for row in found], dtype=float), table


def loss_curves(logs: Mapping[str, Rows], colours: Mapping[str, str], tapered: str, baseline: str) -> Draw:
    """Training and validation loss of every arm, the gate on a second axis, and the gap between two arms."""
    gap = np.array(gap_so_far(logs.get(baseline, ()), logs.get(tapered, ())), dtype=float).reshape(-1, 2).T

    def draw(width: int) -> Figure:
        height = 330 if gap[0].size < 2 else 470
        fig = new_figure(width, height)
        ax = place_axes(fig, 46, 56, width - 92, 232)
        steps = _last_step(logs)
        gate_ax = ax.twinx()
        gate_ax.set_zorder(ax.get_zorder() - 1)
        ax.patch.set_visible(False)
        for arm in (tapered, *logs):
            x, gate = series(logs.get(arm, ()), "gate")
            if x.size and (arm == tapered or gate.min() < 1):
                gate_ax.fill_between(x, 0, gate, color=MUTED, alpha=0.10, linewidth=0)
                gate_ax.plot(x, gate, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
                break
        gate_ax.set(ylim=(0, 1.08), yticks=(0, 0.5, 1), yticklabels=("0", "½", "1"))
        gate_ax.grid(False)
        gate_ax.set_title("gate (dotted)", loc="right", color=MUTED)
        everything = []
        for arm, rows in logs.items():
            x, y, low, high = binned(*series(rows, "loss"))
            ax.fill_between(x, low, high, color=colours[arm], alpha=0.18, linewidth=0)
            # two arms that agree lie on each other: the tapered one is drawn thin upon a broad line
            ax.plot(x, y, color=colours[arm], label=shortened(arm), linewidth=1.3 if arm == tapered else 2.6)
            ex, ey = series(rows, "eval_loss")
            ax.plot(ex, ey, "o", color=colours[arm], markersize=6, markeredgecolor=PAGE, clip_on=False)
            everything += [low, high, ey]
        scale_y(ax, np.concatenate(everything))
        step_axis(ax, steps, label=gap[0].size < 2)
        ax.set_title("loss, nats per token")
        legend_above(fig, ax, width)
        if gap[0].size >= 2:
            low_ax = place_axes(fig, 46, 352, width - 92, 76)
            low_ax.axhline(0, color=MUTED, linewidth=1)
            low_ax.plot(*gap, "o-", color=colours[tapered], markersize=5, clip_on=False)
            low_ax.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
            low_ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+.3g}" if v else "0"))
            low_ax.set_title(f"validation loss above “{shortened(baseline)}”, in percent")
            step_axis(low_ax, steps)
        return fig

    return draw


def site_lines(rows: Rows, sites: Sequence[str]) -> Draw:
    """The residual scale r and the fixed scale c of every site over time, coloured by depth."""

    def draw(width: int) -> Figure:
        panels = [("scale", "residual scale r"), ("c", "fixed scale c")]
        fig, boxes = place_grid(width, len(panels), 210, top=34)
        for (key, title), ax in zip(panels, boxes, strict=True):
            steps, table = by_site(rows, key, sites)
            for i, line in enumerate(table):
                marker = "o" if steps.size == 1 else None
                ax.plot(steps, line, color=depth_colour(i, len(sites)), linewidth=1.3, marker=marker, markersize=4)
            scale_y(ax, table, log=True)
            step_axis(ax, _last_step({"": rows}))
            ax.set_title(title if steps.size else f"{title}: not measured")
        _depth_key(fig, len(sites))
        return fig

    return draw


def site_drift(rows: Rows, sites: Sequence[str]) -> Draw:
    """c·r of every site over time as a heatmap, transparent where it is 1, to suit any background."""

    def draw(width: int) -> Figure:
        row_height = min(16, max(5, 260 / len(sites)))
        body = math.ceil(row_height * len(sites))
        fig = new_figure(width, body + 96)
        ax = place_axes(fig, 46, 54, width - 62, body)
        steps, drift = _drift(rows, sites)
        edges = (steps[0], max(steps[-1], steps[0] + 1))
        columns = np.linspace(*edges, min(160, max(2, steps.size)))
        nearest = np.abs(columns[:, None] - steps[None]).argmin(1)
        spread = np.abs(np.log2(drift[np.isfinite(drift)]))
        top = min(8.0, max(1.25, 2.0 ** float(spread.max(initial=0))))
        image = _diverging(np.log2(drift[:, nearest]) / math.log2(top))
        ax.imshow(image, aspect="auto", interpolation="none", extent=(*edges, len(sites) + 0.5, 0.5))
        stride = max(1, math.ceil(15 / row_height))
        ax.set_yticks(range(1, len(sites) + 1, stride))
        ax.grid(False)
        ax.set_title("norm, numbered in order of execution")
        ax.set_xlim(0, _last_step({"": rows}))
        step_axis(ax, _last_step({"": rows}))
        _drift_key(fig, top)
        return fig

    return draw


def logit_panels(logs: Mapping[str, Rows], colours: Mapping[str, str]) -> Draw:
    """Logit scale, pre-logit residual scale and radial gradient over time, all arms."""
    panels = [
        ("logit_std", "standard deviation of the logits"),
        ("logit_max", "largest logit"),
        ("prelogit_scale", "scale of the last residual"),
        ("radial_gradient", "radial gradient ⟨∇ℓ, h⟩"),
    ]
    panels = [panel for panel in panels if any(series(rows, panel[0])[0].size for rows in logs.values())]

    def draw(width: int) -> Figure:
        fig, boxes = place_grid(width, len(panels), 150, top=56)
        for (key, title), ax in zip(panels, boxes, strict=True):
            everything = []
            for arm, rows in logs.items():
                x, y = series(rows, key)
                marker = "o" if x.size < 3 else None
                ax.plot(x, y, color=colours[arm], label=shortened(arm), marker=marker, markersize=4)
                everything.append(y)
            values = np.concatenate(everything)
            if values.min() < 0 < values.max():
                ax.axhline(0, color=MUTED, linewidth=1)
            scale_y(ax, values)
            step_axis(ax, _last_step(logs))
            ax.set_title(title)
        legend_above(fig, boxes[0], width)
        return fig

    return draw


def throughput(groups: Sequence[tuple[str, Rows]]) -> Draw:
    """Bars of tokens a second, one group a setting; whiskers p20 to p80; the ratio to stock on the bar."""

    def draw(width: int) -> Figure:
        bar, head, gap = 26, 26, 18
        height = sum(head + bar * len(rows) + gap for _, rows in groups) - gap + 4
        fig, top, left = new_figure(width, height), 0, 104 if width == WIDE else 84
        for title, rows in groups:
            ax = place_axes(fig, left, top + head, width - left - 4, bar * len(rows))
            reach = max((max(row["value"], number(row.get("p80")) or 0) for row in rows), default=0) or 1.0
            room = (width - left) / (width - left - 124)  # what is written after the longest bar
            ax.set(xlim=(0, reach * room), ylim=(len(rows) - 0.5, -0.5), xticks=[])
            for i, row in enumerate(rows):
                colour = ACCENT if row["variant"].startswith("folded") else BAR
                ax.barh(i, row["value"], height=0.66, color=colour, linewidth=0)
                low, high = number(row.get("p20")), number(row.get("p80"))
                if low is not None and high is not None:
                    ax.plot([low, high], [i, i], color=PAGE, linewidth=4, solid_capstyle="butt")
                    ax.plot([low, high], [i, i], color=INK, linewidth=1.1)
                    ax.plot([low, high], [i, i], "|", color=INK, markersize=7, markeredgewidth=1.1)
                ratio = f"\u2002\u2002{row['ratio']:.2f} ×" if row["ratio"] is not None else ""
                end = max(row["value"], high or 0)
                ax.annotate(f"{row['shown']}{ratio}", (end, i), xytext=(8, 0), textcoords="offset points", va="center")
            ax.set_yticks(range(len(rows)), [shortened(row["variant"], 14) for row in rows])
            ax.tick_params(axis="y", labelcolor=INK)
            ax.grid(False)
            ax.spines["bottom"].set_visible(False)
            fig.text(0, 1 - (top + 15) / height, shortened(title, 90 if width == WIDE else 52), color=MUTED)
            top += head + bar * len(rows) + gap
        return fig

    return draw


def _depth_key(fig: Figure, count: int) -> None:
    ax = place_axes(fig, 46, 2, 120, 10)
    for i in range(count):
        ax.axvspan(i, i + 1, color=depth_colour(i, count), linewidth=0)
    ax.set(xlim=(0, count), xticks=[], yticks=[])
    ax.spines["bottom"].set_visible(False)
    for x, text, side in ((0, "first", "right"), (count, f"last of {count} norms", "left")):
        offset = (-6 if side == "right" else 6, 0)
        ax.annotate(text, (x, 0.5), xytext=offset, textcoords="offset points", ha=side, va="center", color=MUTED)


def _drift(rows: Rows, sites: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """c·r wherever both are known; c keeps its last value, since it is frozen after the warm-up."""
    c_steps, c = by_site(rows, "c", sites)
    steps, r = by_site(rows, "scale", sites)
    at = np.searchsorted(c_steps, steps, side="right") - 1
    known = at >= 0
    return steps[known], r[:, known] * c[:, at[known]]


def has_drift(rows: Rows, sites: Sequence[str]) -> bool:
    """Whether `site_drift` has anything to show."""
    return bool(sites) and bool(np.isfinite(_drift(rows, sites)[1]).any())


def _diverging(x: np.ndarray) -> np.ndarray:
    """RGBA, [..., 4]: orange above 0, blue below, the more opaque the further away."""
    x = np.clip(x, -1, 1)
    colour = np.where(x[..., None] > 0, np.array([0.87, 0.42, 0.05]), np.array([0.13, 0.47, 0.80]))
    return np.concatenate([colour, np.nan_to_num(np.abs(x))[..., None] ** 0.8], axis=-1)


def _drift_key(fig: Figure, top: float) -> None:
    ax = place_axes(fig, 110, 2, 140, 10)
    ax.imshow(_diverging(np.linspace(-1, 1, 41)[None]), aspect="auto", interpolation="none", extent=(0, 1, 0, 1))
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    for x, text, side, shift in ((0, f"c·r = {1 / top:.2g}", "right", -6), (1, f"{top:.2g}", "left", 6)):
        ax.annotate(text, (x, 0.5), xytext=(shift, 0), textcoords="offset points", ha=side, va="center", color=MUTED)
    ax.annotate("1", (0.5, 0.5), ha="center", va="center", color=MUTED, fontsize=11)


def step_axis(ax: Axes, last: float, label: bool = True) -> None:
    """Optimizer steps from 0 to the last one."""
    ax.set_xlim(0, max(last, 1))
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 4, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if label:
        ax.set_xlabel("optimizer step", loc="right")


def binned(x: np.ndarray, y: np.ndarray, bins: int = 240) -> tuple[np.ndarray, ...]:
    """Mean, smallest and largest of at most `bins` neighbouring groups: a spike stays visible in the band."""
    if x.size <= bins:
        return x, y, y, y
    parts = np.array_split(np.arange(x.size), bins)
    reduce = [[f(a[p]) for p in parts] for a, f in ((x, np.mean), (y, np.mean), (y, np.min), (y, np.max))]
    return tuple(np.array(part) for part in reduce)


def _last_step(logs: Mapping[str, Rows]) -> float:
    return float(max((row["step"] for rows in logs.values() for row in rows), default=1))
