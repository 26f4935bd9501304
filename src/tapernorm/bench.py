"""Tokens a second, measured fairly: a model with its norms, with faster norms, unfused, folded and fused.

    decode      greedy decoding of `new_tokens` after a prompt, with a key-value cache; the prompt is not timed
    last-token  one forward over T tokens without a cache, logits of the last token only
    prefill     one forward over T tokens that fills a cache, logits of the last token only

All candidates take turns in every round, in an order drawn anew, so that a machine whose speed drifts slows them all;
a ratio is the median over rounds of the ratio within a round. Compilation and warm-up are outside the timed parts,
and a compilation inside one is an error. The device is synchronised before the clock is read.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import datetime
import gc
import inspect
import math
import platform
import random
import shutil
import statistics
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import StaticCache

from tapernorm.bandwidth import cache_bytes, copy_bandwidth, synchronize, weight_bytes
from tapernorm.config import nearest
from tapernorm.sites import context_length
from tapernorm.variants import VARIANTS, stock_like, variants
from tapernorm.verify import new_cache

__all__ = ["VARIANTS", "Setting", "append_csv", "bench", "compile_modes", "device_name", "stock_like", "variants"]

MODES = ("decode", "last-token", "prefill")
CACHES = ("dynamic", "static")
EAGER, COMPILED, GRAPHS = "", "default", "reduce-overhead"  # torch.compile's modes; the last is with CUDA graphs
_SHORTEST = 0.03  # seconds of a timed part: what is quicker is repeated
_MOST_REPEATS = 50


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one interleaved run measures.

    Args:
        mode: one of `MODES`; cache: of `CACHES`, or `"none"` for last-token.
        batch: sequences together; prompt: tokens before the first decoded one, or T of the other modes; new_tokens:
            decoded in one timed part. Decoding takes a shorter prompt and fewer tokens where a model's context is
            too short.
        compile: modes of torch.compile, `""` for none; the candidates are all models in all of them.
        rounds: timed parts of each candidate, after one that is not counted.

    Raises:
        ValueError: an unknown mode, cache or compile mode; a number below 1; CUDA graphs with a dynamic cache.
    """

    mode: str = "decode"
    batch: int = 1
    cache: str = "dynamic"
    prompt: int = 16
    new_tokens: int = 64
    compile: tuple[str, ...] = (EAGER,)
    rounds: int = 15

    def __post_init__(self) -> None:
        caches = ("none",) if self.mode == "last-token" else CACHES
        for field, value, known in (("mode", self.mode, MODES), ("cache", self.cache, caches)):
            if value not in known:
                where = f" of {self.mode}" if field == "cache" else ""
                raise ValueError(f"{field}={value!r}{where} is not one of {', '.join(known)}{nearest(value, known)}")
        for field in ("batch", "prompt", "new_tokens", "rounds"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r} must be at least 1")
        unknown = next((mode for mode in self.compile if mode not in (EAGER, COMPILED, GRAPHS)), None)
        if unknown is not None or not self.compile:
            raise ValueError(f"compile={unknown!r} is not one of '', {COMPILED}, {GRAPHS}")
        if GRAPHS in self.compile and self.cache == "dynamic":
            raise ValueError("CUDA graphs need tensors that keep their places: take a static cache, not a dynamic one")


def compile_modes(device: torch.device, cache: str) -> tuple[str, ...]:
    """What `--compile` measures: eager, compiled, and on a GPU with CUDA graphs, which a growing cache cannot have.

    Raises:
        ValueError: torch cannot compile for a processor without a C++ compiler.
    """
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        raise ValueError("--compile needs a C++ compiler (g++ or clang++), and none is on the path")
    return (EAGER, COMPILED, GRAPHS) if device.type == "cuda" and cache != "dynamic" else (EAGER, COMPILED)


