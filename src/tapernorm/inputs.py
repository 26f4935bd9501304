"""Inputs that a model runs on, made from what its config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def default_example(model: nn.Module, batch: int = 1, length: int = 5) -> dict[str, Any]:
    """Random inputs for a transformers model, on its device: token ids, and images or sounds where it takes them.

    ids: [batch, length]; images: [batch, channels, height, width]; sounds: [batch, mel bins, frames].

    Raises:
        ValueError: the model takes something else, or does not say.
    """
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    generator = torch.Generator().manual_seed(0)
    vocabulary, pixels = _vocabulary(config), _image_size(config)
    length = min(length, context_length(model))
    example: dict[str, Tensor] = {}
    if main == "input_ids" and vocabulary:
        example["input_ids"] = torch.randint(vocabulary, (batch, length), generator=generator)
    if pixels and (main == "pixel_values" or (main == "input_ids" and _is_dual(model))):
        example["pixel_values"] = torch.randn(batch, *pixels, generator=generator)
    if main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions
        example["input_features"] = torch.randn(batch, config.num_mel_bins, frames, generator=generator)
    if not example:
        raise ValueError(
            f"{type(model).__name__} does not say what inputs it takes; pass example=..., such as "
            'example={"input_ids": ids}'
        )
    if getattr(config, "is_encoder_decoder", False) and vocabulary:
        example["decoder_input_ids"] = torch.randint(vocabulary, (batch, length), generator=generator)
    device = next(model.parameters()).device
    example = {name: value.to(device) for name, value in example.items()}
    if device.type == "meta" and set(example) == {"input_ids"}:
        # transformers looks into any other mask, and meta tensors cannot be looked into
        example["attention_mask"] = torch.ones(batch, 1, length, length, dtype=torch.bool, device=device)
    return example


def context_length(model: Any) -> int:
    """The most tokens that the model takes; a very large number where its config sets no bound."""
    return int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or 1 << 30)


def run(model: nn.Module, inputs: Any) -> Any:
    """One forward of `model` on an example, without a key-value cache where the model has one."""
    if isinstance(inputs, Mapping):
        extra = {}
        if hasattr(getattr(model, "config", None), "use_cache") and "use_cache" not in inputs:
            extra["use_cache"] = False
        return model(**inputs, **extra)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _vocabulary(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    return vocabulary if isinstance(vocabulary, int) else None


def _image_size(config: Any) -> tuple[int, int, int] | None:
    """(channels, height, width)."""
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    if isinstance(size, int):
        size = (size, size)
    return (channels, *size) if isinstance(size, list | tuple) and len(size) == 2 else None


def _is_dual(model: Any) -> bool:
    """Text and images side by side (CLIP), which must both be given; a language model reads text without images."""
    parts = all(hasattr(model.config, part) for part in ("text_config", "vision_config"))
    return parts and not (hasattr(model, "can_generate") and model.can_generate())
