"""Follow what becomes of a norm's output through one forward: who multiplies it with what, and what else reads it.

The trace only records; `tapernorm.sites` judges.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One linear map that reads a norm: `weight` [.., width along `axis`, ..] of the module `owner`."""

    weight: str  # full parameter name, such as "model.layers.0.self_attn.q_proj.weight"
    owner: str  # full name of the module that holds it
    axis: int  # the dimension of the weight that the norm's output is multiplied into
    bias: str | None  # full parameter name of the bias that is added, None where there is none


_CASTS = {"to", "float", "double", "half", "bfloat16", "type_as", "contiguous", "clone", "dropout", "detach"}
_VIEWS = {
    "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "expand_as", "permute", "transpose",
    "__getitem__", "chunk", "split", "unbind", "narrow", "select", "index_select", "view_as", "unflatten",
    "__get__",  # .T, .mT, .data; what is no tensor, such as .shape, is not followed
}  # fmt: skip
_GATHERS = {"__getitem__", "index_select"}
_QUERIES = {
    "size", "dim", "numel", "__len__", "is_floating_point", "__repr__", "is_contiguous", "stride", "data_ptr",
    "__hash__", "get_device", "is_complex", "element_size", "storage_offset", "is_tracing", "zeros_like", "ones_like",
    "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_empty", "new_full",
}  # fmt: skip
_SHAPES = {"view_as", "expand_as", "type_as"}  # the second argument lends its shape or dtype and nothing else
_SUMS = {"add", "__add__", "__radd__", "add_", "__iadd__"}
_PRODUCTS = {"linear": (0, 1), "addmm": (1, 2), "matmul": (0, 1), "__matmul__": (0, 1), "mm": (0, 1)}


