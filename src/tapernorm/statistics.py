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
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tapernorm.config import TaperConfig
from tapernorm.modules import TaperNorm, in_backward, uncompiled

FIELDS = ("num", "den", "log_r", "log_r²", "r")  # what is averaged, in the order of the sums
_SAMPLE = 1024  # tokens of one forward that are looked at; more are sampled
_KEPT = 64  # forwards of one step whose tokens are kept until it ends


class MassiveTokenError(RuntimeError):
    """A token's scale stood far above its site's median in warm-up: a fixed scale cannot serve both."""


@dataclasses.dataclass
class Inputs:
    """What the model was last called with, as far as statistics need it. `note` is a forward pre-hook on the model."""

    mask: Tensor | None = None  # [B, T], nonzero for real tokens
    ids: Tensor | None = None  # [B, T]
    # Whether gradients were on when the model was entered. Not asked at the norms: the first pass of reentrant
    # checkpointing has them off.
    training: bool = True

    @uncompiled
    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward():
            return
        named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) if args else {}
        given = named | kwargs
        mask, ids = given.get("attention_mask"), given.get("input_ids", args[0] if args else None)
        self.mask = mask if isinstance(mask, Tensor) else None
        self.ids = ids if isinstance(ids, Tensor) and not ids.is_floating_point() else None
        self.training = torch.is_grad_enabled()

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


def _terms(energy: Tensor, r: Tensor, calibration: str) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of c for each token. energy: ‖h γ‖²; both [...]"""
    if calibration == "log":  # c is taken from log r
        return torch.ones_like(r), torch.ones_like(r)
    den = energy / r.pow(2) if calibration == "robust" else energy
    return den / r, den


@torch.no_grad()
def robust_scale(h: Tensor, gain: Tensor, kind: str, eps: float) -> Tensor:
    """The robust c of these tokens alone. h: [..., D]; gain: [D] -> []"""
    x = h.to(torch.promote_types(h.dtype, torch.float32))
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    energy = x.pow(2) @ gain.to(x.dtype).pow(2)
    num, den = _terms(energy, token_scale(h, kind, eps), "robust")
    return num.sum() / den.sum()


@dataclasses.dataclass
class _Forward:
    """The tokens of one forward at one site, every `every`-th of them; mask and ids are the model's, of all tokens."""

    square: Tensor  # mean square of h (less its mean), [N]
    energy: Tensor  # ‖h γ‖², [N]
    tokens: int
    length: int
    every: int
    mask: Tensor | None
    ids: Tensor | None

    def kind(self) -> tuple[Any, ...]:
        """Forwards of one kind, at several sites, are added up together."""
        same = (id(self.mask), id(self.ids), self.tokens, self.length, self.every)
        return (*same, self.square.shape, self.square.dtype, self.square.device)


class SiteStatistics:
    """What passes one site in the forwards of one optimizer step, two numbers a token; `pending` adds it up.

    Not added up at the site: a dozen operations on a thousand numbers, at each of a hundred sites, cost more than the
    numbers do. Plain tensors on the site's device, not registered buffers: DistributedDataParallel would overwrite each
    rank's own with those of rank 0.
    """

    def __init__(self, module: TaperNorm, config: TaperConfig, inputs: Inputs) -> None:
        self.module = module
        self.calibration = config.calibration
        self.inputs = inputs
        self.note: Callable[[Tensor, Tensor | None], None] | None = None  # also given the tokens and their mask
        self.forwards: list[_Forward] = []
        self.earlier: Tensor | None = None  # the sums of forwards that are not kept any more, [10]

    @torch.no_grad()
    def __call__(self, h: Tensor) -> None:
        """Note the tokens of one training forward. h: [..., D]"""
        if not self.inputs.training:
            return
        norm, width = self.module.probed, h.shape[-1]
        tokens, length = h.numel() // width, h.shape[-2] if h.dim() > 2 else h.numel() // width
        every = stride(tokens, length)
        with torch.autocast(h.device.type, enabled=False):
            x = h.detach().reshape(-1, width)[::every]
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            if norm.kind == "layer":
                x = x - x.mean(-1, keepdim=True)
            squares = x.pow(2)
            square = squares.mean(-1)
            # Now: by the time of the sums the optimizer has changed the gain.
            energy = square if self.calibration == "log" else squares @ self.module.gain().to(x.dtype).pow(2)
        if self.note is not None:
            mask = self.inputs.mask_for(tokens)
            self.note(x, None if mask is None else mask[::every])
        self.forwards.append(_Forward(square, energy, tokens, length, every, self.inputs.mask, self.inputs.ids))
        if len(self.forwards) == _KEPT:
            self.earlier, self.forwards = pending([self])[0], []

    def drop(self) -> None:
        """Forget what was gathered: it has been committed, or its step did not happen."""
        self.forwards, self.earlier = [], None


@torch.no_grad()
def pending(sites: Sequence[SiteStatistics]) -> Tensor:
    """What was gathered since the last `drop`: count, FIELDS, non-finite batches, and the worst token's r / median,
    position and id (−1 where not known). [sites, 10], float32, on the first site's device."""
    device = sites[0].module.gate.device
    rows = torch.zeros(len(sites), 10, device=device)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, site in enumerate(sites):
        if site.earlier is not None:
            rows[number] = site.earlier.to(device)
        groups.setdefault(tuple(forward.kind() for forward in site.forwards), []).append(number)
    for kinds, members in groups.items():
        for at in range(len(kinds)):
            found = _added_up([sites[number] for number in members], at).to(device)
            old = rows[members]
            worse = found[:, 7:8] > old[:, 7:8]  # NaN > x is False
            rows[members] = torch.cat([old[:, :7] + found[:, :7], torch.where(worse, found[:, 7:], old[:, 7:])], 1)
    return rows


def _added_up(sites: list[SiteStatistics], at: int) -> Tensor:
    """The sums of forward number `at` at sites that it passed alike. [sites, 10]"""
    forwards = [site.forwards[at] for site in sites]
    first = forwards[0]
    square, energy = torch.stack([f.square for f in forwards]), torch.stack([f.energy for f in forwards])
    eps = torch.tensor([[site.module.probed.eps] for site in sites], dtype=square.dtype, device=square.device)
    r = torch.sqrt(square + eps)  # [sites, N]
    log = r.log()
    num, den = _terms(energy, r, sites[0].calibration)
    fields = torch.stack([torch.ones_like(r), num, den, log, log * log, r], 1)
    seen = r
    if (mask := Inputs(first.mask).mask_for(first.tokens)) is not None:
        mask = mask[:: first.every].to(r.device)
        fields = torch.where(mask, fields, 0.0)  # where, not times: padding may hold anything, and 0 · inf is not 0
        seen = torch.where(mask, r, torch.nan)  # which nanmedian leaves out
    sums = fields.sum(-1).float() * first.every  # as many as it stands for
    finite = torch.isfinite(sums).all(1, keepdim=True)
    largest, index = torch.where(torch.isfinite(seen), seen, 0.0).max(1)
    where = index * first.every
    known = first.ids is not None and first.ids.numel() == first.tokens
    token = first.ids.reshape(-1).to(r.device)[where] if known and first.ids is not None else torch.full_like(where, -1)
    ratio = (largest / seen.nanmedian(1).values).float()
    worst = torch.stack([ratio, (where % first.length).float(), token.float()], 1)
    return torch.cat([torch.where(finite, sums, 0.0), (~finite).float(), worst], 1)


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
