"""Models that never had a norm: a squashing function in its place, or nothing.

    DyT:   γ · tanh(α h) + β            (Zhu et al., arXiv 2503.10622)
    Derf:  γ · erf(α h + s) + β         (Chen et al., arXiv 2512.10938)
    none:  h, with each branch's output times a learned number that begins at 0, or divided by sqrt(2 L) once

h: [..., D]; γ, β: [D]; α, s: one number a site. No reduction over D, so no statistics of a token; but tanh and erf do
not fold into anything.

All three are for a model that is to be trained from scratch. A fresh language model's embedding is some fifty times
smaller than what a norm makes of it, and a squashing function leaves it so small; DyT's authors put a learned number
behind it that begins at sqrt(D). At the widths of their models that makes the residual about 1, at a width of 64 it
does not, so here the number begins at what makes the residual's mean square 1 (`scale_embedding_`).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tapernorm.probe import gain
from tapernorm.sites import NormSite, find_sites

BRANCHES = ("*.o_proj", "*.down_proj", "*.attn.c_proj", "*.mlp.c_proj")  # of Llama's kind and of GPT-2


class DyT(nn.Module):
    """γ · tanh(α h) + β. weight: γ, bias: β, [D] each; alpha: where α begins."""

    def __init__(self, weight: Tensor, bias: Tensor, alpha: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())
        self.alpha = nn.Parameter(torch.full((1,), alpha, dtype=weight.dtype, device=weight.device))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.alpha * h) * self.weight + self.bias


class Derf(DyT):
    """γ · erf(α h + s) + β. shift: where s begins."""

    def __init__(self, weight: Tensor, bias: Tensor, alpha: float = 0.5, shift: float = 0.0) -> None:
        super().__init__(weight, bias, alpha)
        self.shift = nn.Parameter(torch.full((1,), shift, dtype=weight.dtype, device=weight.device))

    def forward(self, h: Tensor) -> Tensor:
        return torch.erf(self.alpha * h + self.shift) * self.weight + self.bias


class Scaled(nn.Module):
    """A linear map times one learned number: a · (W h + b)."""

    def __init__(self, linear: Any, start: float) -> None:
        super().__init__()
        self.linear = linear
        self.scale = nn.Parameter(torch.full((1,), start, dtype=linear.weight.dtype, device=linear.weight.device))

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h) * self.scale


@torch.no_grad()
def dyt_(model: nn.Module, alpha: float = 0.5, example: Any = None) -> list[str]:
    """Put a `DyT` in the place of every norm. In place. Returns the names.

    γ and β are the norm's gain and bias (1 and 0 where it has none). 0.5 is where the papers begin α; for Llama DyT's
    begins at 1.0 at their smallest width, 1,024, and lower at larger ones.

    Raises:
        ValueError: the model has no norms, or one of which nobody knows what it computes.
    """
    return _replace(model, example, lambda weight, bias: DyT(weight, bias, alpha))


@torch.no_grad()
def derf_(model: nn.Module, alpha: float = 0.5, shift: float = 0.0, example: Any = None) -> list[str]:
    """Put a `Derf` in the place of every norm, as `dyt_` does. In place. Returns the names.

    Raises:
        ValueError: as `dyt_`.
    """
    return _replace(model, example, lambda weight, bias: Derf(weight, bias, alpha, shift))


@torch.no_grad()
def no_norms_(
    model: nn.Module,
    residual: Literal["learned", "depth"] = "learned",
    branches: Iterable[str] = BRANCHES,
    example: Any = None,
) -> list[str]:
    """Leave every norm out. In place. Returns the names of the norms.

    Without norms a residual grows with every block, and a fresh model of some depth does not train. So each branch's
    output is multiplied by a learned number that begins at 0, with the whole model at the identity (`"learned"`), or
    its weights are divided by sqrt(number of branches) once (`"depth"`).

    Args:
        model: a fresh model, whose gains are 1 and whose norms' biases are 0: they are left out, too.
        branches: glob patterns of the linear maps that write to the residual.

    Raises:
        ValueError: as `dyt_`; no module matches `branches`; a norm has a gain that is not 1 or a bias that is not 0.
    """
    sites = _sites(model, example)
    for site in sites:
        weight, bias = _gain_and_bias(model, site)
        if not (weight == 1).all() or bias.any():
            raise ValueError(
                f"{site.name} has been trained: without it the model is another one; begin with a fresh one"
            )
    names = [name for name, _ in model.named_modules() if any(fnmatch.fnmatch(name, p) for p in branches)]
    if not names:
        raise ValueError(
            f"no module matches {', '.join(branches)}; name the maps that write to the residual: branches="
        )
    for site in sites:
        model.set_submodule(site.name, nn.Identity())
    for name in names:
        linear: Any = model.get_submodule(name)
        if residual == "learned":
            model.set_submodule(name, Scaled(linear, 0.0))
        else:
            linear.weight.mul_(len(names) ** -0.5)
    return [site.name for site in sites]


@torch.no_grad()
def merge_(model: nn.Module) -> int:
    """Multiply the numbers that `no_norms_` added into the weights before them. In place. Returns how many."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Scaled)]
    for name, module in found:
        for parameter in module.linear.parameters():
            parameter.mul_(module.scale)
        model.set_submodule(name, module.linear)
    return len(found)


@torch.no_grad()
def scale_embedding_(model: Any, start: Literal["unit", "sqrt"] = "unit") -> float:
    """Put a learned number behind the token embedding, the parameter `scale` of it. In place. Returns where it begins.

    A tied head is not multiplied by it. It is a hook, so it is not there in a model that is saved and loaded again.

    Args:
        start: `"unit"`, the inverse of the embedding's root mean square, or `"sqrt"`, sqrt(D).

    Raises:
        ValueError: the embedding has one already.
    """
    embedding = model.get_input_embeddings()
    if hasattr(embedding, "scale"):
        raise ValueError("the embedding has a learned scale already")
    weight = embedding.weight
    value = math.sqrt(weight.shape[1]) if start == "sqrt" else float(weight.pow(2).mean().rsqrt())
    embedding.register_parameter(
        "scale", nn.Parameter(torch.full((1,), value, dtype=weight.dtype, device=weight.device))
    )
    embedding.register_forward_hook(_times_scale)
    return value


def _times_scale(module: Any, args: Any, output: Tensor) -> Tensor:
    return output * module.scale


def _replace(model: nn.Module, example: Any, make: Callable[[Tensor, Tensor], nn.Module]) -> list[str]:
    sites = _sites(model, example)
    for site in sites:
        model.set_submodule(site.name, make(*_gain_and_bias(model, site)).train(model.training))
    return [site.name for site in sites]


def _sites(model: nn.Module, example: Any) -> list[NormSite]:
    sites = find_sites(model, example)
    if not sites:
        raise ValueError("the model has no normalization layers that could be found: nothing to replace")
    odd = next((site for site in sites if site.probed is None), None)
    if odd is not None:
        raise ValueError(f"{odd.name} cannot be replaced: {odd.reason}")
    return sites


def _gain_and_bias(model: nn.Module, site: NormSite) -> tuple[Tensor, Tensor]:
    """γ and β of a norm in its own dtype, 1 and 0 where it has none. [D] each"""
    norm = model.get_submodule(site.name)
    assert site.probed is not None  # _sites() refuses others
    weight = gain(norm, site.probed, site.width)
    like = next(norm.parameters(), next(model.parameters()))
    weight = weight.to(like.device, like.dtype)
    bias = getattr(norm, site.probed.bias).reshape(site.width) if site.probed.bias else torch.zeros_like(weight)
    return weight, bias
