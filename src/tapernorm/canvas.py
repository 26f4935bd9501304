"""What every figure is drawn on: style, colours, axes placed in pixels, and SVG to be put inside a page.

matplotlib through its object API; no pyplot, no backend and no lasting rcParams: a program that draws its own figures
is not disturbed. Colours are CSS variables (`--ink`, `--accent`, ...): a figure follows the page into dark mode, and
its text is text. Every figure is drawn twice, for a wide and a narrow window, because shrinking the wide one would
shrink its letters. A file of its own, which no page's style reaches, has one size and half-way colours.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

Rows = Sequence[Mapping[str, Any]]
Draw = Callable[[int], Figure]

WIDE, NARROW = 720, 368  # CSS pixels; one unit of the viewBox is one pixel

# matplotlib accepts only real colours, so each stands for a CSS variable that _to_inline puts in its place.
_VARIABLES = ("ink", "muted", "rule", "accent", "grey", "third", "fourth", "bar", "page")
INK, MUTED, RULE, ACCENT, GREY, THIRD, FOURTH, BAR, PAGE = (f"#0a0a{i:02x}" for i in range(9))
_ON_ANY_GROUND = {
    "ink": "#7d8a8c", "muted": "#7d8a8c", "rule": "#7d8a8c55", "accent": "#2f8f9d", "grey": "#7d8a8c",
    "third": "#c97b2e", "fourth": "#b4557f", "bar": "#7d8a8c33", "page": "none", "sans": "sans-serif",
    "shallow": "#c97b2e", "deep": "#2f8f9d",
}  # fmt: skip
ARM_COLOURS = (ACCENT, GREY, THIRD, FOURTH)  # the tapered arm, its baseline, others

_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "tapernorm", "font.size": 13, "lines.linewidth": 1.6,
    "text.parse_math": False,  # a name with two dollar signs is not a formula
    "text.color": INK, "axes.titlecolor": INK, "axes.edgecolor": RULE, "axes.labelcolor": MUTED,
    "axes.titlelocation": "left", "axes.titlesize": 13, "axes.titlepad": 8, "axes.titley": 1.0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": RULE, "grid.linewidth": 0.8,
    "xtick.color": RULE, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "ytick.major.size": 0, "ytick.minor.size": 0,
    "legend.frameon": False, "legend.borderpad": 0, "legend.borderaxespad": 0,
}  # fmt: skip


def depth_colour(index: int, count: int) -> str:
    """Stands for a mix of `--shallow` and `--deep`, by the place of a site among `count`."""
    return f"#0b0b{round(100 * index / max(count - 1, 1)):02x}"


def inline(draw: Draw, name: str, label: str) -> str:
    """Both sizes of a figure as SVG, of which the page's style sheet shows one; `label` is read aloud."""
    sizes = (("wide", WIDE), ("narrow", NARROW))
    return "\n".join(_to_inline(_drawn(draw, width), f"{name}-{size}", size, label) for size, width in sizes)


def save(draw: Draw, path: Path, label: str) -> Path:
    """The wide size as an SVG file of its own, in colours that can be read on light and on dark ground."""
    text = _to_inline(_drawn(draw, WIDE), path.stem, "wide", label)
    text = re.sub(r"var\(--(\w+)\)", lambda match: _ON_ANY_GROUND[match[1]], text)
    text = text.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" ', 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def _drawn(draw: Draw, width: int) -> bytes:
    out = io.BytesIO()
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser's fonts will have it
        draw(width).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()


def _to_inline(svg: bytes, prefix: str, size: str, label: str) -> str:
    """A matplotlib SVG made fit for HTML: unique ids, CSS variables, no metadata, style sheet or namespaces."""
    root = ET.fromstring(svg)
    for element in root.iter():
        for child in list(element):
            if child.tag.endswith(("}metadata", "}style")):
                element.remove(child)
    text = [value for element in root.iter() for value in element.attrib.values()]
    used = set(re.findall(r"#([\w-]+)", " ".join(value for value in text if not value.startswith("data:"))))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name, value in list(element.attrib.items()):
            del element.attrib[name]
            short = name.rpartition("}")[2]
            if short == "id" and value not in used:
                continue
            if short == "id":
                value = f"{prefix}-{value}"
            elif short == "href" and value.startswith("#"):
                value = f"#{prefix}-{value[1:]}"
            elif short == "clip-path":
                value = value.replace("(#", f"(#{prefix}-")
            elif short == "style":
                value = re.sub(r"(font: [^']*?)\s*'.*?(?=;|$)", r"\1 var(--sans)", value)
                value = re.sub(r"#0([ab])0\1([0-9a-f]{2})", _css_colour, value)
            elif short == "d":
                value = re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), value)
            element.set(short, value)
    root.attrib = {"viewBox": root.attrib["viewBox"], "class": size, "role": "img", "aria-label": label}
    return ET.tostring(root, encoding="unicode")


def _css_colour(match: re.Match[str]) -> str:
    if match[1] == "a":
        return f"var(--{_VARIABLES[int(match[2], 16)]})"
    return f"color-mix(in oklab, var(--deep) {int(match[2], 16)}%, var(--shallow))"


def new_figure(width: int, height: float) -> Figure:
    return Figure(figsize=(width / 72, height / 72), dpi=72)


def place_axes(fig: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes placed in pixels from the upper left corner."""
    full_w, full_h = fig.get_size_inches() * 72
    return fig.add_axes((left / full_w, 1 - (top + height) / full_h, width / full_w, height / full_h))


def place_grid(width: int, count: int, height: int, top: int) -> tuple[Figure, list[Axes]]:
    """`count` panels in two columns, or in one when narrow, under a head of `top` pixels."""
    columns = 2 if width == WIDE and count > 1 else 1
    cell_w, cell_h = width / columns, height + 70
    fig = new_figure(width, top + cell_h * math.ceil(count / columns) - 14)
    places = [divmod(i, columns) for i in range(count)]
    return fig, [place_axes(fig, x * cell_w + 46, top + y * cell_h + 10, cell_w - 62, height) for y, x in places]


def legend_above(fig: Figure, ax: Axes, width: int) -> None:
    """The names of the lines, in their colours, above the figure."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0, 1), ncols=4 if width == WIDE else 2,
        labelcolor="linecolor", handlelength=1.4, columnspacing=1.6, handletextpad=0.5,
    )  # fmt: skip


def scale_y(ax: Axes, values: np.ndarray, log: bool | None = None) -> None:
    """A logarithmic axis for positive values that span much, since a cut axis would hide a spike."""
    values = values[np.isfinite(values)]
    if not values.size:
        return
    low, high = float(values.min()), float(values.max())
    wide = low > 0 and high / low > (4 if log else 3)
    if wide:
        ax.set_yscale("log")
        subs = (1, 2, 5) if high / low < 1000 else (1,)
        subs = (1, 1.5, 2, 3, 5, 7) if high / low < 10 else subs
        ax.yaxis.set_major_locator(LogLocator(10, subs=subs, numticks=9))
        ax.minorticks_off()
        ax.set_ylim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
    else:
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(tick_text))


def tick_text(value: float, _: int) -> str:
    text = f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e")
    return text.replace("-", "−")


def shortened(text: Any, length: int = 24) -> str:
    text = str(text)
    return text if len(text) <= length else text[: length - 1] + "…"