@torch.no_grad()
def bench(
    models: dict[str, nn.Module],
    batch: int = 1,
    prompt: int = 16,
    new_tokens: int = 64,
    rounds: int = 15,
    name: str = "",
    progress: Callable[[], None] | None = None,
    mode: str = "decode",
    cache: str | None = None,
    compile: Sequence[str] = (EAGER,),
) -> list[dict[str, Any]]:
    """All models in turn in every round.

    Args:
        models: variant name -> model; the ratio is to `"stock"`, or to the first, with the same compile mode.
        name: written into each row's `model`; progress: called after each round. The others: see `Setting`.

    Returns:
        One row a model and compile mode: median tokens a second (all sequences together; those read, where none are
        decoded) with p20 and p80, the ratio, and what share of the memory's bandwidth that is.

    Raises:
        ValueError: as `Setting`; the context of a model is shorter than T; it cannot leave out logits.
    """
    cache = cache or ("none" if mode == "last-token" else "dynamic")
    setting = Setting(mode, batch, cache, prompt, new_tokens, tuple(compile), rounds)
    reference = "stock" if "stock" in models else next(iter(models))
    setting = _fitted(setting, models[reference])
    vocabulary = int(getattr(models[reference].config, "vocab_size", 2))
    shape = (setting.batch, setting.prompt)
    ids = torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    works = {
        (variant, how): Work(model, setting, how, ids) for how in setting.compile for variant, model in models.items()
    }
    for work in works.values():
        work.warm_up()
    repeats = _repeats(works[reference, setting.compile[0]])
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    order, shuffle = list(works), random.Random(0).shuffle
    for number in range(rounds + 1):
        shuffle(order)  # nobody always comes after the same neighbour
        with _no_garbage_collection():
            for key in order:
                elapsed = works[key].seconds(repeats)
                if number:
                    seconds[key].append(elapsed)
        if progress is not None:
            progress()
    return [
        {"model": name, "mode": mode, "variant": variant}
        | _row(works[variant, how], times, seconds[reference, how])
        | {"repeats": repeats}
        for (variant, how), times in seconds.items()
    ]


