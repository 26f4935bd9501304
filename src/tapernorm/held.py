"""Norms that went before the taper began are held in training as those that go: seat belt, gradient belt, uniformity.

    h · min(1, κ / (c r)),   c = 1 / the median r there

`tapernorm.remove_` takes norms out by weights alone. An identity stands in their place, whose readers have taken up the
scale; a token that runs away there takes its sequence along while others are still tapered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tapernorm.belts import bound_gradient
from tapernorm.layout import layout_of
from tapernorm.modeling_tapernorm import name_pattern
from tapernorm.modules import evaluation, first_input
from tapernorm.statistics import token_scale
from tapernorm.trace import Trace

_CENTRED = 1e-3  # of a row's length: what rounding leaves of the sum of a row that takes no mean


class Gone(NamedTuple):
    """A norm that is gone: the weights that read what it read, "rms" or "layer", and the median r of its tokens."""

    readers: tuple[str, ...]
    kind: str
    r: float


def gone(model: Any, ids: Tensor) -> dict[str, Gone]:
    """Every norm that is gone, by name. A "layer" is what its readers take no mean of. ids: [N, T] of real text"""
    patterns = [name_pattern(name) for name in layout_of(model)["removed_norms"]]
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Identity)]
    names = [name for name in names if any(pattern.fullmatch(name) for pattern in patterns)]
    if not names:
        return {}
    ids = ids.to(next(model.parameters()).device)
    inputs = {"input_ids": ids[:1, :8], "use_cache": False}
    trace = Trace(model, set(names))
    trace.start(inputs)
    with evaluation(model), trace.watch(), trace:
        output = model(**inputs)
    trace.finish(output)
    links = {name: list(trace.links[name].values()) for name in names}
    kinds = {name: "layer" if all(_takes_no_mean(model, link) for link in links[name]) else "rms" for name in names}
    scales: dict[str, list[Tensor]] = {name: [] for name in names}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        scales[name].append(token_scale(first_input(args, kwargs).detach(), kinds[name], 0.0).flatten())

    handles = [
        model.get_submodule(name).register_forward_pre_hook(functools.partial(note, name), with_kwargs=True)
        for name in names
    ]
    try:
        with evaluation(model):
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    medians = {name: float(torch.cat(parts).median()) for name, parts in scales.items() if parts}
    return {
        name: Gone(tuple(link.weight for link in links[name]), kinds[name], r) for name, r in medians.items() if r > 0
    }


def _takes_no_mean(model: Any, link: Any) -> bool:
    """Whether the rows of a weight add up to nothing, as after the fold of a layer norm."""
    weight = model.get_parameter(link.weight).detach().float().movedim(link.axis, -1)
    return bool(weight.sum(-1).norm() < _CENTRED * weight.norm())


class Held:
    """In front of an identity that stands where a norm was: a forward pre-hook, which acts in training alone.

    Args:
        r: scale of the usual token there; kind: how it is measured, "rms" or "layer".
        times: λ, None for no gradient belt.
    """

    def __init__(self, r: float, kind: str, times: float | None = None) -> None:
        self.c, self.kind, self.times = torch.tensor(1 / r), kind, times
        self.cap: float | None = None  # κ, set by the controller
        self.pull: Callable[[Tensor], Tensor] | None = None  # as that of a TaperNorm

    @property
    def ruler(self) -> tuple[Tensor, str, float]:
        """As `TaperNorm.ruler`."""
        return self.c, self.kind, 0.0

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> Tensor | None:
        if not module.training:
            return None
        (h,) = args
        if self.pull is not None:
            h = self.pull(h)
        if self.times is not None:
            h = bound_gradient(h, self.times)
        if self.cap is not None:
            held = (self.cap / (self.c * token_scale(h, self.kind, 0.0))).clamp(max=1)
            h = h * held.to(h.dtype)[..., None]
        return h
