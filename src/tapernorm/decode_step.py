"""One step of decoding as a function of tensors alone, run as it is or compiled, and the compiled steps on disk.

The step reads one token a row, writes its keys and values into a cache of a fixed size, and returns the logits of the
next. torch.export traces it, AOTInductor makes a shared library of it, and that is called without a Python frame of
the model's: nearly all the time of a small model goes there. The number of places in the cache is a symbol of the
graph, so one compilation serves every length, and a cache that doubles as the text grows keeps attention from reading
thousands of empty places. The weights are no part of the library: they are lent to it by pointer at each use, so a
library on disk serves every model of its shape.

B batch, C places of the cache, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from tapernorm.export.decoder import cache_name, static_cache, takes_positions
from tapernorm.export.quiet import quiet
from tapernorm.layout import is_fused_part

PLACES = 128  # of a cache at first; a power of two, doubled where the text outgrows it
_VARIABLE, _OFF = "TAPERNORM_CACHE", ("off", "0", "no")
# Largest difference of logits between the compiled step and the model, over the largest logit.
_AGREE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class NotCompiled(RuntimeError):
    """Why a step cannot be compiled here, in one line."""


class Step(nn.Module):
    """A causal language model as one step over a cache of one size."""

    def __init__(self, model: Any, padded: bool) -> None:
        super().__init__()
        self.model, self.padded = model, padded
        self.cache_name, self.takes_positions = cache_name(model), takes_positions(model)

    def forward(
        self, token: Tensor, start: Tensor, pads: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """token: [B, 1] at the place start; start: [1], moved on by one; pads: [B], how many places at the left of a
        row are padding; keys, values: [B, heads, C, width] a layer, changed in place.

        Returns the next token's logits in float32, [B, V], and the largest one's index, [B, 1]."""
        named: dict[str, Any] = {}
        if self.takes_positions:
            named["position_ids"] = (start - pads).unsqueeze(1)
        if self.padded:
            named["attention_mask"] = (torch.arange(keys[0].shape[2]) >= pads.unsqueeze(1)).long()
        cache = static_cache(start, keys, values)
        logits = self.model(input_ids=token, use_cache=True, **named, **{self.cache_name: cache}).logits
        logits = logits[:, -1].to(torch.float32)
        start.add_(1)
        return logits, logits.argmax(-1, keepdim=True)


class Places:
    """The cache as tensors of one size, twice as large whenever it is full."""

    def __init__(self, cache: Cache, pads: Tensor, length: int) -> None:
        """cache: after the prompt's forward, of plain or sliding layers; pads: [B]; length: of the prompt."""
        self.start, self.pads, self.used, self.places = torch.tensor([length]), pads, length, PLACES
        while self.places <= length:
            self.places *= 2
        self.keys = [self._spread(layer.keys) for layer in cache.layers]  # type: ignore[union-attr]
        self.values = [self._spread(layer.values) for layer in cache.layers]  # type: ignore[union-attr]

    def _spread(self, x: Tensor) -> Tensor:
        """x: [B, heads, n, width], the last n of the places used. A sliding layer has forgotten what its window no
        longer shows, and the mask hides those places."""
        made = x.new_zeros(*x.shape[:2], self.places, x.shape[3])
        made[:, :, self.used - x.shape[2] : self.used] = x
        return made

    def room(self) -> None:
        """Make place for one more token."""
        if self.used == self.places:
            self.places *= 2
            self.keys, self.values = [self._spread(k) for k in self.keys], [self._spread(v) for v in self.values]
        self.used += 1

    def copies(self) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """What a step reads after its token, for a step that counts for nothing."""
        return self.start.clone(), self.pads, [k.clone() for k in self.keys], [v.clone() for v in self.values]


def has_plain_cache(cache: Cache) -> bool:
    """Whether every layer keeps keys and values, and nothing else."""
    return bool(cache.layers) and all(type(x) in (DynamicLayer, DynamicSlidingWindowLayer) for x in cache.layers)


# Compiling


