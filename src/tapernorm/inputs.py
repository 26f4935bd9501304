"""Inputs that a model runs on, made from what its config says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.modules import evaluation


def default_example(model: nn.Module, batch: int = 1, length: int = 5) -> dict[str, Any]:
    """Random inputs for a transformers model, in its dtype: token ids, and images or sounds where it takes them.

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
    first = next(model.parameters())
    device = first.device
    example = {k: v.to(device, first.dtype if v.is_floating_point() else v.dtype) for k, v in example.items()}
    return _with_masks(model, example) if device.type == "meta" else example


def context_length(model: Any) -> int:
    """The most tokens that the model takes; a very large number where its config sets no bound."""
    return int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or 1 << 30)


def run(model: nn.Module, inputs: Any) -> Any:
    """One forward of `model` on an example, without a key-value cache where the model has one."""
    with _without_values(model):
        if isinstance(inputs, Mapping):
            extra = {}
            if hasattr(getattr(model, "config", None), "use_cache") and "use_cache" not in inputs:
                extra["use_cache"] = False
            return model(**inputs, **extra)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@contextlib.contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """On the meta device, the attention and the experts whose code looks into no tensor's values."""
    configs: dict[int, Any] = {}
    first = next(model.parameters(), None)
    if first is not None and first.is_meta:
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                configs[id(config)] = config
    before = [(c, c._attn_implementation_internal, c._experts_implementation_internal) for c in configs.values()]
    try:
        for config, *_ in before:
            config._attn_implementation_internal, config._experts_implementation_internal = "eager", "batched_mm"
        yield
    finally:
        for config, attention, experts in before:
            config._attn_implementation_internal, config._experts_implementation_internal = attention, experts


def _with_masks(model: nn.Module, example: dict[str, Tensor]) -> dict[str, Tensor]:
    """The attention masks, if any, with which a model on the meta device runs.

    transformers looks into the values of a mask, or of positions where there is none, to see whether it can do
    without; of a mask with four dimensions it does not, but a few families take only one with two.
    """
    names = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
    error: Exception | None = None
    for dims in (4, 2, 0):
        tried = dict(example)
        for ids, mask in names.items():
            if ids in example and dims:
                batch, length = example[ids].shape
                shape = (batch, 1, length, length) if dims == 4 else (batch, length)
                tried[mask] = torch.ones(shape, dtype=torch.bool, device="meta")
        try:
            with evaluation(model):
                run(model, tried)
            return tried
        except (RuntimeError, ValueError, NotImplementedError) as failed:
            error = error or failed
    raise ValueError(f"{type(model).__name__} does not run on the meta device ({error}); load its weights") from error


def _vocabulary(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    return vocabulary if isinstance(vocabulary, int) else None


def _image_size(config: Any) -> tuple[int, int, int] | None:
    """(channels, height, width)."""
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    return (channels, height, width) if isinstance(height, int) and isinstance(width, int) else None


def _is_dual(model: Any) -> bool:
    """Text and images side by side (CLIP), which must both be given; a language model reads text without images."""
    parts = all(hasattr(model.config, part) for part in ("text_config", "vision_config"))
    return parts and not (hasattr(model, "can_generate") and model.can_generate())
