"""Where the norms of a model are, who reads them, and which can go.

One small forward is traced. A norm can go only if everything that reads its output, followed through views and
casts, is a linear map with a known weight that reads nothing else, and the output does not leave the model. Names
of classes and modules decide nothing: `post_attention_layernorm` is a pre-norm in Llama and a post-norm in Gemma 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tapernorm.modules import TaperNorm, taper_norms
from tapernorm.probe import Norm, probe

Role = Literal["internal", "final", "qk", "post", "embedding", "other"]


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One linear map that reads a norm: `weight` [.., width along `axis`, ..] of the module `owner`."""

    weight: str  # full parameter name, such as "model.layers.0.self_attn.q_proj.weight"
    owner: str  # full name of the module that holds it
    axis: int  # the dimension of the weight that the norm's output is multiplied into
    bias: str | None  # full parameter name of the bias that is added, None where there is none


@dataclasses.dataclass(frozen=True)
class NormSite:
    """A norm found in a model, in the order of execution.

    `removable` says whether its fixed scale can be folded away; `reason` says why not ("" if it can).
    `consumers` are the names of the weights that read it.
    """

    name: str
    kind: str  # "rms", "layer", or "unknown"
    role: Role
    removable: bool
    reason: str
    consumers: tuple[str, ...]
    zero_centered: bool
    eps: float
    width: int
    links: tuple[Consumer, ...] = dataclasses.field(repr=False)
    probed: Norm | None = dataclasses.field(repr=False)


def find_sites(model: nn.Module, example: Any = None) -> list[NormSite]:
    """Trace one forward and list the norms of `model`. The model is left as it was; meta tensors will do.

    Args:
        model: any module; transformers models bring their own example.
        example: inputs for one forward: a mapping of keyword arguments, a tuple of arguments or one tensor. None
            makes token ids (or what the model's config asks for).

    Raises:
        ValueError: no example was given and none could be made.
    """
    inputs = default_example(model) if example is None else example
    shapes, training = {}, {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), _hooks(model, before=lambda name, args: shapes.setdefault(name, args)):
            run(model, inputs)
        norms = _probe_all(model, shapes)
        trace = _Trace(model, set(norms))
        with torch.no_grad(), trace.hooks(), trace:
            output = run(model, inputs)
    finally:
        for module, flag in training.items():
            module.training = flag
    escaped = trace.finish(output)
    sites = [trace.judge(name, norms[name], name in escaped) for name in trace.calls]
    post = next((site.name for site in sites if site.role == "post" and trace.made_by[site.name] == "residual"), None)
    if post is None:
        return sites
    reason = f"the model is post-norm: {post} normalises the residual stream itself"
    return [dataclasses.replace(s, removable=False, reason=reason) if s.removable else s for s in sites]


def default_example(model: nn.Module, batch: int = 1, length: int = 5) -> dict[str, Any]:
    """Random token ids for a model that takes `input_ids`, on its device.

    Raises:
        ValueError: the model takes something else, or does not say.
    """
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if getattr(model, "main_input_name", None) != "input_ids" or not isinstance(vocabulary, int):
        raise ValueError(
            f"{type(model).__name__} does not say what inputs it takes; pass example=..., such as "
            'example={"input_ids": ids}'
        )
    longest = getattr(config, "max_position_embeddings", None) or length
    length = min(length, int(longest))
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    device = next(model.parameters()).device
    example = {"input_ids": ids.to(device)}
    if device.type == "meta":  # transformers looks into any other mask, and meta tensors cannot be looked into
        example["attention_mask"] = torch.ones(batch, 1, length, length, dtype=torch.bool, device=device)
    return example


def run(model: nn.Module, inputs: Any) -> Any:
    """One forward of `model` on an example, without a key-value cache where the model has one."""
    if isinstance(inputs, Mapping):
        extra = {}
        if hasattr(getattr(model, "config", None), "use_cache") and "use_cache" not in inputs:
            extra["use_cache"] = False
        return model(**inputs, **extra)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


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
def _hooks(model: nn.Module, before: Any, after: Any = None) -> Iterator[None]:
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


