"""TransformerLens: the model as a `HookedTransformer` without normalization, for work on its inside.

Where every norm is gone, `normalization_type` is None: the logits are a sum over what each layer, head and neuron
wrote into the residual, and direct logit attribution is exact. Where norms are kept, those are TransformerLens' own and
the others are nothing. `HookedTransformer` belongs to transformer-lens 3; version 4 has none.

A constant prefix travels as the beginning of TransformerLens' key-value cache, in every forward and in `generate`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.metadata
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tapernorm import modeling_tapernorm as modeling
from tapernorm.export.decoder import sample_ids
from tapernorm.export.folder import Made, write_companions
from tapernorm.export.norms import ExportError, Norms, norms_of
from tapernorm.fuse import apart
from tapernorm.inputs import context_length
from tapernorm.modules import evaluation

BOUND = 1e-4  # largest difference over the largest logit
_LLAMA = ("llama", "mistral", "qwen2")
_FAMILIES = (*_LLAMA, "gpt2")
_STATE, _CONFIG = "hooked_transformer.safetensors", "hooked_transformer.json"
_REST = ("mask", "IGNORE", "rotary_sin", "rotary_cos")  # buffers that the config makes, or that are written apart


def to_transformer_lens(model: Any, tokenizer: Any = None, norms: Norms | None = None) -> Any:
    """A `HookedTransformer` that computes what `model` computes, on the CPU, in float32 or float64.

    Args:
        model: a folded causal language model: llama, mistral, qwen2, gpt2. It is not changed.
        tokenizer: for strings as inputs.
        norms: of the model, where they are known already.

    Raises:
        ValueError: transformer-lens 3 is not installed; the model is tapered and not folded, of another family, has
            all its norms, or computes something that HookedTransformer cannot (sliding windows, a bias of the gate).
        ExportError: its logits differ from the model's.
    """
    _require()
    norms = norms_of(model) if norms is None else norms
    _refuse(model, norms)
    model = apart(copy.deepcopy(model).eval())
    model = model if model.dtype == torch.float64 else model.float()
    config = _config(model, norms)
    rotary = _rotary(model) if config["positional_embedding_type"] == "rotary" else {}
    hooked = _build(config, _weights(model, config), rotary, _prefix(model, config), tokenizer)
    error = difference(hooked, model, sample_ids(model, 2, 12))
    if not error <= BOUND:
        raise ExportError(f"the HookedTransformer differs from the model by {error:.1e} of the largest logit")
    return hooked


def load_transformer_lens(folder: str | os.PathLike[str], tokenizer: Any = None) -> Any:
    """The `HookedTransformer` of a folder that `--format transformer-lens` wrote.

    Args:
        folder: that folder.
        tokenizer: None: the one in the folder, if there is one.

    Raises:
        ValueError: transformer-lens 3 is not installed, or the folder holds no such model.
    """
    _require()
    place = Path(folder).expanduser()
    if not (place / _CONFIG).is_file():
        raise ValueError(
            f"{place} holds no {_CONFIG}: it was not written by tapernorm export --format transformer-lens"
        )
    told = json.loads((place / _CONFIG).read_text(encoding="utf-8"))
    if tokenizer is None and (place / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(place)
    state = load_file(place / _STATE)
    kinds = ("weights", "rotary", "prefix")
    parts = [{k.removeprefix(f"{kind}:"): v for k, v in state.items() if k.startswith(f"{kind}:")} for kind in kinds]
    config = told["config"] | {"dtype": getattr(torch, told["config"]["dtype"])}
    weights, rotary, prefix = parts
    return _build(config, weights, rotary, prefix, tokenizer)


def write(model: Any, tokenizer: Any, norms: Norms, folder: Path, ids: Tensor | None = None) -> Made:
    """The weights by TransformerLens' names, its config, and the companions; `load_transformer_lens` reads it.

    Raises:
        ValueError, ExportError: as `to_transformer_lens`.
    """
    hooked = to_transformer_lens(model, tokenizer, norms)
    config, attention = hooked.built_from, hooked.blocks[0].attn
    turned = config["positional_embedding_type"] == "rotary"
    parts = {
        "weights": {name: value for name, value in hooked.state_dict().items() if not name.endswith(_REST)},
        "rotary": {name: getattr(attention, name) for name in ("rotary_cos", "rotary_sin")} if turned else {},
        "prefix": hooked.constant_prefix,
    }
    pairs = [(f"{part}:{name}", value) for part, state in parts.items() for name, value in state.items()]
    named = {name: value.detach().clone().contiguous() for name, value in pairs}
    save_file(named, folder / _STATE)
    told = {"config": config | {"dtype": str(config["dtype"]).removeprefix("torch.")}}
    (folder / _CONFIG).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    write_companions(model, tokenizer, norms, folder)
    again = load_transformer_lens(folder)
    reference = copy.deepcopy(model).eval()
    reference = reference if reference.dtype == torch.float64 else reference.float()
    error = difference(again, reference, sample_ids(model, 2, 12) if ids is None else ids[:4])
    if not error <= BOUND:
        raise ExportError(f"the HookedTransformer differs from the model by {error:.1e} of the largest logit")
    return Made({"bound": BOUND, "relative_error": error}, details={"normalization_type": config["normalization_type"]})


def difference(hooked: Any, model: Any, ids: Tensor) -> float:
    """The largest difference of the logits over the largest logit. ids: [B, T]"""
    with evaluation(model):
        wanted, made = model(input_ids=ids, use_cache=False).logits, hooked(ids)
    return float((made - wanted).abs().max() / wanted.abs().max())


# What cannot be


def _require() -> None:
    try:
        version = importlib.metadata.version("transformer-lens")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if not version.startswith("3."):
        found = f"{version} is here, which has no HookedTransformer" if version else "it is not installed"
        raise ValueError(f"this needs transformer-lens 3 ({found}): pip install 'tapernorm[lens]'")


def _refuse(model: Any, norms: Norms) -> None:
    config, kind = model.config, type(model).__name__
    base = config.model_type.removeprefix(modeling.TYPE_PREFIX)
    if base not in _FAMILIES:
        raise ValueError(f"{kind}: HookedTransformers are made of {', '.join(_FAMILIES)}, not of {base}")
    if not norms.removed:
        raise ValueError(f"{norms.sentence()}; TransformerLens loads such a model itself, with HookedTransformer")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < context_length(model):
        raise ValueError(f"{kind} has sliding-window attention ({window} tokens), which is not carried over")
    if base == "gpt2":
        return
    for name, module in model.named_modules():
        bias = getattr(module, "bias", None)
        if name.endswith(("gate_proj", "up_proj")) and isinstance(bias, Tensor) and bias.any():
            raise ValueError(f"{name} has a bias, and HookedTransformer's gated MLP has none there")


# The config


def _config(model: Any, norms: Norms) -> dict[str, Any]:
    """Of HookedTransformerConfig."""
    config = model.config
    gpt2 = config.model_type.endswith("gpt2")
    layers = model.transformer.h if gpt2 else model.model.layers
    mlp = layers[0].mlp
    n_prefix = len(norms.prefix)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scaling = layers[0].attn.scaling if gpt2 else layers[0].self_attn.scaling
    made = {
        "n_layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "n_ctx": config.max_position_embeddings + n_prefix,
        "d_head": head,
        "n_heads": config.num_attention_heads,
        "d_mlp": (mlp.c_fc.nf if gpt2 else mlp.up_proj.out_features),
        "d_vocab": config.vocab_size,
        "act_fn": config.activation_function if gpt2 else config.hidden_act,
        "attn_scale": 1 / float(scaling),
        "eps": config.layer_norm_epsilon if gpt2 else config.rms_norm_eps,
        "normalization_type": ("LN" if gpt2 else "RMS") if norms.kept else None,
        "original_architecture": model.stock_class.__name__ if hasattr(model, "stock_class") else type(model).__name__,
        "model_name": Path(config.name_or_path or "model").name or "model",
        "device": "cpu",
        "dtype": model.dtype if model.dtype == torch.float64 else torch.float32,
        "init_weights": False,
        "default_prepend_bos": False,
    }
    if gpt2:
        return made | {"positional_embedding_type": "standard"}
    heads = config.num_key_value_heads
    made |= {"positional_embedding_type": "rotary", "rotary_dim": head, "rotary_adjacent_pairs": False}
    return made | {
        "gated_mlp": True,
        "final_rms": True,
        "n_key_value_heads": None if heads == made["n_heads"] else heads,
    }


# Weights


def _weights(model: Any, config: dict[str, Any]) -> dict[str, Tensor]:
    """By HookedTransformer's names. W_Q: [heads, D, width], W_O: [heads, width, D], W_in: [D, M], W_U: [D, V]"""
    write_layer = _gpt2_layer if config["positional_embedding_type"] == "standard" else _llama_layer
    body = model.base_model
    layers = body.h if hasattr(body, "h") else body.layers
    head = model.get_output_embeddings()
    state = {"embed.W_E": model.get_input_embeddings().weight, "unembed.W_U": head.weight.T}
    state["unembed.b_U"] = _bias(head, head.weight.shape[0])
    for number, layer in enumerate(layers):
        state |= {f"blocks.{number}.{name}": value for name, value in write_layer(layer, config).items()}
    if hasattr(body, "wpe"):
        table = body.wpe.weight  # the prefix took its first rows, which a cache of as many tokens skips
        state["pos_embed.W_pos"] = torch.cat([table.new_zeros(config["n_ctx"] - len(table), table.shape[1]), table])
    final = body.ln_f if hasattr(body, "ln_f") else body.norm
    state |= _norm("ln_final", final)
    return {name: value.detach().clone().contiguous() for name, value in state.items()}


