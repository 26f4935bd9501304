"""A run while it is running, read from what it writes into its folder; the run itself is not touched.

Looks at run.json and the logs, and loads neither torch nor matplotlib: the run beside it has the machine to itself.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tapernorm.output import NUMERICAL, console, print_json
from tapernorm.page import (
    finite,
    format_count,
    format_duration,
    format_gap,
    format_loss,
    format_ratio,
    format_speed,
    number,
    part,
)
from tapernorm.reading import arm_names, gap_so_far, headline_speed, outcome, read_run

_BLOCKS = "▁▂▃▄▅▆▇█"
_RECENT = 5  # rows of the log that the speed is averaged over
_QUIET = 300.0  # seconds without a word, at least, before the run is suspected to be gone
_ENDED = ("done", "stopped")
_EVENTS = 5


def watch_run(run: Path, every: float | None, once: bool, as_json: bool) -> None:
    """`watch`: until the run has ended, or once.

    Raises:
        ValueError: `run` is no run; `every` is too short to be meant.
        typer.Exit: the run stopped before its end or failed its checks.
    """
    if every is not None and not 0.1 <= every < float("inf"):
        raise ValueError(f"--every {every:g}: it must be a number of seconds, at least 0.1")
    if as_json:
        return print_json({key: value for key, value in snapshot(run).items() if key != "curve"})
    if once:
        return console().print(panel(snapshot(run)))
    live = sys.stdout.isatty()
    last = _show(_looks(run, every or (1.0 if live else 5.0)), live)
    print(last["result"], flush=True)
    if last["status"] != "done" or last["failed"]:
        raise typer.Exit(NUMERICAL)
    return None


def _looks(run: Path, every: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[dict[str, Any]]:
    """Snapshots until the run has ended, that of its end included."""
    while True:
        seen = snapshot(run)
        yield seen
        if seen["status"] in _ENDED:
            return
        sleep(every)


def _show(looks: Iterator[dict[str, Any]], live: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    if not live:
        for seen in looks:
            if seen["status"] not in _ENDED:
                print(line(seen), flush=True)  # who reads the pipe reads it now
        return seen
    # Live's stand-in for stdout has no encoding, and the curve asks for it
    with Live(console=console(), auto_refresh=False, redirect_stdout=False) as screen:
        for seen in looks:
            screen.update(panel(seen | {"result": None}), refresh=True)  # that is said last, once
    return seen


def snapshot(run: Path, now: float | None = None) -> dict[str, Any]:
    """What a run has come to, as plain JSON values, None for what is not known (yet).

    Raises:
        ValueError: `run` is no run.
    """
    data, logs, _ = read_run(run)
    settings, found = part(data, "settings"), outcome(data)
    arms = _arms(data, settings, logs)
    arm, stage = _stage(data, arms, logs)
    rows = logs.get(arm or "", [])
    row: Mapping[str, Any] = rows[-1] if rows else {}
    tapered, baseline = arm_names(data, logs)
    gaps = gap_so_far(logs.get(baseline, ()), logs.get(tapered, ())) if tapered != baseline else []
    speeds = [speed for each in rows[-_RECENT:] if (speed := number(each.get("tokens_per_second")))]
    speed = sum(speeds) / len(speeds) if speeds else None
    status = str(data.get("status") or "unknown")
    evals = [loss for each in rows if (loss := number(each.get("eval_loss"))) is not None]
    seen = {
        "run": str(run), "kind": data.get("kind"), "model": part(data, "model").get("name"), "status": status,
        "stage": stage, "arm": arm, "arms": arms, "phase": _phase(data, arm, row), "step": number(row.get("step")),
        "steps": number(settings.get("steps")), "gate": number(row.get("gate")), "loss": number(row.get("loss")),
        "eval_loss": evals[-1] if evals else None, "gap_percent": gaps[-1][1] if gaps else None,
        "tokens_per_second": speed, "remaining_seconds": None, "events": _events(data, logs),
        "seconds_since_written": max(0.0, (now or time.time()) - _written(run)),
        "removed": found["removed"], "total": found["total"], "failed": found["failed"],
        "loss_after": number(found["after"].get("loss")), "report": data.get("report"), "result": None,
        "curve": [loss for each in rows if (loss := number(each.get("loss"))) is not None],
    }  # fmt: skip
    for whole in ("step", "steps"):
        seen[whole] = None if seen[whole] is None else int(seen[whole])
    if status not in _ENDED:
        seen["remaining_seconds"] = _remaining(data, seen, arms, logs)
    else:
        seen["result"] = _result(data, found, seen)
    return seen


def _arms(data: Mapping[str, Any], settings: Mapping[str, Any], logs: Mapping[str, Any]) -> list[str]:
    """The arms of a training in the order in which they are trained."""
    if data.get("kind") == "remove":
        return []
    tapered, baseline = arm_names(data, logs)
    arms = [baseline] if tapered == "baseline" or settings.get("baseline", baseline in logs) else []
    return arms if tapered == "baseline" else [*arms, tapered]


def _stage(data: Mapping[str, Any], arms: Sequence[str], logs: Mapping[str, Any]) -> tuple[str | None, str]:
    """(arm, what is being done): the arm is the one that is trained, or was trained last."""
    status = data.get("status")
    losses, steps = part(data, "losses"), number(part(data, "settings").get("steps"))
    begun = [arm for arm in arms if logs.get(arm)]
    last = begun[-1] if begun else None
    if status in _ENDED:
        return last, str(status)
    if data.get("kind") == "taper" and "original" not in losses and not begun:
        return None, "measuring the loss of the original"
    for arm in arms:
        if arm in losses:
            continue
        if not logs.get(arm):
            return last, f"about to train {arm}"
        over = steps is not None and logs[arm][-1]["step"] >= steps
        return arm, f"measuring the loss of {arm}" if over else f"training {arm}"
    if data.get("arm") == "baseline":
        return last, "writing the report"
    after = [("after", "measuring the loss")] if data.get("kind") == "remove" else []
    for key, doing in (("fold", "folding"), ("verify", "verifying"), *after, ("bench", "measuring the speed")):
        if not data.get(key):
            return last, doing
    return last, "writing the report"


def _phase(data: Mapping[str, Any], arm: str | None, row: Mapping[str, Any]) -> str | None:
    gate, step = number(row.get("gate")), number(row.get("step"))
    if arm is None or gate is None or step is None:
        return None
    if arm != arm_names(data, [arm])[0]:
        return "norms kept"
    if gate <= 0:
        return "at gate 0"
    warmup = number(part(data, "taper").get("warmup_steps"))
    return "warm-up" if gate >= 1 and (warmup is None or step < warmup) else "taper"


def _remaining(
    data: Mapping[str, Any], seen: Mapping[str, Any], arms: Sequence[str], logs: Mapping[str, Any]
) -> float | None:
    """Seconds of training that are left, of all arms, at the speed of the last rows of the log."""
    steps, tokens = seen["steps"], _tokens_a_step(data)
    if not arms or steps is None or not seen["tokens_per_second"] or tokens is None:
        return None
    left = sum(max(0.0, steps - logs[arm][-1]["step"]) if logs.get(arm) else steps for arm in arms)
    return left * tokens / seen["tokens_per_second"]


def _tokens_a_step(data: Mapping[str, Any]) -> float | None:
    settings = part(data, "settings")
    sizes = (settings.get("batch"), settings.get("accumulate", 1), part(data, "data").get("block"))
    known = [size for each in sizes if (size := number(each)) is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _events(data: Mapping[str, Any], logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Those of run.json, which is told at the end of an arm, and those that so far are in the log alone."""
    events = [event for event in data.get("events") or () if isinstance(event, dict)]
    for rows in logs.values():
        for row in rows:
            events += [e for e in row.get("events") or () if isinstance(e, dict) and e not in events]
    return events


