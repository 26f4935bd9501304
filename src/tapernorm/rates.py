"""Learning rates of a model that has lost norms already and is trained on.

    y = W h,   W = V / r:   the map V that read n = h / r has taken up the scale of the norm that was in front of it

Adam moves a weight by its learning rate η, however large its gradient is. A step of W changes y by η |h|, r times as
much as the same step of V would have: 5 to 30 times for most maps of a small Llama. So W learns at η / r, which is the
step of V.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.layout import layout_of
from tapernorm.modeling_tapernorm import name_pattern
from tapernorm.modules import evaluation, first_input
from tapernorm.statistics import token_scale
from tapernorm.trace import Trace


def readers(model: Any, ids: Tensor) -> dict[str, tuple[str, ...]]:
    """For each norm that is gone, the weights that read what it read. ids: [N, T], of which a few will do"""
    patterns = [name_pattern(name) for name in layout_of(model)["removed_norms"]]
    gone = [name for name, module in model.named_modules() if isinstance(module, nn.Identity)]
    gone = [name for name in gone if any(pattern.fullmatch(name) for pattern in patterns)]
    if not gone:
        return {}
    inputs = {"input_ids": ids[:1, :8].to(next(model.parameters()).device), "use_cache": False}
    trace = Trace(model, set(gone))
    trace.start(inputs)
    with evaluation(model), trace.watch(), trace:
        output = model(**inputs)
    trace.finish(output)
    return {name: tuple(link.weight for link in trace.links[name].values()) for name in gone}


def rate_factors(model: Any, ids: Tensor) -> dict[str, float]:
    """1 / r for each weight that reads the residual stream where a norm is gone, by its full name. r: the median over
    tokens of the root mean square of what it reads. Other weights are not in it. ids: [N, T]"""
    found = readers(model, ids)
    scales: dict[str, list[Tensor]] = {name: [] for name in found}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        scales[name].append(token_scale(first_input(args, kwargs).detach(), "rms", 0.0).flatten())

    handles = [
        model.get_submodule(name).register_forward_pre_hook(functools.partial(note, name), with_kwargs=True)
        for name in found
    ]
    try:
        if found:
            with evaluation(model):
                model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    medians = {name: float(torch.cat(parts).median()) for name, parts in scales.items() if parts}
    return {weight: 1 / medians[name] for name, weights in found.items() for weight in weights if medians[name] > 0}


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
