"""ONNX: a decoder with its key-value cache as inputs and outputs, by the names that optimum and onnxruntime use.

    input_ids [B, T], attention_mask [B, P + T], position_ids [B, T], past_key_values.N.key, .value [B, heads, P, width]
    → logits [B, T, V], present.N.key, .value [B, heads, P + T, width]

One graph serves the prompt (P = 0) and every step after it. Other models: their own inputs → output. What was written
is run in onnxruntime with its optimisations off and on, and compared with the model.
"""

from __future__ import annotations

import ast
import collections
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tapernorm.export.decoder import (
    DynamicDecoder,
    Plain,
    cache_shapes,
    is_decoder,
    prepared,
    sample_ids,
    takes_positions,
)
from tapernorm.export.folder import Made, write_companions
from tapernorm.export.inputs import named_inputs
from tapernorm.export.norms import ExportError, Norms
from tapernorm.export.quiet import quiet, require

# Operations by which a norm can be told; a removed one must leave none behind.
NORM_OPERATIONS = frozenset({
    "ReduceMean", "Pow", "Sqrt", "Rsqrt", "Reciprocal", "ReduceL2", "ReduceSumSquare", "LayerNormalization",
    "SimplifiedLayerNormalization", "RMSNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
    "InstanceNormalization", "GroupNormalization", "LpNormalization", "MeanVarianceNormalization",
})  # fmt: skip
BOUND = 1e-4  # largest difference over the largest output
GREEDY = 10
_WRAPPER = "model"


def write(
    model: nn.Module,
    tokenizer: Any,
    norms: Norms,
    folder: Path,
    ids: Tensor | None = None,
    example: Any = None,
    opset: int | None = None,
) -> Made:
    """model.onnx and its companions.

    Args:
        model: it is not changed; weights of another type are written as float32.
        ids: [N, T] tokens to check a decoder on; None: random ones.
        example: inputs of a model that is no decoder, as for `find_sites`.
        opset: of the graph; None: the exporter's own.

    Raises:
        ValueError: a package is missing; the model cannot be exported.
        ExportError: the graph is not the same function, or holds operations of a norm that was removed.
    """
    require("onnx", "onnxscript", "onnxruntime", extra="onnx")
    notes = ()
    dtype = next(model.parameters()).dtype
    if dtype != torch.float32:
        notes = (f"the weights were {str(dtype).removeprefix('torch.')} and are float32 in the file",)
    model = prepared(copy.deepcopy(model).float())
    path = folder / "model.onnx"
    if is_decoder(model):
        names = _export_decoder(model, path, opset)
        checks = _check_decoder(model, path, sample_ids(model, 2, 8) if ids is None else ids)
    else:
        names, inputs = _export_plain(model, path, example, opset)
        checks = _check_plain(model, path, inputs)
    counted, total, version = norm_operations(path, norms)
    optimised = optimised_operations(path)
    inside = {name: operations for name, operations in counted.items() if name in norms.removed}
    if inside:
        raise ExportError(f"the graph holds operations of norms that were removed: {inside}")
    write_companions(model, tokenizer, norms, folder)
    details = {"opset": version, "operations": total, "norm_operations": counted, "optimised": optimised, **names}
    return Made(checks=checks, notes=notes, details=details)


def _export_decoder(model: Any, path: Path, opset: int | None) -> dict[str, list[str]]:
    shapes = cache_shapes(model)
    batch, past, new = 2, 4, 3  # none of them 0 or 1, for which torch would write a graph apart
    ids = sample_ids(model, batch, new)
    cache = [(torch.randn(batch, h, past, w), torch.randn(batch, g, past, v)) for (h, w), (g, v) in shapes]
    places = torch.arange(past, past + new).expand(batch, -1).contiguous() if takes_positions(model) else None
    args = (ids, torch.ones(batch, past + new, dtype=torch.long), places, cache)
    axes, total = {0: "batch_size", 1: "sequence_length"}, "past_sequence_length + sequence_length"
    of_cache = {0: "batch_size", 2: "past_sequence_length"}
    dynamic = (axes, {0: "batch_size", 1: total}, None if places is None else axes, [(of_cache, of_cache)] * len(cache))
    pairs = [f"{i}.{kind}" for i in range(len(shapes)) for kind in ("key", "value")]
    inputs = ["input_ids", "attention_mask"] + (["position_ids"] if places is not None else [])
    inputs += [f"past_key_values.{pair}" for pair in pairs]
    outputs = ["logits", *(f"present.{pair}" for pair in pairs)]
    _export(DynamicDecoder(model), args, path, opset, inputs, outputs, dynamic)
    return {"inputs": inputs, "outputs": outputs}


def _export_plain(model: nn.Module, path: Path, example: Any, opset: int | None) -> tuple[dict[str, Any], Any]:
    inputs = named_inputs(model, example)
    dynamic = tuple(
        {0: "batch_size", **({1: "sequence_length"} if value.dim() == 2 and not value.is_floating_point() else {})}
        for value in inputs.values()
    )
    output = "last_hidden_state" if type(model).__name__.endswith("Model") else "logits"
    wrapped = Plain(model, tuple(inputs))
    _export(wrapped, tuple(inputs.values()), path, opset, list(inputs), [output], (dynamic,))
    return {"inputs": list(inputs), "outputs": [output]}, inputs


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    path: Path,
    opset: int | None,
    inputs: list[str],
    outputs: list[str],
    dynamic: Any,
) -> None:
    try:
        with quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                module.eval(), args, dynamo=True, input_names=inputs, output_names=outputs, dynamic_shapes=dynamic,
                opset_version=opset, verbose=False,
            )  # fmt: skip
            program.save(str(path))  # weights above 2 GB go into a file of their own
    except torch.onnx.OnnxExporterError as error:
        name = type(module.get_submodule(_WRAPPER)).__name__
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ValueError(f"torch cannot write {name} as ONNX: {lines[-1]}") from error


