"""Tiny Llama, Gemma and GPT-2 models whose every parameter is random, norm gains and biases included; and their rows.

The rows of `zoo` have square matrices, for what is computed. These are for what is trained, saved and generated: they
have tokens that end and pad, and grouped keys.
"""

import torch
import transformers

# The names that all three have; GPT-2 maps them to its own.
SHAPE = {
    "vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LLAMA = SHAPE | {"intermediate_size": 24, "num_key_value_heads": 1}
SHAPES = {"llama": LLAMA, "gemma": LLAMA | {"head_dim": 8}, "gpt2": SHAPE}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def tiny(family="llama", seed=0, dtype=torch.float32, layers=2, dropout=True, **settings):
    """A model in training mode. settings: of its configuration, before the shape above. dropout: GPT-2's, 0.1."""
    settings = SHAPES[family] | {"num_hidden_layers": layers} | settings
    if family == "gpt2" and not dropout:
        settings = NO_DROPOUT | settings
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if parameter.ndim == 1 and name.endswith("weight") and family != "gemma":  # Gemma's gain is 1 + weight
                parameter += 1
    return model.to(dtype).train()


def ids(rows=2, length=8, seed=0):
    """Tokens of text: none that begins, ends or pads."""
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
