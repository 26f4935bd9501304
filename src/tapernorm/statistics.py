"""From what passes a norm during warm-up to its fixed scale c.

For one token h with scale r (σ for a layer norm, after the mean is taken off) and energy e = ‖h γ‖²:

    lstsq:   c = E[e / r] / E[e]             the paper's, argmin E‖N(h) − c h γ‖²
    robust:  c = E[e / r³] / E[e / r²]       the same with each token weighted by 1/r²
    log:     c = exp(−E[log r])              the optimum of (log r·c)²

Sums are taken over the tokens of one optimizer step: over micro-batches and ranks, without padding. Each step's
means enter a bias-corrected moving average; c = num / (den + 1e-12). (arXiv 2602.10408, section 3.)
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor

from tapernorm.config import TaperConfig
from tapernorm.modules import TaperNorm

_FIELDS = ("num", "den", "log_r", "r")  # what is averaged, in the order of the sums
_MEDIAN_TOKENS = 4096  # a strided sample this large stands for the batch where a median is taken


class MassiveTokenError(RuntimeError):
    """A token's scale stood far above its site's median in warm-up: a fixed scale cannot serve both."""


@dataclasses.dataclass
class Inputs:
    """What the model was last called with, as far as statistics need it. Written by a hook on the model."""

    mask: Tensor | None = None  # [B, T], nonzero for real tokens
    ids: Tensor | None = None  # [B, T]

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


class SiteStatistics:
    """The sums of one site over one optimizer step, and the worst token of the warm-up.

    Sums are plain float32 tensors on the site's device, not registered buffers: DistributedDataParallel would
    overwrite each rank's own with those of rank 0.
    """

    def __init__(self, module: TaperNorm, config: TaperConfig, inputs: Inputs) -> None:
        self.module = module
        self.calibration = config.calibration
        self.inputs = inputs
        self._sums: Tensor | None = None  # [6]: count, num, den, log r, r, non-finite batches
        self._worst: Tensor | None = None  # [3]: r / median, position, token id (−1 where not known)

    @torch.no_grad()
    def __call__(self, h: Tensor) -> None:
        """Add the tokens of one training forward. h: [..., D]"""
        norm = self.module.probed
        with torch.autocast(h.device.type, enabled=False):
            x = h.detach().to(torch.promote_types(h.dtype, torch.float32)).reshape(-1, h.shape[-1])
            if norm.kind == "layer":
                x = x - x.mean(-1, keepdim=True)
            square = x.pow(2)
            r = torch.sqrt(square.mean(-1) + norm.eps)
            if self.calibration == "log":
                num = den = torch.ones_like(r)
            else:
                energy = square @ self.module.gain().to(x.dtype).pow(2)
                den = energy / r.pow(2) if self.calibration == "robust" else energy
                num = den / r
            mask = self.inputs.mask_for(r.numel())
            rows = torch.stack([torch.ones_like(r), num, den, r.log(), r])
            if mask is not None:  # where, not times: padding may hold anything, and 0 · inf is not 0
                rows = torch.where(mask, rows, 0.0)
            sums = rows.sum(-1).float()
            finite = torch.isfinite(sums).all()
            sums = torch.cat([torch.where(finite, sums, 0.0), (~finite).float().reshape(1)])
            self._sums = sums if self._sums is None else self._sums + sums
            self._note_worst(r, mask, h.shape)

    def _note_worst(self, r: Tensor, mask: Tensor | None, shape: torch.Size) -> None:
        stride = max(1, r.numel() // _MEDIAN_TOKENS)
        # masked tokens become NaN, which nanmedian leaves out
        seen = r if mask is None else torch.where(mask, r, torch.nan)
        ratio = torch.where(torch.isfinite(seen), seen, 0.0) / seen[::stride].nanmedian()
        index = ratio.argmax()
        ids = self.inputs.ids
        token = ids.reshape(-1)[index] if ids is not None and ids.numel() == r.numel() else torch.tensor(-1.0)
        length = shape[-2] if len(shape) > 2 else r.numel()
        found = torch.stack([ratio[index].float(), (index % length).float(), token.to(r.device).float()])
        if self._worst is None:
            self._worst = torch.zeros_like(found)
        self._worst = torch.where(found[0] > self._worst[0], found, self._worst)  # NaN > x is False

    def restart(self, worst: Tensor | None) -> None:
        """No sums, and the worst token of a saved state."""
        self._sums = None
        self._worst = None if worst is None else worst.to(self.module.gate.device, copy=True)

    def take(self) -> Tensor:
        """The sums since the last call, [6] float32; they start at zero again."""
        sums, self._sums = self._sums, None
        return torch.zeros(6, device=self.module.gate.device) if sums is None else sums

    def worst(self) -> tuple[float, int, int]:
        """(r / median, position, token id) of the token that stood out most since warm-up began."""
        if self._worst is None:
            return 0.0, -1, -1
        ratio, position, token = self._worst.tolist()
        return ratio, int(position), int(token)


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


def all_reduce(sums: Tensor) -> Tensor:
    """The sum over all ranks; `sums` itself in a single process."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(sums)
    return sums


def scale(averages: Tensor, calibration: str) -> Tensor:
    """c of every site from its averages [sites, 4] (num, den, log r, r) -> [sites]."""
    if calibration == "log":
        return torch.exp(-averages[:, 2])
    return averages[:, 0] / (averages[:, 1] + 1e-12)


def refuse_massive(found: dict[str, tuple[float, int, int]], config: TaperConfig) -> None:
    """Raise for the token that stands out most, if it stands above `massive_ratio` times its site's median.

    Raises:
        MassiveTokenError: naming site, position and token id.
    """
    if config.allow_massive or not found:
        return
    name, (ratio, position, token) = max(found.items(), key=lambda item: item[1][0])
    if not ratio > config.massive_ratio or math.isnan(ratio):
        return
    which = f"token id {token}" if token >= 0 else "a token"
    raise MassiveTokenError(
        f"{name}: {which} at position {position} had a scale of {ratio:.1f} times the site's median during "
        f"warm-up (massive_ratio={config.massive_ratio:g}); with a fixed scale such a token swamps the layer. "
        "Leave the norm in place with keep=(...), or go on all the same with allow_massive=True"
    )
