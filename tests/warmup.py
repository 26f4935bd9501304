"""What the tests of warm-up share: tapered models of two blocks, their rows, and steps without an optimizer."""

import torch

import tiny_models
from tapernorm import taper_


def tiny(family="llama", seed=0, dtype=torch.float32):
    """Two blocks without dropout."""
    return tiny_models.tiny(family, seed, dtype, dropout=False)


def tapered(config, family="llama", dtype=torch.float32):
    model = tiny(family, dtype=dtype)
    return model, taper_(model, config)


def scales(controller):
    return torch.tensor(list(controller.scales.values()))


def warm(model, controller, batches, steps=3, **inputs):
    """The same micro-batches in each of `steps` optimizer steps, without an optimizer."""
    for _ in range(steps):
        for rows in batches:
            model(input_ids=rows, **inputs)
        controller.step()
    return scales(controller)
