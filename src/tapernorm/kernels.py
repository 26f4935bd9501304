"""How many operations a decoded token takes: what a small model is bound by, and what no noise touches.

One step of greedy decoding is run under torch.profiler, after warm-up and with a cache that holds a prompt. Counted are

    on a processor   aten operations that compute: those with no operation inside them that computes, less views,
                     allocations and what only reads shapes; `aten::linear` counts as the one product inside it
    on a GPU         kernels, copies and fills that ran on the device

A layer's count is the median over the layers of what runs inside each; the rest (embedding, mask, positions, last
norm, head) is the same for all variants but for a last norm that was removed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from tapernorm.bench import EAGER, GRAPHS, Setting, Work, device_name
from tapernorm.inputs import context_length

_LAYER = "tapernorm: a layer"
# What makes no value: a view, an empty tensor, a question about a tensor.
_FREE = {
    "alias", "as_strided", "broadcast_tensors", "chunk", "data", "detach", "detach_", "diagonal", "empty",
    "empty_like", "empty_permuted", "empty_strided", "expand", "expand_as", "flatten", "is_nonzero", "item", "lift",
    "lift_fresh", "_local_scalar_dense", "movedim", "narrow", "new_empty", "new_empty_strided", "permute",
    "_reshape_alias", "reshape", "resize_", "resolve_conj", "resolve_neg", "result_type", "select", "set_", "slice",
    "split", "split_with_sizes", "squeeze", "swapaxes", "t", "tensor_split", "transpose", "unbind", "unflatten",
    "unsafe_split", "unsqueeze", "_unsafe_view", "view", "view_as", "is_same_size", "size", "stride", "contiguous",
    "to", "type_as", "float", "_to_copy", "matmul", "linear", "einsum", "scaled_dot_product_attention",
    "_fused_sdp_choice", "_has_compatible_shallow_copy_type",
}  # fmt: skip


@torch.no_grad()
def count_rows(
    models: dict[str, nn.Module], cache: str = "dynamic", compile: str = EAGER, prompt: int = 16, name: str = ""
) -> list[dict[str, Any]]:
    """One row a model: operations per decoded token (batch 1), and inside each layer.

    Args:
        models: variant name -> model.
        cache: `"dynamic"` or `"static"`; compile: a mode of torch.compile, for a GPU alone: what a compiler wrote for
            a processor is no operation that can be counted.
        name: written into each row's `model`.

    Raises:
        ValueError: a compiled model on a processor; CUDA graphs, which launch all kernels at once.
    """
    rows = []
    for variant, model in models.items():
        first = next(model.parameters())
        if compile and (first.device.type != "cuda" or compile == GRAPHS):
            raise ValueError("only kernels on a GPU, compiled without CUDA graphs, can be counted in a compiled model")
        total, inside = _count(model, cache, compile, prompt)
        rows.append(
            {
                "model": name,
                "variant": variant,
                "counted": "kernels" if first.device.type == "cuda" else "aten operations",
                "per_token": total,
                "per_layer": statistics.median(inside) if inside else "",
                "layers": len(inside) or "",
                "cache": cache,
                "compiled": bool(compile),
                "dtype": str(first.dtype).removeprefix("torch."),
                "attention": getattr(model.config, "_attn_implementation", ""),
                "device": device_name(first.device),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "date": datetime.date.today().isoformat(),
            }
        )
    return rows


def _count(model: Any, cache: str, how: str, prompt: int) -> tuple[int, list[int]]:
    """(operations of one decoded token, those inside each layer; none where the model is compiled)."""
    prompt = max(1, min(prompt, context_length(model) - 2))
    vocabulary = int(getattr(model.config, "vocab_size", 2))
    ids = torch.randint(1, vocabulary, (1, prompt), generator=torch.Generator().manual_seed(0))
    work = Work(model, Setting(cache=cache, prompt=prompt, new_tokens=1, compile=(how,)), how, ids)
    work.warm_up()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would announce every start and stop on stderr
    state = work.prepare()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (work.device.type == "cuda")
    with contextlib.nullcontext() if how else _marked(model), profile(activities=activities) as seen:
        work.run(*state)
        if work.device.type == "cuda":
            torch.cuda.synchronize()
    events = list(seen.events() or ())
    on_gpu = work.device.type == "cuda"
    counted = _launched if on_gpu else _computing
    roots = [event for event in events if event.cpu_parent is None and event.device_type.name == "CPU"]
    layers = [event for event in events if event.name == _LAYER and event.device_type.name == "CPU"]
    if on_gpu and how:  # a launch may belong to no operation
        total = sum(event.device_type.name == "CUDA" for event in events)
    else:
        total = sum(map(counted, roots))
    return total, [counted(layer) for layer in layers]


def _computing(event: Any) -> int:
    """Aten operations that compute, of an event and all inside it."""
    inside = sum(map(_computing, event.cpu_children))
    itself = event.name.startswith("aten::") and event.name.removeprefix("aten::") not in _FREE
    return inside or int(itself)


def _launched(event: Any) -> int:
    """Kernels launched by an event and by all inside it."""
    return len(event.kernels) + sum(map(_launched, event.cpu_children))


@contextlib.contextmanager
def _marked(model: nn.Module) -> Iterator[None]:
    """Every layer announces itself to the profiler."""
    open_marks: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        open_marks.append(record_function(_LAYER))
        open_marks[-1].__enter__()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    handles = []
    for layer in layers_of(model):
        handles += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder's layers: the first list of modules that is as long as the config says; none where there is none."""
    count = getattr(model.config, "num_hidden_layers", 0)
    lists = (list(m) for m in model.modules() if isinstance(m, nn.ModuleList))
    return next((found for found in lists if found and len(found) == count), [])
