"""What each torch operation does to a tensor that is followed: the tables and the small tests of `tapernorm.trace`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "dropout", "detach"}
VIEWS = {
    "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "expand_as", "permute", "transpose",
    "__getitem__", "chunk", "split", "split_with_sizes", "unbind", "narrow", "select", "index_select", "view_as",
    "unflatten", "repeat", "repeat_interleave",
    "__get__",  # .T, .mT, .data; what is no tensor, such as .shape, is not followed
}  # fmt: skip
GATHERS = {"__getitem__", "index_select", "repeat", "repeat_interleave"}
MEANS = {"mean"}  # over tokens, not over features: a constant scale and shift go through it
# What may be done to a weight before it is multiplied with: its dimensions turned, picked from or cut.
TURNS = {
    "t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "select", "index_select", "__getitem__",
    "__get__", "chunk", "split", "unbind", "narrow",
}  # fmt: skip
QUERIES = {
    "size", "dim", "numel", "__len__", "is_floating_point", "__repr__", "is_contiguous", "stride", "data_ptr",
    "__hash__", "get_device", "is_complex", "element_size", "storage_offset", "is_tracing", "zeros_like", "ones_like",
    "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_empty", "new_full",
}  # fmt: skip
SHAPES = {"view_as", "expand_as", "type_as"}  # the second argument lends its shape or dtype and nothing else
SUMS = {"add", "__add__", "__radd__", "add_", "__iadd__"}
SCALINGS = {"mul", "__mul__", "__rmul__", "div", "__truediv__"}
JOINS = {"cat", "concat", "where", "masked_fill"}
# product -> the positions of what is multiplied and of the weight; in all but `linear` the weight is [.., in, out]
PRODUCTS = {
    "linear": (0, 1), "addmm": (1, 2), "matmul": (0, 1), "__matmul__": (0, 1), "mm": (0, 1), "bmm": (0, 1),
    "_grouped_mm": (0, 1), "grouped_mm": (0, 1), "grouped_mm_fallback": (0, 1),
}  # fmt: skip
EMBEDDINGS = {"embedding", "conv1d", "conv2d", "conv3d"}
ATTENTION = "multi_head_attention_forward"  # torch's own, one operation to a trace
STREAMS = {"input", "embedding", "residual", "norm"}


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of mappings, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors([getattr(value, field.name) for field in dataclasses.fields(value)])


def bias_of(name: str, values: list[Any], kwargs: Any) -> Any:
    if name == "addmm":
        return values[0]
    return kwargs.get("bias", values[2] if name == "linear" and len(values) > 2 else None)


def scaled_by(name: str, args: Any) -> float | None:
    """The number by which an operation multiplies its one tensor, None if it does something else."""
    numbers = [value for value in args if isinstance(value, int | float) and not isinstance(value, bool)]
    if name not in SCALINGS or len(args) != 2 or len(numbers) != 1 or not math.isfinite(numbers[0]) or not numbers[0]:
        return None
    if name in ("div", "__truediv__"):
        return 1 / numbers[0] if isinstance(args[0], Tensor) else None
    return float(numbers[0])


def axes_of(
    func: Any, args: Any, kwargs: Any, axes: tuple[int | None, ...], count: int
) -> list[tuple[int | None, ...]]:
    """Which dimension of a parameter each dimension of a view is, told by doing the same to an empty tensor whose
    sizes are all different. None for a dimension that is cut or new, or when it cannot be told."""
    if not axes:
        return [()] * count
    sizes = [prime * (max(args[0].shape) + 1) for prime in (7, 11, 13, 17, 19)[: len(axes)]]
    known = dict(zip(sizes, axes, strict=False))
    blank = torch.empty(1, device="meta", dtype=args[0].dtype).expand(sizes)

    def on_meta(value: Any) -> Any:
        if isinstance(value, Tensor):  # one index is read as a number, which a meta tensor does not have
            return value.to("meta") if value.dim() else 0
        return type(value)(map(on_meta, value)) if isinstance(value, list | tuple) else value

    try:
        made = list(tensors(func(blank, *on_meta(tuple(args[1:])), **kwargs)))
    except (RuntimeError, IndexError, NotImplementedError, TypeError):
        made = []
    found = [tuple(known.get(size) for size in view.shape) for view in made]
    if found and len(found) != count and len(set(found)) == 1:  # as many pieces as there are numbers in a dimension
        return found[:1] * count
    return found if len(found) == count else [()] * count


def same_features(before: Tensor, after: Tensor) -> bool:
    """Whether a view or a cast left the last dimension whole and last."""
    if not after.dim() or before.shape[-1] != after.shape[-1]:
        return False
    is_view = before.is_meta or before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return not is_view or before.dtype != after.dtype or before.stride(-1) == after.stride(-1)


def in_order(func: Any, args: Any, kwargs: Any, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether an operation that picks or averages tokens leaves the features in order: it is shown their numbers."""
    if not args or args[0] is not tensor:
        return False
    features = torch.arange(tensor.shape[-1], device=tensor.device, dtype=dtype)
    picked = func(features.expand(tensor.shape), *args[1:], **kwargs)
    return bool(picked.is_meta or (picked == features).all())
