"""The uniformity loss: tokens are drawn to one scale while the norms still hide it.

    weight · Σ_sites E_tokens[d²],   d = log(r·c),   ∂/∂h of a token = 2 d · h / (D r²)

(h − μ and σ for a layer norm), with c the running value of warm-up and then the frozen one, both constants here. With
`uniformity_above` = u it is d = max(0, log(r·c / u)): what goes wrong without norms are the few large tokens, and those
of the usual scale keep their freedom. It acts from the second step on, when there is a c, until the fold: at gate 0 it
is what brings back tokens that run away.

The loss is never a part of the graph that the model builds: inside a checkpointed block such a part fails, or is lost
with the second forward. Instead an identity at h adds the gradient as the backward pass comes by. How much it adds,
the caller says without knowing: `auxiliary_loss()` returns a scalar whose backward only notes the factor by which the
caller scaled it (accumulation, a GradScaler), and autograd, which goes backwards in the order of making, runs it
before any site of the forwards that it stands for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tapernorm.config import TaperConfig
from tapernorm.held import Held
from tapernorm.modules import TaperNorm, in_backward, uncompiled
from tapernorm.statistics import Inputs


class _Share:
    """The training forwards that one call of `auxiliary_loss()` stands for."""

    def __init__(self) -> None:
        self.value: Tensor | None = None  # Σ over sites and tokens of (log r·c)², without a graph
        self.tokens: Tensor | None = None
        self.factor: Tensor | None = None  # what the gradient of that Σ is, once the backward pass has said so
        self.missed = False  # a backward pass came by before the factor was known


class Uniformity:
    """Adds up the loss over the sites of a model, and injects its gradient.

    Args:
        sites: the tapered norms by name; `pull` is set on each.
        config: `uniformity_weight` is the weight, `uniformity_above` is u.
        inputs: mask and mode of the model's last call.
    """

    def __init__(self, sites: dict[str, TaperNorm], config: TaperConfig, inputs: Inputs) -> None:
        self.weight = config.uniformity_weight
        self.above = config.uniformity_above
        self.inputs = inputs
        self.active = False  # set by the controller: there is a c
        self._open = _Share()
        self._closed = _Share()
        self._modules = list(sites.values())
        for module in self._modules:
            module.pull = _Pull(self, module)

    def add(self, site: Held) -> None:
        """A norm that went before counts as the others do."""
        site.pull = _Pull(self, site)

    def is_first(self, module: TaperNorm | Held) -> bool:
        """Whether it is the one site that counts a forward's tokens."""
        return module is self._modules[0]

    @property
    def pending(self) -> bool:
        """Whether there were training forwards that `take` has not taken."""
        return self._open.value is not None

    @property
    def missed(self) -> bool:
        """Whether a backward pass ran without the loss in it."""
        return self._open.missed or self._closed.missed

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """(weight · Σ, tokens) of the training forwards since the last call, (None, None) where there were none.

        The Σ requires a gradient, which goes to the sites.
        """
        share = self._open
        if share.value is None or share.tokens is None:
            return None, None
        self._closed, self._open = share, _Share()
        leaf = torch.zeros((), device=share.value.device, requires_grad=True)
        total: Any = _Factor.apply(leaf, self.weight * share.value, self.weight, share)
        return total, share.tokens

    def drop(self) -> None:
        """Forget forwards whose step did not happen."""
        self._open, self._closed = _Share(), _Share()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no part in the graph of forwards that it did not see."""
        return vars(self) | {"_open": _Share(), "_closed": _Share()}

    def shares(self) -> tuple[_Share, bool]:
        """The share that a forward belongs to now, and whether it is the forward's first time."""
        again = in_backward()  # gradient checkpointing: the forward was counted, and its loss was taken
        return (self._closed if again else self._open), not again


class _Pull:
    """`pull` of one site; an object, so that a deep copy of the model is one of its own."""

    def __init__(self, loss: Uniformity, module: TaperNorm | Held) -> None:
        self.loss, self.module = loss, module

    @uncompiled
    def __call__(self, h: Tensor) -> Tensor:
        loss = self.loss
        if not (loss.active and loss.inputs.training):
            return h
        share, is_first_time = loss.shares()
        mask = loss.inputs.mask_for(h.numel() // h.shape[-1])
        c, kind, eps = self.module.ruler
        if is_first_time:
            with torch.no_grad():
                deviation = _deviation(h, c, kind, eps, loss.above)[1]
                if mask is not None:
                    deviation = torch.where(mask.view_as(deviation), deviation, 0.0)
                value = deviation.pow(2).sum()
                share.value = value if share.value is None else share.value + value.to(share.value.device)
                if loss.is_first(self.module):
                    count = torch.tensor(float(deviation.numel())) if mask is None else mask.sum().float()
                    count = count.to(h.device)
                    share.tokens = count if share.tokens is None else share.tokens + count
        injected: Any = _Inject.apply(h, c.clone(), mask, kind, eps, loss.above, share)
        return injected


def _deviation(h: Tensor, c: Tensor, kind: str, eps: float, above: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(h or h − μ, d, r) in float32 or wider."""
    x = h.to(torch.promote_types(h.dtype, torch.float32))
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    r = torch.sqrt(x.pow(2).mean(-1) + eps)
    deviation = torch.log(r * c.to(x.dtype))
    return x, deviation if above is None else (deviation - math.log(above)).clamp(min=0), r


class _Factor(torch.autograd.Function):
    """The value of the loss, forward; backward, the caller's scaling of it is written into the share."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor, weight: float, share: _Share) -> Tensor:
        ctx.weight, ctx.share = weight, share
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.share.factor = grads[0] * ctx.weight
        return None, None, None, None


class _Inject(torch.autograd.Function):
    """h, with 2 · factor · d · h / (D r²) added to its gradient."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, c: Tensor, mask: Tensor | None, kind: str, eps: float, above: float | None, share: _Share
    ) -> Tensor:
        ctx.save_for_backward(h, c, mask)
        ctx.kind, ctx.eps, ctx.above, ctx.share = kind, eps, above, share
        return h.view_as(h)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, c, mask = ctx.saved_tensors
        factor = ctx.share.factor
        if factor is None:
            ctx.share.missed = True
            return (grads[0], None, None, None, None, None, None)
        with torch.autocast(h.device.type, enabled=False):
            x, deviation, r = _deviation(h, c, ctx.kind, ctx.eps, ctx.above)
            pull = 2 * factor.to(x.device) * deviation / (x.shape[-1] * r.pow(2))
            if mask is not None:
                pull = torch.where(mask.view_as(pull), pull, 0.0)
            added = x * pull[..., None]
            if mask is not None:  # padding may hold anything, and 0 · inf is not 0
                added = torch.where(mask.view_as(pull)[..., None], added, 0.0)
        return (grads[0] + added.to(grads[0].dtype), None, None, None, None, None, None)
