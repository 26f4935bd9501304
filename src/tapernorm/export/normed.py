"""A stock checkpoint that computes the norm-free model, for tools that know stock models alone: every norm is there
again and does nothing.

    RMS:    h / sqrt(mean(h²) + eps) · γ,       eps = 4ᵏ ≫ mean(h²),  γ = 2ᵏ      →  h
    Layer:  (h − μ) / sqrt(var(h) + eps) · γ,   the same                          →  h − μ

With eps above 2²⁴ times mean(h²) the sum rounds to eps in float32, and powers of two multiply without rounding: what
comes out is h, bit for bit. Layer norms centre. That changes nothing where all that reads them takes the mean out
itself, W 1 = 0, which is what folding a layer norm leaves. Where folding made a bias for which the stock class has no
place, it goes through the norm's own: β = 1 and W + b 1ᵀ / D, since the centred rest does not see the change of W.

It is no faster: the norms are computed. In float16 neither γ nor h / 2ᵏ fits. A config has one eps for all its norms,
so a model that keeps a norm cannot be written, unless that norm alone reads a linear map: W s and eps s² are then the
same function for every s (norms of queries and keys, norms of a block's output).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.export.decoder import is_decoder, sample_ids
from tapernorm.export.folder import Made
from tapernorm.export.norms import ExportError, Norms
from tapernorm.fuse import apart
from tapernorm.inputs import default_example, run
from tapernorm.layout import layout_of, stock_class, stock_config
from tapernorm.modules import evaluation
from tapernorm.sites import NormSite, find_sites
from tapernorm.trace import Consumer

BOUND = 1e-3  # largest difference over the largest logit
_EXACT, _HEADROOM = 2.0**26, 2.0**10  # above float32's last place; tokens 32 times as large as the largest seen
_BIASES = ("attention_bias", "mlp_bias", "qkv_bias", "use_bias")  # flags of stock configs
_WARNING = (
    "its norms are computed and do nothing: it is no faster than the original, and must not be run in float16; "
    "use it only where a tool knows nothing but stock models"
)


def write(model: Any, tokenizer: Any, norms: Norms, folder: Path, ids: Tensor | None = None) -> Made:
    """A stock folder: config.json, weights, tokenizer.

    Args:
        model: a folded transformers model without norms, but for those that a linear map feeds alone. Not changed.
        ids: [N, T] tokens on which the scale of the residual is measured and the result is checked; None: random ones.

    Raises:
        ValueError: no norm was removed; a norm is kept that cannot be moved; the model has a constant prefix; the stock
            class has no place for a bias, or its norms no gain or another eps than the config's.
        ExportError: the stock model's logits differ.
    """
    if not norms.removed:
        raise ValueError(f"{norms.sentence()}; it is a stock model already")
    if norms.prefix:
        raise ValueError("the model has a constant prefix, and a stock model has no place for its keys and values")
    inputs = _inputs(model, ids)
    sites = _stock_sites(model)
    kept = _movable(norms, sites)
    model = apart(copy.deepcopy(model).eval())
    notes = (_WARNING,)
    if model.dtype == torch.float16:
        notes = (*notes, "the weights were float16 and are float32 in the file")
        model = model.float()
    largest = _largest(model, norms, inputs)
    eps = 4.0 ** math.ceil(math.log(max(largest, 1e-12) * _EXACT * _HEADROOM, 4))
    stock, added = _stock(model, eps)
    _fill(stock, norms, sites, eps)
    _absorb(stock, added, norms, sites)
    for site in kept:
        _scale(stock, site, math.sqrt(eps / site.eps))
    stock.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    again = stock_class(type(model)).from_pretrained(folder, dtype="auto").eval()
    error = _difference(again, model, inputs)
    if not error <= BOUND:
        raise ExportError(
            f"the stock model differs by {error:.1e} of the largest output: what reads its layer norms does not take "
            "the mean out itself, or a norm's input is far larger on some token"
        )
    details = {"eps": eps, "gain": math.sqrt(eps), "largest_mean_square": largest, "rescaled": [s.name for s in kept]}
    return Made({"bound": BOUND, "relative_error": error}, notes, details)


def _inputs(model: Any, ids: Tensor | None) -> dict[str, Any]:
    if ids is not None:
        return {"input_ids": ids[:8]}
    return {"input_ids": sample_ids(model, 4, 32)} if is_decoder(model) else default_example(model, batch=2)


def _difference(made: Any, wanted: Any, inputs: dict[str, Any]) -> float:
    outputs = []
    for model in (made, wanted):
        with evaluation(model):
            out = run(model, inputs)
        outputs.append((out.logits if hasattr(out, "logits") else out[0]).double())
    return float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max())


def _stock_sites(model: Any) -> dict[str, NormSite]:
    """The norms that a stock model of this config has, with their readers, known without weights."""
    with torch.device("meta"):
        fresh = stock_class(type(model))._from_config(stock_config(model.config), dtype=torch.bfloat16).eval()
    return {site.name: site for site in find_sites(fresh)}


def _movable(norms: Norms, sites: dict[str, NormSite]) -> list[NormSite]:
    """The kept norms, each of which stands alone behind a linear map."""
    kept = [sites.get(site.name, site) for site in norms.kept]
    kept = [dataclasses.replace(site, producer=_before(site, sites)) for site in kept]
    for site in kept:
        if site.producer is None:
            raise ValueError(
                f"{site.name} is kept, and a stock config has one epsilon for all norms: with the one that makes the "
                "removed norms do nothing, this one would do nothing either. Remove it too (--arm all), or use a "
                "format that needs no stock class (onnx, pt2)"
            )
    return kept


def _before(site: NormSite, sites: dict[str, NormSite]) -> Consumer | None:
    """The linear map that a norm alone reads. For a norm of queries or keys, the map of the same name beside it, which
    reads a norm itself: the check at the end holds for that too."""
    if site.producer is not None or site.role != "qk":
        return site.producer
    parent, _, name = site.name.rpartition(".")
    wanted = f"{parent}.{name[0]}_proj" if re.fullmatch(r"[qk]_(layer)?norm", name) else None
    links = [link for other in sites.values() for link in other.links if link.owner == wanted]
    return links[0] if links else None


def _largest(model: Any, norms: Norms, inputs: dict[str, Any]) -> float:
    """The largest mean(h²) of a token where a norm was."""
    seen: list[Tensor] = []
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args: seen.append(args[0].detach().double().pow(2).mean(-1).max())
        )
        for name in norms.removed
    ]
    try:
        with evaluation(model):
            run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return float(torch.stack(seen).max())


def _stock(model: Any, eps: float) -> tuple[Any, dict[str, Tensor]]:
    """(a stock model with these weights and this eps, the biases for which it has no place, by linear map)"""
    config = stock_config(model.config)
    config.architectures = None
    fields = [k for k, v in config.to_dict().items() if re.search(r"(eps|epsilon)\Z", k) and isinstance(v, float)]
    for field in fields:
        setattr(config, field, eps)
    layout = layout_of(model)
    if layout["untied"]:
        config.tie_word_embeddings = False
    kind = stock_class(type(model))
    if layout["added_biases"]:
        for flag in _BIASES:
            if getattr(config, flag, None) is False:
                setattr(config, flag, True)
    stock = kind._from_config(config, dtype=model.dtype).eval()
    state = model.state_dict()
    places = dict(stock.named_parameters(remove_duplicate=False))
    added = {k.removesuffix(".bias"): v for k, v in state.items() if k not in places and k.endswith(".bias")}
    made_up = {k: torch.zeros_like(v) for k, v in places.items() if k not in state and k.endswith(".bias")}
    result = stock.load_state_dict(
        {k: v for k, v in (made_up | state).items() if k in stock.state_dict()}, strict=False
    )
    for name in result.missing_keys:
        if not any(name.startswith(f"{gone}.") for gone in _gone(model)):
            raise ValueError(f"the stock class wants {name}, which this model does not have")
    stock.generation_config = model.generation_config if stock.can_generate() else None
    return stock, added


def _gone(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Identity)]


@torch.no_grad()
def _fill(stock: Any, norms: Norms, sites: dict[str, NormSite], eps: float) -> None:
    """Gains of √eps and biases of 0 in the norms that are to do nothing."""
    for name in norms.removed:
        module: Any = stock.get_submodule(name)
        found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if found != eps:
            raise ValueError(
                f"{name} does not take its epsilon from the config (it is {found}); it cannot be switched off"
            )
        if getattr(module, "weight", None) is None:
            raise ValueError(f"{name} has no gain in the stock class, so it cannot be made to do nothing")
        module.weight.fill_(math.sqrt(eps) - (1 if sites[name].zero_centered else 0))
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()


@torch.no_grad()
def _absorb(stock: Any, added: dict[str, Tensor], norms: Norms, sites: dict[str, NormSite]) -> None:
    """Put biases for which the stock class has no place through the layer norm in front: β = 1, W + b 1ᵀ / D."""
    for name in norms.removed:
        site = sites[name]
        wanted = {link.owner: added[link.owner] for link in site.links if link.owner in added}
        module: Any = stock.get_submodule(name)
        if not wanted:
            continue
        if site.kind != "layer" or getattr(module, "bias", None) is None:
            raise ValueError(f"{next(iter(wanted))} has a bias here, and the stock class has no place for one")
        module.bias.fill_(1.0)
        for link in site.links:
            weight = stock.get_parameter(link.weight)
            rows = weight.detach().double().movedim(link.axis, -1)  # [.., D]
            bias = wanted.pop(link.owner, None)
            shift = -rows.mean(-1, keepdim=True)  # W 1 = 0 to the last place, now that 1 is an input
            if bias is not None:
                shift = shift + bias.double().unsqueeze(-1) / rows.shape[-1]
            weight.copy_((rows + shift).movedim(-1, link.axis))
    claimed = {link.owner for name in norms.removed for link in sites[name].links}
    left = sorted(set(added) - claimed)
    if left:
        raise ValueError(f"{left[0]} has a bias here, and the stock class has no place for one")


@torch.no_grad()
def _scale(stock: Any, site: NormSite, factor: float) -> None:
    """Scale the linear map in front of a kept norm as its epsilon was scaled: the norm's output stays."""
    producer = site.producer
    assert producer is not None  # `_movable`
    stock.get_parameter(producer.weight).mul_(factor)
    if producer.bias is not None:
        stock.get_parameter(producer.bias).mul_(factor)
