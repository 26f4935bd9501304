"""The page about a run: `write_report` reads a run folder and writes one self-contained HTML file.

Every key of `run.json` may be missing, and so may the logs: what is not there is said to be not measured. The
page loads nothing (its content security policy forbids it) and runs no script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from tapernorm import canvas, figures
from tapernorm.canvas import number
from tapernorm.page import (
    finite,
    format_error,
    format_gap,
    format_loss,
    format_ratio,
    format_speed,
    part,
    render,
)

_VARIANT_ORDER = ("stock", "functional", "unfused", "folded", "folded-fused")


def write_report(run: Path) -> Path:
    """Write `run/report.html` from `run/run.json` and `run/<arm>/log.jsonl`, and return its path.

    Works on a run that has not ended; parts not measured yet are marked so.

    Raises:
        ValueError: `run` is not a folder, holds neither `run.json` nor a log, or its `run.json` is not JSON.
    """
    run = Path(run)
    data, logs, notes = _read(run)
    if data.get("kind") == "remove":
        from tapernorm.removal_report import render_removal

        page = render_removal(run, data)
    else:
        page = render("report.html.j2", _view(run, data, logs, notes))
    path = run / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def summary_table(run: Mapping[str, Any], report: Path | str | None = None) -> Table:
    """What a person wants to know at the end of a run, narrow enough for any terminal.

    Args:
        run: the content of `run.json`.
        report: where the report is; without it, `run["report"]`, if that is there.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", max_width=20)
    table.add_column(overflow="fold")

    def add(what: str, value: str, note: str = "") -> None:
        table.add_row(Text(what), Text(f"{value:>7}  {note}".rstrip()))

    loss = _losses(run)
    for key, label in (("original", "loss, original"), ("baseline", "loss, norms kept")):
        if loss[key] is not None:
            add(label, format_loss(loss[key]))
    add("loss, norms removed", format_loss(loss["tapered"]), format_gap(loss["tapered"], loss["baseline"]))
    fold = part(run, "fold")
    bound = fold.get("bound")
    note = f"relative {format_error(fold.get('relative_error'), plain=True)}" if fold.get("relative_error") else ""
    note += f", bound {format_error(bound, plain=True)}" if note and bound is not None else ""
    add("largest logit error", format_error(fold.get("max_abs_logit_error"), plain=True), note)
    speed = _headline_speed(run)
    for variant, label in (("stock", "before"), ("unfused", "unfused"), ("folded", "folded")):
        row = speed.get(variant, {})
        add(f"tokens/s, {label}", format_speed(row.get("value")), format_ratio(row.get("ratio"), ""))
    for label, value in (
        ("report", report or run.get("report")),
        ("norm-free model", run.get("norm_free_model")),
    ):
        if value:
            table.add_row(Text(label), Text(str(value)))
    return table


def _read(run: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]], list[str]]:
    """run.json, the log of every arm, and notes about what could not be read."""
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
    found = {log.parent.name: _read_log(log, notes) for log in sorted(run.glob("*/log.jsonl"))}
    if not data and not any(found.values()):
        raise ValueError(f"{run} is not a run folder: it holds neither run.json nor <arm>/log.jsonl")
    tapered, baseline = _arm_names(data, found)
    order = [baseline, tapered, *found]
    logs = {arm: found[arm] for arm in dict.fromkeys(order) if found.get(arm)}
    return data, logs, notes


def _read_log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
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
    infinite = sum(isinstance(r.get("loss"), float) and not math.isfinite(r["loss"]) for r in rows.values())
    if bad:
        notes.append(f"{path.parent.name}: {bad} unreadable line(s) of log.jsonl left out")
    if infinite:
        notes.append(f"{path.parent.name}: the training loss was not finite in {infinite} row(s); not drawn")
    return [rows[step] for step in sorted(rows)]


def _arm_names(run: Mapping[str, Any], logs: Iterable[str]) -> tuple[str, str]:
    """The names of the tapered arm and of its baseline; guessed from the logs when run.json does not say."""
    known = [*logs, *part(run, "losses")]
    arm = run.get("arm") or next((name for name in ("internal", "all") if name in known), "internal")
    base = run.get("baseline_arm") or next((n for n in ("rms", "normed", "layer") if n in known), "baseline")
    return str(arm), str(base)


def _losses(run: Mapping[str, Any]) -> dict[str, Any]:
    tapered, baseline = _arm_names(run, ())
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


def _headline_speed(run: Mapping[str, Any]) -> dict[str, Any]:
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


def fold_rows(run: Mapping[str, Any], sites: Iterable[str] = ()) -> list[dict[str, Any]]:
    """One row a norm, numbered as in the figures: in order of execution as far as the logs know it."""
    fold = part(run, "fold")
    folded, kept = (list(fold.get(key) or ()) for key in ("folded", "kept"))
    names = dict.fromkeys([*sites, *part(fold, "c"), *part(fold, "kinds"), *folded, *kept])
    if not folded and not kept:
        return []
    return [
        {
            "number": i,
            "name": name,
            "kind": part(fold, "kinds").get(name, ""),
            "role": part(fold, "roles").get(name, ""),
            "verdict": "folded" if name in folded else "kept",
            "reason": part(fold, "reasons").get(name, ""),
            "c": finite(part(fold, "c").get(name), lambda v: f"{v:#.4g}") if name in folded else "",
        }
        for i, name in enumerate(names, 1)
        if name in folded or name in kept
    ]


