"""How far a model's activations are from the largest number of float16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tapernorm.modules import evaluation


@torch.no_grad()
def largest_activation(model: Any, ids: Tensor) -> tuple[float, str]:
    """The largest absolute value that enters or leaves a linear map, or leaves a block, and which: fp16 ends at 65,504.

    ids: [N, T]. Attention scores are not looked at; kernels form those in float32.
    """
    found: dict[str, float] = {}
    where: list[Callable[[], None]] = []

    def note(name: str, values: Any) -> None:
        values = values[0] if isinstance(values, tuple) and values else values
        if isinstance(values, Tensor) and values.is_floating_point() and values.numel():
            size = float(torch.nan_to_num(values.detach().abs().amax(), nan=math.inf))
            found[name] = max(found.get(name, 0.0), size)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            before = module.register_forward_pre_hook(lambda m, args, name=name: note(f"{name} (input)", args))
            after = module.register_forward_hook(lambda m, args, out, name=name: note(f"{name} (output)", out))
            where += [before.remove, after.remove]
        elif isinstance(module, nn.ModuleList):
            for index, block in enumerate(module):
                place = f"{name}.{index} (output)"
                where.append(block.register_forward_hook(lambda m, args, out, n=place: note(n, out)).remove)
    try:
        with evaluation(model):
            for rows in ids.split(2):
                model(input_ids=rows.to(next(model.parameters()).device), use_cache=False, logits_to_keep=1)
    finally:
        for remove in where:
            remove()
    worst = max(found, key=lambda name: found[name], default="")
    return found.get(worst, 0.0), worst
