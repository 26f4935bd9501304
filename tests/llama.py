"""A tiny Llama with two blocks, near its fresh weights, for trainings elsewhere: other processes, other trainers."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def tiny(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads, **ends))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model
