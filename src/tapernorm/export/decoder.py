"""Models as functions of tensors alone: what the exporters trace, with every input and output named.

B batch, T tokens of this call, P tokens in the cache, C places of a static cache, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from tapernorm.inputs import context_length
from tapernorm.modules import evaluation

KeysAndValues = Sequence[tuple[Tensor, Tensor]]


class DynamicDecoder(nn.Module):
    """A causal language model with its cache as tensors that grow."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cache_name = cache_name(model)
        self.takes_positions = takes_positions(model)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None, past: KeysAndValues
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """input_ids: [B, T]; attention_mask: [B, P + T]; position_ids: [B, T]; past: [B, heads, P, width] twice a
        layer. Returns logits [B, T, V] and the same with P + T places."""
        # Plain layers: the window of a sliding layer is in its mask, and the whole past stays in the cache.
        cache = DynamicCache()
        for layer, (key, value) in enumerate(past):
            cache.update(key, value, layer)
        named = {"position_ids": position_ids} if self.takes_positions else {}
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **named, **{self.cache_name: cache}
        )
        return out.logits, [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[union-attr]


class StaticDecoder(nn.Module):
    """A causal language model with its cache as tensors of one size, which a call fills in place."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cache_name = cache_name(model)
        self.takes_positions = takes_positions(model)

    def forward(self, input_ids: Tensor, start: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """input_ids: [B, T], at the places start, start + 1, …; start: [1]; keys, values: [B, heads, C, width], one a
        layer, changed in place. Returns logits [B, T, V]."""
        cache = static_cache(start, keys, values)
        places = start + torch.arange(input_ids.shape[1], device=input_ids.device)
        named = {"position_ids": places.expand(input_ids.shape[0], -1)} if self.takes_positions else {}
        return self.model(input_ids=input_ids, use_cache=True, **named, **{self.cache_name: cache}).logits


def static_cache(start: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Cache:
    """A cache over tensors of one size, filled up to `start`. start: [1]; keys, values: [B, heads, C, width] a layer.

    Plain layers for all: the window of a sliding layer is in its mask, and the whole past stays in the cache."""
    layers = []
    for key, value in zip(keys, values, strict=True):
        layer = StaticLayer(max_cache_len=key.shape[2])
        layer.keys, layer.values, layer.is_initialized = key, value, True
        layer.device, layer.cumulative_length = key.device, start[0].clone()
        layers.append(layer)
    return Cache(layers)


class Plain(nn.Module):
    """Any other model: its tensors by name in, one tensor out (logits, or the last hidden states)."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *values: Tensor) -> Tensor:
        """The values of the inputs in the order of the names."""
        if self.names == ("input",):
            out = self.model(*values)
        else:
            named: dict[str, Any] = dict(zip(self.names, values, strict=True))
            out = self.model(**named, **({"use_cache": False} if takes(self.model, "use_cache") else {}))
        for field in ("logits", "last_hidden_state"):
            if isinstance(getattr(out, field, None), Tensor):
                return getattr(out, field)
        return out if isinstance(out, Tensor) else out[0]


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def takes_positions(model: Any) -> bool:
    """Whether the model reads the places of its tokens from the caller."""
    return takes(model, "position_ids")


def cache_name(model: Any) -> str:
    """The argument that holds the cache."""
    return "cache" if takes(model, "cache") else "past_key_values"


def is_decoder(model: Any) -> bool:
    """Whether this is a causal language model with a cache."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    config = getattr(model, "config", None)
    return (
        hasattr(model, "can_generate")
        and bool(model.can_generate())
        and head is not None
        and not getattr(config, "is_encoder_decoder", False)
    )


def cache_shapes(model: Any) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """((heads, width) of the keys, of the values) for each layer of the cache.

    Raises:
        ValueError: a layer of the cache is not keys and values (a recurrent or convolutional state).
    """
    cache = DynamicCache()
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    try:
        with evaluation(model):
            model(input_ids=ids, use_cache=True, **{cache_name(model): cache})
    except (AttributeError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{type(model).__name__} does not run with a cache of keys and values ({error})") from error
    shapes = []
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if type(layer) is not DynamicLayer or keys is None or values is None or keys.dim() != 4:
            raise ValueError(
                f"layer {number} of {type(model).__name__} keeps a state that is not keys and values "
                f"({type(layer).__name__}); only attention can be exported with a cache"
            )
        shapes.append(((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])))
    if not shapes:
        raise ValueError(f"{type(model).__name__} filled no cache; it cannot be exported with one")
    return shapes


def sample_ids(model: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids. [batch, at most length]"""
    length = min(length, context_length(model) - 1)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def prepared(model: Any) -> Any:
    """The model as exporters can trace it: experts without loops over what the router chose."""
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("batched_mm")
    return model.eval()