def _written(run: Path) -> float:
    """When the run wrote last."""
    paths = [run / "run.json", *run.glob("*/log.jsonl")]
    return max((path.stat().st_mtime for path in paths if path.is_file()), default=time.time())


def _result(data: Mapping[str, Any], found: Mapping[str, Any], seen: Mapping[str, Any]) -> str:
    """The last line."""
    if seen["status"] == "stopped":
        at = f" at step {seen['step']:,}" if seen["step"] is not None else ""
        why = next((f": {e.get('text')}" for e in reversed(seen["events"]) if e.get("step") == -1), "")
        return f"stopped{at}{why}"
    said = []
    if found["removed"] is not None:
        said.append(f"{found['removed']} of {found['total']} norms removed")
    if found["after"]:
        against = {"kept": "norms kept", "before": "before"}.get(found["against"])
        gap = format_gap(found["after"].get("loss"), found.get(found["against"], {}).get("loss"))
        said.append(f"loss {format_loss(found['after'].get('loss'))}" + (f" ({gap} against {against})" if gap else ""))
    elif found["kept"]:
        said.append(f"loss {format_loss(found['kept'].get('loss'))} with the norms kept")
    if ratio := format_ratio(headline_speed(data).get("folded", {}).get("ratio"), ""):
        said.append(f"{ratio} the stock model's tokens a second")
    said += [f"FAILED: {sentence}" for sentence in found["failed"]]
    return "done: " + ", ".join(said) + (f"; {seen['report']}" if seen["report"] else "")


