"""bfloat16 products, where the processor has them: elsewhere they are emulated, and slow."""

from __future__ import annotations

import torch
from torch import nn


def has_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are made by the hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def refuse_bfloat16(device: torch.device) -> None:
    """Raises ValueError where `--bf16` would be slower than without it."""
    if not has_bfloat16(device):
        raise ValueError("bf16 asks for a GPU, or a CPU with AVX-512, that computes in bfloat16; leave it out")


def fast_products(model: nn.Module, wanted: bool = True) -> torch.autocast:
    """bfloat16 products in a float32 model for as long as the block lasts; a no-op where they would not be fast."""
    parameter = next(model.parameters())
    enabled = wanted and parameter.dtype == torch.float32 and has_bfloat16(parameter.device)
    return torch.autocast(parameter.device.type, torch.bfloat16, enabled=enabled)
