"""What a model at gate 0 must not do before it is folded: hold a token by the seat belt, or lose one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.held import Held
from tapernorm.logits import token_losses
from tapernorm.modules import TaperNorm, first_input
from tapernorm.sites import run
from tapernorm.statistics import token_scale

_LOST = 3.0  # times the loss of a uniform guess: no text makes a sound model so sure of the wrong token
_SHARE = 1e-3  # of tokens that may be lost


class FoldError(RuntimeError):
    """A refused fold. The model is as it was before."""


def refuse_held(model: nn.Module, sites: Mapping[str, TaperNorm | Held], inputs: Any) -> None:
    """The seat belt (`TaperConfig.cap`) is gone at gate 0: no token may be one that it would still hold."""
    largest: dict[str, float] = {}

    def watch(name: str, site: TaperNorm | Held) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            c, kind, eps = site.ruler
            largest[name] = float((token_scale(first_input(args, kwargs), kind, eps) * c).max())

        return hook

    belted = {name: site for name, site in sites.items() if site.cap is not None}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(watch(name, site), with_kwargs=True)
        for name, site in belted.items()
    ]
    try:
        if belted:
            run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    for name, value in largest.items():
        if value > (cap := belted[name].cap or math.inf):
            raise FoldError(
                f"{name}: a token of the example has r·c = {value:.3g}, above cap={cap:g}: in the taper the seat belt "
                "held such tokens, and without it they were never trained for. Train longer at gate 0, taper without a "
                "cap, or pass an example that is more like real use"
            )


def refuse_lost(model: nn.Module, logits: Tensor, inputs: Any) -> None:
    """A mean hides the tail: a few tokens whose scale ran away, each at a loss of hundreds.

    Nothing is known, and nothing refused, unless the example has `labels` [B, T] that are its own `input_ids` where
    they are not negative: next-token losses mean nothing for a classifier of tokens or an encoder-decoder.

    Args:
        logits: [B, T, V] of the model on the example.
        inputs: the example.

    Raises:
        FoldError: more than one token in a thousand has a loss above three times that of a uniform guess, or one
            that is not finite.
    """
    labels, ids = (inputs.get(k) if isinstance(inputs, Mapping) else None for k in ("labels", "input_ids"))
    if not isinstance(labels, Tensor) or not isinstance(ids, Tensor) or logits.dim() != 3:
        return
    if labels.shape != logits.shape[:2] or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    if labels.shape != ids.shape or not torch.equal(labels[labels >= 0], ids[labels >= 0]):
        return
    losses = token_losses(logits, labels)[labels[:, 1:].flatten().cpu() >= 0]
    bound = _LOST * math.log(logits.shape[-1])
    lost = int((~(losses <= bound)).sum())  # NaN is lost, too
    if lost > _SHARE * len(losses):
        worst = float(torch.nan_to_num(losses, nan=torch.inf).max())
        raise FoldError(
            f"{lost} of {len(losses)} tokens of the example have a loss above {bound:.3g} nats (the largest: "
            f"{worst:.3g}), three times that of a guess: their scale ran away when the norms went. Look at the "
            "report's tail, keep the norms where it begins (keep=...), train longer, or fold all the same with "
            "allow_tail=True"
        )
