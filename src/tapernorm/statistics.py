"""From what passes a norm during warm-up to its fixed scale c.

For one token h with scale r (σ for a layer norm, after the mean is taken off) and energy e = ‖h γ‖²:

    lstsq:   c = E[e / r] / E[e]             the paper's, argmin E‖N(h) − c h γ‖²
    robust:  c = E[e / r³] / E[e / r²]       the same with each token weighted by 1/r²
    log:     c = exp(−E[log r])              the optimum of (log r·c)²

Sums are taken over the tokens of one optimizer step: over micro-batches and ranks, without padding; in a forward of
more than 1,024 tokens a fixed sample stands for all. Each step's means enter a bias-corrected moving average;
c = num / (den + 1e-12). (arXiv 2602.10408, section 3.)
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor

from tapernorm.config import TaperConfig
from tapernorm.modules import TaperNorm

FIELDS = ("num", "den", "log_r", "log_r²", "r")  # what is averaged, in the order of the sums
_SAMPLE = 1024  # tokens of one forward that are looked at; more are sampled


class MassiveTokenError(RuntimeError):
    """A token's scale stood far above its site's median in warm-up: a fixed scale cannot serve both."""


@dataclasses.dataclass
class Inputs:
    """What the model was last called with, as far as statistics need it. Written by a hook on the model."""

    mask: Tensor | None = None  # [B, T], nonzero for real tokens
    ids: Tensor | None = None  # [B, T]
    # Whether gradients were on when the model was entered. Not asked at the norms: the first pass of reentrant
    # checkpointing has them off.
    training: bool = True

    def mask_for(self, tokens: int) -> Tensor | None:
        """The mask as booleans over `tokens` flattened tokens, or None where all count."""
        if self.mask is None or self.mask.dim() != 2 or self.mask.numel() != tokens:
            return None
        return self.mask.reshape(-1) != 0


def token_scale(h: Tensor, kind: str, eps: float) -> Tensor:
    """r of an RMS norm or σ of a layer norm, in float32 or wider. h: [..., D] -> [...]"""
    x = h.to(torch.promote_types(h.dtype, torch.float32))
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return torch.sqrt(x.pow(2).mean(-1) + eps)


def _terms(square: Tensor, r: Tensor, gain: Tensor, calibration: str) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of c for each token. square: (h − μ)², [..., D]; r: [...]; gain: [D]"""
    if calibration == "log":  # c is taken from log r
        return torch.ones_like(r), torch.ones_like(r)
    energy = square @ gain.to(square.dtype).pow(2)
    den = energy / r.pow(2) if calibration == "robust" else energy
    return den / r, den


@torch.no_grad()
def robust_scale(h: Tensor, gain: Tensor, kind: str, eps: float) -> Tensor:
    """The robust c of these tokens alone. h: [..., D]; gain: [D] -> []"""
    x = h.to(torch.promote_types(h.dtype, torch.float32))
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    num, den = _terms(x.pow(2), token_scale(h, kind, eps), gain, "robust")
    return num.sum() / den.sum()


class SiteStatistics:
    """The sums of one site over one optimizer step, and the token that stood out most in it.

    Plain float32 tensors on the site's device, not registered buffers: DistributedDataParallel would overwrite each
    rank's own with those of rank 0.
    """

    def __init__(self, module: TaperNorm, config: TaperConfig, inputs: Inputs) -> None:
        self.module = module
        self.calibration = config.calibration
        self.inputs = inputs
        self._sums: Tensor | None = None  # [7]: count, the FIELDS, non-finite batches
        self._worst: Tensor | None = None  # [3]: r / median, position, token id (−1 where not known)

    @torch.no_grad()
    def __call__(self, h: Tensor) -> None:
        """Add the tokens of one training forward. h: [..., D]"""
        if not self.inputs.training:
            return
        norm, width = self.module.probed, h.shape[-1]
        tokens, length = h.numel() // width, h.shape[-2] if h.dim() > 2 else h.numel() // width
        mask = self.inputs.mask_for(tokens)
        every = stride(tokens, length)
        with torch.autocast(h.device.type, enabled=False):
            x = h.detach().reshape(-1, width)[::every]
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            if norm.kind == "layer":
                x = x - x.mean(-1, keepdim=True)
            square = x.pow(2)
            r = torch.sqrt(square.mean(-1) + norm.eps)
            log = r.log()
            num, den = _terms(square, r, self.module.gain(), self.calibration)
            rows = torch.stack([torch.ones_like(r), num, den, log, log * log, r])
            if mask is not None:  # where, not times: padding may hold anything, and 0 · inf is not 0
                mask = mask[::every]
                rows = torch.where(mask, rows, 0.0)
            sums = rows.sum(-1).float() * every  # as many as it stands for
            finite = torch.isfinite(sums).all()
            sums = torch.cat([torch.where(finite, sums, 0.0), (~finite).float().reshape(1)])
            self._sums = sums if self._sums is None else self._sums + sums
            self._note_worst(r, mask, every, tokens, length)

    def _note_worst(self, r: Tensor, mask: Tensor | None, every: int, tokens: int, length: int) -> None:
        # masked tokens become NaN, which nanmedian leaves out
        seen = r if mask is None else torch.where(mask, r, torch.nan)
        largest, index = torch.where(torch.isfinite(seen), seen, 0.0).max(0)
        where = index * every
        ids = self.inputs.ids
        token = ids.reshape(-1)[where] if ids is not None and ids.numel() == tokens else torch.full_like(where, -1)
        found = torch.stack(
            [(largest / seen.nanmedian()).float(), (where % length).float(), token.to(r.device).float()]
        )
        if self._worst is None:
            self._worst = torch.zeros_like(found)
        self._worst = torch.where(found[0] > self._worst[0], found, self._worst)  # NaN > x is False

    def pending(self) -> Tensor:
        """What was gathered since the last `drop`: count, FIELDS, non-finite batches, worst token. [10] float32"""
        device = self.module.gate.device
        parts = ((self._sums, 7), (self._worst, 3))
        return torch.cat([torch.zeros(n, device=device) if t is None else t.to(device) for t, n in parts])

    def drop(self) -> None:
        """Forget what was gathered: it has been committed, or its step did not happen."""
        self._sums = self._worst = None


