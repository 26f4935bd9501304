"""How a model differs from a fresh one of its stock class, and the config that says so: norms gone, biases gained, ties
cut, a constant prefix. `tapernorm.modeling_tapernorm` builds a model from such a config again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from tapernorm import modeling_tapernorm as modeling
from tapernorm.fused_tapernorm import FusedPart
from tapernorm.prefix import prefix_of


def _is_exported(cls: type) -> bool:
    return getattr(transformers, cls.__name__, None) is cls


def stock_class(cls: type) -> Any:
    """transformers' own class behind a model or config class. Raises ValueError when there is none."""
    stock = getattr(cls, "stock_class", cls)
    if not _is_exported(stock):
        raise ValueError(
            f"{stock.__module__}.{stock.__name__} is not a class that transformers exports; a folder that loads "
            "without norms can be written for transformers' own classes only"
        )
    return stock


def stock_config(config: Any) -> Any:
    """The config without what this library adds: an equal stock config."""
    values = {k: v for k, v in config.to_dict().items() if k not in ("model_type", "auto_map", *modeling.FIELDS)}
    return stock_class(type(config)).from_dict(values)


def layout_of(model: PreTrainedModel) -> dict[str, Any]:
    """How a model differs from a fresh one of its stock class: norms gone, biases gained, ties cut."""
    stock = getattr(type(model), "stock_class", type(model))
    # A class of somebody's own is compared with itself; if it was changed, writing it is refused later on.
    config = stock_config(model.config) if _is_exported(stock) else copy.deepcopy(model.config)
    with torch.device("meta"):
        fresh = dict(stock(config).named_modules())
    pairs = {name: (old, new) for name, new in model.named_modules() if (old := fresh.get(name)) is not None}
    identity = nn.Identity
    gone = {n for n, (old, new) in pairs.items() if isinstance(new, identity) and not isinstance(old, identity)}
    biased = {
        name
        for name, (old, new) in pairs.items()
        if getattr(old, "bias", 0) is None and getattr(new, "bias", None) is not None
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ties = (stock._tied_weights_keys or {}) if getattr(model.config, "tie_word_embeddings", False) else {}
    untied = sorted(k for k, v in ties.items() if k in parameters and parameters[k] is not parameters.get(v))
    layout = {"removed_norms": _short(gone, fresh), "added_biases": _short(biased, fresh), "untied": untied}
    if fused := _fused(model, fresh):
        layout["fused_linears"] = fused
    if short := _short_forwards(model, fresh):
        layout["short_forwards"] = short
    if prefix_of(model):
        layout |= {"constant_prefix": list(prefix_of(model)), "prefix_shapes": dict(model.config.prefix_shapes)}
    return layout


def _fused(model: nn.Module, fresh: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """{module: {linear map: the names of those that it stands for}}, with stars where they may be."""
    groups: dict[str, dict[str, list[str]]] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        if is_fused_part(module):
            owner, _, part = name.rpartition(".")
            groups.setdefault(owner, {}).setdefault(module.whole, [""] * len(module.sizes))[module.index] = part
    return _starred(groups, fresh)


def _short_forwards(model: nn.Module, fresh: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{module: what its forward computes in fewer calls}, with stars where they may be."""
    short = {name: vars(module).get("short") for name, module in model.named_modules()}
    return _starred({name: how["saved"] for name, how in short.items() if how}, fresh)


def _starred(values: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """By module, those with equal values under one name if stars can say it."""
    alike: dict[str, set[str]] = {}
    for name, value in values.items():
        alike.setdefault(json.dumps(value, sort_keys=True), set()).add(name)
    found = {name: json.loads(key) for key, names in alike.items() for name in _short(names, known)}
    return dict(sorted(found.items()))


def is_fused_part(module: Any) -> bool:
    """Also one of a folder's own copy of the code."""
    return type(module).__name__ == FusedPart.__name__ and hasattr(module, "whole")


def _short(names: set[str], known: Iterable[str]) -> list[str]:
    """Names with a star for the layer's index, if the stars name these modules and no other."""
    stars = sorted({modeling.starred(name) for name in names})
    patterns = [modeling.name_pattern(star) for star in stars]
    named = {name for name in known if any(pattern.match(name) for pattern in patterns)}
    return stars if named == names else sorted(names)


def changed_config(model: PreTrainedModel, fields: dict[str, Any], **more: Any) -> Any:
    """The config of type `tapernorm_<base>` that describes the model."""
    config_class = modeling.get_class(modeling.PREFIX + stock_class(type(model.config)).__name__)
    # What the folder said from which the model comes may be so no more: its linear maps may have been taken apart.
    said = {"model_type", "auto_map", *modeling.FIELDS}
    values = {k: v for k, v in model.config.to_dict().items() if k not in said}
    if fields["untied"] and set(fields["untied"]) == set(stock_class(type(model))._tied_weights_keys):
        values["tie_word_embeddings"] = False  # not where other ties remain, as between T5's encoder and decoder
    config = config_class(**{**values, **fields, **more})
    config.auto_map = modeling.auto_map(config_class)
    config.architectures = [modeling.PREFIX + stock_class(type(model)).__name__]
    return config
