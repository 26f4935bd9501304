"""Linear maps that read one tensor become one: q, k and v, or gate and up, as a single product.

    [q | k | v] = x [W_q; W_k; W_v]ᵀ + [b_q | b_k | b_v]

x: [.., in]; W: [out, in] each. Exact up to the order in which a product sums: no weight is changed, they only lie one
below the other. Fewer launches and a larger product; what it is worth depends on how small the model is.

Which maps read the same tensor is seen in one forward, never guessed from names: queries read another tensor than
keys and values where a decoder attends to an encoder. A module goes on calling `self.q_proj(x)`; what stands there is
a `FusedPart` (`tapernorm.fused_tapernorm`), which hands out its slice. Modules that are seen to compute a gated MLP
or an attention with rotary positions from such a product do so in fewer calls (`tapernorm.shorten`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm import fused_tapernorm
from tapernorm.inputs import default_example, run
from tapernorm.layout import is_fused_part
from tapernorm.modules import evaluation, taper_norms
from tapernorm.shorten import lengthen_, shorten_
from tapernorm.soundness import FoldError
from tapernorm.trace import hooks


@dataclasses.dataclass(frozen=True)
class Group:
    """Linear maps of one module that read one tensor, in the order in which they do."""

    owner: str  # full name of the module that calls them
    parts: tuple[str, ...]  # their names in it

    @property
    def names(self) -> tuple[str, ...]:
        """Their full names."""
        return tuple(f"{self.owner}.{part}" if self.owner else part for part in self.parts)

    @property
    def whole(self) -> str:
        """What the one linear map is called."""
        return fused_name(self.parts)


@dataclasses.dataclass(frozen=True)
class FuseReport:
    """What `fuse_` did: the groups that are one product now, by full name; why others that read one tensor are not;
    modules that compute the rest in fewer calls (`tapernorm.shorten`); and the largest error against the model before,
    absolute, relative to the largest output, and its bound."""

    fused: tuple[tuple[str, ...], ...]
    unfused: dict[str, str]
    shortened: tuple[str, ...]
    max_abs_logit_error: float
    relative_error: float
    bound: float


def fuse_(model: nn.Module, example: Any = None) -> FuseReport:
    """Fuse the linear maps of `model` that read one tensor. In place, checked, or refused and untouched.

    For a model that is folded already, or whose norms all stay; `fold_(fuse=True)` does both at once. An optimizer
    that was made before holds the parameters of before. `unfuse_` takes it back.

    Args:
        model: any module without gated norms.
        example: inputs for one forward, as for `find_sites`. None makes random token ids.

    Raises:
        FoldError: a tapered model; nothing to fuse; an output that is not finite; an error above the bound of `fold_`.
    """
    from tapernorm import fold  # which imports this module

    tapered = next(iter(taper_norms(model)), None)
    if tapered is not None:
        raise FoldError(f"{tapered}: the model is tapered and not folded; fold it with fuse=True")
    inputs = default_example(model, batch=2, length=16) if example is None else example
    groups, unfused = find_groups(model, inputs)
    if not groups:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(unfused.items())[:3])
        raise FoldError(f"nothing to fuse: no two linear maps of one module read the same tensor{why and f' ({why})'}")
    with evaluation(model):
        before = fold.outputs_of(model, inputs)
        if not before or not all(torch.isfinite(t).all() for t in before):
            raise FoldError("the model's output on the example is not finite, or there is none; nothing was fused")
        undo = fuse_groups(model, groups)
        try:
            shortened = shorten_(model, inputs)
            error = fold.compare_outputs(before, fold.outputs_of(model, inputs), fold.examine(model, inputs)[1])
        except BaseException:
            undo()
            raise
    fold.guard_saving(model)
    return FuseReport(tuple(group.names for group in groups), unfused, shortened, *error)


def find_groups(model: nn.Module, inputs: Any) -> tuple[list[Group], dict[str, str]]:
    """The groups that can be fused, and for linear maps that share their input but cannot: why not, by name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    read: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    calls: Counter[str] = Counter()
    alive = []  # so that no identity is used twice

    def enter(name: str, args: tuple[Any, ...]) -> None:
        x: Any = args[0] if len(args) == 1 else None
        if isinstance(x, Tensor) and isinstance(modules[name], nn.Linear):
            calls[name] += 1
            alive.append(x)
            # A tensor that was written to in between is another.
            version = 0 if x.is_inference() else x._version
            read[name.rpartition(".")[0], id(x), version].append(name)

    with evaluation(model), hooks(model, enter):
        run(model, inputs)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    uses = Counter(id(p) for module in modules.values() for p in module._parameters.values() if p is not None)
    found, unfused = [], {}
    for (owner, _, _), names in read.items():
        names = list(dict.fromkeys(names))
        if len(names) < 2:
            continue
        reasons = {n: "it is the head" if modules[n] is head else _reason(modules[n], calls[n], uses) for n in names}
        like = next((modules[n] for n in names if not reasons[n]), None)
        for name in names:
            reasons[name] = reasons[name] or _unlike(modules[name], like)
        good = [name for name in names if not reasons[name]]
        if len(good) < 2:
            reasons |= dict.fromkeys(good, "no other linear map that can be fused reads what it reads")
        else:
            group = Group(owner, tuple(name.rpartition(".")[2] for name in good))
            if hasattr(modules[owner], group.whole):
                reasons |= dict.fromkeys(good, f"{owner} has something called {group.whole} already")
            else:
                found.append(group)
        unfused |= {name: reason for name, reason in reasons.items() if reason}
    return found, unfused


