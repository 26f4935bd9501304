"""The pages that are made from the tests and from measurements are those that would be made now."""

import importlib.util
import re
from pathlib import Path

import pytest

from tapernorm import studies
from tapernorm.studies.rows import read_rows

DOCS = Path(__file__).resolve().parent.parent / "docs"


def made_by(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_architectures():
    written = (DOCS / "architectures.md").read_text(encoding="utf-8")
    assert written == made_by("architectures").page(), "run `python docs/architectures.py`"


def test_speed():
    speed = made_by("speed")
    written = (DOCS / "speed.md").read_text(encoding="utf-8")
    wanted = speed.page(speed.rows_of("speed.csv"), speed.rows_of("graph_counts.csv"))
    assert written == wanted, "run `python docs/speed.py`"


def test_speed_tables_keep_apart_what_differs():
    speed = made_by("speed")
    row = dict.fromkeys(speed.KEYS, "1") | {
        "variant": "stock", "mode": "decode", "compile_mode": "", "tokens_per_second": "1000.4", "p20": "900",
        "p80": "1100", "ratio": "1.0", "ratio_p20": "1.0", "ratio_p80": "1.0", "bandwidth_share": "0.25",
        "copy_bandwidth": "2e10", "rounds": "15", "device": "machine", "arm": "internal", "model": "1m",
    }  # fmt: skip
    folded = row | {"variant": "folded", "ratio": "1.234"}
    other = {"date": "2", "threads": "2", "batch": "4", "cache": "static", "compile_mode": "default", "dtype": "half"}
    rows = [folded, row, *(folded | {key: value} for key, value in other.items())]
    text = speed.page(rows, [])
    tables = text.split("## Operations")[0].split("\n**")[1:]
    assert len(tables) == 1 + len(other)
    assert tables[0].index("`stock`") < tables[0].index("`folded`") and "| 1,000 | 900 to 1,100 |" in tables[0]
    assert "1.234 [1.00, 1.00] | 25 %" in tables[0] and all("`stock`" not in table for table in tables[1:])
    assert text.count("### machine") == 4  # dates, threads and dtypes are places of their own


def test_pages_of_studies():
    folders = [DOCS.parent / "studies" / name for name in studies.STUDIES]
    folders = [folder for folder in folders if (folder / "results.csv").is_file()]
    if not folders:
        pytest.skip("no results of studies here")
    for folder in folders:
        written = (folder / "page.md").read_text(encoding="utf-8")
        again = f"run `tapernorm study {folder.name} --draw`"
        assert written == studies.load(folder.name).page(read_rows(folder)), again
        shown = set(re.findall(r"\]\(([\w-]+\.svg)\)", written))
        assert shown == {path.name for path in folder.glob("*.svg")}, again
        assert f"studies/{folder.name}/page.md" in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
