"""What every page has in common: how numbers are written, and the environment that the templates are rendered in.

A page is one self-contained HTML file that loads nothing (its content security policy forbids it) and runs no script:
`page.html.j2` holds its head and style, `macros.html.j2` tables and figures.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

MISSING = "not measured"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: Any) -> float | None:
    """`value` as a finite float, or None for anything that is not one (None, NaN, infinity, text)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def render(template: str, view: Mapping[str, Any]) -> str:
    """The page that a template of this package makes of `view`. Every `format_x` below is `x` in a template."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": _breakable, "codes": _codes, "command": _command}
    environment.globals |= {name[7:]: each for name, each in globals().items() if name.startswith("format_")}
    environment.globals["missing"] = MISSING
    return environment.get_template(template).render(view)


def page_path(name: str, out: Path | None) -> Path:
    """Where a page goes: `out`; a file called `name` in it where it is a folder, or here without one.

    Raises:
        ValueError: the folder that it would be in is not there, or `out` is a file of another kind.
    """
    path = Path(name) if out is None else out / name if out.is_dir() else out
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {path}: the page needs a name that ends in .html, or a folder that is there")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it first")
    return path


def format_loss(value: Any) -> str:
    """A loss in nats with four decimals; "NaN" or "∞" if it is that, "not measured" if there is none."""
    return finite(value, lambda v: f"{v:.4f}" if abs(v) < 1e4 else f"{v:,.0f}")


def format_gap(value: Any, base: Any, missing: str = "") -> str:
    """By how many percent `value` is above `base`, with its sign."""
    one, two = number(value), number(base)
    if one is None or not two:
        return missing
    return f"{100 * (one / two - 1):+z.2f} %".replace("-", "−")


def format_error(value: Any, plain: bool = False) -> str:
    """A small number as 2.1 × 10⁻⁷, or 2.1e-07 when `plain`."""

    def show(v: float) -> str:
        if v == 0 or plain:
            return f"{v:.1e}" if v else "0"
        mantissa, exponent = f"{v:.1e}".split("e")
        power = str(int(exponent)).translate(_SUPERSCRIPT)
        return f"10{power}" if mantissa == "1.0" else f"{mantissa} × 10{power}"

    return finite(value, show)


def format_speed(value: Any) -> str:
    """Tokens a second: whole above 100, three digits below."""
    return finite(value, lambda v: f"{v:,.0f}" if v >= 100 else f"{v:.3g}")


def format_ratio(value: Any, missing: str = MISSING) -> str:
    """A ratio to the stock model, 1.21 ×."""
    return f"{value:.2f} ×" if number(value) is not None else missing


def format_count(value: Any) -> str:
    """A whole number: 12,345, or 1.23 million."""
    return finite(value, lambda v: f"{v:,.0f}" if abs(v) < 1e6 else f"{v / 1e6:,.2f} million")


def format_duration(seconds: Any) -> str:
    """Seconds as 2 h 05 min, 3 min 12 s or 4.2 s."""

    def show(v: float) -> str:
        if v < 60:
            return f"{v:.1f} s"
        minutes, rest = divmod(round(v), 60)
        if minutes < 60:
            return f"{minutes} min {rest:02} s"
        return f"{minutes // 60} h {minutes % 60:02} min"

    return finite(seconds, show)


def format_share(value: Any) -> str:
    """A share from 0 to 1 as a percentage that never rounds up to 100 %."""
    return finite(value, lambda v: "100 %" if v == 1 else f"{math.floor(v * 10000) / 100:.2f} %")


def format_short_loss(value: Any) -> str:
    """A percentile of the loss, or a perplexity, with two decimals."""
    return finite(value, lambda v: f"{v:,.2f}")


def format_literal(text: Any) -> str:
    """`text` as a Python string in double quotes."""
    return json.dumps(str(text), ensure_ascii=False)


def format_value(value: Any) -> str:
    """A setting: lists with commas, yes and no, numbers short."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value)) or "none"
    return str(value)


def finite(value: Any, show: Any) -> str:
    """`show(value)` for a finite number; "NaN", "∞" or "not measured" for anything else."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    v = number(value)
    return MISSING if v is None else show(v)


def part(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A part of a record, {} where it is not there or is no mapping."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _breakable(name: Any) -> Markup:
    """A dotted name that may wrap after its dots and underscores."""
    return Markup(str(escape(str(name))).replace(".", ".<wbr>").replace("_", "_<wbr>"))


def _command(text: Any) -> Markup:
    """A command line that never wraps within an option, after one of its hyphens."""
    return Markup(re.sub(r"(?<!\S)(-[\w-]+)", r'<span class="option">\1</span>', str(escape(str(text)))))


def _codes(text: Any) -> Markup:
    """What stands between backticks, as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(str(text)))))


def plain(value: Any, infinite: float | None = None) -> Any:
    """`value` as strict JSON has it: tuples are lists, and numbers that are not finite are `infinite`."""
    if isinstance(value, Mapping):
        return {str(key): plain(each, infinite) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, infinite) for each in value]
    return infinite if isinstance(value, float) and not math.isfinite(value) else value
