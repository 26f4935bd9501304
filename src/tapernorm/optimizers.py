"""What the added gains and biases need of a user's optimizer: to be in it, without decay, with a clock that runs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tapernorm.modules import TaperNorm


def _is_deepspeed(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "_hp_mapping")  # the high-precision copy


def _copy_in_deepspeed(source: nn.Parameter, target: nn.Parameter) -> None:
    from deepspeed.utils import (  # type: ignore[import-not-found]
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    mapping: Any = source._hp_mapping  # type: ignore[attr-defined]
    own = [] if mapping is None else mapping.get_optim_state_keys()  # None: no part of it is on this rank
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(own))
    safe_set_full_fp32_param(target, target.detach().float())
    for key in sorted({key for keys in everyone for key in keys}):  # the clock is one for all parameters
        value = safe_get_full_optimizer_state(source, key)
        if isinstance(value, Tensor) and value.shape == target.shape:
            safe_set_full_optimizer_state(target, value, key)


def complete(optimizer: Any, sites: dict[str, TaperNorm]) -> None:
    """Add the γ̃ and β̃ that an optimizer built before `taper_` lacks, see `TaperController.attach_optimizer`. In place.

    Raises:
        ValueError: parameters are partitioned by ZeRO-3; or they are missing, and a learning-rate scheduler would
            not know of their new group.
    """
    for name, module in sites.items():
        if any(hasattr(p, "ds_id") for p in module.parameters()):
            raise ValueError(
                f"{name}: ZeRO-3 partitions its gain outside of the forward, and it cannot be calibrated; use "
                "ZeRO-1 or 2, or FSDP2"
            )
    if any(_is_deepspeed(p) for module in sites.values() for p in module.norm.parameters()):
        late = [n for n, m in sites.items() if not all(_is_deepspeed(p) for p in m.fixed_norm.parameters())]
        if late:
            raise ValueError(f"DeepSpeed's engine was made before taper_ and does not know {late[0]}: make it after")
        return
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    missing: dict[int, tuple[Any, list[nn.Parameter]]] = {}
    for module in sites.values():
        like = next((groups[id(p)] for p in module.norm.parameters() if id(p) in groups), {})
        new = [p for p in module.fixed_norm.parameters() if p.requires_grad and id(p) not in groups]
        missing.setdefault(id(like), (like, []))[1].extend(new)
    for like, new in missing.values():
        if new and like and not like.get("weight_decay"):
            like["params"].extend(new)
        elif new and "initial_lr" in like:  # written by a scheduler, which counts the groups
            raise ValueError(
                f"the optimizer was built before taper_ and lacks {len(new)} parameters of the tapered norms, and "
                "its learning-rate scheduler cannot take in another group; build both after tapernorm.taper_, or "
                "call controller.attach_optimizer(optimizer) before making the scheduler"
            )
        elif new:
            optimizer.add_param_group({**like, "params": new, "weight_decay": 0.0})


def copy_state(optimizer: Any, source: nn.Parameter, target: nn.Parameter) -> None:
    """Let `target`, just written, begin with the moments and the clock that `source` has.

    Without an optimizer there is nothing to do, unless it is DeepSpeed's: ZeRO-1 and 2 step flat copies of the weights,
    a part on each rank, and would undo what was written. Call it on every rank.
    """
    if _is_deepspeed(target):
        _copy_in_deepspeed(source, target)
        return
    state = {} if optimizer is None else optimizer.state
    if source.numel() != target.numel():  # a matrix, which has no moments of its own yet and no use for a vector's
        state.pop(target, None)
        return
    for key, value in state.get(source, {}).items():
        state[target][key] = value.clone() if isinstance(value, Tensor) else value
