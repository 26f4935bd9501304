"""Tokens a second of decoding: a model with its norms, with faster norms, unfused, and folded. Interleaved.

All variants take turns in every round, so that a machine whose speed drifts slows them all; a ratio is the median
over rounds of the ratio within a round.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tapernorm import hub, layout
from tapernorm.config import Arm, TaperConfig
from tapernorm.convert import get_controller, restore_, taper_
from tapernorm.fold import fold_
from tapernorm.modules import taper_norms
from tapernorm.probe import Norm, gain
from tapernorm.sites import context_length, default_example, find_sites, run
from tapernorm.verify import new_cache

VARIANTS = ("stock", "functional", "unfused", "folded")


class FunctionalNorm(nn.Module):
    """The same norm by `torch.nn.functional`: what a careful user would run instead of the library's."""

    def __init__(self, norm: nn.Module, probed: Norm, width: int) -> None:
        super().__init__()
        dtype = next((p.dtype for p in norm.parameters()), torch.float32)
        self.weight = nn.Parameter(gain(norm, probed, width).detach().to(dtype), requires_grad=False)
        bias = getattr(norm, probed.bias) if probed.bias else None
        self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False) if bias is not None else None
        self.kind, self.eps, self.shape = probed.kind, probed.eps, (width,)

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(h, self.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(h, self.shape, self.weight, self.eps)


@torch.no_grad()
def variants(model: nn.Module, arm: Arm = "internal", keep: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Copies of `model` that differ in their norms only.

    Args:
        model: a tapered model at the end of its taper, of which the last two variants are the same function; or any
            other, whose last two variants are for speed alone (`_calibrated`).
        arm, keep: for a model that is not tapered, as in `TaperConfig`; a tapered one brings its own.
    """
    controller = get_controller(model)
    config = controller.config if controller else TaperConfig(arm=arm, keep=tuple(keep), anchor_weight=0.0)
    stock = copy.deepcopy(model).eval()
    if controller is not None:
        restore_(stock)
    made = {"stock": stock, "functional": copy.deepcopy(stock)}
    for site in find_sites(stock):
        if site.probed is not None:
            norm = FunctionalNorm(stock.get_submodule(site.name), site.probed, site.width)
            made["functional"].set_submodule(site.name, norm.eval())
    done = controller is not None and controller.phase == "done"
    made["unfused"] = copy.deepcopy(model).eval() if done else _calibrated(copy.deepcopy(stock), config)
    made["folded"] = copy.deepcopy(made["unfused"])
    fold_(made["folded"])
    return made


def _calibrated(model: nn.Module, config: TaperConfig) -> nn.Module:
    """`model` tapered to gate 0 with scales measured on random tokens, and a tenth of them.

    Without training nothing holds the scale of the residual, and a gated MLP is quadratic: at the full scale some
    twenty layers overflow. At a tenth each block adds little to the residual.
    """
    steps = {"warmup_steps": 1, "taper_steps": 1, "allow_massive": True, "anchor_weight": 0.0}
    bare = {"uniformity_weight": 0.0, "cap": None, "stagger": 0.0, "guard_margin": None}
    controller = taper_(model, dataclasses.replace(config, **steps, **bare))
    model.train()
    with torch.enable_grad():  # a forward without gradients is none of training, and gives no statistics
        run(model, default_example(model, batch=2, length=16))
    model.eval()
    controller.step()
    controller.step()
    for module in taper_norms(model).values():
        module.fixed_norm.c.mul_(0.1)
    return model


def stock_like(source: str) -> nn.Module:
    """The stock model of a source's config: itself, or, for a norm-free folder, one with random weights.

    Speed does not depend on the weights, and a folded model has no norms left to compare with.
    """
    model, _ = hub.from_pretrained(source)
    stock = getattr(type(model), "stock_class", None)
    if stock is None:
        return model
    config = layout.stock_config(model.config)
    return stock._from_config(config, dtype=model.dtype)


@torch.no_grad()
def bench(
    models: dict[str, nn.Module],
    batch: int = 1,
    prompt: int = 16,
    new_tokens: int = 64,
    rounds: int = 15,
    name: str = "",
    progress: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Decode with a dynamic key-value cache, all models in turn in every round.

    Args:
        models: variant name -> model; the ratio is to `"stock"`, or to the first.
        batch: sequences decoded together.
        prompt: tokens before the first decoded one, outside the timed part.
        new_tokens: tokens decoded in one timed part.
        rounds: timed parts of each model, after one that is not counted.
        name: written into each row's `model`.

    Returns:
        One row a variant: median tokens a second (all sequences together) with p20 and p80, and the ratio.
    """
    reference = "stock" if "stock" in models else next(iter(models))
    seconds: dict[str, list[float]] = {variant: [] for variant in models}
    context = context_length(models[reference])
    prompt = min(prompt, context // 2)
    new_tokens = min(new_tokens, context - prompt - 1)  # a table of positions ends there
    vocabulary = int(getattr(models[reference].config, "vocab_size", 2))
    ids = torch.randint(1, vocabulary, (batch, prompt), generator=torch.Generator().manual_seed(0))
    order = list(models)
    for number in range(rounds + 1):
        for variant in order:
            elapsed = _decode(models[variant], ids, new_tokens)
            if number:
                seconds[variant].append(elapsed)
        order = order[1:] + order[:1]  # nobody always comes after the same neighbour
        if progress is not None:
            progress()
    rows = []
    for variant, times in seconds.items():
        first = next(models[variant].parameters())
        speed = sorted(batch * new_tokens / t for t in times)
        ratios = [a / b for a, b in zip(seconds[reference], times, strict=True)]
        rows.append(
            {
                "model": name,
                "mode": "decode",
                "variant": variant,
                "batch": batch,
                "cache": "dynamic",
                "compiled": False,
                "dtype": str(first.dtype).removeprefix("torch."),
                "tokens_per_second": statistics.median(speed),
                "p20": speed[int(0.2 * (len(speed) - 1))],
                "p80": speed[int(0.8 * (len(speed) - 1))],
                "ratio": statistics.median(ratios),
                "prompt": prompt,
                "new_tokens": new_tokens,
                "rounds": rounds,
                "attention": getattr(models[variant].config, "_attn_implementation", ""),
                "device": device_name(first.device),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "date": datetime.date.today().isoformat(),
            }
        )
    return rows


def append_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file, with a header if it is new. In an old one the columns keep their order.

    Raises:
        ValueError: the file lacks a column that the rows have.
    """
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        header = next(csv.reader(file), [])
        unknown = [name for row in rows for name in row if header and name not in header]
        if unknown:
            raise ValueError(f"{path} has no column {unknown[0]!r}; append to another file")
        writer = csv.DictWriter(file, fieldnames=header or list(rows[0]))
        if not header:
            writer.writeheader()
        writer.writerows(rows)


def _decode(model: Any, ids: Tensor, new_tokens: int) -> float:
    """Seconds for `new_tokens` steps of greedy decoding, the prompt's own forward left out."""
    device = next(model.parameters()).device
    cache = new_cache(model)
    token = model(input_ids=ids.to(device), use_cache=True, **cache).logits[:, -1:].argmax(-1)
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(new_tokens):
        token = model(input_ids=token, use_cache=True, **cache).logits[:, -1:].argmax(-1)
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
