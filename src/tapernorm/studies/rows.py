"""results.csv: read with types, mended after a kill; a Markdown table of it."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tapernorm.studies.base import Row

RESULTS = "results.csv"


def read_rows(folder: Path) -> list[Row]:
    """The rows of a study's folder; none where nothing was run."""
    return read_csv(folder / RESULTS)


def read_csv(path: Path) -> list[Row]:
    """The rows of a file, numbers as numbers, empty fields as None; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: typed(text) for name, text in row.items()} for row in csv.DictReader(file)]


def typed(text: str | None) -> Any:
    """A field of a CSV file as a number where it is one, as None where it is empty."""
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def mend(folder: Path) -> None:
    """Drop a last line that a kill or a full disk cut short."""
    path = folder / RESULTS
    if path.is_file() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def table(head: Sequence[str], lines: Iterable[Sequence[Any]], left: int = 1) -> str:
    """A Markdown table; all but the first `left` columns are aligned to the right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    made = [head, rule, *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in made) + "\n"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, NaN where it cannot be known."""
    if not values:
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def with_error(values: Sequence[float], digits: int = 4) -> str:
    """The mean, and its standard error where it can be known; empty where there are no values."""
    mean, error = mean_and_error(values)
    if math.isnan(mean):
        return ""
    return f"{mean:.{digits}f}" if math.isnan(error) else f"{mean:.{digits}f} ± {error:.{digits}f}"


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of a column, in the order of their first appearance."""
    return list(dict.fromkeys(row[key] for row in rows))
