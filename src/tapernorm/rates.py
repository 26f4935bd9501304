"""Learning rates of a model that has lost norms already and is trained on.

    y = W h,   W = V / r:   the map V that read n = h / r has taken up the scale of the norm that was in front of it

Adam moves a weight by its learning rate η, however large its gradient is. A step of W changes y by η |h|, r times as
much as the same step of V would have: 5 to 30 times for most maps of a small Llama. So W learns at η / r, which is the
step of V.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tapernorm.held import Gone


def rate_factors(gone: Mapping[str, Gone]) -> dict[str, float]:
    """1 / r for each weight that reads the residual stream where a norm is gone, by its full name; r: the median over
    tokens of the scale of what it reads. Other weights are not in it. gone: from `tapernorm.held.gone`"""
    return {weight: 1 / each.r for each in gone.values() for weight in each.readers}


def lower_rates(optimizer: torch.optim.Optimizer, model: nn.Module, factors: dict[str, float]) -> None:
    """Give the weights in `factors` groups of their own, with that share of their rate. In place; before any step."""
    named = {id(model.get_parameter(name)): factor for name, factor in factors.items()}
    for group in list(optimizer.param_groups):
        own: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if id(parameter) in named:
                own.setdefault(named[id(parameter)], []).append(parameter)
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in named]
        for factor, parameters in own.items():
            optimizer.add_param_group({**group, "params": parameters, "lr": group["lr"] * factor})
