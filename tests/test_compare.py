"""Several runs on one page: every run in every table, links that lead to reports, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from command import run_command
from runs import gpt2_run, half_run, llama_run, removed_run, write_run
from tapernorm import compare_page
from test_report import Page


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    root = tmp_path_factory.mktemp("compared")
    makers = {"llama": llama_run, "gpt2": gpt2_run, "half done": half_run, "removed": removed_run}
    folders = [make(root / "runs" / name) for name, make in makers.items()]
    path = compare_page.write_comparison(folders, root)
    return path, Page(path.read_text(encoding="utf-8"))


def test_the_page_is_whole(compared):
    path, page = compared
    html = path.read_text(encoding="utf-8")
    assert path.name == "compare.html"
    assert "script" not in page.tags and "default-src 'none'" in html
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"\b(None|nan|Undefined)\b", page.text)
    assert not re.search(r"#0[ab]0[ab][0-9a-f]{2}", html)
    assert html.count('class="wide"') == html.count('class="narrow"') == 3  # loss, gap, gate


def test_every_run_leads_to_its_own_report(compared):
    path, page = compared
    links = {link for _, link in page.links if not link.startswith(("#", "data:"))}
    assert links == {f"runs/{name}/report.html" for name in ("llama", "gpt2", "half%20done", "removed")}
    for link in links:
        assert (path.parent / link.replace("%20", " ")).is_file()


def test_the_numbers_of_every_kind_of_run(compared):
    text = compared[1].text
    for words in (
        "4 runs, 3 of them finished. Checks failed in gpt2.",
        "llama – 2.9041 2.9203 +0.56 % 12.27 +0.56 % 500 1.21 ×",
        "gpt2 3.4100 3.0200 3.0713 +1.70 % 12.90 +1.70 % 500 1.21 ×",
        "half done – – – – – –",
        "removed 3.4100 – 3.4383 +0.83 %* 14.44 +0.83 % 500 1.21 ×",
        "half done pretrain – internal – has not ended: step 210, gate 0.45",
        "removed remove gpt2 no training 16 of 25 done",
        "The runs read different texts",
    ):
        assert words in text, words


def test_settings_that_differ_among_those_that_have_them():
    asked = [{"steps": 10, "seed": 0, "lr": 0.1}, {"steps": 20, "seed": 0}, {"budget": 0.01}]
    assert compare_page.different(asked) == [("steps", ["10", "20", "–"])]


def test_settings_left_open_are_those_that_were_chosen(tmp_path):
    runs = []
    for name, warmup in (("a", 50), ("b", 75)):
        data = {"settings": {"warmup_steps": None, "out": name, "steps": 9}, "taper": {"warmup_steps": warmup}}
        runs.append(write_run(tmp_path / name, data, {}))
    text = Page(compare_page.write_comparison(runs, tmp_path).read_text(encoding="utf-8")).text
    assert "warmup steps 50 75" in text and "No run has curves." in text


def test_names_tell_runs_apart(tmp_path):
    assert compare_page.short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert compare_page.short_names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]


def test_names_are_escaped(tmp_path):
    rows = [{"step": step, "loss": 3.0 / step, "gate": 1.0} for step in (1, 2)]
    evil = "<b>$a$ & 模型#?"
    data = {"status": "done", "settings": {"<i>": evil}, "model": {"name": evil}}
    runs = [write_run(tmp_path / name, data | {"threads": i}, {"internal": rows}) for i, name in enumerate((evil, "b"))]
    page = Page(compare_page.write_comparison(runs, tmp_path).read_text(encoding="utf-8"))
    assert "<b>$a$ & 模型#?" in page.text
    assert "%3Cb%3E%24a%24%20%26%20%E6%A8%A1%E5%9E%8B%23%3F/report.html" in {link for _, link in page.links}


def test_more_runs_than_colours(tmp_path):
    from tapernorm import run_figures

    styles = run_figures.styles([str(i) for i in range(12)])
    assert len({str(style) for style in styles.values()}) == 12


def call(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    return run_command(monkeypatch, capsys, "report", *arguments)


def test_the_command(tmp_path, monkeypatch, capsys):
    one, two = (write_run(tmp_path / name, {"status": "done"}, {}) for name in ("one", "two"))
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, capsys, one, two)[:2] == (0, "compare.html\n")
    assert (tmp_path / "compare.html").is_file()
    code, said, _ = call(monkeypatch, capsys, one, two, "--out", tmp_path / "page.html", "--json")
    assert code == 0 and json.loads(said) == {"report": str(tmp_path / "page.html")}
    assert call(monkeypatch, capsys, one)[1] == f"{one / 'report.html'}\n"
    for arguments, words in (
        ([one, "--out", "x.html"], "several runs"),
        ([one, one], "given twice"),
        ([one, tmp_path], "is not a run folder"),
        ([one, two, "--out", "page.pdf"], "ends in .html"),
        ([one, two, "--out", Path("nowhere") / "page.html"], "make it first"),
    ):
        code, said, err = call(monkeypatch, capsys, *arguments)
        assert (code, said, err.count("\n")) == (2, "", 1) and words in err, err
    assert not (tmp_path / "x.html").exists()
