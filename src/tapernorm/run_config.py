"""What a run from text to report is told to do. Every value that cannot work is refused here."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from tapernorm.config import TaperConfig, is_count, is_number, nearest, read_order, read_sequence

FRESH_WEIGHT = 0.01  # λ of the absolute scale loss where the model is pretrained
SELF_TOKENS = 32_768  # that a model writes where no text is named: some minutes for 135 million parameters on two cores
# name -> (width, layers, vocabulary, context); the shapes of the paper's four sizes, and a quick one
SIZES = {
    "demo": (96, 8, 2048, 256),
    "1m": (64, 8, 10_000, 512),
    "3m": (128, 8, 10_000, 512),
    "9m": (256, 8, 10_000, 512),
    "30m": (512, 8, 10_000, 512),
}


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
        fixed: as in `TaperConfig`; None: `"linear"` for a taper of all weights, else `"diagonal"`.
        uniformity_weight, uniformity_above, cap, loosen_steps, gradient_cap, stagger, order, guard_margin: as in
            `TaperConfig`; here the guard is on unless its margin is 0.
        distill: for taper, the weight of the KL to a teacher (`tapernorm.distill`); 0: none.
        match: for taper, the weight of the distance from the teacher's residual behind every block; 0: none.
        teacher: `"original"`, the model as it was given; `"baseline"`, what has just been trained with its norms on the
            same batches; or another model of the same tokens and shape, as `model`. With none of the three given, a
            taper of all weights that trains a baseline has it as its teacher, with the weights 1 and 10.
        disturb: with a teacher, the share of sequences with random tokens in them, of which it alone says what to make:
            no text is as odd as these, and what a model without norms must not do is run away on odd text.
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
    fixed: str = None  # type: ignore[assignment]  # filled in, as are the three below
    anchor: str | None = None
    anchor_weight: float | None = None
    keep: tuple[str, ...] = ()
    allow_massive: bool = False
    prefix: str = "auto"
    distill: float = None  # type: ignore[assignment]
    match: float = None  # type: ignore[assignment]
    teacher: str = None  # type: ignore[assignment]
    disturb: float = 0.0
    lora: int | None = None
    uniformity_weight: float = 0.0
    uniformity_above: float | None = None
    cap: float | None = None
    loosen_steps: int = 0
    gradient_cap: float | None = None
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
        self._fill()
        object.__setattr__(self, "keep", read_sequence("keep", self.keep, str))
        object.__setattr__(self, "order", read_order(self.order))
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
            if not is_count(getattr(self, field), 1):
                raise ValueError(f"{field}={getattr(self, field)!r} must be a whole number, at least 1")
        if self.block is not None and not is_count(self.block, 2):
            raise ValueError(f"block={self.block!r} must be a whole number of tokens, at least 2")
        for field, what in (("distill", "the KL"), ("match", "the distance behind blocks")):
            if not is_number(value := getattr(self, field)) or not 0 <= value < float("inf"):
                raise ValueError(f"{field}={value!r} must be a finite number, at least 0: the weight of {what}")
        if self.teacher != "original" and not self.taught:
            raise ValueError(f"teacher={self.teacher!r} has nothing to say: give distill or match a weight")
        if self.teacher == "baseline" and not self.baseline:
            raise ValueError("teacher='baseline' is what this run trains with its norms: leave the baseline on")
        if not is_number(self.disturb) or not 0 <= self.disturb < 1:
            raise ValueError(f"disturb={self.disturb!r} must be a share of the sequences, at least 0 and below 1")
        if self.disturb and not self.taught:
            raise ValueError(f"disturb={self.disturb!r} needs a teacher: give distill or match a weight")
        if self.lora is not None and not is_count(self.lora, 1):
            raise ValueError(f"lora={self.lora!r} must be a whole number, at least 1: the rank")
        if self.kind == "pretrain" and (self.taught or self.lora):
            raise ValueError(
                "distill, match and lora start from a model that is trained; pretrain has none: leave them out"
            )
        rate = self.learning_rate
        if rate is not None and (not is_number(rate) or not 0 < rate < 1):
            raise ValueError(f"learning_rate={rate!r} must be a number above 0 and below 1")
        if self.arm != "baseline":
            taper = self.taper
            if taper.total_steps > self.steps:
                raise ValueError(
                    f"warmup_steps={taper.warmup_steps} and taper_steps={taper.taper_steps} end at step "
                    f"{taper.total_steps}, beyond the run's steps={self.steps}: the gate would not reach 0; "
                    "lower them or raise steps"
                )

    def _fill(self) -> None:
        """Defaults that depend on other values: what did best where it was tried."""
        whole = self.kind == "taper" and self.lora is None
        told = (self.distill, self.match, self.teacher) != (None, None, None)
        if whole and self.baseline and self.arm != "baseline" and not told:
            filled: dict[str, Any] = {"distill": 1.0, "match": 10.0, "teacher": "baseline"}
        else:
            filled = {"distill": 0.0, "match": 0.0, "teacher": "original"}
        for field, value in (filled | {"fixed": "linear" if whole else "diagonal"}).items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)

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
            anchor_weight=self._anchor_weight(),
            keep=self.keep,
            allow_massive=self.allow_massive,
            uniformity_weight=self.uniformity_weight,
            uniformity_above=self.uniformity_above,
            cap=self.cap,
            loosen_steps=self.loosen_steps,
            gradient_cap=self.gradient_cap,
            stagger=self.stagger,
            order=self.order,
            guard_margin=self.guard_margin or None,
            post=self.post,
        )

    def _anchor_weight(self) -> float | None:
        """λ: of a fresh model's absolute anchor a tenth of `TaperConfig`'s, which did better (docs/studies)."""
        lighter = self.kind == "pretrain" and self.arm == "all" and self.anchor in (None, "absolute")
        return FRESH_WEIGHT if lighter and self.anchor_weight is None else self.anchor_weight

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