class Trace(TorchFunctionMode):
    """Follows the outputs of norms through one forward.

    Tensors are known by identity, and kept alive so that an identity is not used twice.
    """

    def __init__(self, model: nn.Module, norms: set[str]) -> None:
        super().__init__()
        self.model = model
        self.norms = norms
        self.stack: list[str] = [""]
        self.inside = 0  # depth within norms, whose own arithmetic is of no interest
        self.alive: list[Any] = []
        self.source: dict[int, str] = {}  # tensor -> the norm whose output it is
        self.maker: dict[int, str] = {}  # tensor -> kind of operation that made it
        self.views: dict[int, tuple[nn.Parameter, bool]] = {}  # 2-D view or cast of a parameter -> is it transposed
        self.names: dict[int, list[str]] = defaultdict(list)  # parameter -> its names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names[id(parameter)].append(name)
            self.views[id(parameter)] = (parameter, False)
        self.calls: Counter[str] = Counter()
        self.made_by: dict[str, str] = {}  # norm -> kind of operation that made its input
        self.links: dict[str, dict[str, Consumer]] = defaultdict(dict)
        self.others: dict[str, Counter[str]] = defaultdict(Counter)
        self.readers: dict[int, set[str]] = defaultdict(set)  # parameter -> norms (or "") that it is multiplied with
        self.added_to: dict[int, set[int]] = defaultdict(set)  # bias -> the weights to whose products it is added
        self.result: dict[int, tuple[str, str]] = {}  # tensor -> the norm and the weight whose product it is
        self.put_out: dict[str, set[str]] = defaultdict(set)  # norm -> weights whose products are outputs of the model

    def finish(self, output: Any) -> set[str]:
        """Look at what the model put out; returns the norms whose own output is among it."""
        outputs = [id(tensor) for tensor in tensors(output)]
        for site, weight in (self.result[key] for key in outputs if key in self.result):
            self.put_out[site].add(weight)
        return {self.source[key] for key in outputs if key in self.source}

    def watch(self) -> contextlib.AbstractContextManager[None]:
        """Hooks that tell the trace which module is running. The mode itself is entered besides."""
        return hooks(self.model, self._enter, self._leave)

    def _enter(self, name: str, args: tuple[Any, ...]) -> None:
        self.stack.append(name)
        if name in self.norms:
            if not self.inside:
                self.calls[name] += 1
                h = args[0] if args else None
                self.made_by[name] = self.maker.get(id(h), "")
                if id(h) in self.source:
                    self.others[self.source[id(h)]][f"the norm {name}"] += 1
            self.inside += 1

    def _leave(self, name: str, args: tuple[Any, ...], output: Any) -> None:
        self.stack.pop()
        if name in self.norms:
            self.inside -= 1
            if not self.inside and isinstance(output, Tensor):
                self._remember(output, self.source, name)
                self._remember(output, self.maker, "norm")

    def _remember(self, tensor: Tensor, table: dict[int, Any], value: Any) -> None:
        table[id(tensor)] = value
        self.alive.append(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if self.inside:
            return output
        given = list(tensors([list(args), list(kwargs.values())]))
        self._follow_parameter(name, given, output)
        if name in _PRODUCTS or name in ("embedding", "bmm", "baddbmm", "einsum"):
            self._read_weights(name, args, kwargs, given)
        for made in tensors(output):
            if name in _CASTS | _VIEWS:
                for table in (self.maker, self.result):
                    if given and id(given[0]) in table:
                        self._remember(made, table, table[id(given[0])])
            elif name in (*_PRODUCTS, "embedding"):
                self._remember(made, self.maker, "embedding" if name == "embedding" else "linear")
            elif name in _SUMS:
                makers = {self.maker[id(t)] for t in given if id(t) in self.maker}
                self._remember(made, self.maker, "embedding" if makers <= {"embedding"} else "residual")
        if name not in _QUERIES:
            self._follow_norms(func, name, args, kwargs, given, output)
        return output

    def _follow_parameter(self, name: str, given: list[Tensor], output: Any) -> None:
        if len(given) != 1 or id(given[0]) not in self.views or not isinstance(output, Tensor) or output.dim() != 2:
            return
        parameter, transposed = self.views[id(given[0])]
        if output is given[0] or name not in _CASTS | {"t", "transpose", "permute", "__get__"}:
            return
        if name not in _CASTS and output.stride() == given[0].stride()[::-1]:
            transposed = not transposed
        self._remember(output, self.views, (parameter, transposed))

    def _read_weights(self, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        sources = {self.source[id(t)] for t in given if id(t) in self.source}
        weights = {id(self.views[id(t)][0]) for t in given if id(t) in self.views and t.dim() > 1}
        for weight in weights:
            self.readers[weight] |= sources or {name if name == "embedding" else ""}
        for tensor in given:
            if id(tensor) in self.names and tensor.dim() == 1:
                self.added_to[id(tensor)] |= weights

    def _follow_norms(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], output: Any) -> None:
        read = [t for t in given if id(t) in self.source]
        where = self.stack[-1] or type(self.model).__name__
        for tensor in read:
            site = self.source[id(tensor)]
            if name in _SHAPES and tensor is not given[0]:
                continue
            if name in _CASTS | _VIEWS:
                for made in tensors(output):
                    same = _same_features(tensor, made)
                    if same and name in _GATHERS:
                        same = _in_order(func, args, kwargs, tensor)
                    if same:
                        self._remember(made, self.source, site)
                    else:
                        self.others[site][f"{name} in {where}, which takes the features apart"] += 1
                continue
            link = self._link(name, args, kwargs, tensor)
            if isinstance(link, Consumer):
                self.links[site][link.weight] = link
                self._remember(output, self.result, (site, link.weight))
            else:
                self.others[site][link] += 1

    def _link(self, name: str, args: Any, kwargs: Any, tensor: Tensor) -> Consumer | str:
        """The linear map that this operation is, or what it is instead."""
        owner = self.stack[-1]
        what = f"{name} in {owner or type(self.model).__name__} ({type(self.model.get_submodule(owner)).__name__})"
        if name not in _PRODUCTS:
            return what
        where, at = _PRODUCTS[name]
        values = [*args, *kwargs.values()]
        weight = kwargs.get("weight", values[at] if len(values) > at else None)
        if values[where] is not tensor or id(weight) not in self.views:
            return f"{what}, whose weight is not a parameter"
        parameter, transposed = self.views[id(weight)]
        if not parameter.is_floating_point():
            return f"{what}, whose weight is quantized ({parameter.dtype})"
        axis = int((name == "linear") != transposed)
        if parameter.dim() != 2 or parameter.shape[axis] != tensor.shape[-1]:
            return f"{what}, whose weight has the shape {tuple(parameter.shape)}"
        bias = kwargs.get("bias", values[2] if name == "linear" and len(values) > 2 else None)
        bias = values[0] if name == "addmm" else bias
        if bias is not None and id(bias) not in self.names:
            return f"{what}, whose bias is not a parameter"
        full = self._name(parameter, owner)
        return Consumer(full, full.rpartition(".")[0], axis, self._name(bias, owner) if bias is not None else None)

    def _name(self, parameter: Tensor, owner: str) -> str:
        """The parameter's name in the module that is running, or its first name."""
        names = self.names[id(parameter)]
        return next((n for n in names if n.rpartition(".")[0] == owner), names[0])


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


@contextlib.contextmanager
def hooks(model: nn.Module, before: Any, after: Any = None) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, args, name=name: before(name, args) and None))
        if after is not None:
            handles.append(module.register_forward_hook(lambda m, args, out, name=name: after(name, args, out)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _same_features(before: Tensor, after: Tensor) -> bool:
    """Whether a view or a cast left the last dimension whole and last."""
    if not after.dim() or before.shape[-1] != after.shape[-1]:
        return False
    is_view = before.is_meta or before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return not is_view or before.dtype != after.dtype or before.stride(-1) == after.stride(-1)


def _in_order(func: Any, args: Any, kwargs: Any, tensor: Tensor) -> bool:
    """Whether an operation that picks elements leaves the features in their order: it is shown their numbers."""
    if not args or args[0] is not tensor:
        return False
    features = torch.arange(tensor.shape[-1], device=tensor.device)
    picked = func(features.expand(tensor.shape), *args[1:], **kwargs)
    return bool(picked.is_meta or (picked == features).all())
