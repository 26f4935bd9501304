"""What somebody needs first who puts the model on a fixed-function chip or runs it under encryption.

    operations   per token by kind, by module, with the removed norms and without: one step of decoding over a cache
    depth        how deep products are nested, for each block and for the whole model (`tapernorm.export.count`)
    ranges       of the input of every linear map, for static int8: smallest, largest, 99.99th percentile of |x|, and
                 the scale that the latter gives

As spec.json and a table. Norms are put back for the "before" column with their own operations and random gains; what
counts is what they compute.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tapernorm.export.count import KINDS, Counter, Depth, by_module
from tapernorm.export.decoder import cache_name, is_decoder, prepared, sample_ids
from tapernorm.export.folder import Made
from tapernorm.export.inputs import named_inputs
from tapernorm.export.norms import ExportError, Norms
from tapernorm.inputs import context_length
from tapernorm.layout import stock_class, stock_config
from tapernorm.modules import evaluation

_PAST = 127  # tokens in the cache of the counted step, so that it attends to 128
_KEPT = 1 << 20  # values of an input that its percentile is taken from
_NORM_KINDS = ("reductions", "divisions", "square roots")
_RANDOM = "the ranges are from random tokens; pass --data with text of the kind that the model will see"


def write(
    model: Any, tokenizer: Any, norms: Norms, folder: Path, ids: Tensor | None = None, example: Any = None
) -> Made:
    """spec.json.

    Args:
        model: it is not changed.
        ids: [N, T] tokens for the ranges; None: random ones, with a note that says so.
        example: inputs of a model that is no decoder, as for `find_sites`.

    Raises:
        ExportError: a removed norm still computes something.
    """
    model = copy.deepcopy(model)
    model = prepared(model if model.dtype == torch.float64 else model.float())
    decoder = is_decoder(model)
    inputs = {"input_ids": sample_ids(model, 1, 8)} if decoder else named_inputs(model, example, batch=1)
    with _eager(model):
        after = _count(model, inputs, decoder)
        depths = _depths(model, inputs)
        with _restored(model, norms) as restored:
            before = _count(model, inputs, decoder) if restored else None
            depths_before = _depths(model, inputs) if restored else None
    left = {name: dict(after.counts[name]) for name in norms.removed if sum(after.counts[name].values())}
    if left:
        raise ExportError(f"norms that were removed still compute: {left}")
    text = inputs if ids is None and not decoder else {"input_ids": sample_ids(model, 8, 64) if ids is None else ids}
    ranges = _ranges(model, text)
    totals, prior = after.total(), before.total() if before else None
    spec = {
        "per": f"token, decoding with {min(_PAST, context_length(model) - 2) + 1} in reach"
        if decoder
        else "forward, batch 1",
        "operations": {kind: {"before": prior[kind] if prior else None, "after": totals[kind]} for kind in KINDS},
        "left_by_module": _left(after, norms),
        "by_module": {name: dict(counted) for name, counted in sorted(after.counts.items()) if counted},
        "not_counted": dict(after.strange),
        "depth": {"after": depths, "before": depths_before},
        "ranges": ranges,
    }
    (folder / "spec.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")
    notes = (_RANDOM,) if ids is None and decoder else ()
    shown = {name: value for name, value in spec.items() if name not in ("by_module", "ranges")}
    return Made({"linear maps with ranges": len(ranges)}, notes, shown)


def table(details: dict[str, Any]) -> Any:
    """The counts and depths of an export's details as a table for the terminal."""
    from rich.table import Table

    made = Table("per " + details["per"], "before", "after")
    for kind, pair in details["operations"].items():
        made.add_row(kind, *("" if value is None else f"{value:,}" for value in pair.values()))
    made.add_section()
    depth = details["depth"]
    for place in ("deepest block", "model"):
        for chain in ("products", "scalings", "functions"):
            values = [str(depth[when][place][chain]) if depth[when] else "" for when in ("before", "after")]
            made.add_row(f"depth of {chain}, {place}", *values)
    return made


# Counts


