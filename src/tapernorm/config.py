"""What a run is told to do. Every value that cannot work is refused here, before anything is touched."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Arm = Literal["internal", "all"]
Calibration = Literal["robust", "lstsq", "log"]

MASSIVE_RATIO = 20.0  # times a site's median: no fixed scale serves such a token beside the others
ORDERS = ("depth", "reverse", "difficulty")
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


def is_number(value: Any) -> bool:
    """A real number. A YAML file's `3e-4`, without a point, is a string, and a string compares with nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read_sequence(field: str, value: Any, of: type) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}={value!r} must be a sequence, such as {field}=({value!r},)")
    items = tuple(value)
    if not all(isinstance(item, of) for item in items):
        raise ValueError(f"{field}={items!r} must hold values of type {of.__name__} only")
    return items


def read_order(value: Any) -> str | tuple[str, ...] | dict[str, float]:
    """The value of `TaperConfig.order`, checked as far as is possible without a model."""
    if isinstance(value, str):
        if value not in ORDERS:
            hint = nearest(value, ORDERS) or f"; names of sites go into a sequence, such as order=({value!r}, '*')"
            raise ValueError(f"order={value!r} is not one of {', '.join(map(repr, ORDERS))}{hint}")
        return value
    if isinstance(value, Mapping):
        for name, place in value.items():
            if not isinstance(name, str) or not is_number(place) or not 0 <= place <= 1:
                raise ValueError(f"order={{{name!r}: {place!r}}} must map names of sites to places from 0 to 1")
        return dict(value)
    return read_sequence("order", value, str)


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
        fixed: shape of the fixed branch: `"diagonal"`, the paper's c·γ̃, or `"linear"`, a matrix fitted at the end of
            warm-up and trained from there (`tapernorm.linear_branch`); it folds at the same cost, none.
        anchor: `"absolute"`, λ·E[(s − s_tgt)²], or `"relative"`, λ·E[(s/s_tgt − 1)²].
        anchor_weight: λ. None means 0.1 for `arm="all"` and 0 for `arm="internal"`; 0 turns the anchor off.
        keep: glob patterns of norms to leave alone, matched against full module names.
        post: also taper sandwich post-norms, the norms of a block's output (Gemma 2, OLMo 2, GLM-4). They are folded
            backwards, into the rows of the linear map that they read.
        prefix: 1 to 4 token ids whose keys and values become constants in front of every text, before anything is
            tapered (`tapernorm.prefix`); `tapernorm.find_prefix` proposes them.
        uniformity_weight: weight of the uniformity loss, Σ over sites of the mean over tokens of (log r·c)², until
            the fold (`tapernorm.uniformity`); 0 turns it off.
        uniformity_above: where a token's scale begins to count, as a multiple of the usual one: the loss is
            max(0, log(r·c / uniformity_above))², which leaves all but the large tokens alone; None: every token counts.
        cap: κ of the seat belt: below gate 1 the fixed branch's scale for a token is c·min(1, κ/(c·r)), at gate 0 in
            training only; 1.5 to 4 is usual, None turns it off.
        loosen_steps: after the taper κ doubles every so many optimizer steps, so that the end is trained for what the
            fold leaves; 0: it stays.
        gradient_cap: in training no token's gradient at the input of a norm counts for more than this many times the
            median token's (`tapernorm.belts`); 10 leaves all but the few that run away alone, None turns it off.
        massive_ratio: a token whose r is above this multiple of its site's median in warm-up is massive.
        allow_massive: go on although massive tokens were seen.
        stagger: how much later than the first site the last one starts, as a share of taper_steps, 0 ≤ stagger < 1.
            Each site's gate then falls in (1 − stagger)·taper_steps steps, and all are 0 at the same end; 0 is the
            paper's one gate for all.
        order: which sites start first when they are staggered: `"depth"`, `"reverse"`, `"difficulty"` (those with the
            smallest spread of log r over tokens first, as measured in warm-up), a sequence of names or glob patterns
            in groups of their order, or a mapping of these to their place from 0 (first) to 1 (last).
        guard_margin: how far, in nats, the loss of a step may lie above the warm-up's before the guard holds the
            gate (`tapernorm.guard`); None for no guard.
        guard_patience: how many steps in a row may be unsound before the gate is moved back.
        guard_rewinds: how many times it is moved back before the run is stopped.

    Raises:
        ValueError: a value out of its range or not among its choices.
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
    uniformity_above: float | None = None
    cap: float | None = None
    loosen_steps: int = 0
    gradient_cap: float | None = None
    massive_ratio: float = MASSIVE_RATIO
    allow_massive: bool = False
    stagger: float = 0.0
    order: str | tuple[str, ...] | dict[str, float] = "depth"
    guard_margin: float | None = None
    guard_patience: int = 20
    guard_rewinds: int = 3

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                known = ", ".join(map(repr, choices))
                raise ValueError(f"{field}={value!r} is not one of {known}{nearest(value, choices)}")
        for field in ("warmup_steps", "taper_steps"):
            value = getattr(self, field)
            if not is_count(value, 1):
                raise ValueError(f"{field}={value!r} must be a whole number of optimizer steps, at least 1")
        if not is_number(self.ema_decay) or not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay!r} must be a number, at least 0 and below 1")
        weight = self.anchor_weight
        if weight is not None and (not is_number(weight) or not 0 <= weight < float("inf")):
            raise ValueError(f"anchor_weight={weight!r} must be None or a finite number, at least 0")
        if not isinstance(self.post, bool):
            raise ValueError(f"post={self.post!r} must be True or False")
        if not is_number(self.massive_ratio) or not self.massive_ratio > 1:
            raise ValueError(f"massive_ratio={self.massive_ratio!r} must be a number above 1: it multiplies a median")
        for field, of in (("keep", str), ("prefix", int)):
            object.__setattr__(self, field, read_sequence(field, getattr(self, field), of))
        if len(self.prefix) > 4 or any(token < 0 for token in self.prefix):
            raise ValueError(f"prefix={self.prefix!r} must hold at most 4 token ids, none below 0")
        if not is_number(self.uniformity_weight) or not 0 <= self.uniformity_weight < float("inf"):
            raise ValueError(f"uniformity_weight={self.uniformity_weight!r} must be a finite number, at least 0")
        above = self.uniformity_above
        if above is not None and (not is_number(above) or not 1 <= above < float("inf")):
            raise ValueError(
                f"uniformity_above={above!r} must be None or a finite number, at least 1: a multiple of the usual scale"
            )
        if self.cap is not None and (not is_number(self.cap) or not 1 < self.cap < float("inf")):
            raise ValueError(
                f"cap={self.cap!r} must be None or a finite number above 1: r·c is about 1 where all is well"
            )
        bound = self.gradient_cap
        if bound is not None and (not is_number(bound) or not 1 <= bound < float("inf")):
            raise ValueError(
                f"gradient_cap={bound!r} must be None or a finite number, at least 1: it multiplies a median"
            )
        if not is_count(self.loosen_steps, 0):
            raise ValueError(
                f"loosen_steps={self.loosen_steps!r} must be a whole number of optimizer steps, at least 0"
            )
        if self.loosen_steps and self.cap is None:
            raise ValueError(
                f"loosen_steps={self.loosen_steps} loosens the seat belt, and there is none: give cap a value"
            )
        if not is_number(self.stagger) or not 0 <= self.stagger < 1:
            raise ValueError(f"stagger={self.stagger!r} must be a share of taper_steps, at least 0 and below 1")
        object.__setattr__(self, "order", read_order(self.order))
        margin = self.guard_margin
        if margin is not None and (not is_number(margin) or not 0 < margin < float("inf")):
            raise ValueError(f"guard_margin={margin!r} must be None or a finite number of nats above 0")
        for field, least in (("guard_patience", 1), ("guard_rewinds", 0)):
            if not is_count(getattr(self, field), least):
                raise ValueError(f"{field}={getattr(self, field)!r} must be a whole number, at least {least}")

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
