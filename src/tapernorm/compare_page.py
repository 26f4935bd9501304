"""Several runs on one page: what came out of each, what they were asked for differently, and their curves.

Runs of every kind may be mixed, finished or not: what a run has not measured is said to be missing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from tapernorm import canvas, run_figures
from tapernorm.page import MISSING, format_gap, format_ratio, format_value, number, page_path, part, render
from tapernorm.reading import arm_names, gap_so_far, headline_speed, outcome, read_run
from tapernorm.report import write_report

NAME = "compare.html"
_STATES = {"running": "has not ended", "stopped": "stopped before its end"}
# where a run stands, and what it has of its own by nature
_PLACES = ("out", "csv", "kind", "model", "arm", "tensorboard")


def write_comparison(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page and return its path. A run that has not ended, or has no report yet, gets its own written too.

    Args:
        runs: the folders of two runs or more, in the order in which they are shown.
        out: the page's file, or a folder for `compare.html`; None for the current folder.

    Raises:
        ValueError: fewer than two runs, one of them given twice, or one that is no run; `out` is in no folder, or no
            .html file.
    """
    path = page_path(NAME, out)
    folders = [Path(run) for run in runs]
    if len(folders) < 2:
        raise ValueError("a comparison needs two runs or more")
    twice = [folder for folder, count in Counter(folder.resolve() for folder in folders).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} was given twice; name every run once")
    read = [read_run(folder) for folder in folders]
    names = short_names(folders)
    shown = [
        _row(name, folder, data, logs, path) for name, folder, (data, logs, _) in zip(names, folders, read, strict=True)
    ]
    view = {
        "runs": shown, "figure": _draw(names, [logs for _, logs, _ in read], [data for data, _, _ in read]),
        "settings": different([_asked(data) for data, _, _ in read]), "cautions": _cautions([d for d, _, _ in read]),
        "speeds": list(dict.fromkeys(row["speed_title"] for row in shown if row["speed_title"])),
        "verdict": _verdict(shown),
    }  # fmt: skip
    path.write_text(render("compare.html.j2", view), encoding="utf-8")
    return path


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart."""
    whole = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-count:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def different(asked: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(name, a value for each run) of what differs among the runs that have such a setting; "–" for the others."""
    rows = []
    for name in dict.fromkeys(name for each in asked for name in each):
        values = [format_value(each[name]) if name in each else "–" for each in asked]
        if len({value for value, each in zip(values, asked, strict=True) if name in each}) > 1:
            rows.append((name, values))
    return rows


def _asked(data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, those left to the program as it chose them, and the machine."""
    settings = {k: v for k, v in part(data, "settings").items() if k not in _PLACES}
    for name, value in part(data, "taper").items():
        if name not in _PLACES and settings.get(name) is None:
            settings[name] = value
    settings |= {key: data[key] for key in ("device", "threads") if data.get(key) is not None}
    return settings | part(data, "versions")


def _row(name: str, folder: Path, data: Mapping[str, Any], logs: Mapping[str, Any], page: Path) -> dict[str, Any]:
    """What the tables say of one run."""
    found, fast = outcome(data), headline_speed(data)
    tapered, baseline = arm_names(data, logs)
    folded, status = fast.get("folded", {}), data.get("status")
    rows = logs.get(tapered) or logs.get(baseline) or []
    state = "done" if status == "done" else _STATES.get(str(status), "its state is not recorded")
    if state != "done" and rows:
        state += f": step {rows[-1]['step']:,}"
        if (gate := number(rows[-1].get("gate"))) is not None:
            state += f", gate {gate:.2f}"
    after, against = found["after"], found.get(found["against"]) or {}
    return {
        "name": name, "kind": data.get("kind") or "–", "model": part(data, "model").get("name") or "–",
        "arm": {"remove": "no training"}.get(str(data.get("kind")), baseline if tapered == "baseline" else tapered),
        "state": state, "done": status == "done", "failed": found["failed"], "link": _link(folder, data, page),
        "before": found["before"].get("loss"), "kept": found["kept"].get("loss"), "after": after.get("loss"),
        "gap": format_gap(after.get("loss"), against.get("loss"), MISSING), "against": found["against"],
        "tail": after.get("p999"), "tail_gap": format_gap(after.get("p999"), against.get("p999")),
        "removed": MISSING if found["removed"] is None else f"{found['removed']} of {found['total']}",
        "speed": folded.get("value"), "ratio": format_ratio(folded.get("ratio"), ""), "speed_title": fast["title"],
    }  # fmt: skip


def _link(folder: Path, data: Mapping[str, Any], page: Path) -> str | None:
    """The address of the run's own report, seen from the page; None where there is none and none can be written."""
    report = folder / "report.html"
    if data.get("status") != "done" or not report.is_file():
        try:
            write_report(folder)
        except OSError:  # another's run, that may be read only
            if not report.is_file():
                return None
    return quote(Path(os.path.relpath(report.resolve(), page.resolve().parent)).as_posix())


def _draw(
    names: Sequence[str], logs: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> dict[str, Markup]:
    """The SVG of every figure that has data."""
    lines: dict[str, list[tuple[str, Any]]] = {"loss": [], "gate": [], "gap": []}
    for name, of_run, data in zip(names, logs, records, strict=True):
        tapered, baseline = arm_names(data, of_run)
        rows = of_run.get(tapered) or of_run.get(baseline)
        if rows:
            lines["loss"].append((name, rows))
        if of_run.get(tapered) and any(number(row.get("gate")) is not None for row in rows or ()):
            lines["gate"].append((name, rows))
        gaps = gap_so_far(of_run.get(baseline, ()), of_run.get(tapered, ())) if tapered != baseline else []
        if gaps:
            lines["gap"].append((name, gaps))
    styles = run_figures.styles(names)
    draws = {
        "loss": (run_figures.losses, "Loss of every run over optimizer steps."),
        "gate": (run_figures.gates, "The gate of every run over optimizer steps."),
        "gap": (run_figures.gaps, "Validation loss above that of the same training with the norms kept, in percent."),
    }
    return {
        key: Markup(canvas.inline(draw(lines[key], styles), key, label))
        for key, (draw, label) in draws.items()
        if lines[key]
    }


def _cautions(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why numbers of these runs may not be held against each other."""

    def differ(*values: Any) -> bool:
        return len({str(value) for value in values if value is not None}) > 1

    said, data = [], [part(record, "data") for record in records]
    if differ(*(each.get("name") for each in data)):
        said.append("The runs read different texts, so their losses are not of the same thing; compare the gaps.")
    elif differ(*(each.get("validation_tokens") for each in data)) or differ(*(each.get("block") for each in data)):
        said.append("The losses were measured on different amounts or lengths of text; compare the gaps.")
    if differ(*(record.get("device") for record in records)) or differ(*(record.get("threads") for record in records)):
        said.append("The runs had different machines or numbers of threads; compare the ratios, not the speeds.")
    return said


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many runs, and how many of them are whole."""
    done = sum(row["done"] for row in rows)
    text = f"{len(rows)} runs, " + ("all of them finished." if done == len(rows) else f"{done} of them finished.")
    failed = [row["name"] for row in rows if row["failed"]]
    return text + (f" Checks failed in {', '.join(failed)}." if failed else "")