# As text


def line(seen: Mapping[str, Any]) -> str:
    """A snapshot in one line without colours."""
    said = [seen["stage"]]
    if seen["stage"].startswith("training"):
        said.append(f"step {seen['step']:,}" + (f" of {seen['steps']:,}" if seen["steps"] else ""))
    said += [f"{name} {shown}" for name, shown in _facts(seen).items()]
    return ", ".join(filter(None, said))


def panel(seen: Mapping[str, Any]) -> Group:
    """A snapshot for a terminal."""
    head = Text.assemble((str(seen["run"]), "bold"), f"  {seen['kind'] or ''} {seen['model'] or ''}".rstrip())
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("now", seen["stage"])
    if seen["step"] is not None and seen["steps"]:
        bar = ProgressBar(total=seen["steps"], completed=seen["step"], width=30)
        table.add_row(f"step of {seen['arm']}", _beside(bar, f"{seen['step']:,} of {seen['steps']:,}"))
    curve = sparkline(seen["curve"])
    for name, shown in _facts(seen).items():
        table.add_row(name, Text(f"{shown}  {curve}" if name == "loss" and curve else shown))
    for event in seen["events"][-_EVENTS:]:
        at = f"step {event.get('step')}: " if (number(event.get("step")) or -1) >= 0 else ""
        table.add_row("event", Text(f"{at}{event.get('kind')}: {event.get('text')}"))
    rows: list[Any] = [head, table]
    if seen["result"]:
        rows.append(Text(seen["result"]))
    return Group(*rows)


def _facts(seen: Mapping[str, Any]) -> dict[str, str]:
    """What is known, as it is shown."""
    running = seen["status"] not in _ENDED
    facts = {"phase": seen["phase"] or ""}
    facts["gate"] = finite(seen["gate"], lambda v: f"{v:.2f}")
    facts["loss"] = format_loss(seen["loss"])
    facts["validation loss"] = format_loss(seen["eval_loss"])
    facts["gap so far"] = finite(seen["gap_percent"], lambda v: f"{v:+z.2f} %".replace("-", "−"))
    facts["tokens/s"] = format_speed(seen["tokens_per_second"])
    facts["training left"] = format_duration(seen["remaining_seconds"]) if running and seen["remaining_seconds"] else ""
    if count := len(seen["events"]):
        facts["events"] = format_count(count)
    quiet = seen["seconds_since_written"]
    if running and quiet > _QUIET:
        facts["nothing written for"] = f"{format_duration(quiet)}; has it been killed? --resume would go on"
    known = {"gate": "gate", "loss": "loss", "validation loss": "eval_loss", "gap so far": "gap_percent"}
    known |= {"tokens/s": "tokens_per_second", "training left": "remaining_seconds"}
    return {name: text for name, text in facts.items() if text and seen.get(known.get(name, "run")) is not None}


def _beside(*parts: Any) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*parts)
    return grid


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The last values in one line of blocks, "" where there are too few or the terminal has no such letters."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        _BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ""
    if len(values) < 2:
        return ""
    groups = min(width, len(values))
    edges = [round(i * len(values) / groups) for i in range(groups + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high <= low:
        return _BLOCKS[0] * groups
    return "".join(_BLOCKS[round((mean - low) / (high - low) * (len(_BLOCKS) - 1))] for mean in means)
