"""What a run is told to do. Every value that cannot work is refused here, before anything is touched."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Arm = Literal["internal", "all"]
Calibration = Literal["robust", "lstsq", "log"]

MASSIVE_RATIO = 20.0  # times a site's median: no fixed scale serves such a token beside the others
SELF_TOKENS = 32_768  # that a model writes where no text is named: some minutes for 135 million parameters on two cores
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


def _is_number(value: Any) -> bool:
    """A real number. A YAML file's `3e-4`, without a point, is a string, and a string compares with nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _sequence(field: str, value: Any, of: type) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}={value!r} must be a sequence, such as {field}=({value!r},)")
    items = tuple(value)
    if not all(isinstance(item, of) for item in items):
        raise ValueError(f"{field}={items!r} must hold values of type {of.__name__} only")
    return items


def _order(value: Any) -> str | tuple[str, ...] | dict[str, float]:
    """The value of `TaperConfig.order`, checked as far as is possible without a model."""
    if isinstance(value, str):
        if value not in ORDERS:
            hint = nearest(value, ORDERS) or f"; names of sites go into a sequence, such as order=({value!r}, '*')"
            raise ValueError(f"order={value!r} is not one of {', '.join(map(repr, ORDERS))}{hint}")
        return value
    if isinstance(value, Mapping):
        for name, place in value.items():
            if not isinstance(name, str) or not _is_number(place) or not 0 <= place <= 1:
                raise ValueError(f"order={{{name!r}: {place!r}}} must map names of sites to places from 0 to 1")
        return dict(value)
    return _sequence("order", value, str)


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
        cap: κ of the seat belt: below gate 1 the fixed branch's scale for a token is c·min(1, κ/(c·r)), at gate 0 in
            training only; 2 to 4 is usual, None turns it off.
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
    cap: float | None = None
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
            if not _is_count(value, 1):
                raise ValueError(f"{field}={value!r} must be a whole number of optimizer steps, at least 1")
        if not _is_number(self.ema_decay) or not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay!r} must be a number, at least 0 and below 1")
        weight = self.anchor_weight
        if weight is not None and (not _is_number(weight) or not 0 <= weight < float("inf")):
            raise ValueError(f"anchor_weight={weight!r} must be None or a finite number, at least 0")
        if not isinstance(self.post, bool):
            raise ValueError(f"post={self.post!r} must be True or False")
        if not _is_number(self.massive_ratio) or not self.massive_ratio > 1:
            raise ValueError(f"massive_ratio={self.massive_ratio!r} must be a number above 1: it multiplies a median")
        for field, of in (("keep", str), ("prefix", int)):
            object.__setattr__(self, field, _sequence(field, getattr(self, field), of))
        if len(self.prefix) > 4 or any(token < 0 for token in self.prefix):
            raise ValueError(f"prefix={self.prefix!r} must hold at most 4 token ids, none below 0")
        if not _is_number(self.uniformity_weight) or not 0 <= self.uniformity_weight < float("inf"):
            raise ValueError(f"uniformity_weight={self.uniformity_weight!r} must be a finite number, at least 0")
        if self.cap is not None and (not _is_number(self.cap) or not 1 < self.cap < float("inf")):
            raise ValueError(
                f"cap={self.cap!r} must be None or a finite number above 1: r·c is about 1 where all is well"
            )
        if not _is_number(self.stagger) or not 0 <= self.stagger < 1:
            raise ValueError(f"stagger={self.stagger!r} must be a share of taper_steps, at least 0 and below 1")
        object.__setattr__(self, "order", _order(self.order))
        margin = self.guard_margin
        if margin is not None and (not _is_number(margin) or not 0 < margin < float("inf")):
            raise ValueError(f"guard_margin={margin!r} must be None or a finite number of nats above 0")
        for field, least in (("guard_patience", 1), ("guard_rewinds", 0)):
            if not _is_count(getattr(self, field), least):
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


def read_sources(data: Any, self_generate: Any, may_write: bool = True) -> str | tuple[str, ...] | None:
    """`data` of a config: None, one source, or several.

    Raises:
        ValueError: no source, or one twice; a number of tokens that is none.
    """
    named = (data,) if isinstance(data, str) else tuple(data or ())
    if not all(isinstance(source, str) for source in named):
        raise ValueError(f"data={data!r} must be the name of a text, or several")
    twice = next((source for source in named if named.count(source) > 1), None)
    if twice is not None:
        raise ValueError(f"--data {twice} is given twice; once is enough")
    if self_generate is not None and (isinstance(self_generate, bool) or not isinstance(self_generate, int)):
        raise ValueError(f"self_generate={self_generate!r} must be a whole number of tokens")
    if not named and self_generate is None:
        hint = ", or --self-generate N to let the model write N tokens" if may_write else ""
        raise ValueError(f"there is no text: pass --data FILE{hint}")
    return named[0] if len(named) == 1 else named or None


