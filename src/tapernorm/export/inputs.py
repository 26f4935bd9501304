"""Inputs to trace a model that is no decoder with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.inputs import default_example


def named_inputs(model: nn.Module, example: Any, batch: int = 2) -> dict[str, Tensor]:
    """Inputs by name, of the model's dtype, of at least `batch` rows; one tensor alone is called "input".

    Raises:
        ValueError: the example is neither a tensor nor a mapping of names to tensors.
    """
    if example is None:
        example = default_example(model, batch=batch)
    if isinstance(example, tuple) and len(example) == 1:
        example = example[0]
    if isinstance(example, Tensor):
        example = {"input": example}
    if not isinstance(example, Mapping) or not all(isinstance(value, Tensor) for value in example.values()):
        raise ValueError("example must be a tensor, or a mapping of the forward's argument names to tensors")
    dtype = next(model.parameters()).dtype

    def wide(value: Tensor) -> Tensor:
        value = value.to(dtype) if value.is_floating_point() else value
        return torch.cat([value, value]) if len(value) == 1 and batch > 1 else value

    return {name: wide(value) for name, value in example.items()}
