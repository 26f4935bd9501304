"""torch.export: the prompt and one step after it as two programs that share a cache of one size.

    prefill.pt2   (input_ids [B, T], start [1], keys, values) → logits [B, T, V]     any T from 2 on
    decode.pt2    (input_ids [B, 1], start [1], keys, values) → logits [B, 1, V]

keys, values: a list each, one tensor [B, heads, C, width] a layer, which a call changes in place; fresh ones are zeros.
start is the place of the first token of the call. Weights and the constants of a prefix are in the programs. They load
with `torch.export.load` in a process that knows neither this library nor transformers. A model that is no decoder
becomes model.pt2. With `compile`, AOTInductor also makes a shared library of each, which needs no Python at all.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.export.decoder import Plain, StaticDecoder, cache_shapes, is_decoder, prepared, sample_ids
from tapernorm.export.folder import Made, write_companions
from tapernorm.export.inputs import named_inputs
from tapernorm.export.norms import ExportError, Norms
from tapernorm.export.quiet import quiet
from tapernorm.inputs import context_length

BOUND = 1e-5  # largest difference over the largest output
PLACES = 512
_NORM_OPERATIONS = ("mean", "rsqrt", "sqrt", "var", "var_mean", "native_layer_norm", "layer_norm", "rms_norm", "norm")


def write(
    model: nn.Module,
    tokenizer: Any,
    norms: Norms,
    folder: Path,
    ids: Tensor | None = None,
    example: Any = None,
    context: int | None = None,
    batch: int = 1,
    compile: bool = False,
) -> Made:
    """The programs and their companions.

    Args:
        model: it is not changed; weights keep their type.
        ids: [N, T] tokens to check a decoder on; None: random ones.
        example: inputs of a model that is no decoder, as for `find_sites`.
        context: places in the cache; None: 512, or the model's context where that is less.
        batch: rows in one call.
        compile: also write `*.aoti.pt2`, compiled for this machine.

    Raises:
        ValueError: torch cannot export the model; no compiler is here; `context` is more than the model's.
        ExportError: a program is not the same function.
    """
    if compile and shutil.which("g++") is None and shutil.which("clang++") is None:
        raise ValueError("--compile needs a C++ compiler (g++ or clang++), and none is on the path")
    model = prepared(copy.deepcopy(model))
    write_companions(model, tokenizer, norms, folder)
    if not is_decoder(model):
        return _write_plain(model, folder, named_inputs(model, example, batch=2), norms, compile)
    limit = context_length(model)
    places = min(PLACES, limit) if context is None else context
    if not 4 <= places <= limit:
        raise ValueError(f"context={places}: this model takes 4 to {limit} tokens")
    module, shapes = StaticDecoder(model), cache_shapes(model)
    start = torch.zeros(1, dtype=torch.long)
    longest = torch.export.Dim("length", min=2, max=places)
    programs = {}
    for name, length, dynamic in (("prefill", min(5, places - 1), longest), ("decode", 1, None)):
        cache = fresh_cache(shapes, batch, places, _dtype(model))
        args = (sample_ids(model, batch, length), start + (length == 1), *cache)
        axes = ({1: dynamic} if dynamic is not None else None, None, [None] * len(shapes), [None] * len(shapes))
        programs[name] = _export(module, args, axes)
        _save(programs[name], folder / f"{name}.pt2", compile)
    ids = (sample_ids(model, batch, min(12, places - 2)) if ids is None else ids)[:batch, : places - 2]
    ids = ids.repeat(batch, 1)[:batch]
    checks = _check(model, folder, ids, shapes, places, compile)
    details = {
        "batch": batch,
        "places": places,
        "cache": [{"key": [batch, h, places, w], "value": [batch, g, places, v]} for (h, w), (g, v) in shapes],
        "dtype": str(_dtype(model)).removeprefix("torch."),
        "norm_operations": norm_operations(programs["decode"], norms),
    }
    _refuse_left(details["norm_operations"], norms)
    return Made(checks, details=details)


def fresh_cache(
    shapes: list[tuple[tuple[int, int], tuple[int, int]]], batch: int, places: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of an empty cache. Each [batch, heads, places, width]"""
    keys = [torch.zeros(batch, heads, places, width, dtype=dtype) for (heads, width), _ in shapes]
    return keys, [torch.zeros(batch, heads, places, width, dtype=dtype) for _, (heads, width) in shapes]


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _export(module: nn.Module, args: tuple[Any, ...], dynamic: Any) -> Any:
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(module.eval(), args, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # torch raises a dozen kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        name = type(module.get_submodule("model")).__name__
        raise ValueError(f"torch.export cannot export {name}: {lines[0] if lines else type(error).__name__}") from error


def _save(program: Any, path: Path, compile: bool) -> None:
    with quiet():
        torch.export.save(program, path)
        if compile:
            from torch._inductor import aoti_compile_and_package

            try:
                aoti_compile_and_package(program, package_path=str(path.with_suffix(".aoti.pt2")))
            except Exception as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                raise ValueError(f"AOTInductor cannot compile {path.stem}: {lines[0] if lines else error!r}") from error


def _write_plain(model: nn.Module, folder: Path, inputs: dict[str, Tensor], norms: Norms, compile: bool) -> Made:
    module, values = Plain(model, tuple(inputs)), tuple(inputs.values())
    batch = torch.export.Dim.AUTO
    program = _export(module, values, (tuple({0: batch} for _ in values),))
    _save(program, folder / "model.pt2", compile)
    checks: dict[str, Any] = {"bound": BOUND}
    with torch.no_grad():
        wanted = module(*values)
        for path in sorted(folder.glob("*.pt2")):
            checks[path.stem] = {"relative_error": _within(_load(path)(*values), wanted, path)}
    operations = norm_operations(program, norms)
    _refuse_left(operations, norms)
    return Made(checks, details={"inputs": list(inputs), "norm_operations": operations})


def _load(path: Path) -> Any:
    if path.name.endswith(".aoti.pt2"):
        return torch._inductor.aoti_load_package(str(path))
    return torch.export.load(path).module()


def _within(made: Tensor, wanted: Tensor, path: Path) -> float:
    bound = BOUND if wanted.dtype in (torch.float32, torch.float64) else 3e-2  # two half precision kernels differ
    error = float((made.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    if not error <= bound:
        raise ExportError(f"{path.name} differs from the model by {error:.1e} of the largest output")
    return error


def _check(model: Any, folder: Path, ids: Tensor, shapes: Any, places: int, compile: bool) -> dict[str, Any]:
    """The prompt but its last tokens through one program, those through the other, against the model at once."""
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    checks: dict[str, Any] = {"bound": BOUND}
    for suffix in (".pt2", ".aoti.pt2") if compile else (".pt2",):
        prefill, decode = (_load(folder / f"{name}{suffix}") for name in ("prefill", "decode"))
        cache, first = fresh_cache(shapes, len(ids), places, _dtype(model)), ids.shape[1] - 2
        with torch.no_grad():
            made = [prefill(ids[:, :first].contiguous(), torch.tensor([0]), *cache)]
            for place in range(first, ids.shape[1]):
                made.append(decode(ids[:, place : place + 1].contiguous(), torch.tensor([place]), *cache))
        error = _within(torch.cat(made, dim=1), wanted, folder / f"prefill{suffix}, decode{suffix}")
        checks["torch.export" if suffix == ".pt2" else "AOTInductor"] = {"relative_error": error}
    return checks


def norm_operations(program: Any, norms: Norms) -> dict[str, dict[str, int]]:
    """Operations of the kinds that norms are made of, by the norm or module that they come from."""
    found: dict[str, dict[str, int]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        name = getattr(node.target, "_schema", None)
        kind = name.name.rpartition("::")[2] if name is not None else ""
        if kind in _NORM_OPERATIONS:
            stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            module = (stack[-1] if stack else "").removeprefix("model").removeprefix(".")
            counted = found.setdefault(norms.owner(module) or module, {})
            counted[kind] = counted.get(kind, 0) + 1
    return found


def _refuse_left(operations: dict[str, dict[str, int]], norms: Norms) -> None:
    inside = {name: kinds for name, kinds in operations.items() if name in norms.removed}
    if inside:
        raise ExportError(f"the program holds operations of norms that were removed: {inside}")
