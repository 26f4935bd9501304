"""The models that a benchmark compares: copies of one model that differ in nothing but its norms.

    stock           the model as transformers runs it
    functional      every norm by `torch.nn.functional`: what a careful user would run instead of the library's
    unfused         the scales of the removed norms as products of their own, c γ̃ · h
    folded          the same scales in the weights that read them
    folded-fused    folded, and linear maps that read one tensor made one; missing where none do, as in GPT-2

`stock-again` is a second copy of stock. Its ratio should be 1.00, and how far it is from that is the noise.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tapernorm import hub, layout
from tapernorm.config import Arm, TaperConfig
from tapernorm.convert import get_controller, release, restore_, taper_
from tapernorm.fold import fold_
from tapernorm.modules import taper_norms
from tapernorm.probe import Norm, gain
from tapernorm.sites import default_example, find_sites, run

VARIANTS = ("stock", "functional", "unfused", "folded", "folded-fused")
AGAIN = "stock-again"


class FunctionalNorm(nn.Module):
    """The same norm by `torch.nn.functional`: what a careful user would run instead of the library's."""

    def __init__(self, norm: nn.Module, probed: Norm, width: int) -> None:
        super().__init__()
        dtype = next((p.dtype for p in norm.parameters()), torch.float32)
        self.weight = nn.Parameter(gain(norm, probed, width).detach().to(dtype), requires_grad=False)
        bias = getattr(norm, probed.bias) if probed.bias else None
        self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False) if bias is not None else None
        self.kind, self.eps, self.shape = probed.kind, probed.eps, (width,)

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(h, self.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(h, self.shape, self.weight, self.eps)


@torch.no_grad()
def variants(
    model: nn.Module, arm: Arm = "internal", keep: Iterable[str] = (), again: bool = False
) -> dict[str, nn.Module]:
    """Copies of `model` that differ in their norms only.

    Args:
        model: a tapered model at the end of its taper, of which the unfused and folded variants are the same
            function; or any other, whose unfused and folded variants are for speed alone (`_calibrated`).
        arm, keep: for a model that is not tapered, as in `TaperConfig`; a tapered one brings its own.
        again: also a second copy of the stock model, the measure of the benchmark's own noise.
    """
    controller = get_controller(model)
    config = controller.config if controller else TaperConfig(arm=arm, keep=tuple(keep), anchor_weight=0.0)
    stock = copy.deepcopy(model).eval()
    if controller is not None:
        restore_(stock)
    made = {"stock": stock, "functional": copy.deepcopy(stock)}
    for site in find_sites(stock):
        if site.probed is not None:
            norm = FunctionalNorm(stock.get_submodule(site.name), site.probed, site.width)
            made["functional"].set_submodule(site.name, norm.eval())
    done = controller is not None and controller.phase == "done"
    made["unfused"] = copy.deepcopy(model).eval() if done else _calibrated(copy.deepcopy(stock), config)
    made["folded"] = copy.deepcopy(made["unfused"])
    fold_(made["folded"])
    fused = copy.deepcopy(made["unfused"])
    if fold_(fused, fuse=True).fused:
        made["folded-fused"] = fused
    release(made["unfused"])  # a hook that only training needs would be a break in every compiled graph
    if again:
        made[AGAIN] = copy.deepcopy(stock)
    return made


def _calibrated(model: nn.Module, config: TaperConfig) -> nn.Module:
    """`model` tapered to gate 0 with scales measured on random tokens, and a tenth of them.

    Without training nothing holds the scale of the residual, and a gated MLP is quadratic: at the full scale some
    twenty layers overflow. At a tenth each block adds little to the residual.
    """
    steps = {"warmup_steps": 1, "taper_steps": 1, "allow_massive": True, "anchor_weight": 0.0}
    bare = {"uniformity_weight": 0.0, "cap": None, "stagger": 0.0, "guard_margin": None}
    controller = taper_(model, dataclasses.replace(config, **steps, **bare))
    model.train()
    with torch.enable_grad():  # a forward without gradients is none of training, and gives no statistics
        run(model, default_example(model, batch=2, length=16))
    model.eval()
    controller.step()
    controller.step()
    for module in taper_norms(model).values():
        module.fixed_norm.c.mul_(0.1)
    return model


def stock_like(source: str) -> nn.Module:
    """The stock model of a source's config: itself, or, for a norm-free folder, one with random weights.

    Speed does not depend on the weights, and a folded model has no norms left to compare with.
    """
    model, _ = hub.from_pretrained(source)
    stock = getattr(type(model), "stock_class", None)
    if stock is None:
        return model
    config = layout.stock_config(model.config)
    return stock._from_config(config, dtype=model.dtype)
