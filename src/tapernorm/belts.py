"""The gradient belt: no token pulls much harder than the others.

    ∂/∂h of a token · min(1, λ · median / ‖∂/∂h‖)

Without norms a gated MLP is quadratic in its input, and so is its gradient: a token a few times too large would rule
the step, and clipping the whole would leave its direction in it. (The seat belt is in `tapernorm.modules`.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def bound_gradient(h: Tensor, times: float) -> Tensor:
    """h; backward, no token's gradient is longer than `times` that of the median token. One that is not finite is 0.

    h: [..., D]. Tokens without a gradient (padding) have no part in the median.
    """
    return _Bound.apply(h, times)  # type: ignore[return-value]


class _Bound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, times: float) -> Tensor:
        ctx.times = times
        return h.view_as(h)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0]
        lengths = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.promote_types(gradient.dtype, torch.float32))
        bound = ctx.times * torch.where(lengths > 0, lengths, torch.nan).nanmedian()
        share = (bound / lengths).clamp(max=1).to(gradient.dtype)
        sound = (lengths > 0) & torch.isfinite(lengths)
        return torch.where(sound[..., None], gradient * share[..., None], 0), None
