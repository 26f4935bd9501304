"""The arithmetic of a fold, and what it needs of a linear map: the same in memory and from disk to disk.

RMS:    W' = W · diag(s),                      backwards  W' = diag(s) · W
Layer:  W' = W · diag(s) · (I − 11ᵀ/D),        backwards  W' = diag(s) · (I − 11ᵀ/D) · W

s = c γ̃, products in float64, rounded once to the weight's dtype. (arXiv 2602.10408, section 3.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tapernorm.sites import NormSite
from tapernorm.soundness import FoldError
from tapernorm.trace import Consumer

log = logging.getLogger(__name__)


def claims(sites: Iterable[NormSite]) -> Iterator[tuple[NormSite, Consumer]]:
    """Each norm with each linear map that takes it up.

    Raises:
        FoldError: a norm that cannot go; a weight that would take up two from one side.
    """
    claimed: dict[tuple[str, bool], str] = {}
    for site in sites:
        if not site.removable and site.producer is None:
            raise FoldError(f"{site.name}: it can no longer be folded: {site.reason}")
        for link in targets(site):
            key = link.weight, site.removable
            if key in claimed:
                raise FoldError(f"{link.weight} is to take up both {claimed[key]} and {site.name}")
            claimed[key] = site.name
            yield site, link


def targets(site: NormSite) -> tuple[Consumer, ...]:
    """The linear maps that take a norm up: what reads it or, for a post-norm, what it reads."""
    return (site.producer,) if not site.removable and site.producer else site.links


def refuse_no_bias(owner: nn.Module, name: str, link: Consumer) -> None:
    """Raises FoldError where a norm has a bias, and what takes it up has none and cannot be given one."""
    from transformers.pytorch_utils import Conv1D  # imported late: slow

    if link.bias is None and not isinstance(owner, nn.Linear | Conv1D):
        kind = type(owner).__name__
        raise FoldError(f"{link.owner}: {name} has a bias, and a {kind} without one cannot be given one")


def _centred(w: Tensor, kind: str) -> Tensor:
    """w (I − 11ᵀ/D) for a layer norm, w for an RMS norm. w: [.., D]"""
    return w - w.mean(-1, keepdim=True) if kind == "layer" else w


def forwards(w: Tensor, scale: Tensor, kind: str) -> Tensor:
    """W · diag(scale), centred behind it for a layer norm. w: [.., D], scale: [D], float64"""
    return _centred(w * scale, kind)


def backwards(w: Tensor, scale: Tensor, kind: str) -> Tensor:
    """diag(scale) · W, centred before it for a layer norm. w: [.., D], D its outputs; or a bias [D]"""
    return _centred(w, kind) * scale


def rounded(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Rounded once. Raises FoldError where that is not finite."""
    made = value.to(dtype)
    if made.numel() and not all(torch.isfinite(end) for end in made.aminmax()):  # NaN is both, and it is quick
        raise FoldError(f"{name} does not fit {dtype} after scaling (largest value {value.abs().max():.3g})")
    if dtype == torch.float16:
        tiny = torch.finfo(dtype).tiny
        lost = int(((made.abs() < tiny) & (value.abs() >= tiny * 1e-3)).sum())
        if lost:
            log.warning("%s: %d values become subnormal in %s", name, lost, dtype)
    return made
