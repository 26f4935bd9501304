"""One file as a table, whatever its kind, or why it is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets

from tapernorm.config import nearest

KINDS = (".txt", ".jsonl", ".json", ".parquet", ".csv")
TEXT = datasets.Features({"text": datasets.Value("large_string")})


def read(path: Path, cache: str | None) -> datasets.Dataset:
    """One file as a table, with all its columns."""
    kind, known = path.suffix.lower(), ", ".join(KINDS)
    if kind not in KINDS:
        raise ValueError(f"{path}: unknown kind of file {kind!r}{nearest(kind, KINDS)}; pass one of {known}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty; pass one with text in it")
    options: dict[str, Any] = {"cache_dir": cache}
    try:
        if kind == ".txt":
            return table_of(re.split(r"\n(?:[^\S\n]*\n)+", path.read_text(encoding="utf-8-sig")))
        if kind == ".csv":
            options["keep_default_na"] = False  # the documents "NA" and "null" are not missing ones
        reader = {".parquet": "from_parquet", ".csv": "from_csv"}.get(kind, "from_json")
        table: Any = getattr(datasets.Dataset, reader)(str(path), **options)
        if kind == ".csv" and "__index_level_0__" in table.column_names:
            # Pandas makes row names of the surplus, which moves every column by one.
            raise ValueError("its rows have more fields than its header: quote the fields with commas")
        return table
    except Exception as error:
        json_like = kind in (".json", ".jsonl") and not isinstance(error, OSError)
        why = (_broken_line(path) if json_like else "") or reason(error)
        raise ValueError(f"{path}: cannot be read as {kind}: {why}; repair the file or pass another") from error


def _broken_line(path: Path) -> str:
    """Where a JSON file stops being one: pyarrow names only a row within a chunk."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix.lower() == ".json":
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # that is what a second line is, under the name .json
                return f"line {error.lineno}: {error.msg}"
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip() and not isinstance(json.loads(line), dict | list):
                return f"line {number} is not an object with named fields"
        except json.JSONDecodeError as error:
            return f"line {number}: {error.msg}"
    return ""


def reason(error: BaseException) -> str:
    """The first line of what lies at the bottom of a chain of exceptions."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def table_of(texts: list[str]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": texts}, features=TEXT)
