"""The gate as a function of the taper clock, site by site. Pure functions; no state.

    g(k) = 1                                        k ≤ k_s
         = ½ (1 + cos(π (k − k_s) / length))        k_s < k < k_s + length
         = 0                                        k ≥ k_s + length

with k_s = warmup_steps and length = taper_steps for the paper's one gate (arXiv 2602.10408, section 3). Staggered,
a site with the place p (0 first, 1 last) starts at k_s = warmup_steps + p · stagger · taper_steps and takes
length = (1 − stagger) · taper_steps, so that all gates are 0 at k_t = warmup_steps + taper_steps.

The clock is counted in optimizer steps, and is a fraction of one where a guard has slowed the taper.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from tapernorm.config import TaperConfig, nearest

Phase = Literal["warmup", "taper", "done"]


def gate(clock: float, config: TaperConfig, place: float = 0.0) -> float:
    """g(clock) of a site: exactly 1.0 up to `warmup_steps` and exactly 0.0 from `total_steps` on.

    place: of the site among those that are staggered, from 0 (starts first) to 1 (last).
    """
    start = config.warmup_steps + place * config.stagger * config.taper_steps
    length = (1 - config.stagger) * config.taper_steps
    if clock <= start:
        return 1.0 if clock < config.total_steps else 0.0
    if clock >= min(start + length, config.total_steps):
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (clock - start) / length))


def cap(clock: float, config: TaperConfig) -> float | None:
    """κ of the seat belt: `cap`, and doubled every `loosen_steps` after the taper. In jumps, as compiled code sees each
    value as another program."""
    if config.cap is None or not config.loosen_steps or clock < config.total_steps:
        return config.cap
    return float(config.cap * 2 ** int((clock - config.total_steps) // config.loosen_steps))


def phase(clock: float, config: TaperConfig) -> Phase:
    """`"warmup"` until the calibration is frozen at `warmup_steps`, `"taper"` until every gate is 0, then `"done"`."""
    if clock < config.warmup_steps:
        return "warmup"
    return "taper" if clock < config.total_steps else "done"


def places(names: Sequence[str], config: TaperConfig, spread: Mapping[str, float] | None = None) -> dict[str, float]:
    """Each site's place in the order in which they start, from 0 to 1.

    Args:
        names: the sites in the order of execution.
        config: `order` says what the order is.
        spread: how far log r spreads over tokens at each site, for `order="difficulty"`; until it is known all have
            the place 0.

    Raises:
        ValueError: `order` names a site that is not there, or leaves one out.
    """
    order = config.order
    if isinstance(order, Mapping):
        return {name: float(order[_first(name, order, names)]) for name in names}
    if not isinstance(order, str):
        groups = {pattern: number for number, pattern in enumerate(dict.fromkeys(order))}
        return {name: groups[_first(name, groups, names)] / max(1, len(groups) - 1) for name in names}
    ranked = list(names)
    if order == "difficulty":
        if spread is None:
            return dict.fromkeys(names, 0.0)
        ranked.sort(key=lambda name: spread[name])  # stable: the shallower of two equals goes first
    elif order == "reverse":
        ranked.reverse()
    return {name: ranked.index(name) / max(1, len(ranked) - 1) for name in names}


def _first(name: str, patterns: Mapping[str, object], names: Sequence[str]) -> str:
    """The first pattern that matches `name`, when all of them match something."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"order={pattern!r} matches none of the tapered norms{nearest(pattern, names)}")
    found = next((pattern for pattern in patterns if fnmatch.fnmatch(name, pattern)), None)
    if found is None:
        raise ValueError(f"order leaves out {name}; name it, or end with '*'")
    return found
