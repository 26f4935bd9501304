"""What the tests of TaperNorm share: one of each kind of norm, tapered, a residual, and the definition once more."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tapernorm.modules import TaperNorm
from tapernorm.probe import probe
from zoo import ROWS, D, randomise

ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
PATHS = {"exact": 1.0, "mixed": 0.3, "fixed": 0.0}


def rms(eps=1e-6):
    return LlamaRMSNorm(D, eps)


NORMS = {
    "rms": rms,
    "rms-zero-centred": lambda: GemmaRMSNorm(D),
    "rms-torch": lambda: nn.RMSNorm(D, 1e-5),
    "rms-weightless": lambda: nn.RMSNorm(D, 1e-5, elementwise_affine=False),
    "layer": lambda: nn.LayerNorm(D),
    "layer-no-bias": lambda: nn.LayerNorm(D, bias=False),
    "layer-weightless": lambda: nn.LayerNorm(D, elementwise_affine=False),
}
NORM = pytest.mark.parametrize("name", NORMS)


def taper_norm(name, gate=1.0, dtype=torch.float64, seed=0):
    norm = NORMS[name]().to(dtype)
    probed = probe(norm, D)
    assert probed is not None
    module = randomise(TaperNorm(norm, probed, D).to(dtype), seed)
    module.set_gate(gate)
    return module


def residual(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, D, generator=generator, dtype=torch.float64) * 1.5 + 1.5).to(dtype)


def formula(module, h, g):
    """DESIGN: the definition, in float64, written down once more."""
    h = h.double()
    gain = module.norm.weight.double() if module.probed.gain else torch.ones(D, dtype=torch.float64)
    gain = 1 + gain if module.probed.zero_centered else gain
    c, fixed_gain = module.fixed_norm.c.double(), module.fixed_norm.weight.double()
    g = torch.tensor(g, dtype=torch.float32).double()
    if module.probed.kind == "rms":
        r = (h.pow(2).mean(-1, keepdim=True) + module.probed.eps).sqrt()
        return g * h / r * gain + (1 - g) * c * h * fixed_gain
    centred = h - h.mean(-1, keepdim=True)
    sigma = (centred.pow(2).mean(-1, keepdim=True) + module.probed.eps).sqrt()
    has_bias = module.probed.bias is not None
    bias = module.norm.bias.double() if has_bias else 0
    fixed_bias = module.fixed_norm.bias.double() if has_bias else 0
    return g * (centred / sigma * gain + bias) + (1 - g) * (c * centred * fixed_gain + fixed_bias)
