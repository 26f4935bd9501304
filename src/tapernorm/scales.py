"""What passes the norms of a model: the scale r of every token at every site, and who stands out."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.modules import evaluation, first_input
from tapernorm.sites import NormSite
from tapernorm.statistics import token_scale


def token_scales(
    model: nn.Module, sites: list[NormSite], ids: Tensor, batch: int = 8, progress: Callable[[], None] | None = None
) -> dict[str, Tensor]:
    """r (σ for a layer norm) of every token at the input of every site. ids: [N, T] -> [N, T] each, float32.

    A norm that does not see the text token by token (one over heads, or over an image) is left out.
    """
    found: dict[str, list[Tensor]] = {}
    wanted = {site.name: site for site in sites if site.probed is not None}

    def note(site: NormSite, module: nn.Module, args: Any, kwargs: Any) -> None:
        h = first_input(args, kwargs).detach()
        assert site.probed is not None
        if h.dim() == 3:
            found.setdefault(site.name, []).append(token_scale(h, site.probed.kind, site.probed.eps).float().cpu())

    with contextlib.ExitStack() as stack, evaluation(model):
        for name, site in wanted.items():
            module = model.get_submodule(name)
            handle = module.register_forward_pre_hook(functools.partial(note, site), with_kwargs=True)
            stack.callback(handle.remove)
        for rows in ids.split(batch):
            model(input_ids=rows.to(next(model.parameters()).device), use_cache=False, logits_to_keep=1)
            if progress is not None:
                progress()
    return {name: torch.cat(parts) for name, parts in found.items() if torch.cat(parts).shape == ids.shape}


def outstanding(scales: dict[str, Tensor], ids: Tensor, ratio: float) -> tuple[Counter[int], Counter[int]]:
    """How often each token id, and each position, stands above `ratio` times the median at some site."""
    out = torch.stack([r / r.median() > ratio for r in scales.values()]).any(0)
    places = out.nonzero()
    return Counter(ids[out].tolist()), Counter(places[:, 1].tolist())
