"""Beyond text: a vision transformer on handwritten digits, as classes and as a number, with its norms and without."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapernorm.studies.base import FILLED, Cell, Context, Row, Scale, Study

if TYPE_CHECKING:
    from torch import Tensor

TASKS = ("classes", "value")
ARMS = ("norm", "internal", "all")
SEEDS = {"small": 3, "paper": 10}
# width, layers, heads, steps; images of 8 × 8 pixels in patches of 2 × 2
SHAPES = {"small": (64, 4, 4, 300), "paper": (192, 12, 6, 3000)}
BATCH, RATE, DECAY = 64, 2e-3, 0.05
TEST = 450  # images of 1,797
MEAN, DEVIATION = 4.5, 8.25**0.5  # of the numbers 0 to 9
KEYS = ("task", "arm", "seed")


def cells(scale: Scale) -> list[Cell]:
    """All arms of both tasks, seed by seed."""
    return [{"task": task, "arm": arm, "seed": seed} for seed in range(SEEDS[scale]) for task in TASKS for arm in ARMS]


@functools.lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    """(images [N, 1, 8, 8] from −1 to 1, numbers [N]) of scikit-learn's digits.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    import torch

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("the digits come with scikit-learn: pip install 'tapernorm[digits]'") from error
    found: Any = load_digits()
    images = torch.from_numpy(found.images).float().div(8).sub(1)[:, None]
    return images, torch.from_numpy(found.target).long()


def build(task: str, scale: Scale, seed: int) -> Any:
    """A fresh `ViTForImageClassification`, with ten outputs or with one."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    width, layers, heads, _ = SHAPES[scale]
    torch.manual_seed(seed)
    kind: dict[str, Any] = {"num_labels": 10} if task == "classes" else {"num_labels": 1, "problem_type": "regression"}
    return ViTForImageClassification(
        ViTConfig(
            image_size=8, patch_size=2, num_channels=1, hidden_size=width, intermediate_size=4 * width,
            num_hidden_layers=layers, num_attention_heads=heads, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, **kind,
        )
    )  # fmt: skip


def run(cell: Cell, context: Context) -> Row:
    """Train one model; what is measured on the test images is the folded one."""
    import torch

    from tapernorm.convert import taper_
    from tapernorm.fold import FoldError, fold_
    from tapernorm.material import device
    from tapernorm.run_config import RunConfig
    from tapernorm.sites import find_sites
    from tapernorm.studies.loop import Recipe, order, train

    task, arm, seed = cell["task"], cell["arm"], cell["seed"]
    steps = context.counts("steps").get("steps", SHAPES[context.scale][3])
    images, numbers = digits()
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, rest = shuffled[:TEST], shuffled[TEST:]
    labels = numbers if task == "classes" else (numbers.float() - MEAN) / DEVIATION
    recipe = Recipe(steps, BATCH, RATE, DECAY)
    model = build(task, context.scale, seed).to(device())
    config = RunConfig(kind="pretrain", data="-", out="-", arm="baseline" if arm == "norm" else arm, steps=steps)
    controller = None if arm == "norm" else taper_(model, config.taper)

    def inputs(rows: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": images[rest[rows]], "labels": labels[rest[rows]]}

    why = train(model, order(len(rest), recipe, seed), inputs, recipe, controller)
    row: Row = {"steps": steps, "images": steps * BATCH, "norms": ""}
    if not why:
        try:
            if controller is not None:
                row["fold_error"] = fold_(model, example={"pixel_values": images[test[:8]].to(device())}).relative_error
            row |= _measured(model, task, images[test], labels[test])
            row["norms"] = sum(site.probed is not None for site in find_sites(model))
        except FoldError as error:
            why = f"FoldError: {str(error).splitlines()[0]}"
    score = row.get("accuracy" if task == "classes" else "mse", math.nan)
    guess = 0.2 if task == "classes" else 1.0  # twice as often as by chance; the mean for every image
    failed = not math.isfinite(score) or (score < guess if task == "classes" else score > guess)
    if failed:
        why = why or f"{score:.3g} on test images is no better than a guess"
    return row | {"diverged": int(bool(why)), "why": why}


def _measured(model: Any, task: str, images: Tensor, labels: Tensor) -> Row:
    """Accuracy and cross-entropy, or the mean squared error, of the digit in both cases."""
    import torch

    with torch.no_grad():
        outputs = model.eval()(pixel_values=images.to(model.device)).logits.cpu()
    if task == "classes":
        right = (outputs.argmax(-1) == labels).float().mean()
        return {"accuracy": float(right), "test_loss": float(torch.nn.functional.cross_entropy(outputs, labels))}
    error = float((outputs[:, 0] - labels).pow(2).mean())
    return {"mse": error, "test_loss": error}


def draw(rows: list[Row], folder: Path) -> list[Path]:
    from tapernorm.studies.transfer_page import figures

    return figures(rows, folder)


def page(rows: list[Row]) -> str:
    from tapernorm.studies.transfer_page import text

    return text(rows)


STUDY = Study(
    name="transfer",
    title="A vision transformer on digits, as classes and as a number, with norms and without",
    columns=(
        *KEYS, "scale", "accuracy", "mse", "test_loss", "diverged", "why", "norms", "fold_error", "steps", "images",
        *(name for name in FILLED if name not in ("scale", "data")),
    ),
    keys=KEYS,
    cells=cells,
    run=run,
    draw=draw,
    page=page,
    extras={"steps": "optimizer steps"},
)  # fmt: skip