def read_prefix(value: str) -> tuple[int, ...] | None:
    """None for "auto", () for "none", else the token ids.

    Raises:
        ValueError: it is none of these.
    """
    text = value.strip().lower()
    if text in ("auto", "none"):
        return None if text == "auto" else ()
    if not re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        hint = nearest(text, ("auto", "none"))
        raise ValueError(f"--prefix {value}: give auto, none, or token ids such as 0,504{hint}")
    return tuple(int(token) for token in text.split(","))


# name -> (width, layers, vocabulary, context); the shapes of the paper's four sizes, and a quick one
SIZES = {
    "demo": (96, 8, 2048, 256),
    "1m": (64, 8, 10_000, 512),
    "3m": (128, 8, 10_000, 512),
    "9m": (256, 8, 10_000, 512),
    "30m": (512, 8, 10_000, 512),
}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What `tapernorm taper` and `tapernorm pretrain` do, from text to report.

    Args:
        kind: `"taper"` trains the norms out of a given model, `"pretrain"` starts from random weights.
        model: for taper, a folder, a hub id or a file that `tapernorm.from_pretrained` reads.
        size: for pretrain, one of `SIZES`.
        data: what `tapernorm.data.load_text` reads, or several such, whose documents are mixed.
        self_generate: for taper, so many tokens that the model writes itself, beside `data` or in place of it.
        arm: `"internal"`, `"all"`, or `"baseline"` for the model with its norms alone.
        baseline: also train the model with its norms, on the same batches, to compare with.
        steps: optimizer steps of each arm.
        batch: sequences in one forward; accumulate: forwards in one step; block: tokens in a sequence (None: the
            model's context, at most 512).
        warmup_steps, taper_steps: of the gate; None: a quarter and a half of the run for pretrain, a twentieth and
            a quarter for taper.
        learning_rate: None: 3e-3 · sqrt(64 / width) for pretrain, 0.06 / width and at most 5e-4 for taper.
        fixed, uniformity_weight, cap, stagger, order, guard_margin: as in `TaperConfig`; here the guard is on unless
            its margin is 0.
        distill: for taper, the weight of the KL to a teacher (`tapernorm.distill`); 0: none.
        match: for taper, the weight of the distance from the teacher's residual behind every block; 0: none.
        teacher: `"original"`, the model as it was given; `"baseline"`, what has just been trained with its norms on the
            same batches; or another model of the same tokens and shape, as `model`.
        lora: for taper, the rank of adapters that are trained in place of the linear maps (`tapernorm.lora`).
        prefix: for taper, `"auto"` (one is looked for where tokens are massive), `"none"`, or ids such as `"0,504"`.
        eval_tokens: how much of the validation text to measure on.
        bf16: bfloat16 autocast.
        tensorboard: also write the log as TensorBoard events; may differ when a run is resumed.

    Raises:
        ValueError: a value out of its range, an unknown size or arm, a taper that does not fit in the run.
    """

    kind: Literal["taper", "pretrain"]
    data: str | tuple[str, ...] | None
    out: str
    model: str | None = None
    size: str = "1m"
    arm: str = "internal"
    baseline: bool = True
    steps: int = 1000
    batch: int = 8
    accumulate: int = 1
    block: int | None = None
    learning_rate: float | None = None
    warmup_steps: int | None = None
    taper_steps: int | None = None
    calibration: str = "robust"
    fixed: str = "diagonal"
    anchor: str | None = None
    anchor_weight: float | None = None
    keep: tuple[str, ...] = ()
    allow_massive: bool = False
    prefix: str = "auto"
    distill: float = 0.0
    match: float = 0.0
    teacher: str = "original"
    lora: int | None = None
    uniformity_weight: float = 0.0
    cap: float | None = None
    stagger: float = 0.0
    order: str | tuple[str, ...] | dict[str, float] = "depth"
    guard_margin: float = 1.0
    post: bool = False
    text_column: str = "text"
    split: str | None = None
    self_generate: int | None = None
    vocab_size: int | None = None
    eval_tokens: int = 65_536
    seed: int = 0
    bf16: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", _sequence("keep", self.keep, str))
        object.__setattr__(self, "order", _order(self.order))
        kinds = ("taper", "pretrain")
        if self.kind not in kinds:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(kinds)}{nearest(self.kind, kinds)}")
        arms = ("internal", "all", "baseline")
        if self.arm not in arms:
            raise ValueError(f"arm={self.arm!r} is not one of {', '.join(arms)}{nearest(self.arm, arms)}")
        if self.kind == "pretrain" and self.size not in SIZES:
            raise ValueError(f"size={self.size!r} is not one of {', '.join(SIZES)}{nearest(self.size, SIZES)}")
        read_prefix(self.prefix)
        if self.kind == "taper" and not self.model:
            raise ValueError("taper needs a model: a folder, a hub id or a file")
        if self.kind == "pretrain" and self.self_generate is not None:
            raise ValueError("a model that is pretrained has nothing to write yet: leave self_generate out")
        object.__setattr__(self, "data", read_sources(self.data, self.self_generate, self.kind == "taper"))
        for field in ("steps", "batch", "accumulate", "eval_tokens"):
            if not _is_count(getattr(self, field), 1):
                raise ValueError(f"{field}={getattr(self, field)!r} must be a whole number, at least 1")
        if self.block is not None and not _is_count(self.block, 2):
            raise ValueError(f"block={self.block!r} must be a whole number of tokens, at least 2")
        for field, what in (("distill", "the KL"), ("match", "the distance behind blocks")):
            if not _is_number(value := getattr(self, field)) or not 0 <= value < float("inf"):
                raise ValueError(f"{field}={value!r} must be a finite number, at least 0: the weight of {what}")
        if self.teacher != "original" and not self.taught:
            raise ValueError(f"teacher={self.teacher!r} has nothing to say: give distill or match a weight")
        if self.teacher == "baseline" and not self.baseline:
            raise ValueError("teacher='baseline' is what this run trains with its norms: leave the baseline on")
        if self.lora is not None and not _is_count(self.lora, 1):
            raise ValueError(f"lora={self.lora!r} must be a whole number, at least 1: the rank")
        if self.kind == "pretrain" and (self.taught or self.lora):
            raise ValueError(
                "distill, match and lora start from a model that is trained; pretrain has none: leave them out"
            )
        rate = self.learning_rate
        if rate is not None and (not _is_number(rate) or not 0 < rate < 1):
            raise ValueError(f"learning_rate={rate!r} must be a number above 0 and below 1")
        if self.arm != "baseline":
            taper = self.taper
            if taper.total_steps > self.steps:
                raise ValueError(
                    f"warmup_steps={taper.warmup_steps} and taper_steps={taper.taper_steps} end at step "
                    f"{taper.total_steps}, beyond the run's steps={self.steps}: the gate would not reach 0; "
                    "lower them or raise steps"
                )

    @property
    def taught(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.distill or self.match)

    @property
    def taper(self) -> TaperConfig:
        """The taper of this run. The relative anchor is the default for a model that was trained before."""
        # A fresh model's residual takes its time to settle, and c with it; a trained one's has settled long ago,
        # and what a short fine-tuning lacks is time at gate 0.
        warmup, taper = (4, 2) if self.kind == "pretrain" else (20, 4)
        warmup = max(1, self.steps // warmup) if self.warmup_steps is None else self.warmup_steps
        taper = max(1, self.steps // taper) if self.taper_steps is None else self.taper_steps
        return TaperConfig(
            arm=self.arm,  # type: ignore[arg-type]
            warmup_steps=warmup,
            taper_steps=taper,
            calibration=self.calibration,  # type: ignore[arg-type]
            fixed=self.fixed,  # type: ignore[arg-type]
            # The scale moves while a model is trained: a tenth of the warm-up is as far as the average looks back.
            ema_decay=min(0.99, max(0.0, 1 - 10 / warmup)) if warmup else 0.0,
            anchor=self.anchor or ("relative" if self.kind == "taper" else "absolute"),  # type: ignore[arg-type]
            anchor_weight=self.anchor_weight,
            keep=self.keep,
            allow_massive=self.allow_massive,
            uniformity_weight=self.uniformity_weight,
            cap=self.cap,
            stagger=self.stagger,
            order=self.order,
            guard_margin=self.guard_margin or None,
            post=self.post,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