def _bias(linear: Any, width: int) -> Tensor:
    return linear.weight.new_zeros(width) if getattr(linear, "bias", None) is None else linear.bias


def _norm(name: str, module: nn.Module) -> dict[str, Tensor]:
    """Nothing for a norm that is gone."""
    if isinstance(module, nn.Identity):
        return {}
    weight, bias = module.weight, getattr(module, "bias", None)
    return {f"{name}.w": weight} | ({} if bias is None else {f"{name}.b": bias})  # type: ignore[dict-item]


def _llama_layer(layer: Any, config: dict[str, Any]) -> dict[str, Tensor]:
    attention, mlp, state = layer.self_attn, layer.mlp, {}
    grouped = "_" if config["n_key_value_heads"] is not None else ""
    width, residual = config["d_head"], config["d_model"]
    for letter in "QKV":
        linear = getattr(attention, f"{letter.lower()}_proj")
        under = "" if letter == "Q" else grouped
        heads = linear.out_features // width
        state[f"attn.{under}W_{letter}"] = linear.weight.view(heads, width, residual).transpose(1, 2)
        state[f"attn.{under}b_{letter}"] = _bias(linear, linear.out_features).view(heads, width)
    state["attn.W_O"] = attention.o_proj.weight.T.reshape(config["n_heads"], width, residual)
    state["attn.b_O"] = _bias(attention.o_proj, residual)
    state |= {
        "mlp.W_in": mlp.up_proj.weight.T,
        "mlp.W_gate": mlp.gate_proj.weight.T,
        "mlp.W_out": mlp.down_proj.weight.T,
    }
    state |= {"mlp.b_in": mlp.up_proj.weight.new_zeros(config["d_mlp"]), "mlp.b_out": _bias(mlp.down_proj, residual)}
    return state | _norm("ln1", layer.input_layernorm) | _norm("ln2", layer.post_attention_layernorm)


