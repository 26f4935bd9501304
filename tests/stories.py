"""Documents in files, and how they are read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import datasets
import pytest

from tapernorm.data import load_text

REAL = Path(os.environ.get("TAPERNORM_DATA", Path(__file__).parents[1] / ".." / "shared" / "data"))
STORIES = [f"Once upon a time, number {i}.\nThe cat sat on mat {i * i}, and was glad. " * 3 for i in range(40)]


@pytest.fixture
def load(tmp_path):
    """`load_text` with its Arrow files outside the folders that it reads."""
    return lambda source, **options: load_text(source, cache_dir=tmp_path / "cache", **options)


def real(name: str) -> Path:
    if not (REAL / name).exists():
        pytest.skip(f"{name} is not in {REAL}; point TAPERNORM_DATA at the data")
    return REAL / name


def write(path: Path, texts: list[str], column: str = "text") -> Path:
    """The texts in a file of the kind that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{column: text, "n": i} for i, text in enumerate(texts)]
    if path.suffix == ".txt":
        path.write_text("\n\n".join(texts))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_pandas().to_csv(path, index=False)
    else:
        datasets.Dataset.from_list(rows).to_pandas().to_parquet(path)
    return path


def refusal(load, source, **options) -> str:
    with pytest.raises(ValueError) as caught:
        load(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message