def stride(tokens: int, length: int) -> int:
    """Every how many tokens one is looked at, so that a large forward costs no more than 1,024 tokens.

    Prime to the sequence length: the sample then meets every position alike, and the first token of a sequence,
    which is the massive one where there is one, not more often than any other.
    """
    every = -(-tokens // _SAMPLE)
    while math.gcd(every, length) != 1:
        every += 1
    return every


class Average:
    """Bias-corrected moving averages of several rows at once. Values are float32, [rows, columns]."""

    def __init__(self, rows: int, columns: int, decay: float) -> None:
        self.decay = decay
        self.total = torch.zeros(rows, columns)
        self.weight = torch.zeros(rows, 1)

    def update(self, means: Tensor, valid: Tensor) -> None:
        """Enter one step's means. Rows that are not valid (no finite token in this step) stay as they are."""
        self.total, self.weight = self.total.to(means.device), self.weight.to(means.device)
        keep = torch.where(valid, self.decay, 1.0)[:, None]
        self.total = keep * self.total + (1 - keep) * torch.where(valid[:, None], means, 0.0)
        self.weight = keep * self.weight + (1 - keep)

    def value(self) -> Tensor:
        """Σ / weight; NaN for rows that never got a value."""
        return self.total / self.weight


def gather(rows: Tensor) -> Tensor:
    """`rows` of every rank, [ranks, ...]: the same on all of them, so that what is made of it is the same, too."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows[None]
    found = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(found, rows.contiguous())
    return torch.stack(found)


def most_outstanding(found: Tensor) -> Tensor:
    """Of several worst tokens of each site the one that stands out most. found: [N, sites, 3] -> [sites, 3]"""
    return found[found[..., 0].argmax(0), torch.arange(found.shape[1], device=found.device)]


def spread(averages: Tensor) -> Tensor:
    """The standard deviation of log r over tokens, from the averages [sites, FIELDS] -> [sites]."""
    return (averages[:, 3] - averages[:, 2] ** 2).clamp(min=0).sqrt()


def scale(averages: Tensor, calibration: str) -> Tensor:
    """c of every site from its averages [sites, FIELDS] -> [sites]."""
    if calibration == "log":
        return torch.exp(-averages[:, 2])
    return averages[:, 0] / (averages[:, 1] + 1e-12)


def refuse_massive(found: dict[str, list[float]], config: TaperConfig) -> None:
    """Raise for the token that stands out most, if it stands above `massive_ratio` times its site's median.

    found: (r / median, position, token id) of each site's worst token; an id of −1 is not known.

    Raises:
        MassiveTokenError: naming site, position and token id.
    """
    if config.allow_massive or not found:
        return
    name, (ratio, position, token) = max(found.items(), key=lambda item: item[1][0])
    if not ratio > config.massive_ratio or math.isnan(ratio):
        return
    which = f"token id {int(token)}" if token >= 0 else "a token"
    raise MassiveTokenError(
        f"{name}: {which} at position {int(position)} had a scale of {ratio:.1f} times the site's median during "
        f"warm-up (massive_ratio={config.massive_ratio:g}); with a fixed scale such a token swamps the layer. "
        "Leave the norm in place with keep=(...), or go on all the same with allow_massive=True"
    )