def _fitted(setting: Setting, model: Any) -> Setting:
    context = context_length(model)
    if setting.mode == "decode":
        prompt = min(setting.prompt, max(1, context // 2))
        left = context - prompt - 1  # a table of positions ends there
        return dataclasses.replace(setting, prompt=prompt, new_tokens=max(1, min(setting.new_tokens, left)))
    if setting.prompt > context:
        raise ValueError(f"length={setting.prompt} is longer than the model's context of {context} tokens")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} has no logits_to_keep, which the mode {setting.mode} needs")
    return dataclasses.replace(setting, new_tokens=1)


class Work:
    """One candidate: a model, compiled or not, and what it does in a timed part."""

    def __init__(self, model: Any, setting: Setting, how: str, ids: Tensor) -> None:
        self.model, self.setting, self.how = model, setting, how
        self.device = next(model.parameters()).device
        self.ids = ids.to(self.device)
        self.tokens = setting.batch * (setting.new_tokens if setting.mode == "decode" else setting.prompt)
        self.cache: dict[str, Any] = {}
        options = {"use_cache": setting.cache != "none"} | ({} if setting.mode == "decode" else {"logits_to_keep": 1})

        def step(ids: Tensor, cache: dict[str, Any]) -> Tensor:
            return model(input_ids=ids, **options, **cache).logits[:, -1:].argmax(-1)

        self.eager = step
        # torch.compile keeps what it made by code object: with one for all, each candidate would be asked whether it
        # is one of the others, and their number would be limited.
        own = types.FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
        self.step = torch.compile(own, mode=how) if how else step

    def warm_up(self) -> None:
        """Compile, record graphs, fill caches."""
        for _ in range(3 if self.how else 1):
            self.run(*self.prepare())

    def seconds(self, repeats: int = 1) -> float:
        """Of `repeats` timed parts, less what prepares each."""
        compilation_fails = torch.compiler.set_stance("fail_on_recompile") if self.how else contextlib.nullcontext()
        with compilation_fails:
            return sum(self._timed() for _ in range(repeats)) / repeats

    def bytes_per_token(self) -> float:
        """What must at least be read: all weights and, in decoding, the cache, divided among the tokens of a step."""
        weights, s = weight_bytes(self.model), self.setting
        if s.mode != "decode":
            return weights / self.tokens
        held: float = sum(cache_bytes(cache) for cache in self.cache.values())
        if s.cache == "dynamic":  # it grew: its mean length over the steps
            held *= (s.prompt + (s.new_tokens + 1) / 2) / (s.prompt + s.new_tokens)
        return (weights + held) / s.batch

    def prepare(self) -> tuple[Tensor, dict[str, Any]]:
        """(the first ids, the cache) of a timed part."""
        places = self.setting.prompt + self.setting.new_tokens
        if self.setting.cache == "static" and self.cache:
            for cache in self.cache.values():
                cache.reset()  # in place: compiled code and CUDA graphs know where it is
        elif self.setting.cache == "static":
            self.cache = {key: StaticCache(self.model.config, places) for key in new_cache(self.model)}
            if self.setting.mode == "prefill":  # it takes its shapes from a first forward, which is not compiled
                self.eager(self.ids, self.cache)
                return self.prepare()
        elif self.setting.cache == "dynamic":
            self.cache = new_cache(self.model)
        ids = self.eager(self.ids, self.cache) if self.setting.mode == "decode" else self.ids
        return ids, self.cache

    def _timed(self) -> float:
        ids, cache = self.prepare()
        synchronize(self.device)
        start = time.perf_counter()
        self.run(ids, cache)
        synchronize(self.device)
        return time.perf_counter() - start

    def run(self, ids: Tensor, cache: dict[str, Any]) -> Tensor:
        for _ in range(self.setting.new_tokens):
            if self.how == GRAPHS:
                torch.compiler.cudagraph_mark_step_begin()
            ids = self.step(ids, cache)
            if self.how == GRAPHS:
                ids = ids.clone()  # the next replay writes to the same place
        return ids


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Before, not in a timed part."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _repeats(work: Work) -> int:
    """How often a timed part is repeated to be long enough for the clock and for the scheduler; the same for all."""
    return max(1, min(_MOST_REPEATS, math.ceil(_SHORTEST / max(work.seconds(), 1e-9))))


def _row(work: Work, times: list[float], reference: list[float]) -> dict[str, Any]:
    setting, first = work.setting, next(work.model.parameters())
    speed = statistics.median(work.tokens / t for t in times)
    ratios = [a / b for a, b in zip(reference, times, strict=True)]
    bandwidth = copy_bandwidth(work.device, torch.get_num_threads())
    return {
        "batch": setting.batch,
        "cache": setting.cache,
        "compiled": bool(work.how),
        "compile_mode": work.how,
        "dtype": str(first.dtype).removeprefix("torch."),
        "tokens_per_second": speed,
        "p20": _quantile([work.tokens / t for t in times], 0.2),
        "p80": _quantile([work.tokens / t for t in times], 0.8),
        "ratio": statistics.median(ratios),
        "ratio_p20": _quantile(ratios, 0.2),
        "ratio_p80": _quantile(ratios, 0.8),
        "prompt": setting.prompt,
        "new_tokens": setting.new_tokens if setting.mode == "decode" else 0,
        "bytes_per_token": round(work.bytes_per_token()),
        "bandwidth_share": speed * work.bytes_per_token() / bandwidth,
        "copy_bandwidth": round(bandwidth),
        "rounds": setting.rounds,
        "attention": getattr(work.model.config, "_attn_implementation", ""),
        "device": device_name(work.device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[round(q * (len(values) - 1))]


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
        writer = csv.DictWriter(file, fieldnames=header or list(rows[0]), lineterminator="\n")
        if not header:
            writer.writeheader()
        writer.writerows(rows)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