def _reason(module: Any, calls: int, uses: Counter[int]) -> str:
    """Why a linear map is fused with no other."""
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, not a plain linear map (quantized, parametrized or wrapped)"
    if calls > 1:
        return f"it runs {calls} times in one forward"
    parameters = [p for p in module.parameters() if p is not None]
    if any(uses[id(p)] > 1 for p in parameters):
        return "its weight or bias is shared with another module"
    if any(type(p.data) is not Tensor or hasattr(p, "ds_id") or not p.is_floating_point() for p in parameters):
        return "its weight is quantized or sharded"
    if any(p.is_meta for p in parameters):
        return "it is on the meta device: load the weights first"
    if "forward" in vars(module) or any(
        table for name, table in vars(module).items() if name.endswith("_hooks") and "state_dict" not in name and table
    ):
        return "it has hooks, which would not run any more"
    return ""


def _unlike(module: Any, like: Any) -> str:
    """Why it is not fused with the first of its group."""
    if like is None or module is like:
        return ""
    a, b = module.weight, like.weight
    for what, one, other in (
        ("dtype", a.dtype, b.dtype),
        ("device", a.device, b.device),
        ("requires_grad", {p.requires_grad for p in module.parameters()}, {p.requires_grad for p in like.parameters()}),
    ):
        if one != other:
            return f"its {what} ({one}) is not that of the others ({other})"
    return ""


def fused_name(parts: tuple[str, ...]) -> str:
    """q_proj, k_proj, v_proj -> qkv_proj; gate_proj, up_proj -> gate_up_proj; wi_0, wi_1 -> wi_0_1."""
    words = [part.split("_") for part in parts]
    head = _common(words)
    tail = _common([w[head:][::-1] for w in words])
    middle = ["_".join(w[head : len(w) - tail]) for w in words]
    joined = ("" if all(len(part) == 1 and part.isalpha() for part in middle) else "_").join(filter(None, middle))
    return "_".join([*words[0][:head], joined, *words[0][len(words[0]) - tail :]])


def _common(words: list[list[str]]) -> int:
    """How many words they all begin with."""
    return sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, zip(*words, strict=False)))


@torch.no_grad()
def fuse_groups(model: nn.Module, groups: list[Group]) -> Any:
    """Fuse; returns what takes it back. Nothing is checked here.

    The old weights become views of the new, so that no second copy of them is held until it is known to be right.
    """
    old: list[tuple[Any, str, Any]] = []

    def undo() -> None:
        lengthen_(model)
        for group in groups:
            vars(model.get_submodule(group.owner))["_modules"].pop(group.whole, None)
        for owner, part, linear in old:
            for parameter in linear.parameters():
                parameter.data = parameter.data.clone()
            setattr(owner, part, linear)

    try:
        for group in groups:
            owner = model.get_submodule(group.owner)
            linears: list[Any] = [owner.get_submodule(part) for part in group.parts]
            old += zip([owner] * len(linears), group.parts, linears, strict=True)
            whole: Any = fused_tapernorm.fuse_linears(owner, group.whole, group.parts)
            place = 0
            for linear in linears:
                rows = slice(place, place := place + linear.out_features)
                whole.weight.data[rows] = linear.weight
                linear.weight.data = whole.weight.data[rows]
                if whole.bias is not None:
                    whole.bias.data[rows] = 0 if linear.bias is None else linear.bias
                    if linear.bias is not None:
                        linear.bias.data = whole.bias.data[rows]
            whole.requires_grad_(linears[0].weight.requires_grad)
    except BaseException:
        undo()
        raise
    return undo


def apart(model: nn.Module) -> nn.Module:
    """`model` without fused linear maps: for code that knows the weights of a stock class by name. In place."""
    return unfuse_(model) if any(map(is_fused_part, model.modules())) else model


@torch.no_grad()
def unfuse_(model: nn.Module) -> nn.Module:
    """Make every fused linear map the several that it was. In place; the same function. A bias that some of them had
    is there for all.

    Raises:
        ValueError: nothing is fused; or a fused map is no plain linear map any more (quantized, or wrapped).
    """
    parts: dict[str, Any] = {name: module for name, module in model.named_modules() if is_fused_part(module)}
    if not parts:
        raise ValueError("nothing to take apart: the model has no fused linear maps")
    for name, part in parts.items():
        whole: Any = part.owner._modules[part.whole]
        if type(whole) is not nn.Linear:
            raise ValueError(f"{name}: it is part of a {type(whole).__name__}, and no longer of a plain linear map")
    for name, part in parts.items():
        weight, bias = part.weight, part.bias
        linear: Any = nn.Linear(1, 1, bias=bias is not None, device="meta").train(part.training)
        linear.in_features, linear.out_features = part.in_features, part.out_features
        for key, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                flag = part.owner._modules[part.whole].weight.requires_grad
                setattr(linear, key, nn.Parameter(value.detach().clone(), requires_grad=flag))
        model.set_submodule(name, linear)
    for part in parts.values():
        part.owner._modules.pop(part.whole, None)
    return lengthen_(model)
