"""What the tests of fused linear maps share."""

import copy

import torch

import tapernorm as tn
from tapernorm import fused_tapernorm
from zoo import BY_NAME, tapered

QKV = ("q_proj", "k_proj", "v_proj")


def fused(name, arm="all", dtype=torch.float64):
    """(the folded model, the fused one, its report)."""
    folded = tapered(BY_NAME[name], arm, dtype=dtype)
    model = copy.deepcopy(folded)
    tn.fold_(folded)
    return folded, model, tn.fold_(model, fuse=True)


def parts_of(model):
    """The stand-ins for the linear maps that were fused."""
    return [m for m in model.modules() if isinstance(m, fused_tapernorm.FusedPart)]
