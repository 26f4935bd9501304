"""Modules that compute something well known from one fused product do it in fewer calls.

    MLP         out(act(a) · b),                        [a | b]     = x Wᵀ
    attention   out(attention(turn(q), turn(k), v)),    [q | k | v] = x Wᵀ,  turn([l | r]) = [l | r] cos + [−r | l] sin

One decoded token of a small model waits for Python, not for arithmetic: three views and three transpositions where one
does, queries and keys turned one after the other, a module called for every step. The forwards are in
`tapernorm.fused_tapernorm`; here it is seen which modules compute this. Nothing is guessed from names: a module is
run as it is, what its parts read and give is recorded, and the formula has to give the same to the bit. The names under
which a module takes its inputs, and the number of its layer in the cache, are those that were seen. A call with
anything else, training, hooks, another attention function or a cache of another kind take the stock forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tapernorm import fused_tapernorm
from tapernorm.inputs import run
from tapernorm.modules import evaluation


@dataclasses.dataclass
class _Call:
    """What happened in one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    children: dict[str, list[tuple[Any, Any]]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    cached: list[tuple[Tensor, Tensor, int]] = dataclasses.field(default_factory=list)
    attended: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)  # q, k, v, mask, scaling, result

    def once(self, child: str) -> tuple[Any, Any]:
        """(input, output) of a child that was called once, with one tensor."""
        calls = self.children.get(child, [])
        return calls[0] if len(calls) == 1 else (None, None)

    def named(self, value: Any) -> str | None:
        """The name under which the module was given `value`."""
        return next((name for name, given in self.kwargs.items() if given is value), None)


@torch.no_grad()
def shorten_(model: nn.Module, inputs: Any) -> tuple[str, ...]:
    """Shorten what can be, after `tapernorm.fuse.fuse_groups`. In place; returns names of modules.

    Raises:
        FoldError: a model with a key-value cache gives something else than before.
    """
    from tapernorm import fold  # which imports this module

    owners, ids, before = _owners(model), _ids(model, inputs), None
    with evaluation(model):
        with _Watch(model, owners) as watch:
            run(model, inputs)
        found = {name: _mlp(watch.seen[name], parts) for name, parts in owners.items()}
        if ids is not None:
            with _Watch(model, owners) as watch:
                before = _decoded(model, ids, watch)
            found |= _attentions(model, owners, watch)
        shortened = {name: how for name, how in found.items() if how is not None}
        for name, how in shortened.items():
            module: Any = model.get_submodule(name)
            fused_tapernorm.shorten(module, how | {"whole": module._modules[owners[name][0]].whole})
        if ids is not None and before is not None:
            fold.compare_outputs(before, _decoded(model, ids))
    return tuple(name for name in owners if name in shortened)


def lengthen_(model: nn.Module) -> nn.Module:
    """Give every module its own forward back. In place."""
    for module in model.modules():
        if vars(module).pop("short", None) is not None:
            vars(module).pop("forward", None)
    return model


