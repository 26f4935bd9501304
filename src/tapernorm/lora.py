"""A taper trained with LoRA: adapters on the linear maps and the gains of the norms learn, the rest stays as it was.

    W h + s · B A h, with A and B trained;   γ and γ̃ of every tapered norm (β and β̃) trained as they are

`add_lora` after `taper_`, `merge_lora` before `fold_`: then a fold multiplies the scales into the merged weights, one
product for each. (Folding under an adapter, which keeps it apart, is `tapernorm.adapters`.) Needs the extra peft.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from tapernorm.modules import taper_norms


def require() -> None:
    """Before the work, not after it.

    Raises:
        ImportError: the package peft is not there.
    """
    import peft  # noqa: F401


def add_lora(model: Any, rank: int, gains: Iterable[str] = (), seed: int = 0) -> Any:
    """The model in a `PeftModel`: adapters on all its linear maps but the head; the gains of its TaperNorms learn.

    In place: the model holds the adapters from then on, and its own weights learn nothing more until `merge_lora`.

    Args:
        model: a transformers model, tapered or stock.
        rank: of A and B; what they add is scaled by s = 2.
        gains: norms of a stock model, by name, that learn as well.
        seed: of A's first values; B is 0, so the model is the same function at first.

    Raises:
        ImportError: peft is not installed.
        ValueError: the model has no linear map that an adapter could be put on.
    """
    import peft

    names = [name for name in gains if any(True for _ in model.get_submodule(name).parameters())]
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", modules_to_save=names or None, task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # GPT-2's maps: it sees that itself
        wrapped: Any = peft.get_peft_model(model, config)
    for module in taper_norms(wrapped).values():
        module.requires_grad_(True)
    return wrapped


def merge_lora(wrapped: Any) -> Any:
    """The model again, with the adapters in its weights, and all of these trainable."""
    model = wrapped.merge_and_unload()
    vars(model).pop("peft_config", None)
    return model.requires_grad_(True)
