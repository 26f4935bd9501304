"""PEFT's layers, so that an adapter may still be merged or switched off after a fold.

A LoRA layer computes W h + s · (B A h + b_B). A norm's scale goes into W and A; its shift β̃ into the biases of W and
of B, b_B' = b_B + B A β̃, since merging would lose a bias of A. A copy that `modules_to_save` made is folded together
with the module that it stands in for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from tapernorm.trace import Consumer


def refusal(model: nn.Module, ran: set[str], norm: str, link: Consumer) -> str:
    """Why an adapter at the norm or at the reader is in the way; "" if none is."""
    if _ancestor(model, norm, _is_copied):
        return "it is a copy made by modules_to_save, beside the norm that it stands in for: merge the adapter first"
    name = _ancestor(model, link.owner, _is_lora)
    if not name:
        return ""
    layer: Any = model.get_submodule(name)
    if any(getattr(layer, "use_dora", {}).values()):
        return f"{name} is a DoRA layer, whose magnitudes follow its weight: merge the adapter first"
    if getattr(layer, "merged", False):
        return f"{name} has its adapter merged in place: unmerge it, or merge it for good with merge_and_unload()"
    idle = [adapter for adapter in layer.lora_A if f"{name}.lora_A.{adapter}" not in ran]
    return f"{name} has an adapter that is not active ({idle[0]}): activate, merge or delete it first" if idle else ""


def twins(model: nn.Module, link: Consumer) -> list[Consumer]:
    """Linear maps that stand in for the reader when another adapter, or none, is active."""
    name = _ancestor(model, link.owner, _is_copied)
    copy = f"{name}.modules_to_save."
    if not name or not link.owner.startswith(copy):
        return []
    wrapper: Any = model.get_submodule(name)
    adapter, _, rest = link.owner.removeprefix(copy).partition(".")
    others = [f"{copy}{other}" for other in wrapper.modules_to_save if other != adapter]
    found = []
    for place in [f"{name}.original_module", *others]:
        owner = f"{place}.{rest}" if rest else place
        weight, bias = (
            parameter and f"{owner}.{parameter.rpartition('.')[2]}" for parameter in (link.weight, link.bias)
        )
        found.append(dataclasses.replace(link, weight=weight, owner=owner, bias=bias))
    return found


def taker(model: nn.Module, link: Consumer) -> Consumer:
    """The linear map whose bias takes up what β̃ becomes behind `link`: for A that is B, for any other the same."""
    name = _ancestor(model, link.owner, _is_lora)
    if not name or not link.owner.startswith(f"{name}.lora_A."):
        return link
    owner = f"{name}.lora_B.{link.owner.rpartition('.')[2]}"
    bias = f"{owner}.bias" if getattr(model.get_submodule(owner), "bias", None) is not None else None
    return dataclasses.replace(link, weight=f"{owner}.weight", owner=owner, bias=bias)


def carried(model: nn.Module, link: Consumer, shift: Tensor) -> Tensor:
    """What is to be added to the taker's bias for a `shift` of the output of `link`: for A that is B A β̃. [out]"""
    other = taker(model, link)
    return shift if other is link else model.get_parameter(other.weight).detach().double() @ shift


def declare_biases(model: nn.Module) -> None:
    """Let PEFT know which of its maps B have a bias; it merges and saves what it knows of."""
    layers: list[Any] = [m for m in model.modules() if _is_lora(m) and hasattr(m, "lora_bias")]
    for layer in layers:
        for adapter, b in layer.lora_B.items():
            layer.lora_bias[adapter] = getattr(b, "bias", None) is not None
    for adapter, config in getattr(model, "peft_config", {}).items():
        if hasattr(config, "lora_bias") and layers:
            config.lora_bias = any(layer.lora_bias.get(adapter) for layer in layers)


def unwrapped(model: Any) -> Any:
    """The model inside a `PeftModel`, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_lora(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _is_copied(module: Any) -> bool:
    return hasattr(module, "modules_to_save") and hasattr(module, "original_module")


def _ancestor(model: nn.Module, name: str, kind: Any) -> str:
    """The innermost module of a kind that `name` is in; "" if there is none."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if kind(model.get_submodule(".".join(parts[:end]))):
            return ".".join(parts[:end])
    return ""