def _probe_all(model: nn.Module, shapes: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Norm | None, int]]:
    """The norms among the modules that ran: TaperNorms, what the probe explains, and what is named a norm."""
    found: dict[str, tuple[Norm | None, int]] = {}
    parts = tuple(f"{name}." for name in taper_norms(model))
    for name, args in shapes.items():
        module = model.get_submodule(name)
        if isinstance(module, TaperNorm):
            found[name] = (module.probed, module.width)
        elif name.startswith(parts):
            continue
        elif len(args) == 1 and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].dim() > 1:
            width = args[0].shape[-1]
            if next(module.children(), None) is not None:
                continue  # a container, whose parts are looked at one by one, though it be called PreNorm
            probed = probe(module, width)
            if probed is not None or type(module).__name__.lower().endswith("norm"):
                found[name] = (probed, width)
    return found


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


class _Trace(TorchFunctionMode):
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

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        return _hooks(self.model, self._enter, self._leave)

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

    def judge(self, name: str, found: tuple[Norm | None, int], escaped: bool) -> NormSite:
        probed, width = found
        links = tuple(self.links[name].values())
        reason = self._reason(name, probed, links, escaped)
        return NormSite(
            name=name,
            kind=probed.kind if probed else "unknown",
            role=self._role(name, links, escaped),
            removable=not reason,
            reason=reason,
            consumers=tuple(link.weight for link in links),
            zero_centered=bool(probed and probed.zero_centered),
            eps=probed.eps if probed else 0.0,
            width=width,
            links=links,
            probed=probed,
        )

    def _reason(self, name: str, probed: Norm | None, links: tuple[Consumer, ...], escaped: bool) -> str:
        if probed is None:
            kind = type(self.model.get_submodule(name)).__name__
            return f"what it computes ({kind}) is neither an RMS norm nor a layer norm"
        if self.calls[name] > 1:
            return f"it runs {self.calls[name]} times in one forward"
        if escaped:
            return "its output is an output of the model"
        if self.others[name]:
            return f"its output is also read by {self.others[name].most_common(1)[0][0]}"
        if not links:
            return "nothing was seen to read its output"
        for link in links:
            parameter = self.model.get_parameter(link.weight)
            readers = self.readers[id(parameter)] - {name}
            names = self.names[id(parameter)]
            if readers and not (readers == {"embedding"} and self._is_head(link)):
                return f"{link.weight} also reads something else ({', '.join(filter(None, readers)) or 'not a norm'})"
            if len(names) > 1 and not self._is_head(link):
                return f"{link.weight} is shared with {next(n for n in names if n != link.weight)}"
            if probed.bias and (reason := self._bias_reason(link)):
                return reason
        return ""

    def _bias_reason(self, link: Consumer) -> str:
        """Why the norm's bias cannot go into the reader's."""
        if link.bias is None:
            owner = self.model.get_submodule(link.owner)
            if isinstance(owner, nn.Linear):
                return ""
            return f"it has a bias, and {link.weight} ({type(owner).__name__}) has none that could take it up"
        others = self.added_to[id(self.model.get_parameter(link.bias))] - {id(self.model.get_parameter(link.weight))}
        return f"{link.bias} is also the bias of another weight than {link.weight}" if others else ""

    def _is_head(self, link: Consumer) -> bool:
        """Whether the link is the model's output head, which can be untied from the embedding."""
        get = getattr(self.model, "get_output_embeddings", None)
        head = get() if get else None
        return head is not None and self.model.get_submodule(link.owner) is head

    def _role(self, name: str, links: tuple[Consumer, ...], escaped: bool) -> Role:
        weights = {link.weight for link in links}
        if escaped or any(self._is_head(link) for link in links) or (weights and weights == self.put_out[name]):
            return "final"
        made_by, others = self.made_by.get(name, ""), " ".join(self.others[name])
        if made_by == "linear":
            return "post" if "add" in others else "qk" if others else "internal"
        if not others:
            return "internal"
        if made_by == "embedding":
            return "embedding"
        return "post" if "add" in others else "other"


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
