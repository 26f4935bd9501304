"""What a run has written so far: run.json, the logs of its arms, and what is made of them. Loads nothing heavy.

Every key of `run.json` may be missing, and so may the logs: a run may be half-way, killed, or of another version.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tapernorm.page import format_speed, number, part

_VARIANT_ORDER = ("stock", "functional", "unfused", "folded", "folded-fused")


def read_run(run: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]], list[str]]:
    """run.json, the log of every arm, and notes about what could not be read."""
    if not run.exists():
        raise ValueError(f"{run} is not a folder; a run makes it when its texts are read and its training begins")
    if not run.is_dir():
        raise ValueError(f"{run} is not a folder; give the folder that --out of taper or pretrain named")
    data: dict[str, Any] = {}
    path = run / "run.json"
    if path.is_file():
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    notes: list[str] = []
    found = {log.parent.name: read_log(log, notes) for log in sorted(run.glob("*/log.jsonl"))}
    if not data and not any(found.values()):
        raise ValueError(f"{run} is not a run folder: it holds neither run.json nor <arm>/log.jsonl")
    tapered, baseline = arm_names(data, found)
    order = [baseline, tapered, *found]
    logs = {arm: found[arm] for arm in dict.fromkeys(order) if found.get(arm)}
    return data, logs, notes


def read_log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Rows by step. A resumed run writes some steps again: the last row of a step counts."""
    rows: dict[float, dict[str, Any]] = {}
    bad = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            rows[number(row["step"])] = row  # type: ignore[index]
        except (ValueError, KeyError, TypeError):
            bad += bool(line.strip())  # a run that was killed leaves half a line
    rows.pop(None, None)  # type: ignore[call-overload]
    infinite = sum("loss" in r and number(r["loss"]) is None for r in rows.values())
    if bad:
        notes.append(f"{path.parent.name}: {bad} unreadable line(s) of log.jsonl left out")
    if infinite:
        notes.append(f"{path.parent.name}: the training loss was not finite in {infinite} row(s); not drawn")
    return [rows[step] for step in sorted(rows)]


def arm_names(run: Mapping[str, Any], logs: Iterable[str]) -> tuple[str, str]:
    """The names of the tapered arm and of its baseline; guessed from the logs when run.json does not say."""
    known = [*logs, *part(run, "losses")]
    arm = run.get("arm") or next((name for name in ("internal", "all") if name in known), "internal")
    base = run.get("baseline_arm") or next((n for n in ("rms", "normed", "layer") if n in known), "baseline")
    return str(arm), str(base)


def losses_of(run: Mapping[str, Any]) -> dict[str, Any]:
    tapered, baseline = arm_names(run, ())
    losses = part(run, "losses")
    names = {"original": "original", "baseline": baseline, "tapered": tapered}
    return {key: part(losses, name).get("loss") for key, name in names.items()}


def bench_groups(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Benchmark rows that may be compared: same model, mode, batch, cache, compile mode and dtype."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    rows = part(run, "bench").get("rows")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    models = {row.get("model") for row in rows}
    for row in rows:
        value = number(row.get("tokens_per_second"))
        if value is None:
            continue
        words = [str(row["mode"])] if row.get("mode") else []
        words += [f"batch {row['batch']}"] if row.get("batch") is not None else []
        words += [f"{row['cache']} cache" if row["cache"] != "none" else "no cache"] if row.get("cache") else []
        words += [f"T {row['prompt']}"] if row.get("prompt") and row.get("mode") not in (None, "decode") else []
        words += ["compiled" if row["compiled"] else "eager"] if row.get("compiled") is not None else []
        words += ["CUDA graphs"] if row.get("compile_mode") == "reduce-overhead" else []
        words += [str(row["dtype"])] if row.get("dtype") else []
        words += [str(row.get("model"))] if len(models) > 1 else []
        variant = str(row.get("variant", "unnamed"))
        shown = {**row, "variant": variant, "value": value, "ratio": number(row.get("ratio"))}
        groups.setdefault(", ".join(words), {})[variant] = {**shown, "shown": format_speed(value)}
    for group in groups.values():
        stock = group.get("stock", {}).get("value")
        for row in group.values():
            if row["ratio"] is None and stock:
                row["ratio"] = row["value"] / stock
    rank = {name: i for i, name in enumerate(_VARIANT_ORDER)}
    return [
        {"title": title, "rows": sorted(group.values(), key=lambda row: rank.get(row["variant"], 9))}
        for title, group in groups.items()
    ]


def headline_speed(run: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of one benchmark setting, by variant: decoding, where that was measured."""
    groups = bench_groups(run)
    by_variant = [{row["variant"]: row for row in group["rows"]} for group in groups]
    wanted = {"stock", "folded"}
    best = max(
        by_variant,
        key=lambda g: (wanted <= set(g), any(r.get("mode") == "decode" for r in g.values())),
        default={},
    )
    title = next((g["title"] for g, rows in zip(groups, by_variant, strict=True) if rows is best), "")
    return {**best, "title": title}


def outcome(run: Mapping[str, Any]) -> dict[str, Any]:
    """What came out, the same keys for every kind of run; {} and None for what is not there.

    before, kept, after: the losses of the model as it came, after the same training with its norms, and without them;
    against: "kept" or "before", what `after` is to be compared with, "" where there is nothing;
    removed, total: norms; failed: sentences.
    """
    fold, verified = part(run, "fold"), part(run, "verify")
    folded, stay = (list(fold.get(key) or ()) for key in ("folded", "kept"))
    if run.get("kind") == "remove":
        before, after = (part(part(part(run, when), "losses"), "validation") for when in ("before", "after"))
        kept, failed = {}, [str(sentence) for sentence in run.get("failed") or ()]
        total = run.get("sites_total")
    else:
        arm, baseline = arm_names(run, ())
        losses = part(run, "losses")
        before, kept = part(losses, "original"), part(losses, baseline)
        after, failed, total = part(losses, arm), [], None
        if verified.get("passed") is False:
            failed.append("The verification after folding failed: do not use the norm-free model.")
    has = {"kept": kept, "before": before}
    return {
        **has, "after": after, "against": next((key for key, found in has.items() if after and found), ""),
        "removed": len(folded) if fold else None, "total": (total or len(folded) + len(stay)) if fold else None,
        "failed": failed,
    }  # fmt: skip


def gap_so_far(base: Iterable[Mapping[str, Any]], tapered: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Validation loss above the baseline's, in percent, at the steps that both arms measured."""
    one, two = ({row["step"]: number(row.get("eval_loss")) for row in rows} for rows in (base, tapered))
    pairs = [(step, one.get(step), value) for step, value in two.items()]
    return [(step, 100 * (value / was - 1)) for step, was, value in pairs if was and value is not None]
