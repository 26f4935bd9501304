"""The figures and the page of the study `alternatives`."""

from __future__ import annotations

from pathlib import Path

from tapernorm.canvas import ACCENT, FOURTH, GREY, INK, THIRD, save
from tapernorm.studies.alternatives import KEYS, LOST, METHODS
from tapernorm.studies.base import Row
from tapernorm.studies.drawing import dots
from tapernorm.studies.rows import distinct, mean_and_error, table, with_error
from tapernorm.studies.tinystories_page import percent

OTHERS = METHODS[1:]
COLOURS = (ACCENT, THIRD, FOURTH, GREY, INK)

HEAD = """\
# Other ways to go without norms

The same Llama, from the same weights on the same batches with the same optimizer, trained once with each of:

| method | in the place of a norm | at inference |
| --- | --- | --- |
| `rms` | RMS norm | the norm |
| `internal` | TaperNorm, all but the final norm | nothing; the final norm |
| `all+aux` | TaperNorm, all norms, with the scale loss, λ = 0.1 | nothing |
| `dyt` | γ tanh(α h) + β | the same |
| `derf` | γ erf(α h + s) + β | the same |
| `none` | nothing; each branch times a learned number that begins at 0 | nothing |

A gap is by how many percent the validation loss lies above that of `rms` **of the same seed**. A decoding ratio is
tokens a second divided by those of a stock model that took turns with it in the same run. After ± stands the standard
error over seeds. Lost is a run whose loss was not finite, whose gate did not reach 0, or which ended more than {lost}
above `rms`; lost runs are in no mean.

    tapernorm study alternatives --data D
    tapernorm study alternatives --data D --only "method=dyt 0.5,dyt 2" --only seed=0
"""

SETTING = """\
## What was chosen, and what differs

- `dyt`, `derf` and `none` get what helps them at this width: a learned number behind the embedding that begins where
  the residual's mean square is 1. DyT's authors begin it at sqrt(D), which amounts to the same at their widths and
  would leave 0.16 at a width of 64. α begins at 1.0 for DyT, as for Llama at their smallest width, and at 0.5 for
  Derf; the rows `dyt 0.5` and so on begin it elsewhere.
- `none` could also begin with weights divided by sqrt(2 L) in place of learned numbers
  (`tapernorm.baselines.pointwise.no_norms_`); that was not tried.
- TaperNorm's gate is 1 for a quarter of the steps, falls for half of them and is 0 for a quarter, with the robust
  calibration and the guard, as `tapernorm pretrain` does it. Nothing is tuned by method.
- DyT's and Derf's authors train larger models for longer, and report that nothing is lost there. That was not tried
  here.
"""


def figures(rows: list[Row], folder: Path) -> list[Path]:
    """gap.svg and decoding.svg: a dot for each seed."""
    kept = [row for row in rows if not row["diverged"] and row["method"] in OTHERS]
    made = []
    for column, name, title in (
        ("gap_percent", "gap", "validation loss above RMS norm, in percent"),
        ("decode_ratio", "decoding", "decoding speed above RMS norm, in percent"),
    ):
        found = {}
        for model in distinct(rows, "model"):
            own = [row for row in kept if row["model"] == model and row[column] is not None]
            found[str(model)] = {m: [_value(row, column) for row in own if row["method"] == m] for m in OTHERS}
        if any(values for group in found.values() for values in group.values()):
            made.append(save(dots(found, title, colours=COLOURS), folder / f"{name}.svg", title))
    return made


def _value(row: Row, column: str) -> float:
    return 100 * (row[column] - 1) if column == "decode_ratio" else row[column]


def text(rows: list[Row]) -> str:
    """The page."""
    parts = [HEAD.format(lost=f"{LOST:.0%}".replace("%", " %"))]
    kept = [row for row in rows if not row["diverged"] and row["method"] in OTHERS]
    if any(row["gap_percent"] is not None for row in kept):
        parts.append("![Validation loss above RMS norm by method and seed](gap.svg)\n")
    if any(row["decode_ratio"] is not None for row in kept):
        parts.append("![Decoding speed above RMS norm by method and seed](decoding.svg)\n")
    settings = ("model", "scale", "steps", "batch", "block", "data", "device")
    for setting in dict.fromkeys(tuple(row[key] for key in settings) for row in rows):
        own = [row for row in rows if tuple(row[key] for key in settings) == setting]
        first = own[0]
        parts.append(
            f"**{first['model']}** on {first['data']}: {first['steps']:,} steps of {first['batch']} × {first['block']} "
            f"tokens ({first['tokens'] / 1e6:.3g} M in all); {first['device']}, torch {first['torch']}\n"
        )
        parts.append(_methods(own))
    return "\n".join([*parts, _lost(rows), SETTING])


def _methods(rows: list[Row]) -> str:
    lines = []
    for method in (*METHODS, *(m for m in distinct(rows, "method") if m not in METHODS)):
        own = [row for row in rows if row["method"] == method]
        kept = [row for row in own if not row["diverged"]]
        if not own:
            continue
        loss = with_error([row["val_loss"] for row in kept])
        gaps = [row["gap_percent"] for row in kept if row["gap_percent"] is not None]
        ratios = [row["decode_ratio"] for row in kept if row["decode_ratio"] is not None]
        speed = f"{mean_and_error(ratios)[0]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        lost = sum(bool(row["diverged"]) for row in own)
        gap = "" if method == "rms" else percent(gaps)
        lines.append([f"`{method}`", len(own), loss, gap, speed, f"{lost} of {len(own)}"])
    return table(("method", "seeds", "validation loss", "gap", "decoding ratio (range)", "lost"), lines)


def _lost(rows: list[Row]) -> str:
    lines = [f"- {', '.join(str(row[key]) for key in KEYS)}: {row['why']}" for row in rows if row["diverged"]]
    return "## Lost runs\n\n" + "\n".join(lines or ["None."]) + "\n"