def _gpt2_layer(layer: Any, config: dict[str, Any]) -> dict[str, Tensor]:
    attention, mlp, state = layer.attn, layer.mlp, {}
    heads, width, residual = config["n_heads"], config["d_head"], config["d_model"]
    weights, biases = attention.c_attn.weight.split(residual, dim=1), attention.c_attn.bias.split(residual)
    for letter, weight, bias in zip("QKV", weights, biases, strict=True):  # a Conv1D: [in, out]
        state[f"attn.W_{letter}"] = weight.view(residual, heads, width).transpose(0, 1)
        state[f"attn.b_{letter}"] = bias.view(heads, width)
    state["attn.W_O"] = attention.c_proj.weight.view(heads, width, residual)
    state["attn.b_O"] = attention.c_proj.bias
    state |= {"mlp.W_in": mlp.c_fc.weight, "mlp.b_in": mlp.c_fc.bias}
    state |= {"mlp.W_out": mlp.c_proj.weight, "mlp.b_out": mlp.c_proj.bias}
    return state | _norm("ln1", layer.ln_1) | _norm("ln2", layer.ln_2)


def _rotary(model: Any) -> dict[str, Tensor]:
    """The model's own tables of angles, whatever scaling they have. [places, width]"""
    places = torch.arange(context_length(model) + len(getattr(model.config, "constant_prefix", ())))[None]
    cos, sin = model.base_model.rotary_emb(torch.zeros(1, 1, 1, dtype=model.dtype), places)
    return {"rotary_cos": cos[0].clone(), "rotary_sin": sin[0].clone()}


