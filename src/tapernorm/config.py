"""What a run is told to do. Every value that cannot work is refused here, before anything is touched."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, Literal

Arm = Literal["internal", "all"]
Calibration = Literal["robust", "lstsq", "log"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "arm": ("internal", "all"),
    "calibration": ("robust", "lstsq", "log"),
    "fixed": ("diagonal", "linear"),
    "anchor": ("absolute", "relative"),
}


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an error message: `" (did you mean 'internal'?)"`, or nothing when no name is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclasses.dataclass(frozen=True)
class TaperConfig:
    """How the norms of a model are tapered.

    The gate g(k) is 1 for k ≤ warmup_steps, falls along a cosine for taper_steps optimizer steps, and is 0
    after that (`tapernorm.schedule`). Source: arXiv 2602.10408, sections 3 and 4.

    Args:
        arm: `"internal"` tapers every removable norm but the final one, which stays and anchors the scale of
            the logits; `"all"` tapers the final one too and puts the scale loss in its place.
        warmup_steps: optimizer steps at gate 1, in which the statistics for c are gathered; at least 1.
        taper_steps: optimizer steps in which the gate falls from 1 to 0; at least 1.
        calibration: how the fixed scale c is found. `"lstsq"` is the paper's least squares over all tokens;
            `"robust"` weights a token by 1/r², so that no large token pulls c down; `"log"` is exp(−E log r).
        ema_decay: decay of the moving averages of the statistics, per optimizer step; 0 ≤ decay < 1.
        fixed: shape of the fixed branch; only `"diagonal"`, the paper's c·γ̃, so far.
        anchor: `"absolute"`, λ·E[(s − s_tgt)²], or `"relative"`, λ·E[(s/s_tgt − 1)²].
        anchor_weight: λ. None means 0.1 for `arm="all"` and 0 for `arm="internal"`; 0 turns the anchor off.
        keep: glob patterns of norms to leave alone, matched against full module names.
        post: also taper sandwich post-norms; not available yet.
        prefix: token ids of a constant prefix; not available yet.
        uniformity_weight: weight of the uniformity loss (log r·c)²; only 0 so far.
        cap: κ of the seat belt, the largest r·c that the fixed branch may see while 0 < g < 1; only None so far.
        massive_ratio: a token whose r is above this multiple of its site's median in warm-up is massive.
        allow_massive: go on although massive tokens were seen.

    Raises:
        ValueError: a value out of its range or not among its choices; a value whose feature is not there yet.
    """

    arm: Arm = "internal"
    warmup_steps: int = 100
    taper_steps: int = 700
    calibration: Calibration = "robust"
    ema_decay: float = 0.99
    fixed: Literal["diagonal", "linear"] = "diagonal"
    anchor: Literal["absolute", "relative"] = "absolute"
    anchor_weight: float | None = None
    keep: tuple[str, ...] = ()
    post: bool = False
    prefix: tuple[int, ...] = ()
    uniformity_weight: float = 0.0
    cap: float | None = None
    massive_ratio: float = 20.0
    allow_massive: bool = False

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                known = ", ".join(map(repr, choices))
                raise ValueError(f"{field}={value!r} is not one of {known}{nearest(value, choices)}")
        for field in ("warmup_steps", "taper_steps"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field}={value!r} must be a whole number of optimizer steps, at least 1")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay!r} must be at least 0 and below 1")
        if self.anchor_weight is not None and not 0 <= self.anchor_weight < float("inf"):
            raise ValueError(f"anchor_weight={self.anchor_weight!r} must be None or a finite number, at least 0")
        if self.massive_ratio <= 1:
            raise ValueError(f"massive_ratio={self.massive_ratio!r} must be above 1: it multiplies a median")
        for field in ("keep", "prefix"):
            value = getattr(self, field)
            if isinstance(value, str | int):
                raise ValueError(f"{field}={value!r} must be a sequence, such as {field}=({value!r},)")
            object.__setattr__(self, field, tuple(value))
        self._refuse_what_is_not_there()

    def _refuse_what_is_not_there(self) -> None:
        """An option that would be ignored is worse than one that is missing."""
        missing = {
            "fixed": self.fixed != "diagonal",
            "post": self.post,
            "prefix": bool(self.prefix),
            "uniformity_weight": self.uniformity_weight != 0,
            "cap": self.cap is not None,
        }
        for field, asked in missing.items():
            if asked:
                raise ValueError(
                    f"{field}={getattr(self, field)!r} is not available in this version; leave {field} out"
                )

    @property
    def weight(self) -> float:
        """λ with the default of the arm filled in."""
        if self.anchor_weight is not None:
            return float(self.anchor_weight)
        return 0.1 if self.arm == "all" else 0.0

    @property
    def total_steps(self) -> int:
        """k_t: the optimizer step from which the gate is 0."""
        return self.warmup_steps + self.taper_steps

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, tuples as lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TaperConfig:
        """The inverse of `to_dict`. Raises ValueError for a name that is not a field."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"TaperConfig has no field {name!r}{nearest(name, known)}")
        return cls(**values)