def _owners(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Modules with one fused product: the names of its parts, in their order."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        parts: dict[str, Any] = {n: m for n, m in module.named_children() if type(m) is fused_tapernorm.FusedPart}
        free = "forward" not in vars(module) and not hasattr(module, "short")  # where what was seen is kept
        if len({part.whole for part in parts.values()}) == 1 and free:
            found[name] = tuple(sorted(parts, key=lambda n: parts[n].index))
    return found


def _ids(model: Any, inputs: Any) -> Tensor | None:
    """Token ids of the example, [B, T], for a decoder that writes with a key-value cache."""
    ids: Any = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    writes = isinstance(model, PreTrainedModel) and model.can_generate() and not model.config.is_encoder_decoder
    return ids[:, :8] if writes and isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > 1 else None


def _decoded(model: Any, ids: Tensor, watch: _Watch | None = None) -> list[Tensor]:
    """Logits of a text that is read into a cache, and of one more token, with padding and without."""
    from tapernorm.verify import new_cache

    padded = torch.ones_like(ids)
    padded[0, -1] = 0
    found = []
    for mask in (padded, torch.ones_like(ids)):
        cache = new_cache(model)
        if watch is not None:
            watch.follow(*cache.values())
        longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        for step, seen in ((ids, mask), (ids[:, :1], longer)):
            output = model(input_ids=step, attention_mask=seen, use_cache=True, **cache)
            found.append(output.logits.detach().clone())
    return found


class _Watch:
    """Records every call of the owners, of their children, and of the attention function and a cache inside them."""

    def __init__(self, model: nn.Module, owners: dict[str, tuple[str, ...]]) -> None:
        self.model, self.owners = model, owners
        self.seen: dict[str, list[_Call]] = defaultdict(list)
        self.stack: list[tuple[nn.Module, _Call]] = []
        self.left = contextlib.ExitStack()

    def __enter__(self) -> _Watch:
        for name in self.owners:
            module = self.model.get_submodule(name)
            self._hook(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hook(module.register_forward_hook(functools.partial(self._leave, name), with_kwargs=True))
            for child, part in module.named_children():
                ran = functools.partial(self._ran, module, child)
                self._hook(part.register_forward_hook(ran, with_kwargs=True))
        if ALL_ATTENTION_FUNCTIONS.get("sdpa") is sdpa_attention_forward:  # and nobody else's
            ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attend
            self.left.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, "sdpa")
        return self

    def __exit__(self, *error: Any) -> None:
        self.left.close()

    def follow(self, cache: Any) -> None:
        """Record what is put into a cache."""
        update = cache.update

        def updated(key: Any, value: Any, layer: Any, *args: Any, **more: Any) -> Any:
            if self.stack and not args and more.keys() <= {"kwargs"}:  # more than that would have to be given again
                self.stack[-1][1].cached.append((key, value, layer))
            return update(key, value, layer, *args, **more)

        cache.update = updated

    def _hook(self, handle: Any) -> None:
        self.left.callback(handle.remove)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append((module, _Call(args, dict(kwargs))))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self.stack.pop()[1]
        call.output = output
        self.seen[name].append(call)

    def _ran(self, owner: nn.Module, child: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.stack and self.stack[-1][0] is owner:
            one = args[0] if len(args) == 1 and not kwargs else None
            self.stack[-1][1].children[child].append((one, output))

    def _attend(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> Any:
        result = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        if self.stack and self.stack[-1][0] is module:
            read = query, key, value, attention_mask
            self.stack[-1][1].attended.append((*read, more.get("scaling"), result[0]))
        return result


def _same(hows: list[Any]) -> Any:
    """What all calls of a module agree on, or None."""
    return hows[0] if hows and all(how == hows[0] for how in hows) else None


def _out(call: _Call, output: Any) -> tuple[str, Any]:
    """The child whose output the module's is, and what it read."""
    return next(((name, call.once(name)[0]) for name in call.children if call.once(name)[1] is output), ("", None))


def _mlp(calls: list[_Call], parts: tuple[str, ...]) -> dict[str, Any] | None:
    """How a module computes out(act(a) · b), or None."""
    return _same([_mlp_of(call, parts) for call in calls]) if len(parts) == 2 else None


def _mlp_of(call: _Call, parts: tuple[str, ...]) -> dict[str, Any] | None:
    (out, read), made = _out(call, call.output), [call.once(part) for part in parts]
    if len(call.args) != 1 or call.kwargs or read is None or any(x is not call.args[0] for x, _ in made):
        return None
    for acted in (0, 1):
        act = next((name for name in call.children if call.once(name)[0] is made[acted][1]), None)
        if act is not None and torch.equal(call.once(act)[1] * made[1 - acted][1], read):
            return {"kind": "mlp", "act": act, "acted": acted, "out": out}
    return None


def _attentions(model: nn.Module, owners: dict[str, tuple[str, ...]], watch: _Watch) -> dict[str, dict[str, Any]]:
    """How modules compute an attention. The attribute with the number of a layer is the same in all of them."""
    found: dict[str, dict[str, Any]] = {}
    numbers: list[set[str]] = []
    for name, parts in owners.items():
        module, calls = model.get_submodule(name), watch.seen[name]
        how = _same([_attention_of(module, call, parts) for call in calls]) if len(parts) == 3 else None
        if how is None or (mask := _mask_name(calls)) is None:
            continue
        layer = how.pop("layer")
        numbers.append({key for key, value in vars(module).items() if type(value) is int and value == layer})
        found[name] = how | {"mask": mask, "known": sorted({key for call in calls for key in call.kwargs})}
    index = min(set.intersection(*numbers), default=None) if numbers else None
    return {name: how | {"index": index} for name, how in found.items() if index is not None}


def _mask_name(calls: list[_Call]) -> str | None:
    """Under which name the attention function's mask comes in; where it gets none, none is given."""
    read = [(call, call.attended[0][3]) for call in calls]
    names = {call.named(mask) for call, mask in read if mask is not None}
    name = names.pop() if len(names) == 1 else None
    return name if name and all(call.kwargs.get(name) is mask for call, mask in read) else None


def _attention_of(module: Any, call: _Call, parts: tuple[str, ...]) -> dict[str, Any] | None:
    made = [call.once(part) for part in parts]
    pairs = [name for name, value in call.kwargs.items() if isinstance(value, tuple) and len(value) == 2]
    once = len(call.attended) == len(call.cached) == len(pairs) == 1 and len(call.args) <= 1
    alone = isinstance(call.output, tuple) and len(call.output) == 2 and call.output[1] is None
    if not (once and alone and hasattr(module, "config") and all(isinstance(x, Tensor) for x, _ in made)):
        return None
    (query, all_keys, all_values, mask, scaling, result), (key, value, layer) = call.attended[0], call.cached[0]
    x, rotary, width = made[0][0], call.kwargs[pairs[0]], query.shape[-1]
    out, read = _out(call, call.output[0])
    if any(other is not x for other, _ in made) or read is None or not isinstance(scaling, float):
        return None
    if any(t.shape[-1] != width for t in (key, value, *rotary)):
        return None
    q, k, v = (y.view(*x.shape[:-1], -1, width).transpose(1, 2) for _, y in made)
    mixed = sdpa_attention_forward(module, query, all_keys, all_values, mask, scaling=scaling)[0]
    pairs_of = (_turn(q, *rotary), query), (_turn(k, *rotary), key), (v, value), (mixed, result)
    if not all(torch.equal(a, b) for a, b in (*pairs_of, (mixed.reshape(*x.shape[:-1], -1), read))):
        return None
    names = {"input": None if call.args else call.named(x), "rotary": pairs[0]}
    names["cache"] = next((key for key, value in call.kwargs.items() if isinstance(value, Cache)), None)
    if names["cache"] is None or (call.args and call.args[0] is not x) or not (call.args or names["input"]):
        return None
    shape = {"heads": q.shape[1], "keys": k.shape[1], "scaling": scaling, "layer": layer, "out": out}
    return {"kind": "attention"} | names | shape


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, H, T, D]; cos, sin: [B, T, D]."""
    left, right = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-right, left), -1) * sin.unsqueeze(1)
