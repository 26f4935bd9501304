"""The gate as a function of the taper clock. Pure functions of whole numbers; no state.

    g(k) = 1                                          k ≤ k_w
         = ½ (1 + cos(π (k − k_w) / (k_t − k_w)))     k_w < k < k_t
         = 0                                          k ≥ k_t

with k_w = warmup_steps and k_t = warmup_steps + taper_steps (arXiv 2602.10408, section 3).
"""

from __future__ import annotations

import math
from typing import Literal

from tapernorm.config import TaperConfig

Phase = Literal["warmup", "taper", "done"]


def gate(clock: int, config: TaperConfig) -> float:
    """g(clock), exactly 1.0 up to `warmup_steps` and exactly 0.0 from `total_steps` on."""
    if clock <= config.warmup_steps:
        return 1.0
    if clock >= config.total_steps:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (clock - config.warmup_steps) / config.taper_steps))


def phase(clock: int, config: TaperConfig) -> Phase:
    """`"warmup"` until the calibration is frozen at `warmup_steps`, `"taper"` until the gate is 0, then `"done"`."""
    if clock < config.warmup_steps:
        return "warmup"
    return "taper" if clock < config.total_steps else "done"
