"""What a taper is going to do and about how long it takes: said before it begins, in a few lines on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tapernorm import distill
from tapernorm.convert import choose
from tapernorm.material import Material, device
from tapernorm.page import format_duration
from tapernorm.run_config import RunConfig
from tapernorm.train import last_checkpoint

TAPER = 1.4  # a step with statistics and losses of the taper, in plain steps


def seconds_per_step(model: Any, batch: int, block: int, accumulate: int = 1, bf16: bool = False) -> float:
    """How long a plain step of training takes: the quicker of two, behind one that makes the optimizer's state.

    bf16: with bfloat16 autocast. The weights stay as they are; the model is in training mode afterwards.
    """
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0)
    ids = _some_ids(model, batch, block)

    def forward() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    times = []
    with torch.random.fork_rng():
        for _ in range(3):
            times.append(accumulate * _timed(forward) + _timed(optimizer.step))
            optimizer.zero_grad()
    return min(times[1:])


def seconds_per_target(model: Any, batch: int, block: int, bf16: bool = False) -> float:
    """How long a teacher takes for one forward and its likeliest tokens; the quicker of two."""
    teacher, ids = distill.Teacher(model), _some_ids(model, batch, block)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        return min(_timed(lambda: teacher.targets(ids)) for _ in range(2))


def _some_ids(model: Any, batch: int, block: int) -> torch.Tensor:
    ids = torch.randint(model.config.vocab_size, (batch, block), generator=torch.Generator().manual_seed(0))
    return ids.to(next(model.parameters()).device)


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def announce(config: RunConfig, material: Material, baseline: str, build: Callable[[], Any]) -> None:
    """Print `lines` to stderr, with what is measured on a fresh model; nothing where all is trained already.

    build: the model as it is trained, with adapters where there are to be some.
    """
    out = Path(config.out)
    arms = [baseline] if config.arm == "baseline" or config.baseline else []
    arms += [config.arm] if config.arm != "baseline" else []
    left = {arm: config.steps - _done(out / arm, config.steps) for arm in arms}
    if not any(left.values()):
        return
    model = build().to(device())
    rows, block = material.train.shape
    plain = seconds_per_step(model, config.batch, block, config.accumulate, config.bf16)
    seconds = {arm: left[arm] * plain * (1.0 if arm == baseline else TAPER) for arm in arms}
    if config.taught:
        forwards = left[config.arm] * config.accumulate
        if not config.match and not distill.too_large(out, rows, block):
            forwards = min(forwards, -(-rows // config.batch))
        seconds[config.arm] += forwards * seconds_per_target(model, config.batch, block, config.bf16)
    for line in lines(config, material, seconds, plain):
        print(f"tapernorm: {line}", file=sys.stderr)


def lines(config: RunConfig, material: Material, seconds: dict[str, float], plain: float) -> list[str]:
    """The lines. seconds: of each arm that is left; plain: of a step with the norms on."""
    tokens = config.batch * config.accumulate * material.train.shape[1]
    steps = f"{config.steps:,} steps of {tokens:,} tokens"
    if config.arm == "baseline":
        said = [f"no norm goes (arm baseline); the model is trained with its norms, {steps}"]
    else:
        taper, gone = config.taper, choose(material.sites, config.taper)
        after = config.steps - taper.total_steps
        said = [
            f"{len(gone)} of {len(material.sites)} norms go (arm {config.arm}) in {steps}: {taper.warmup_steps:,} with "
            f"the norms on, {taper.taper_steps:,} while they are turned off, {after:,} without them"
        ]
    told = [f"the constant prefix {list(material.prefix)} in front"] if material.prefix else []
    if config.taught:
        known = {"original": "the original", "baseline": "the model trained with its norms"}
        who = known.get(config.teacher, config.teacher)
        told.append(f"{who} as a teacher, its KL with weight {config.distill:g}")
        told[-1] += f", its residuals with {config.match:g}" if config.match else ""
    told += [f"adapters of rank {config.lora} trained, then merged" if config.lora else "all weights trained"]
    if material.train.counted < material.train.tokens:
        share = 100 * material.train.counted / material.train.tokens
        told.append(f"the loss counts the answers of chats, {share:.0f} % of the tokens")
    said.append("; ".join(told))
    names = [name for name, value in seconds.items() if value]
    which = "" if len(names) < 2 else " for two trainings, one of them with the norms on, to compare with"
    said.append(
        f"about {format_duration(sum(seconds.values()))} of training{which}: a step with the norms on takes "
        f"{plain:.2g} s here, one of the taper about {TAPER:g} times that"
    )
    return said


def _done(folder: Path, steps: int) -> int:
    """Steps of an arm that are done."""
    if (folder / "final").is_dir():
        return steps
    checkpoint = last_checkpoint(folder)
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint is not None else 0
