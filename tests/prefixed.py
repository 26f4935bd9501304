"""Tiny models with a constant prefix: stock, held as constants, tapered and trained."""

import copy

import torch
import transformers

import tapernorm as tn
from tapernorm.prefix import attach_prefix
from zoo import D, randomise

PREFIX = (5, 9, 3)
P = len(PREFIX)
IDS = torch.randint(D, (2, 12), generator=torch.Generator().manual_seed(1))
FRONT = torch.tensor([PREFIX])
ENDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
LLAMA = {
    "vocab_size": D, "hidden_size": D, "intermediate_size": D, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
MHA = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "head_dim")}
GPT2 = {"vocab_size": D, "n_embd": D, "n_inner": D, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
WINDOW = 5
TYPES = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "mistral": LLAMA | {"sliding_window": WINDOW},
    "gemma3_text": LLAMA | {"sliding_window": WINDOW, "layer_types": TYPES, "query_pre_attn_scalar": 8},
    "qwen2": LLAMA,
    "opt": MHA | {"ffn_dim": D, "word_embed_proj_dim": D},
    "gpt_neox": MHA,
    "phi": MHA | {"partial_rotary_factor": 0.5},
    "gpt_oss": LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW}
    | {"layer_types": TYPES},
}  # fmt: skip
LEARNED = ("gpt2", "opt")
_BUILT = {}


def build(family, attention=None, **changes):
    """A tiny stock model in float64 with random gains."""
    key = family, attention, str(changes)
    if key not in _BUILT:
        config = transformers.AutoConfig.for_model(family, **ENDS, **(MODELS.get(family, LLAMA) | changes))
        attention = attention or ("eager" if family == "gpt_oss" else "sdpa")
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, experts_implementation="eager"
        )
        _BUILT[key] = randomise(model.double().eval())
    return copy.deepcopy(_BUILT[key])


def held(family, attention=None, **changes):
    """(a stock model, the same with the prefix as constants)"""
    model = build(family, attention, **changes)
    stock = copy.deepcopy(model)
    attach_prefix(model, PREFIX)
    return stock, model


def in_front(ids, mask=None):
    """The prefix as tokens, and its mask."""
    ids = torch.cat([FRONT.expand(len(ids), -1), ids], dim=1)
    return ids, None if mask is None else torch.cat([mask.new_ones(len(ids), P), mask], dim=1)


def constants(model):
    return {k: v.clone() for k, v in model.named_buffers() if k.endswith(("prefix_key", "prefix_value"))}


def trained(family="llama", dtype=torch.float64, steps=3, keep=(), arm="all"):
    """A model tapered with the prefix and trained; its controller."""
    model = build(family).to(dtype)
    config = tn.TaperConfig(arm=arm, warmup_steps=1, taper_steps=2, prefix=PREFIX, keep=keep)
    controller = tn.taper_(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    for step in range(steps):
        ids = torch.randint(D, (4, 12), generator=torch.Generator().manual_seed(step))
        model.train()
        (model(input_ids=ids, labels=ids, use_cache=False).loss + controller.auxiliary_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    return model.eval(), controller


WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "top_k": 8},
}


def generated(model, ids, mask=None, **kwargs):
    """New tokens [B, 8] and their logits [8, B, V]."""
    torch.manual_seed(3)
    options = {"do_sample": False, "max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(input_ids=ids, attention_mask=mask, **(options | kwargs))
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits), out
