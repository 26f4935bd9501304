"""Every family: one row states what a tiny model of it is, which of its norms can go, and which stay and why.

Matrices are square (width = intermediate = vocabulary = D), so that a wrong axis raises nothing and changes numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from family import Family
from zoo import D

_ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
_PLAIN: dict[str, Any] = {
    "hidden_size": D, "intermediate_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": D,
    "max_position_embeddings": 64, **_ENDS,
}  # fmt: skip
_GROUPED = _PLAIN | {"num_key_value_heads": 2}
_HEADS = _GROUPED | {"head_dim": D // 2}
_GPT: dict[str, Any] = {
    "vocab_size": D,
    "n_embd": D,
    "n_inner": D,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    **_ENDS,
}
_BLOOM: dict[str, Any] = {"vocab_size": D, "hidden_size": D, "n_layer": 2, "n_head": 2, **_ENDS}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": D,
    "mlp_only_layers": [],
}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": D}
_DECODER: dict[str, Any] = {"vocab_size": D, "d_model": D, "decoder_start_token_id": 0, **_ENDS}
_BOTH = _DECODER | {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 2, "attention_heads": 2, "ffn_dim": D}.items()
}
_IMAGE: dict[str, Any] = {
    "hidden_size": D, "intermediate_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_TEXT = _PLAIN | {"projection_size": D, "projection_dim": D, "eos_token_id": 1}
_DUAL = {"text_config": _TEXT, "vision_config": _IMAGE | {"projection_dim": D}}

_LLAMA = "model.layers.*.{input_layernorm,post_attention_layernorm} model.norm"
_ONE = "model.layers.*.input_layernorm model.norm"
_QK = "it normalises queries or keys"
_QK_NORMS = {"model.layers.*.self_attn.{q_norm,k_norm}": _QK}
_POST = "it is a post-norm"
_OUTPUT = "its output is an output of the model"
_STREAM = "the model is post-norm"
_VIT = "layers.*.{layernorm_before,layernorm_after}"
_ROUTER = "the router computes in float32"
_SOFTMAX = "attention computes in float32"
_ROTARY = "rotary positions are applied in float32"
_KEPT_QK = "the QK norms that stay compute in float32"
_KEPT_POST = "the post-norms that stay compute in float32"


def _bert(name: str, last: str) -> Family:
    """A body of BERT's layout under a masked head, whose norm is `last`."""
    layers = f"{name}.encoder.layer"
    stays = {
        f"{name}.embeddings.LayerNorm": "it normalises the embeddings",
        f"{layers}.*.attention.output.LayerNorm": _POST,
        f"{layers}.0.output.LayerNorm": _POST,
        f"{layers}.1.output.LayerNorm": _STREAM,
        last: _STREAM,
    }
    return Family(name, name, _PLAIN, "", stays, head="AutoModelForMaskedLM")


