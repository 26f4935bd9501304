"""What the added gains and biases need of a user's optimizer: to be in it, without decay, with a clock that runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tapernorm.modules import TaperNorm


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
    """Let `target` begin with the moments and the clock that `source` has. Without an optimizer, nothing."""
    state = {} if optimizer is None else optimizer.state
    for key, value in state.get(source, {}).items():
        state[target][key] = value.clone() if isinstance(value, Tensor) else value