class Compiled:
    """A step from a shared library, with a model's weights lent to it."""

    def __init__(self, step: Step, folder: Path) -> None:
        """Raises NotCompiled where the library does not load, or does not fit the model."""
        try:
            # Not through `AOTICompiledModel.__call__`, which parses the call's tree out of JSON at every step.
            self._package = torch._inductor.aoti_load_package(str(folder / "step.pt2"), run_single_threaded=True)
            self._own = torch.load(folder / "constants.pt", weights_only=True)
        except Exception as error:  # a library of another machine, half a file: torch raises many kinds
            raise NotCompiled(f"{folder} does not load ({_line(error)})") from error
        self._run = self._package.loader.boxed_run  # type: ignore[attr-defined]
        self._names = self._package.get_constant_fqns()
        self.lend(step)

    def lend(self, step: Step) -> None:
        """Point the library at the weights as they are now; they may have been replaced since."""
        here = {**self._own, **_tensors(step)}
        missing = [name for name in self._names if name not in here]
        if missing:
            raise NotCompiled(f"the compiled step wants {missing[0]}, which the model does not have")
        self._lent = {name: here[name] for name in self._names}  # kept alive: the library holds pointers alone
        self._package.load_constants(self._lent, check_full_update=True, user_managed=True)

    def __call__(
        self, token: Tensor, start: Tensor, pads: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> list[Tensor]:
        return self._run([token, start, pads, *keys, *values])


def agrees(step: Step, compiled: Compiled, token: Tensor, places: Places) -> bool:
    """Whether both make the same of this token; the cache stays as it is. It has room for the token."""
    wanted, made = step(token, *places.copies())[0], compiled(token, *places.copies())[0]
    error = float((made - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    return error <= _AGREE.get(next(step.parameters()).dtype, 1e-3)


def refuse_compiling() -> None:
    """Raises NotCompiled where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise NotCompiled("no C++ compiler (g++) is on the path") from error


def compile_step(step: Step, token: Tensor, places: Places, folder: Path) -> None:
    """Write a step's library into `folder`, whole or not at all.

    Raises:
        NotCompiled: no compiler, or torch cannot trace or compile the model.
    """
    refuse_compiling()
    count = torch.export.Dim("places", min=8, max=1 << 20)
    axes = [{2: count}] * len(places.keys)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = {"aot_inductor.package_constants_in_so": False}
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as made, quiet(), torch.no_grad():
            program = torch.export.export(
                step, (token, *places.copies()), dynamic_shapes=(None, None, None, axes, axes), strict=False
            )
            if token.numel() == 1 and next(step.parameters()).dtype == torch.float32:
                program = program.run_decompositions({torch.ops.aten.linear.default: _row})  # type: ignore[dict-item]
            named = _tensors(step)
            own = {k: v for k, v in program.constants.items() if isinstance(v, Tensor) and k not in named}
            inside = Path(made) / "step"
            inside.mkdir()
            torch.save(own, inside / "constants.pt")
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(inside / "step.pt2"), inductor_configs=options
            )
            with contextlib.suppress(OSError):  # another process was quicker
                inside.replace(folder)
    except Exception as error:  # torch raises a dozen kinds
        raise NotCompiled(f"torch cannot compile {type(step.model).__name__} ({_line(error)})") from error


def _row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b of one row as a sum that inductor writes itself: fused with what is around it, and without the library
    call, which takes as long as the product where matrices are small."""
    y = (x.unsqueeze(-2) * weight).sum(-1)
    return y if bias is None else y + bias


def _tensors(step: Step) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are not saved, by every name that they have."""
    named = [*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


# On disk


@contextlib.contextmanager
def step_folder(step: Step, batch: int) -> Iterator[Path]:
    """Where the library of a step is, or would be; gone afterwards where `TAPERNORM_CACHE` is off."""
    root = cache_root()
    if root is not None:
        yield root / step_key(step, batch)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "step"


def cache_root() -> Path | None:
    """`TAPERNORM_CACHE`, or a folder of the user's cache; None where the variable is off."""
    named = os.environ.get(_VARIABLE, "")
    if named.lower() in _OFF:
        return None
    if named:
        return Path(named).expanduser()
    if sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else os.environ.get("XDG_CACHE_HOME")
    return Path(base or "~/.cache").expanduser() / "tapernorm"


def step_key(step: Step, batch: int) -> str:
    """A name for all that the library depends on: the machine, the versions, the structure; no weights."""
    import transformers

    from tapernorm import __version__

    model = step.model
    config = {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}
    parts = {
        "versions": [torch.__version__, transformers.__version__, __version__, sys.version],
        # inductor writes the number of threads into its loops, and tunes for the processor that it runs on
        "machine": [_processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
        "code": [_digest_of(__file__), *_code_of(model)],
        "model": [type(model).__qualname__, str(model), config, str(model.config._attn_implementation)],
        "tensors": [[n, list(t.shape), list(t.stride()), str(t.dtype)] for n, t in _tensors(step).items()],
        "call": [batch, step.padded],
    }
    return "step-" + _digest(json.dumps(parts, sort_keys=True, default=str).encode())


def _code_of(model: nn.Module) -> list[str]:
    """Digests of the files that hold the forwards: that of the model's class, and that of its fused linear maps."""
    kinds = {type(model), *(type(module) for module in model.modules() if is_fused_part(module))}
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    return sorted(_digest_of(file) for file in files if file)


@functools.cache
def _processor() -> str:
    from tapernorm.bench import device_name

    return device_name(torch.device("cpu"))


@functools.cache
def _digest_of(file: str) -> str:
    return _digest(Path(file).read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
