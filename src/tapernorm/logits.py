"""What is read off a causal model's logits: the loss of each token, and the distance between two models."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Next-token losses in nats, 0 where a label is −100; float32 or wider, on the CPU.

    [B, T, V], [B, T] -> [B · (T − 1)]
    """
    wide = logits[:, :-1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide, labels[:, 1:].flatten().to(wide.device), reduction="none").cpu()


def batch_within(model: nn.Module, length: int, most: int = 8) -> int:
    """Sequences in one forward, so that their logits in float32 take half a GB: vocabularies reach 262 thousand."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 1
    return max(1, min(most, (1 << 27) // (length * vocabulary)))


def log_probabilities(logits: Tensor, rows: Tensor) -> Tensor:
    """log softmax in float32, for `Chain.rest`. [B, T, V] -> [B, T, V]"""
    return logits.float().log_softmax(-1)


def divergence(original: Tensor, other: Tensor) -> float:
    """Mean over tokens of KL(original ‖ other), in nats; ∞ where it is not finite. Log probabilities, [B, T, V]."""
    mean = (original.exp() * (original - other)).sum(-1).mean().double()
    return float(torch.where(torch.isfinite(mean), mean, torch.inf))