# What is in the graph


def norm_operations(path: Path, norms: Norms) -> tuple[dict[str, dict[str, int]], dict[str, int], int]:
    """Of a written graph: operations of the kinds that norms are made of, by the norm or module that they come from;
    all operations by kind; the opset.

    The exporter writes into each node which modules it came from; a node without that counts under "".
    """
    import onnx

    graph = onnx.load(str(path), load_external_data=False)
    total = collections.Counter(node.op_type for node in _nodes(graph.graph))
    found: dict[str, collections.Counter[str]] = {}
    for node in _nodes(graph.graph):
        if node.op_type in NORM_OPERATIONS:
            module = _module_of(node)
            found.setdefault(norms.owner(module) or module, collections.Counter())[node.op_type] += 1
    version = max(opset.version for opset in graph.opset_import if opset.domain == "")
    return {name: dict(c) for name, c in sorted(found.items())}, dict(total.most_common()), version


def optimised_operations(path: Path) -> dict[str, int]:
    """Operations of those kinds in the graph that onnxruntime makes of it, by kind. It fuses nodes, and a fused one no
    longer says where it comes from."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="tapernorm-") as folder:
        fused = Path(folder) / "optimised.onnx"
        for _ in sessions(path, optimised=fused):
            pass
        counted = collections.Counter(n.op_type for n in _nodes(onnx.load(str(fused), load_external_data=False).graph))
    return {name: count for name, count in counted.items() if name in NORM_OPERATIONS}


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _module_of(node: Any) -> str:
    """The innermost module that a node comes from, by its name in the model; "" where it is not known."""
    told = {p.key: p.value for p in node.metadata_props}.get("pkg.torch.onnx.name_scopes", "[]")
    scopes = ast.literal_eval(told)[:-1]  # the last is the operation itself
    names = [scope.removeprefix(_WRAPPER).removeprefix(".") for scope in scopes if scope]
    return names[-1] if names else ""


# Whether it is the same function


def sessions(path: Path, optimised: Path | None = None) -> Iterator[tuple[str, Any]]:
    """(name of the setting, onnxruntime session), with its graph optimisations off and on. optimised: where to write
    the graph that it makes."""
    import onnxruntime

    levels = onnxruntime.GraphOptimizationLevel
    for name, level in (("unoptimised", levels.ORT_DISABLE_ALL), ("optimised", levels.ORT_ENABLE_ALL)):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level, options.log_severity_level = level, 3
        if optimised is not None:
            options.optimized_model_filepath = str(optimised)
        yield name, onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _check_decoder(model: Any, path: Path, ids: Tensor) -> dict[str, Any]:
    checks: dict[str, Any] = {"bound": BOUND}
    for name, session in sessions(path):
        checks[name] = compare_decoder(model, session, ids[:2, :32], f"onnxruntime ({name})")
    return checks


def compare_decoder(model: Any, session: Any, ids: Tensor, name: str) -> dict[str, Any]:
    """Logits of a prompt and greedy tokens after it, through the cache. ids: [B, T]

    Raises:
        ExportError: they differ; tokens may where the two best logits are as close as the bound.
    """
    from tapernorm.verify import greedy_tokens

    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.numpy()
    made, tokens = run_greedy(session, ids.numpy(), GREEDY)
    error = relative(made, logits)
    if not error <= BOUND:
        raise ExportError(f"{name} differs from the model by {error:.1e} of the largest logit")
    return {"relative_error": error, "greedy_equal": bool((tokens == greedy_tokens(model, ids, GREEDY).numpy()).all())}


def relative(made: Any, wanted: Any) -> float:
    """The largest difference over the largest value; NaN where something is not finite."""
    return float(np.max(np.abs(made - wanted)) / np.max(np.abs(wanted)))


def run_greedy(session: Any, ids: Any, new_tokens: int) -> tuple[Any, Any]:
    """Greedy decoding with the cache. ids: [B, T] -> (logits of the prompt [B, T, V], new tokens [B, new_tokens])"""
    shapes = {i.name: i.shape for i in session.get_inputs() if i.name.startswith("past_key_values.")}
    past = {n: np.zeros((len(ids), shape[1], 0, shape[3]), np.float32) for n, shape in shapes.items()}
    positions = any(i.name == "position_ids" for i in session.get_inputs())
    first, made, step, start = None, [], ids, 0
    for _ in range(new_tokens):
        places = np.arange(start, start + step.shape[1], dtype=np.int64)
        feed = {"input_ids": step, "attention_mask": np.ones((len(ids), start + step.shape[1]), np.int64)}
        feed |= {"position_ids": np.repeat(places[None], len(ids), 0)} if positions else {}
        logits, *present = session.run(None, feed | past)
        first = logits if first is None else first
        past = dict(zip(shapes, present, strict=True))
        start += step.shape[1]
        step = logits[:, -1:].argmax(-1).astype(np.int64)
        made.append(step)
    return first, np.concatenate(made, axis=1)


def _check_plain(model: nn.Module, path: Path, inputs: dict[str, Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        wanted = Plain(model, tuple(inputs))(*inputs.values()).numpy()
    checks: dict[str, Any] = {"bound": BOUND}
    for name, session in sessions(path):
        (made,) = session.run(None, {k: v.numpy() for k, v in inputs.items()})
        error = relative(made, wanted)
        checks[name] = {"relative_error": error}
        if not error <= BOUND:
            raise ExportError(f"onnxruntime ({name}) differs from the model by {error:.1e} of the largest output")
    return checks
