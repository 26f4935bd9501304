"""Follow what becomes of a norm's output through one forward: who multiplies it with what, and what else reads it.

The trace only records; `tapernorm.sites` judges.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tapernorm import operations as ops
from tapernorm.operations import tensors


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One linear map: `weight` [.., D along `axis`, ..] of the module `owner`; more than two dimensions are a stack.

    It reads a norm (`axis` is what the norm's output is multiplied into), or a norm reads it (`axis` is its output's).
    """

    weight: str  # full parameter name, such as "model.layers.0.self_attn.q_proj.weight"
    owner: str  # full name of the module that holds it
    axis: int
    bias: str | None  # full parameter name of the bias that is added, None where there is none
    factor: float = 1.0  # by which the norm's output is multiplied on its way, as T5 does before its head


@dataclasses.dataclass
class Product:
    """What one linear map made, and what reads it besides a norm."""

    link: Consumer | None  # None where the weight is no parameter, or an unknown part of one
    what: str  # the operation, for people
    readers: Counter[str] = dataclasses.field(default_factory=Counter)


class Trace(TorchFunctionMode):
    """Follows the outputs of norms through one forward.

    Tensors are known by identity, and kept alive so that an identity is not used twice.
    """

    def __init__(self, model: nn.Module, norms: set[str]) -> None:
        super().__init__()
        self.model = model
        self.norms = norms
        self.stack: list[str] = [""]
        self.ran: set[str] = {""}  # modules
        self.inside = 0  # depth within norms, whose own arithmetic is of no interest
        self.alive: list[Any] = []
        self.source: dict[int, str] = {}  # tensor -> the norm whose output it is
        self.factor: dict[int, float] = {}  # tensor -> the number that this output was multiplied by, if any
        self.column: set[int] = set()  # of these, tensors [.., D, 1]
        self.maker: dict[int, str] = {}  # tensor -> kind of operation that made it
        # view or cast of a parameter -> the parameter, and which of its dimensions each of the view's is
        self.views: dict[int, tuple[nn.Parameter, tuple[int | None, ...]]] = {}
        self.names: dict[int, list[str]] = defaultdict(list)  # parameter -> its names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names[id(parameter)].append(name)
            self.views[id(parameter)] = (parameter, tuple(range(parameter.dim())))
        self.calls: Counter[str] = Counter()
        self.made_by: dict[str, str] = {}  # norm -> kind of operation that made its input
        self.links: dict[str, dict[str, Consumer]] = defaultdict(dict)
        self.others: dict[str, Counter[str]] = defaultdict(Counter)
        self.readers: dict[int, set[str]] = defaultdict(set)  # parameter -> norms (or "") that it is multiplied with
        self.uses: Counter[int] = Counter()  # parameter -> products that it is in
        self.added_to: dict[int, set[int]] = defaultdict(set)  # bias -> the weights to whose products it is added
        self.result: dict[int, tuple[str, str]] = {}  # tensor -> the norm and the weight whose product it is
        self.put_out: dict[str, set[str]] = defaultdict(set)  # norm -> weights whose products are outputs of the model
        self.product: dict[int, Product] = {}  # tensor -> the linear map that made it, whatever that reads
        self.producer: dict[str, Product] = {}  # norm -> what made its input
        self.activations = WeakTensorKeyDictionary()  # what depends on the model's inputs
        self.narrowed = ""  # where a float64 model first computed in a narrower type

    def start(self, inputs: Any) -> None:
        """What comes in as numbers is the beginning of a residual stream."""
        for tensor in tensors(inputs):
            if tensor.is_floating_point():
                self._remember(tensor, self.maker, "input")

    def finish(self, output: Any) -> set[str]:
        """Look at what the model put out; returns the norms whose own output is among it."""
        outputs = [id(tensor) for tensor in tensors(output)]
        for key in outputs:
            if key in self.product:
                self.product[key].readers["the model's output"] += 1
        for site, weight in (self.result[key] for key in outputs if key in self.result):
            self.put_out[site].add(weight)
        return {self.source[key] for key in outputs if key in self.source}

    def watch(self) -> contextlib.AbstractContextManager[None]:
        """Hooks that tell the trace which module is running. The mode itself is entered besides."""
        return hooks(self.model, self._enter, self._leave)

    def _enter(self, name: str, args: tuple[Any, ...]) -> None:
        self.stack.append(name)
        self.ran.add(name)
        if name in self.norms:
            if not self.inside:
                self.calls[name] += 1
                h = args[0] if args else None
                self.made_by[name] = self.maker.get(id(h), "")
                if id(h) in self.source:
                    self.others[self.source[id(h)]][f"the norm {name}"] += 1
                if id(h) in self.product:
                    self.producer[name] = self.product[id(h)]
                    self.producer[name].readers[f"the norm {name}"] += 1
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
        given = list(tensors([list(args), list(kwargs.values())]))
        self._follow_activations(name, given, output)
        if self.inside or name in ops.QUERIES:
            return output
        self._follow_parameter(func, name, args, kwargs, output)
        self._read_weights(name, given, output)
        self._follow_makers(name, args, given, output)
        self._follow_products(name, args, kwargs, given, output)
        self._follow_norms(func, name, args, kwargs, given, output)
        return output

    def _where(self, name: str) -> str:
        owner = self.stack[-1]
        return f"{name} in {owner or type(self.model).__name__} ({type(self.model.get_submodule(owner)).__name__})"

    def _follow_activations(self, name: str, given: list[Tensor], output: Any) -> None:
        """Which tensors hang on the model's inputs, and whether one of them loses precision."""
        active = [t for t in given if t in self.activations]
        if not active and name not in ops.EMBEDDINGS and name not in ops.PRODUCTS:
            return
        for made in tensors(output):
            if made.is_floating_point():
                self.activations[made] = True
                if made.dtype != torch.float64 and any(t.dtype == torch.float64 for t in active):
                    self.narrowed = self.narrowed or self._where(name)

    def _follow_parameter(self, func: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Views and casts of a parameter."""
        if not args or id(args[0]) not in self.views or name not in ops.CASTS | ops.TURNS:
            return
        made = [tensor for tensor in tensors(output) if tensor is not args[0]]
        if made:
            parameter, axes = self.views[id(args[0])]
            found = [axes] * len(made) if name in ops.CASTS else ops.axes_of(func, args, kwargs, axes, len(made))
            for view, at in zip(made, found, strict=True):
                self._remember(view, self.views, (parameter, at))

    def _read_weights(self, name: str, given: list[Tensor], output: Any) -> None:
        """Every operation in which a weight is more than looked at."""
        weights = {id(self.views[id(t)][0]) for t in given if id(t) in self.views and t.dim() > 1}
        if not weights or name in ops.CASTS | ops.VIEWS | ops.TURNS or not any(True for _ in tensors(output)):
            return
        sources = {self.source[id(t)] for t in given if id(t) in self.source}
        for weight in weights:
            self.readers[weight] |= sources or {name if name == "embedding" else ""}
            self.uses[weight] += 1
        for tensor in given:
            if id(tensor) in self.names and tensor.dim() == 1 and name != ops.ATTENTION:
                self.added_to[id(tensor)] |= weights

    def _follow_makers(self, name: str, args: Any, given: list[Tensor], output: Any) -> None:
        """What kind of operation made a tensor: a linear map, an embedding, or a sum into the residual stream."""
        known = [self.maker[id(t)] for t in given if id(t) in self.maker]
        if name in ops.PRODUCTS or name == ops.ATTENTION:
            made = "linear"
        elif name in ops.EMBEDDINGS:
            made = "embedding"
        elif name in ops.SUMS:
            made = (
                ("embedding" if set(known) == {"embedding"} else "residual") if ops.STREAMS & set(known) else "linear"
            )
            made = made if known else ""
        elif name in ops.CASTS | ops.VIEWS or (name in ops.SCALINGS and self._is_scaling(given)):
            made = self.maker.get(id(given[0]), "") if given else ""
        else:
            made = known[0] if name in ops.JOINS and known else ""
        if made:
            for tensor in tensors(output):
                self._remember(tensor, self.maker, made)

    def _is_scaling(self, given: list[Tensor]) -> bool:
        """By a number, or by one parameter for each feature."""
        return len(given) == 1 or (len(given) == 2 and id(given[1]) in self.names)

    def _follow_products(self, name: str, args: Any, kwargs: Any, given: list[Tensor], output: Any) -> None:
        """Who reads what linear maps made."""
        for tensor in given:
            if id(tensor) not in self.product or (name in ops.SHAPES and tensor is not given[0]):
                continue
            followed = name in ops.CASTS | ops.VIEWS and name not in ops.GATHERS
            for made in tensors(output) if followed else ():
                followed = followed and ops.same_features(tensor, made)
                if followed:
                    self._remember(made, self.product, self.product[id(tensor)])
            if not followed:
                self.product[id(tensor)].readers[self._where(name)] += 1
        if name in ops.CASTS | ops.VIEWS and given and id(given[0]) in self.result:
            for made in tensors(output):
                self._remember(made, self.result, self.result[id(given[0])])
        if name in ops.PRODUCTS and isinstance(output, Tensor):
            values = [*args, *kwargs.values()]
            link = self._producer(name, values, kwargs)
            self._remember(output, self.product, Product(link, self._where(name)))
            read = values[ops.PRODUCTS[name][0]]
            if id(read) in self.result:  # a linear map of a linear map, such as OPT's project_out before the head
                self._remember(output, self.result, self.result[id(read)])

    def _follow_norms(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], output: Any) -> None:
        read = {id(t): t for t in given if id(t) in self.source}
        where = self.stack[-1] or type(self.model).__name__
        for key, tensor in read.items():
            site, factor = self.source[key], self.factor.get(key, 1.0)
            if name in ops.SHAPES and tensor is not given[0]:
                continue
            scaled = ops.scaled_by(name, args) if len(given) == 1 and key not in self.column else None
            if scaled is not None:
                self._carry(output, site, factor * scaled)
            elif name in ops.CASTS | ops.VIEWS | ops.MEANS:
                for made in tensors(output):
                    if name == "unsqueeze" and made.shape == (*tensor.shape, 1) and key not in self.column:
                        self._carry(made, site, factor)
                        self.column.add(id(made))
                        continue
                    same = ops.same_features(tensor, made) and key not in self.column
                    if same and name in ops.GATHERS | ops.MEANS:
                        same = ops.in_order(
                            func, args, kwargs, tensor, torch.float64 if name in ops.MEANS else torch.int64
                        )
                    if same:
                        self._carry(made, site, factor)
                    else:
                        self.others[site][f"{name} in {where}, which takes the features apart"] += 1
            else:
                links = self._links(name, args, kwargs, tensor)
                for link in links:
                    if isinstance(link, str):
                        self.others[site][link] += 1
                        continue
                    link = dataclasses.replace(link, factor=factor)
                    if self.links[site].setdefault(link.weight, link) != link:
                        self.others[site][f"{self._where(name)}, which reads it in two ways"] += 1
                    if isinstance(output, Tensor):
                        self._remember(output, self.result, (site, link.weight))

    def _carry(self, tensor: Tensor, site: str, factor: float) -> None:
        self._remember(tensor, self.source, site)
        if factor != 1:
            self.factor[id(tensor)] = factor

    def _links(self, name: str, args: Any, kwargs: Any, tensor: Tensor) -> list[Consumer | str]:
        """The linear maps that this operation is, or what it is instead."""
        values, what = [*args, *kwargs.values()], self._where(name)
        if name == ops.ATTENTION:
            return [self._attention_link(args, kwargs, tensor, what)]
        if name not in ops.PRODUCTS:
            return [what]
        where, at = ops.PRODUCTS[name]
        if id(tensor) in self.column:  # W [.., out, in] times a column [.., in, 1]
            where, at, dim = at, where, -1
        else:
            dim = -1 if name == "linear" else -2
        weight = kwargs.get("weight", values[at] if len(values) > at else None)
        if values[where] is not tensor or weight is tensor or id(weight) not in self.views:
            return [f"{what}, whose weight is not a parameter"]
        width = tensor.shape[-2 if id(tensor) in self.column else -1]
        return [self._consumer(what, weight, dim, width, ops.bias_of(name, values, kwargs))]

    def _consumer(self, what: str, weight: Any, dim: int, width: int, bias: Any) -> Consumer | str:
        parameter, axes = self.views[id(weight)]
        if not parameter.is_floating_point():
            return f"{what}, whose weight is quantized ({parameter.dtype})"
        axis = axes[dim] if len(axes) >= -dim else None
        if axis is None or parameter.shape[axis] != width:
            return f"{what}, whose weight has the shape {tuple(parameter.shape)}"
        if bias is not None and id(bias) not in self.names:
            return f"{what}, whose bias is not a parameter"
        owner = self.stack[-1]
        full = self._name(parameter, owner)
        return Consumer(full, full.rpartition(".")[0], axis, self._name(bias, owner) if bias is not None else None)

    def _attention_link(self, args: Any, kwargs: Any, tensor: Tensor, what: str) -> Consumer | str:
        """torch's attention multiplies queries, keys and values with thirds of one weight."""
        if len(args) < 7 or not all(value is tensor for value in args[:3]) or id(args[5]) not in self.views:
            return f"{what}, whose queries, keys and values are not all read from it by one weight"
        if kwargs.get("bias_k", args[7] if len(args) > 7 else None) is not None:
            return f"{what}, which has keys of its own"
        return self._consumer(what, args[5], -1, tensor.shape[-1], args[6])

    def _producer(self, name: str, values: list[Any], kwargs: Any) -> Consumer | None:
        """The linear map that a product is, by the dimension of its output."""
        _, at = ops.PRODUCTS[name]
        weight = kwargs.get("weight", values[at] if len(values) > at else None)
        if id(weight) not in self.views:
            return None
        parameter, axes = self.views[id(weight)]
        bias = ops.bias_of(name, values, kwargs)
        if len(axes) != 2 or None in axes or parameter.dim() != 2 or not parameter.is_floating_point():
            return None
        axis = axes[0 if name == "linear" else 1]
        if axis is None or (bias is not None and id(bias) not in self.names):
            return None
        owner = self.stack[-1]
        full = self._name(parameter, owner)
        return Consumer(full, full.rpartition(".")[0], axis, self._name(bias, owner) if bias is not None else None)

    def _name(self, parameter: Tensor, owner: str) -> str:
        """The parameter's name in the module that is running, or its first name."""
        names = self.names[id(parameter)]
        return next((n for n in names if n.rpartition(".")[0] == owner), names[0])


@contextlib.contextmanager
def hooks(model: nn.Module, before: Any, after: Any = None) -> Iterator[None]:
    """Call `before(name, inputs)` and `after(name, inputs, output)` around every module's forward."""

    def enter(name: str) -> Any:
        return lambda module, args, kwargs: (before(name, (*args, *kwargs.values())), None)[1]

    def leave(name: str) -> Any:
        return lambda module, args, output: (after(name, args, output), None)[1]

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        if after is not None:
            handles.append(module.register_forward_hook(leave(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
