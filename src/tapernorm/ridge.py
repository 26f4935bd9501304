"""Linear maps fitted to activations, drawn towards a map that is known to be harmless."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

RIDGES = (3e-4, 3e-3, 3e-2, 0.3)  # times the mean square of a feature
_HELD_OUT = 4  # one token in so many is not fitted on, and chooses the ridge


@dataclasses.dataclass(frozen=True)
class Fit:
    """weight: [out, in], fitted to all tokens. ridge: the one chosen; inf: the prior itself. before, after: mean square
    error of the prior, and of a fit to the other tokens, on the quarter that chose."""

    weight: Tensor
    ridge: float
    before: float
    after: float


def fit_map(x: Tensor, y: Tensor, prior: Tensor, ridges: tuple[float, ...] = RIDGES) -> Fit:
    """argmin over W of Σ ‖y − W x‖² + λ s ‖W − prior‖², s the mean square of x's features times their number of tokens.

    λ is the one of `ridges`, or ∞, with the smallest error on the first quarter of the tokens (whole sequences, when
    tokens come in order) of a fit to the others; the fit that is returned has that λ and all tokens. x: [N, in];
    y: [N, out]; prior: [out, in]; float32 or wider.
    """
    held = max(1, len(x) // _HELD_OUT)
    missing = y - x @ prior.T
    before = float(missing[:held].pow(2).sum(-1).mean())
    quarter = products(x[:held], missing[:held])
    step, ridge, gained = choose(products(x[held:], missing[held:]), quarter, ridges)
    return Fit(prior if step is None else prior + step.T.to(x.dtype), ridge, before, before - gained / held)


Products = tuple[Tensor, Tensor]  # xᵀx [in, in] and xᵀr [in, out], with r what a prior misses; float64


def choose(
    others: Products, quarter: Products, ridges: tuple[float, ...] = RIDGES
) -> tuple[Tensor | None, float, float]:
    """(the step from the prior, [in, out], fitted to all tokens; the ridge; by how much a fit to the others alone
    lowers the sum of squares of the quarter), with the ridge that lowers it most. (None, ∞, 0) where none does.

    ‖r − x S‖² = ‖r‖² − 2 ⟨S, xᵀr⟩ + ⟨S, xᵀx S⟩
    """
    best, ridge = 0.0, torch.inf
    for each in ridges:
        step = solve(*others, each)
        if step is None:
            continue
        gained = float((step * (2 * quarter[1] - quarter[0] @ step)).sum())
        if gained > best:
            best, ridge = gained, each
    if ridge == torch.inf:
        return None, ridge, best
    step = solve(others[0] + quarter[0], others[1] + quarter[1], ridge)
    assert step is not None  # more tokens make the matrix no less definite
    return step, ridge, best


def products(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """xᵀx and xᵀy in float64. x: [N, in]; y: [N, out]"""
    return (x.T @ x).double(), (x.T @ y).double()


def solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor | None:
    """(G + λ mean(diag G) I)⁻¹ C, or None where that is not definite. gram: [in, in]; cross: [in, out]"""
    shifted = gram + ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    return None if int(failed) else torch.cholesky_solve(cross, factor)