def _prefix(model: Any, config: dict[str, Any]) -> dict[str, Tensor]:
    """Keys and values of the constant prefix as TransformerLens caches them: not turned yet. [1, p, heads, width]

    Ours stand turned at −p … −1. A cache of p tokens is at 0 … p − 1 and the text after it, so the angle between the
    two is the same; turning back means turning key j by p − j.
    """
    made, body = {}, model.base_model
    layers = body.h if hasattr(body, "h") else body.layers
    for number, layer in enumerate(layers):
        attention = layer.attn if hasattr(layer, "attn") else layer.self_attn
        if getattr(attention, "prefix_key", None) is None:
            return {}
        key, value = attention.prefix_key.clone(), attention.prefix_value.clone()
        if config["positional_embedding_type"] == "rotary":
            count = key.shape[2]
            cos, sin = body.rotary_emb(key, torch.arange(count, 0, -1)[None])
            scale = float(cos[0, 0].square()[0] + sin[0, 0].square()[0])  # a table may carry a factor of its own
            half = key.shape[-1] // 2
            turned = torch.cat([-key[..., half:], key[..., :half]], dim=-1)
            key = (key * cos + turned * sin) / scale
        made[f"{number}.key"], made[f"{number}.value"] = (t.transpose(1, 2).contiguous() for t in (key, value))
    return made


# The HookedTransformer


def _build(
    config: dict[str, Any],
    weights: dict[str, Tensor],
    rotary: dict[str, Tensor],
    prefix: dict[str, Tensor],
    tokenizer: Any,
) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of HookedTransformer itself, in favour of version 4
        hooked = _class()(config, tokenizer=tokenizer)
    for number, block in enumerate(hooked.blocks):
        for name in ("ln1", "ln2"):
            if f"blocks.{number}.{name}.w" not in weights:
                setattr(block, name, nn.Identity())
        for name, table in rotary.items():
            getattr(block.attn, name).copy_(table)
    if config["normalization_type"] is not None and "ln_final.w" not in weights:
        hooked.ln_final = nn.Identity()
    missing = hooked.load_state_dict(weights, strict=False)
    lost = [k for k in missing.missing_keys if not k.endswith(_REST)]
    if lost or missing.unexpected_keys:
        raise ExportError(f"HookedTransformer has other weights: {[*lost, *missing.unexpected_keys][:4]}")
    hooked.setup()
    hooked.constant_prefix, hooked.built_from = prefix, config
    return hooked.eval()


@functools.cache
def _class() -> Any:
    """The subclass of HookedTransformer, made when it is first needed."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig  # type: ignore[import-not-found]
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache  # type: ignore[import-not-found]

    known = {field.name for field in dataclasses.fields(HookedTransformerConfig)}

    class NormFreeTransformer(HookedTransformer):
        """A HookedTransformer whose every forward begins with the constant prefix, if there is one, in its cache."""

        constant_prefix: dict[str, Tensor]
        built_from: dict[str, Any]

        def __init__(self, config: dict[str, Any], tokenizer: Any = None) -> None:
            given = {name: value for name, value in config.items() if name in known}
            super().__init__(HookedTransformerConfig(**given), tokenizer=tokenizer)
            self.constant_prefix = {}

        def forward(self, input: Any, *args: Any, past_kv_cache: Any = None, **kwargs: Any) -> Any:
            """As HookedTransformer's."""
            if self.constant_prefix:
                if isinstance(input, str | list):
                    named = {k: kwargs[k] for k in ("prepend_bos", "padding_side") if k in kwargs}
                    input = self.to_tokens(input, **named)
                batch = 1 if input.dim() == 1 else len(input)
                frozen = past_kv_cache is None
                cache = Cache.init_cache(self.cfg, self.cfg.device, batch) if frozen else past_kv_cache
                if not cache.entries[0].past_keys.shape[1]:
                    self._put_prefix(cache, batch)
                if frozen:
                    cache.freeze()
                past_kv_cache = cache
                if self.tokenizer is None and input.dim() < 3:  # nothing tells padding then
                    kwargs.setdefault("attention_mask", torch.ones_like(torch.atleast_2d(input)))
            return super().forward(input, *args, past_kv_cache=past_kv_cache, **kwargs)

        def _put_prefix(self, cache: Any, batch: int) -> None:
            for number, entry in enumerate(cache.entries):
                key, value = (self.constant_prefix[f"{number}.{kind}"] for kind in ("key", "value"))
                entry.past_keys, entry.past_values = (t.expand(batch, -1, -1, -1).clone() for t in (key, value))
            cache.previous_attention_mask = torch.ones(batch, key.shape[1], dtype=torch.int, device=self.cfg.device)

    return NormFreeTransformer
