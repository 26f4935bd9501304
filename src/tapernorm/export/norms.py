"""What an export may say of a model: which norms are gone, which are there, and when it must not be exported at all."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tapernorm import modeling_tapernorm as modeling
from tapernorm.layout import layout_of
from tapernorm.modules import taper_norms
from tapernorm.prefix import prefix_of
from tapernorm.sites import NormSite, find_sites


class ExportError(RuntimeError):
    """An exported model that is not the same function as the model, or that holds what was taken out of it."""


@dataclasses.dataclass(frozen=True)
class Norms:
    """removed: full names of modules that were norms and are nothing now. kept: norms that still run. prefix: ids of
    the constant prefix."""

    removed: tuple[str, ...]
    kept: tuple[NormSite, ...]
    prefix: tuple[int, ...] = ()

    def owner(self, module: str) -> str | None:
        """The norm in which a module of this name lies; None where it lies in none."""
        for name in (*self.removed, *(site.name for site in self.kept)):
            if module == name or module.startswith(f"{name}."):
                return name
        return None

    def sentence(self) -> str:
        """For whoever exports a model that was not changed, and may think that it was."""
        return f"no norm was removed from this model: it still computes all of its {len(self.kept)}"


def norms_of(model: nn.Module, example: Any = None) -> Norms:
    """The norms of a model that is about to be exported.

    Args:
        model: a folded model, or one that never was tapered.
        example: inputs for one forward, as for `find_sites`.

    Raises:
        ValueError: the model is tapered and not folded; no example was given and none could be made.
    """
    refuse_tapered(model)
    if isinstance(model, PreTrainedModel):
        patterns = [modeling.name_pattern(name) for name in layout_of(model)["removed_norms"]]
        removed = [name for name, _ in model.named_modules() if any(p.match(name) for p in patterns)]
    else:  # what `fold_` leaves
        removed = [n for n, m in model.named_modules() if isinstance(m, nn.Identity) and hasattr(m, "eps")]
    return Norms(tuple(removed), tuple(find_sites(model, example)), prefix_of(model))


def refuse_tapered(model: nn.Module) -> None:
    """Raises ValueError for a model with gated norms: what leaves here is either whole or folded."""
    tapered = taper_norms(model)
    if not tapered:
        return
    gates = {name: float(module.gate) for name, module in tapered.items()}
    name, gate = max(gates.items(), key=lambda item: item[1])
    if gate >= 1 and min(gates.values()) >= 1:
        advice = "train it until the gate is 0 and fold it (tapernorm fold), or put its norms back (tapernorm.restore_)"
    elif gate > 0:
        advice = (
            "train on until the gate is 0, then fold (tapernorm fold MODEL --out FOLDER) and export what that wrote"
        )
    else:
        advice = "fold it first (tapernorm fold MODEL --out FOLDER, or tapernorm.fold_) and export what that wrote"
    raise ValueError(f"{name}: this model is tapered and not folded, its gate is {gate:.4g}; {advice}")
