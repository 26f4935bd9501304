"""The page about a run: `write_report` reads a run folder and writes one self-contained HTML file.

Every key of `run.json` may be missing, and so may the logs: what is not there is said to be not measured. The
page loads nothing (its content security policy forbids it) and runs no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from tapernorm import canvas, figures
from tapernorm.page import (
    finite,
    format_error,
    format_gap,
    format_loss,
    format_ratio,
    format_speed,
    number,
    part,
    render,
)
from tapernorm.reading import arm_names, bench_groups, headline_speed, losses_of, read_run


def write_report(run: Path) -> Path:
    """Write `run/report.html` from `run/run.json` and `run/<arm>/log.jsonl`, and return its path.

    Works on a run that has not ended; parts not measured yet are marked so.

    Raises:
        ValueError: `run` is not a folder, holds neither `run.json` nor a log, or its `run.json` is not JSON.
    """
    run = Path(run)
    data, logs, notes = read_run(run)
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

    loss = losses_of(run)
    for key, label in (("original", "loss, original"), ("baseline", "loss, norms kept")):
        if loss[key] is not None:
            add(label, format_loss(loss[key]))
    add("loss, norms removed", format_loss(loss["tapered"]), format_gap(loss["tapered"], loss["baseline"]))
    fold = part(run, "fold")
    bound = fold.get("bound")
    note = f"relative {format_error(fold.get('relative_error'), plain=True)}" if fold.get("relative_error") else ""
    note += f", bound {format_error(bound, plain=True)}" if note and bound is not None else ""
    add("largest logit error", format_error(fold.get("max_abs_logit_error"), plain=True), note)
    speed = headline_speed(run)
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
    tapered, baseline = arm_names(data, logs)
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
    fold, means, fast = view["fold"], losses_of(run), headline_speed(run)
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
