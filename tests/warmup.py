"""What the tests of warm-up share: tapered models of two blocks, their rows, and steps without an optimizer."""

import torch
import transformers

from tapernorm import taper_


def tiny(family="llama", seed=0, dtype=torch.float32):
    """A model with two blocks whose every parameter is random, norm gains and biases included."""
    ends = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if family == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **off, **ends)
    else:
        kind = {"llama": transformers.LlamaConfig, "gemma": transformers.GemmaConfig}[family]
        config = kind(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, max_position_embeddings=64, **ends
        )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if parameter.ndim == 1 and name.endswith("weight") and family != "gemma":
                parameter += 1
    return model.to(dtype).train()


def tapered(config, family="llama", dtype=torch.float32):
    model = tiny(family, dtype=dtype)
    return model, taper_(model, config)


def ids(rows, length=8, seed=0):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def scales(controller):
    return torch.tensor(list(controller.scales.values()))


def warm(model, controller, batches, steps=3, **inputs):
    """The same micro-batches in each of `steps` optimizer steps, without an optimizer."""
    for _ in range(steps):
        for rows in batches:
            model(input_ids=rows, **inputs)
        controller.step()
    return scales(controller)