@contextlib.contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Attention as plain operations, which can be counted."""
    if not isinstance(model, PreTrainedModel) or not model._can_set_attn_implementation():
        yield
        return
    before = model.config._attn_implementation or "eager"
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def _restored(model: Any, norms: Norms) -> Iterator[bool]:
    """The removed norms compute again, where it is known what they were; yields whether it is."""
    if not norms.removed or not isinstance(model, PreTrainedModel):
        yield False
        return
    with torch.device("meta"):
        stock = stock_class(type(model))._from_config(stock_config(model.config), dtype=model.dtype)
    handles = []
    for name in norms.removed:
        norm = stock.get_submodule(name).to_empty(device="cpu").eval()
        for value in (*norm.parameters(), *norm.buffers()):
            value.data.fill_(1.0)
        handles.append(model.get_submodule(name).register_forward_hook(lambda _m, _a, out, norm=norm: norm(out)))
    try:
        yield True
    finally:
        for handle in handles:
            handle.remove()


def _count(model: Any, inputs: dict[str, Tensor], decoder: bool) -> Counter:
    """Of one step of decoding, or of one forward of a model that is no decoder."""
    with evaluation(model):
        if decoder:
            cache = DynamicCache()
            past = sample_ids(model, 1, min(_PAST, context_length(model) - 2))
            model(input_ids=past, use_cache=True, **{cache_name(model): cache})
            inputs = {"input_ids": past[:, -1:], "use_cache": True, cache_name(model): cache}  # type: ignore[dict-item]
        return _run(model, inputs)


def _run(model: Any, inputs: dict[str, Any]) -> Counter:
    counter = Counter(unknown=inputs)
    with by_module(model, counter), counter:
        model(**inputs) if "input" not in inputs else model(inputs["input"])
    return counter


def _left(counter: Counter, norms: Norms) -> dict[str, dict[str, int]]:
    """What is left of the kinds that norms are made of, by the kept norm or the module that computes it."""
    found: dict[str, dict[str, int]] = {}
    for module, counted in counter.counts.items():
        kinds = {kind: counted[kind] for kind in _NORM_KINDS if counted[kind]}
        if kinds:
            mine = found.setdefault(norms.owner(module) or module, dict.fromkeys(kinds, 0))
            for kind, count in kinds.items():
                mine[kind] = mine.get(kind, 0) + count
    return dict(sorted(found.items()))


def _depths(model: Any, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Of the whole model, of the deepest block, and of every block by name, counted from what goes into it."""
    blocks = _blocks(model)
    found: dict[str, Depth] = {}
    counter = Counter(unknown=inputs)
    handles = []
    for name, block in blocks.items():

        def note(_: Any, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
            # What else a block is given (angles, masks, a cache) is known or no deeper than its stream.
            stream = args[0] if args else kwargs["hidden_states"]
            found[name] = counter.depth(out).minus(counter.depth(stream))

        handles.append(block.register_forward_hook(note, with_kwargs=True))
    try:
        with evaluation(model), counter:
            out = model(**inputs) if "input" not in inputs else model(inputs["input"])
    finally:
        for handle in handles:
            handle.remove()
    whole = counter.depth(out.logits if hasattr(out, "logits") else out)
    told = {name: vars(depth) for name, depth in found.items()}
    return {"model": vars(whole), "deepest block": vars(Depth.deepest(list(found.values()) or [Depth()])), **told}


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the longest list whose members hold linear maps: the layers."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and all(any(isinstance(m, nn.Linear | Conv1D) for m in child.modules()) for child in module)
    ]
    if not lists:
        return {}
    name, longest = max(lists, key=lambda item: len(item[1]))
    return {f"{name}.{number}": block for number, block in enumerate(longest)}


# Ranges


def _first(note: Callable[[str, Tensor], None], name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
    note(name, args[0])


def _ranges(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Of the input of every linear map: smallest and largest value, percentile of |x|, the int8 scale that it gives."""
    seen: dict[str, list[Tensor]] = {}
    ends: dict[str, tuple[float, float]] = {}

    def note(name: str, x: Tensor) -> None:
        low, high = ends.get(name, (float("inf"), float("-inf")))
        ends[name] = min(low, float(x.min())), max(high, float(x.max()))
        flat = x.detach().abs().flatten().float()
        stride = -(-flat.numel() * batches // _KEPT)  # every value, or evenly spread ones of a large text
        seen.setdefault(name, []).append(flat[:: max(1, stride)])

    handles = [
        module.register_forward_pre_hook(functools.partial(_first, note, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    ]
    first = next(iter(inputs.values()))
    batches = -(-len(first) // 8)
    try:
        with evaluation(model):
            for at in range(0, len(first), 8):
                rows = {name: value[at : at + 8] for name, value in inputs.items()}
                model(**rows) if "input" not in rows else model(rows["input"])
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, parts in seen.items():
        values = torch.cat(parts)
        high = float(values.kthvalue(min(len(values), int(0.9999 * len(values)) + 1)).values)
        found[name] = {"min": ends[name][0], "max": ends[name][1], "p99.99": high, "int8_scale": high / 127}
    return found
