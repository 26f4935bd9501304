"""From what passes a norm during warm-up to a fixed branch that is a full matrix (`TaperConfig.fixed="linear"`).

    A = argmin Σ ‖(h/r − A h) / r‖² + λ s ‖A − c I‖²  =  (Σ n̂ n̂ᵀ/r + λ s c I)(Σ n̂ n̂ᵀ + λ s I)⁻¹,    n̂ = h/r

with h − μ and σ for a layer norm, c the site's calibrated scale, s the mean of the diagonal of Σ n̂ n̂ᵀ. Then
Γ̃ = diag(γ) A / c, so that the branch is c · Γ̃ h, and Γ̃ = diag(γ), the diagonal branch, for λ = ∞. λ is chosen on one
token in four, which the others are fitted to predict; the fit that is used has all of them.

What it is for: tokens whose scales differ. A scalar serves those of one scale; a matrix can tell them apart by the
directions that they differ in.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tapernorm.modules import TaperNorm
from tapernorm.ridge import choose

_HELD_OUT = 4  # one token in so many chooses λ


class LinearBranches:
    """Σ n̂ n̂ᵀ and Σ n̂ n̂ᵀ/r at every site, averaged over the optimizer steps of warm-up like the other statistics.

    Four matrices a site, [4, D, D] float32: both sums over three tokens in four, and over the fourth.

    Args:
        sites: the tapered norms by name.
        decay: of the moving averages, per optimizer step.
    """

    def __init__(self, sites: dict[str, TaperNorm], decay: float) -> None:
        self.sites, self.decay = sites, decay
        self._total: dict[str, Tensor] = {}
        self._step: dict[str, Tensor] = {}  # of this optimizer step
        self._tokens: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, name: str, x: Tensor, mask: Tensor | None) -> None:
        """Note tokens of one training forward. x: [N, D], h or h − μ; mask: [N], False for padding."""
        if mask is not None:
            x = x[mask.to(x.device)]
        with torch.autocast(x.device.type, enabled=False):
            r = torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.sites[name].probed.eps)
            n = x / r
            held = torch.arange(len(n), device=n.device) % _HELD_OUT == 0
            parts = [(n[rows], (n / r)[rows]) for rows in (~held, held)]
            sums = torch.stack([product for a, b in parts for product in (a.T @ a, a.T @ b)]).float()
        if not bool(torch.isfinite(sums).all()):
            return
        count = torch.tensor(float(len(x)), device=x.device)
        self._step[name] = self._step[name] + sums if name in self._step else sums
        self._tokens[name] = self._tokens[name] + count if name in self._tokens else count

    def commit(self) -> None:
        """Enter this step's sums, of all ranks, into the averages.

        Raises:
            ValueError: the parameters are sharded (FSDP2).
        """
        for name, module in self.sites.items():
            weight = module.fixed_norm.weight
            if isinstance(weight, DTensor):
                raise ValueError(f'{name}: fixed="linear" needs whole parameters, and these are sharded; use DDP')
            width = module.width
            step = self._step.get(name, torch.zeros(4, width, width, device=weight.device))
            tokens = self._tokens.get(name, torch.zeros((), device=weight.device))
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(step)
                dist.all_reduce(tokens)
            if float(tokens) == 0:
                continue
            mean = (1 - self.decay) * step / tokens
            self._total[name] = mean if name not in self._total else self.decay * self._total[name].to(mean) + mean
        self.drop()

    def drop(self) -> None:
        """Forget what was gathered for this optimizer step."""
        self._step, self._tokens = {}, {}

    @torch.no_grad()
    def solve(self, name: str) -> Tensor:
        """Γ̃ of a site, [D, D], float64; diag(γ) where no fit is better than that."""
        module = self.sites[name]
        gain = module.gain().double()
        if name not in self._total or not (c := float(module.fixed_norm.c)) > 0:
            return torch.diag(gain)
        gram, cross, held_gram, held_cross = self._total[name].double()
        # Of what c I misses: n̂/r − c n̂.
        step, *_ = choose((gram, cross - c * gram), (held_gram, held_cross - c * held_gram))
        a = c * torch.eye(module.width, dtype=gain.dtype, device=gain.device)
        if step is not None:
            a = a + step.T.to(gain.device)
        return gain[:, None] * a / c

    def state(self) -> dict[str, Any]:
        """For a checkpoint that is written in warm-up."""
        return {f"map.{name}": total.clone() for name, total in self._total.items()}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._total = {name: state[f"map.{name}"].clone() for name in self.sites if f"map.{name}" in state}
        self.drop()

    def forget(self) -> None:
        """At the end of warm-up: the sums are as large as the model's own maps."""
        self._total = {}
        self.drop()