def _view(run: Path, data: dict[str, Any], logs: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """All that the template shows."""
    tapered, baseline = _arm_names(data, logs)
    rows = logs.get(tapered, [])
    sites = list(dict.fromkeys(site for row in rows for key in ("scale", "c") for site in row.get(key) or ()))
    losses = {str(arm): value for arm, value in part(data, "losses").items() if isinstance(value, dict)}
    events = [event for event in data.get("events") or () if isinstance(event, dict)]
    view = {
        "run": data, "name": run.resolve().name, "tapered": tapered, "baseline": baseline, "losses": losses,
        "fold": part(data, "fold"), "verify": part(data, "verify"), "fold_rows": fold_rows(data, sites),
        "bench": bench_groups(data), "samples": [s for s in data.get("samples") or () if isinstance(s, dict)],
        "events": events, "notes": notes, "part": lambda key: part(data, key),
        "chosen": lambda key: {k: v for k, v in part(data, key).items() if v not in (None, "", [], ())},
        "figure": _draw_all(data, logs, sites, tapered, baseline),
    }  # fmt: skip
    return view | _verdict(data, rows, view)


def _draw_all(
    run: Mapping[str, Any], logs: dict[str, Any], sites: list[str], tapered: str, baseline: str
) -> dict[str, Markup]:
    """The SVG of every figure that has data; a figure that is not in the result was not measured."""
    rows, spare = logs.get(tapered, []), canvas.ARM_COLOURS[2:]
    colours = {arm: spare[i % 2] for i, arm in enumerate(a for a in logs if a not in (tapered, baseline))}
    colours |= {tapered: canvas.ARM_COLOURS[0], baseline: canvas.ARM_COLOURS[1]}
    arms, draws = ", ".join(logs), {}

    def measured(*keys: str) -> bool:
        return any(figures.series(log, key)[0].size for log in logs.values() for key in keys)

    if measured("loss", "eval_loss"):
        draw = figures.loss_curves(logs, colours, tapered, baseline)
        draws["loss"] = draw, f"Loss over optimizer steps, arms {arms}, with the gate on a second axis."
    if sites:
        label = f"Residual scale and fixed scale over optimizer steps, a line for each of {len(sites)} norms."
        draws["sites"] = figures.site_lines(rows, sites), label
    if figures.has_drift(rows, sites):
        draws["drift"] = figures.site_drift(rows, sites), f"Heatmap of c times r over steps, {len(sites)} norms."
    if measured("logit_std", "logit_max", "prelogit_scale", "radial_gradient"):
        label = f"Logit scale, scale of the last residual and radial gradient over steps, arms {arms}."
        draws["logits"] = figures.logit_panels(logs, colours), label
    if groups := bench_groups(run):
        label = "Tokens a second by variant; the numbers are in the table below the figure."
        draws["bench"] = figures.throughput([(g["title"], g["rows"]) for g in groups]), label
    return {name: Markup(canvas.inline(draw, name, label)) for name, (draw, label) in draws.items()}


def _verdict(run: Mapping[str, Any], rows: list[dict[str, Any]], view: dict[str, Any]) -> dict[str, Any]:
    """The run in sentences, and whether anything failed."""
    fold, means, fast = view["fold"], _losses(run), _headline_speed(run)
    model = part(run, "model").get("name") or "the model"
    folded, kept = list(fold.get("folded") or ()), list(fold.get("kept") or ())
    said, failed = [], []
    if folded:
        many = f"{len(folded)} of {len(folded) + len(kept)}" if kept else f"All {len(folded)}"
        final = [part(fold, "roles").get(name) for name in kept] == ["final"]
        stay = f"; {'the final norm' if final else len(kept)} {'stays' if len(kept) == 1 else 'stay'} in place"
        said.append(f"{many} normalization layers of {model} were removed and folded into its weights")
        said[0] += f"{stay if kept else ''}."
    elif rows:
        at = f"step {rows[-1]['step']:,}, gate {finite(rows[-1].get('gate'), lambda v: f'{v:.2f}')}"
        said.append(f"The norms of {model} are not folded: the log ends at {at}.")
    else:
        said.append(f"No norm of {model} has been removed so far.")
    if means["tapered"] is not None:
        gap, change = (format_gap(means["tapered"], means[base]) for base in ("baseline", "original"))
        text = f"Without them the validation loss is {format_loss(means['tapered'])}"
        text += f": {gap} against the same training with the norms kept" if gap else ""
        said.append(text + (f", {change} against the model before any training." if change else "."))
    elif last := [row for row in rows if number(row.get("eval_loss")) is not None][-1:]:
        at = f"{format_loss(last[0]['eval_loss'])} at step {last[0]['step']:,}"
        said.append(f"The last validation loss in the log is {at}.")
    bounds = f"relative {format_error(fold.get('relative_error'))}, bound {format_error(fold.get('bound'))}"
    if fold.get("max_abs_logit_error") is not None:
        said.append(f"Folding moved no logit by more than {format_error(fold['max_abs_logit_error'])} ({bounds}).")
    if row := fast.get("folded"):
        ratio = f", {row['ratio']:.2f} times the stock model" if row["ratio"] is not None else ""
        said.append(f"It makes {row['shown']} tokens a second{ratio} ({fast['title']}).")
    error, bound = fold.get("relative_error"), number(fold.get("bound"))
    measured = isinstance(error, int | float)
    within = error <= bound if measured and bound is not None else None  # NaN is not within
    if within is False:
        failed.append("The error of the fold is above its bound.")
    if view["verify"].get("passed") is False:
        failed.append("The verification after folding failed: do not use the norm-free model.")
    return {
        "verdict": said, "failed": failed, "within": within, "means": means, "fast": fast,
        "bounds": bounds if fold else "", "removed": f"{len(folded)} of {len(folded) + len(kept)}" if folded else "",
    }  # fmt: skip