_ROWS = (
    Family("llama", "llama", _GROUPED, _LLAMA),
    Family("mistral", "mistral", _HEADS | {"sliding_window": 4}, _LLAMA),
    Family("ministral", "ministral", _HEADS, _LLAMA),
    Family("qwen2", "qwen2", _GROUPED, _LLAMA),
    Family("qwen3", "qwen3", _HEADS, _LLAMA, _QK_NORMS, float32=_KEPT_QK),
    Family("qwen2_moe", "qwen2_moe", _GROUPED | _SHARED, _LLAMA, float32=_ROUTER),
    Family("qwen3_moe", "qwen3_moe", _HEADS | _EXPERTS, _LLAMA, _QK_NORMS, float32=_KEPT_QK),
    Family(
        "qwen3_next",
        "qwen3_next",
        _HEADS | _SHARED | {
            "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        _LLAMA,
        {**_QK_NORMS, "model.layers.0.linear_attn.norm": "neither an RMS norm nor a layer norm"},
        float32="the delta rule computes in float32",
    ),
    Family("mixtral", "mixtral", _HEADS | {"num_local_experts": 4}, _LLAMA, float32=_ROUTER),
    Family("gemma", "gemma", _HEADS, _LLAMA),
    Family(
        "gemma2", "gemma2", _HEADS, "model.layers.*.{input_layernorm,pre_feedforward_layernorm} model.norm",
        {"model.layers.*.{post_attention_layernorm,post_feedforward_layernorm}": _POST}, float32=_KEPT_POST,
    ),
    Family(
        "gemma3_text", "gemma3_text", _HEADS, "model.layers.*.{input_layernorm,pre_feedforward_layernorm} model.norm",
        {"model.layers.*.{post_attention_layernorm,post_feedforward_layernorm}": _POST, **_QK_NORMS},
        float32=_KEPT_POST,
    ),
    Family("phi", "phi", _PLAIN, "model.layers.*.input_layernorm model.final_layernorm"),
    Family("phi3", "phi3", _GROUPED, _LLAMA),
    Family("gpt2", "gpt2", _GPT, "transformer.h.*.{ln_1,ln_2} transformer.ln_f"),
    Family(
        "gpt_neo", "gpt_neo",
        {"vocab_size": D, "hidden_size": D, "intermediate_size": D, "num_layers": 2, "num_heads": 2,
         "attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 64, **_ENDS},
        "transformer.h.*.{ln_1,ln_2} transformer.ln_f",
        float32=_SOFTMAX,
    ),
    Family(
        "gpt_neox", "gpt_neox", _PLAIN | {"use_parallel_residual": True},
        "gpt_neox.layers.*.{input_layernorm,post_attention_layernorm} gpt_neox.final_layer_norm",
    ),
    Family(
        "gpt_neox-sequential", "gpt_neox", _PLAIN | {"use_parallel_residual": False},
        "gpt_neox.layers.*.{input_layernorm,post_attention_layernorm} gpt_neox.final_layer_norm",
    ),
    Family("gptj", "gptj", _GPT | {"rotary_dim": 4}, "transformer.h.*.ln_1 transformer.ln_f"),
    Family(
        "opt", "opt", _PLAIN | {"ffn_dim": D, "word_embed_proj_dim": D},
        "model.decoder.layers.*.{self_attn_layer_norm,final_layer_norm} model.decoder.final_layer_norm",
    ),
    Family(
        "opt-projected", "opt", _PLAIN | {"ffn_dim": D, "word_embed_proj_dim": D // 2},
        "model.decoder.layers.*.{self_attn_layer_norm,final_layer_norm} model.decoder.final_layer_norm",
    ),
    Family(
        "opt-post", "opt", _PLAIN | {"ffn_dim": D, "word_embed_proj_dim": D // 2, "do_layer_norm_before": False}, "",
        {"model.decoder.layers.*.self_attn_layer_norm": _POST, "model.decoder.layers.0.final_layer_norm": _POST,
         "model.decoder.layers.1.final_layer_norm": _STREAM},
    ),
    Family(
        "bloom", "bloom", _BLOOM, "transformer.h.*.{input_layernorm,post_attention_layernorm} transformer.ln_f",
        {"transformer.word_embeddings_layernorm": "it normalises the embeddings"},
        float32=_SOFTMAX,
    ),
    Family(
        "falcon-7b", "falcon",
        _PLAIN | {"ffn_hidden_size": D, "parallel_attn": True, "multi_query": True, "new_decoder_architecture": False},
        "transformer.h.*.input_layernorm transformer.ln_f",
    ),
    Family(
        "falcon-40b", "falcon", _PLAIN | {"ffn_hidden_size": D, "num_kv_heads": 2, "new_decoder_architecture": True},
        "transformer.h.*.{ln_attn,ln_mlp} transformer.ln_f",
    ),
    Family(
        "mpt", "mpt",
        {"vocab_size": D, "d_model": D, "n_layers": 2, "n_heads": 2, "expansion_ratio": 1, "max_seq_len": 64, **_ENDS},
        "transformer.blocks.*.{norm_1,norm_2} transformer.norm_f", float32=_SOFTMAX,
    ),
    Family("stablelm", "stablelm", _GROUPED, _LLAMA),
    Family(
        "stablelm-qk", "stablelm", _GROUPED | {"qk_layernorm": True}, _LLAMA,
        {"model.layers.*.self_attn.{q_layernorm,k_layernorm}.norms.*": _QK},
    ),
    Family("stablelm-parallel", "stablelm", _GROUPED | {"use_parallel_residual": True}, _ONE),
    Family("cohere", "cohere", _GROUPED, _ONE, float32=_ROTARY),
    Family(
        "cohere-qk", "cohere", _GROUPED | {"use_qk_norm": True}, _ONE, _QK_NORMS, float32=_KEPT_QK,
    ),
    Family("cohere2", "cohere2", _HEADS | {"sliding_window": 4}, _ONE, float32=_ROTARY),
    Family("olmo", "olmo", _GROUPED, _LLAMA),
    Family(
        "olmo2", "olmo2", _GROUPED, "model.norm",
        {"model.layers.*.{post_attention_layernorm,post_feedforward_layernorm}": _POST, **_QK_NORMS},
        float32=_KEPT_POST,
    ),
    Family(
        "olmoe", "olmoe", _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}, _LLAMA, _QK_NORMS, float32=_KEPT_QK,
    ),
    Family("granite", "granite", _GROUPED | {"residual_multiplier": 0.7, "logits_scaling": 2.0}, _LLAMA),
    Family("granitemoe", "granitemoe", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, _LLAMA,
           float32=_ROUTER),
    Family("starcoder2", "starcoder2", _GROUPED, _LLAMA),
    Family("nemotron", "nemotron", _HEADS, _LLAMA),
    Family("glm", "glm", _HEADS, _LLAMA),
    Family(
        "glm4", "glm4", _HEADS, _LLAMA,
        {"model.layers.*.{post_self_attn_layernorm,post_mlp_layernorm}": _POST}, float32=_KEPT_POST,
    ),
    Family("smollm3", "smollm3", _GROUPED, _LLAMA),
    Family(
        "exaone4", "exaone4", _HEADS, "model.norm",
        {"model.layers.*.{post_attention_layernorm,post_feedforward_layernorm}": _POST, **_QK_NORMS},
        float32=_KEPT_POST,
    ),
    Family(
        "deepseek_v3", "deepseek_v3",
        _GROUPED | {
            "moe_intermediate_size": D, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "q_lora_rank": D, "kv_lora_rank": D, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
        },
        _LLAMA + " model.layers.*.self_attn.{q_a_layernorm,kv_a_layernorm}",
        float32=_ROUTER,
    ),
    Family("helium", "helium", _HEADS, _LLAMA),
    Family(
        "persimmon", "persimmon", _PLAIN,
        "model.layers.*.{input_layernorm,post_attention_layernorm} model.final_layernorm",
        {"model.layers.*.self_attn.{q_layernorm,k_layernorm}": _QK},
    ),
    Family(
        "codegen", "codegen", _GPT | {"n_head": 4, "n_ctx": 64, "rotary_dim": 4},
        "transformer.h.*.ln_1 transformer.ln_f",
    ),
    Family("biogpt", "biogpt", _PLAIN, "biogpt.layers.*.{self_attn_layer_norm,final_layer_norm} biogpt.layer_norm"),
    Family(
        "xglm", "xglm", _DECODER | {"ffn_dim": D, "num_layers": 2, "attention_heads": 2, "max_position_embeddings": 64},
        "model.layers.*.{self_attn_layer_norm,final_layer_norm} model.layer_norm", wide=True,
    ),
    Family(
        "t5", "t5", _DECODER | {"d_kv": D // 2, "d_ff": D, "num_layers": 2, "num_heads": 2},
        "encoder.block.*.layer.*.layer_norm decoder.block.*.layer.*.layer_norm decoder.final_layer_norm",
        {"encoder.final_layer_norm": _OUTPUT},
        head="AutoModelForSeq2SeqLM",
        float32="the encoder's last norm stays, and computes in float32",
    ),
    Family(
        "t5-untied", "t5",
        _DECODER | {"d_kv": D // 2, "d_ff": D, "num_layers": 2, "num_heads": 2, "tie_word_embeddings": False,
                    "feed_forward_proj": "gated-gelu"},
        "encoder.block.*.layer.*.layer_norm decoder.block.*.layer.*.layer_norm decoder.final_layer_norm",
        {"encoder.final_layer_norm": _OUTPUT},
        head="AutoModelForSeq2SeqLM",
        float32="the encoder's last norm stays, and computes in float32",
    ),
    Family(
        "whisper", "whisper", _BOTH | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32},
        "model.encoder.layers.*.{self_attn_layer_norm,final_layer_norm} "
        "model.decoder.layers.*.{self_attn_layer_norm,encoder_attn_layer_norm,final_layer_norm} "
        "model.decoder.layer_norm",
        {"model.encoder.layer_norm": _OUTPUT},
        head="AutoModelForSpeechSeq2Seq",
    ),
    Family("vit", "vit", _IMAGE, f"vit.{_VIT} vit.layernorm", head="AutoModelForImageClassification"),
    Family(
        "dinov2", "dinov2", _IMAGE | {"mlp_ratio": 1}, "dinov2.encoder.layer.*.{norm1,norm2}",
        {"dinov2.layernorm": "also read by cat"}, head="AutoModelForImageClassification",
    ),
    Family("deit", "deit", _IMAGE, f"deit.{_VIT} deit.layernorm", head="DeiTForImageClassification"),
    Family(
        "siglip", "siglip", _DUAL,
        "{vision,text}_model.encoder.layers.*.{layer_norm1,layer_norm2} vision_model.head.layernorm",
        {"vision_model.post_layernorm": _OUTPUT, "text_model.final_layer_norm": _OUTPUT}, head="AutoModel",
    ),
    Family(
        "clip", "clip", _DUAL | {"projection_dim": D},
        "{vision,text}_model.encoder.layers.*.{layer_norm1,layer_norm2} vision_model.post_layernorm",
        {"vision_model.pre_layrnorm": "it normalises the embeddings", "text_model.final_layer_norm": _OUTPUT},
        head="AutoModel",
    ),
    Family("timm-token", "timm", {"pool": "token"}, "blocks.*.{norm1,norm2} norm"),
    Family("timm-avg", "timm", {"pool": "avg"}, "blocks.*.{norm1,norm2} fc_norm"),
    # heads of other kinds, and none
    Family("llama-sequences", "llama", _GROUPED | {"num_labels": D}, _LLAMA, head="AutoModelForSequenceClassification"),
    Family("llama-tokens", "llama", _GROUPED | {"num_labels": D}, _LLAMA, head="AutoModelForTokenClassification"),
    Family(
        "llama-body", "llama", _GROUPED, "layers.*.{input_layernorm,post_attention_layernorm}", {"norm": _OUTPUT},
        head="AutoModel", float32="the last norm stays, and computes in float32",
    ),
    Family(
        "gpt2-sequences", "gpt2", _GPT | {"num_labels": D}, "transformer.h.*.{ln_1,ln_2} transformer.ln_f",
        head="AutoModelForSequenceClassification",
    ),
    Family(
        "gpt2-tokens", "gpt2", _GPT | {"num_labels": D}, "transformer.h.*.{ln_1,ln_2} transformer.ln_f",
        head="AutoModelForTokenClassification",
    ),
    Family("gpt2-body", "gpt2", _GPT, "h.*.{ln_1,ln_2}", {"ln_f": _OUTPUT}, head="AutoModel"),
    Family("qwen3-sequences", "qwen3", _HEADS, _LLAMA, _QK_NORMS, head="AutoModelForSequenceClassification",
           float32=_KEPT_QK),
    Family("qwen3-tokens", "qwen3", _HEADS, _LLAMA, _QK_NORMS, head="AutoModelForTokenClassification",
           float32=_KEPT_QK),
    Family(
        "qwen3-body", "qwen3", _HEADS, "layers.*.{input_layernorm,post_attention_layernorm}",
        {"layers.*.self_attn.{q_norm,k_norm}": _QK, "norm": _OUTPUT}, head="AutoModel", float32=_KEPT_QK,
    ),
    # refused whole
    _bert("bert", "cls.predictions.transform.LayerNorm"),
    _bert("roberta", "lm_head.layer_norm"),
    Family(
        "bart", "bart", _BOTH | {"max_position_embeddings": 64}, "",
        {"model.{encoder,decoder}.layernorm_embedding": "it normalises the embeddings",
         "model.{encoder,decoder}.layers.*.self_attn_layer_norm": _POST,
         "model.decoder.layers.*.encoder_attn_layer_norm": _POST,
         "model.{encoder,decoder}.layers.0.final_layer_norm": _POST,
         "model.encoder.layers.1.final_layer_norm": _OUTPUT, "model.decoder.layers.1.final_layer_norm": _STREAM},
        head="AutoModelForSeq2SeqLM",
    ),
)  # fmt: skip


def _float32_of(row: Family) -> str:
    """Why it rounds when its post-norms are gone."""
    return _KEPT_QK if _QK in row.stays.values() else _SOFTMAX if row.model_type == "gemma2" else ""


# the sandwich again, with its post-norms folded backwards
_SANDWICHES = tuple(
    dataclasses.replace(row, name=f"{row.name}-post", post=True, float32=_float32_of(row))
    for row in _ROWS
    if row.goes and _POST in row.stays.values()
)
FAMILIES = _ROWS + _SANDWICHES
