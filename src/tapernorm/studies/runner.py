"""Make the runs of a study that are not there yet, then its figures and its page.

OUT/NAME/results.csv   a row for every run that was made, appended at once
OUT/NAME/*.svg         the figures
OUT/NAME/page.md       the page
"""

from __future__ import annotations

import datetime
import importlib.metadata
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapernorm import _folder
from tapernorm.config import nearest
from tapernorm.studies import load
from tapernorm.studies.base import SCALES, Cell, Context, Row, Scale, Study
from tapernorm.studies.rows import RESULTS, mend, read_rows

PAGE = "page.md"


def run_study(
    name: str,
    scale: str = "small",
    data: str | None = None,
    only: Sequence[str] = (),
    out: str | Path = "studies",
    minutes: float | None = None,
    draw: bool = False,
    extra: Sequence[str] = (),
) -> dict[str, Any]:
    """Make what is missing of a study.

    Args:
        name, scale: of the study; data: see `Context`.
        only: `KEY=VALUE` or `KEY=VALUE,VALUE`: the runs to make.
        out: the folder for all studies.
        minutes: after which no new run is begun.
        draw: make no run, draw figures and page of the rows that are there.
        extra: `NAME=VALUE`, options of the study's own.

    Returns:
        {"study", "folder", "runs" (made now), "left", "rows", "diverged", "figures", "page"}

    Raises:
        ValueError: a study, scale, key, value or option that is not there; rows of other data in the folder; a folder
            that cannot be written.
    """
    study = load(name)
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r} is not one of {', '.join(SCALES)}{nearest(scale, SCALES)}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes={minutes!r} must be above 0")
    wanted = select(study, scale, only)  # type: ignore[arg-type]
    options = read_extra(study, extra)
    folder = Path(out) / study.name
    _folder.refuse_unwritable(folder)
    mend(folder)
    rows = read_rows(folder)
    context = Context(scale, data or study.data, folder, options)  # type: ignore[arg-type]
    if not draw:
        _refuse_mixture(study, rows, context)
    missing = [cell for cell in wanted if not is_done(study, cell, context, rows)]
    made = 0 if draw else _make(study, missing, context, minutes)
    rows = read_rows(folder)
    figures, page = present(study, rows, folder) if rows else ([], None)
    return {
        "study": study.name,
        "folder": str(folder),
        "runs": made,
        "left": len(missing) - made,
        "rows": len(rows),
        "diverged": sum(bool(row.get("diverged")) for row in rows),
        "figures": [str(path) for path in figures],
        "page": str(page) if page else None,
    }


def _make(study: Study, missing: list[Cell], context: Context, minutes: float | None) -> int:
    """The runs, one after another; how many. A row is written when its run has ended."""
    from tapernorm.bench import append_csv
    from tapernorm.progress import bar

    started, made = time.monotonic(), 0
    context.folder.mkdir(parents=True, exist_ok=True)
    with bar(study.name, len(missing)) as advance:
        for cell in missing:
            if minutes is not None and time.monotonic() - started > 60 * minutes:
                break
            if not is_done(study, cell, context, read_rows(context.folder)):  # by another process meanwhile
                began = time.perf_counter()
                row = study.run(cell, context)
                row = _complete(study, cell, row, context, time.perf_counter() - began)
                append_csv(context.folder / RESULTS, [row])
                made += 1
            advance()
    return made


def _complete(study: Study, cell: Cell, row: Row, context: Context, seconds: float) -> Row:
    """The row with all columns of the study, in their order."""
    import torch

    from tapernorm.bench import device_name

    filled = {
        "scale": context.scale,
        "data": _data_name(context.data),
        "seconds": round(seconds, 1),
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": torch.get_num_threads(),
        "torch": importlib.metadata.version("torch"),
        "date": datetime.date.today().isoformat(),
    }
    known = filled | cell | row
    unknown = [name for name in (*cell, *row) if name not in study.columns]
    if unknown:
        raise KeyError(f"the study {study.name} has no column {unknown[0]!r}{nearest(unknown[0], study.columns)}")
    return {name: known.get(name, "") for name in study.columns}


def present(study: Study, rows: list[Row], folder: Path) -> tuple[list[Path], Path]:
    """Draw the figures and write the page."""
    figures = study.draw(rows, folder)
    page = folder / PAGE
    page.write_text(study.page(rows), encoding="utf-8")
    return figures, page


def is_done(study: Study, cell: Cell, context: Context, rows: Sequence[Row]) -> bool:
    """Whether the file holds a row of this run, with the options that are given: one of other steps is another run."""
    named = {"scale": context.scale, **context.extra, **cell}
    keys = [key for key in named if key in study.columns]
    wanted = [str(named[key]) for key in keys]
    return any([str(row.get(key)) for key in keys] == wanted for row in rows)


def select(study: Study, scale: Scale, only: Sequence[str]) -> list[Cell]:
    """The runs that `--only` names, all by default.

    Raises:
        ValueError: it names a key that the study does not have, or a value that no run has.
    """
    cells, more = study.cells(scale), study.more(scale)
    asked: dict[str, list[str]] = {}
    for item in only:
        key, values = _pair("--only", item)
        if key not in study.keys:
            raise ValueError(f"--only {item}: no key {key!r}{nearest(key, study.keys)}; {_listed(study.keys)}")
        known = list(dict.fromkeys(str(cell[key]) for cell in (*cells, *more)))
        for value in filter(None, (part.strip() for part in values.split(","))):
            if value not in known:
                raise ValueError(f"--only {item}: no {key} {value!r}{nearest(value, known)}; {_listed(known)}")
            asked.setdefault(key, []).append(value)
    usual = {key: {str(cell[key]) for cell in cells} for key in study.keys}

    def named(cell: Cell) -> bool:
        return all(key in asked for key in study.keys if str(cell[key]) not in usual[key])

    found = [*cells, *(cell for cell in more if named(cell))] if asked else cells
    found = [cell for cell in found if all(str(cell[key]) in values for key, values in asked.items())]
    if not found:
        raise ValueError(f"no run of {study.name} at scale {scale} is all of {' '.join(only)}")
    return list({tuple(str(cell[key]) for key in study.keys): cell for cell in found}.values())


def read_extra(study: Study, items: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` as options of the study.

    Raises:
        ValueError: a name that the study does not have.
    """
    made = {}
    for item in items:
        name, value = _pair("--set", item)
        if name not in study.extras:
            has = _listed(study.extras) if study.extras else "it has none"
            raise ValueError(f"--set {item}: {study.name} has no option {name!r}{nearest(name, study.extras)}; {has}")
        made[name] = value
    return made


def _refuse_mixture(study: Study, rows: Sequence[Row], context: Context) -> None:
    name = _data_name(context.data)
    other = next((str(row["data"]) for row in rows if row.get("data") is not None and str(row["data"]) != name), None)
    if other is not None:
        raise ValueError(
            f"{context.folder / RESULTS} holds runs on {other!r}, and these would be on {name!r}: they cannot be "
            "compared; pass the same --data, or another --out"
        )


def _data_name(data: str | None) -> str:
    return "" if data is None else Path(data).name


def _pair(option: str, item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise ValueError(f"{option} {item}: it must be a name and a value, such as {option} size=1m")
    return key.strip(), value.strip()


def _listed(known: Any) -> str:
    return f"there are {', '.join(map(str, known))}"
