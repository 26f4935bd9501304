"""`tapernorm remove` as a user meets it, its report, its CSV row, and what it refuses."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tapernorm as tn
from tapernorm import removal, removal_report, report
from tapernorm.headroom import largest_activation
from tapernorm.search import Search
from tapernorm.verify import summarise
from test_cli import Call, call, models, text  # noqa: F401  (fixtures)
from test_report import Page

QUICK = ("--fit-tokens", 1024, "--eval-tokens", 1024)
SECTIONS = {
    "done",
    "loss",
    "search",
    "costs",
    "prefix",
    "fold",
    "verification",
    "range",
    "throughput",
    "sample",
    "load",
}


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "_ROUNDS", 1)


def check(html: str) -> Page:
    """Whole, self-contained, all sections, nothing that was not meant to be read."""
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>") and "script" not in page.tags and "default-src 'none'" in html
    for _, link in page.links:
        assert link.startswith(("#", "data:")) and (link[1:] in page.ids or not link.startswith("#")), link
    assert len(page.ids) == len(set(page.ids)) and set(page.ids) >= SECTIONS
    assert not re.search(r"#0[ab]0[ab][0-9a-f]{2}", html)
    assert not re.search(r"\b(None|nan|Undefined|inf)\b", page.text)
    return page


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_remove_folds_verifies_measures_and_reports(call: Call, models: Path, text: Path, tmp_path: Path, name: str):  # noqa: F811
    out, table = tmp_path / "run", tmp_path / "results.csv"
    arguments = ("remove", models / name, "--data", text, "--budget", "20%", "--other-data", text, *QUICK)
    code, said, err = call(*arguments, "--out", out, "--csv", table, "--json")
    assert code == 0, err
    result = json.loads(said)
    folded = result["fold"]["folded"]
    assert folded and result["fold"]["kept"][-1] in ("model.norm", "transformer.ln_f")
    assert result["loss_after"] <= 1.25 * 1.2 * result["loss_before"]
    assert result["losses"]["after"]["other"]["nonfinite"] == 0 and result["verify"]["passed"]
    assert 0 < result["largest_activation"]["after"]["value"] < 65_504
    assert [row["variant"] for row in result["bench"]["rows"]] == ["stock", "folded"]
    # what was written is what was measured
    model, tokenizer = tn.from_pretrained(result["model"])
    assert tokenizer is not None
    assert not {site.name for site in tn.find_sites(model)} & set(folded)
    code, said, _ = call("eval", result["model"], "--data", text, "--eval-tokens", 1024, "--json")
    if name == "llama":  # a learned table of positions leaves room for a prefix, and the blocks are shorter
        assert json.loads(said)["loss"] == pytest.approx(result["loss_after"], rel=1e-5)
    record = json.loads((out / "run.json").read_text(), parse_constant=pytest.fail)
    assert record["status"] == "done" and record["kind"] == "remove" and record["settings"]["budget"] == 0.2
    page = check(Path(result["report"]).read_text(encoding="utf-8"))
    assert f"{len(folded)} of 4 norms of {name} were taken out" in page.text
    assert "the final norm stays: it anchors" in page.text and "unrelated text, stories.jsonl" in page.text
    rows = list(csv.DictReader(table.open()))
    assert rows[0]["sites_removed"] == str(len(folded)) and rows[0]["sites_total"] == "4" and rows[0]["model"] == name
    assert rows[0]["recipe"] == "linear+refit, no prefix, 1k tokens" and rows[0]["nonfinite"] == "0"
    assert float(rows[0]["gap_percent"]) == pytest.approx(
        100 * (result["loss_after"] / result["loss_before"] - 1), abs=1e-3
    )
    # again: refused, then replaced; the table grows; the report can be made anew
    code, _, err = call(*arguments, "--out", out)
    assert code == 2 and "not empty" in err and "--overwrite" in err and "--resume" not in err
    code, said, err = call(*arguments, "--out", out, "--overwrite", "--csv", table, "--no-refit", "--prefix", "none")
    assert code == 0, err
    assert "norms removed" in said and f"tapernorm generate {out / 'model'} --prompt" in said
    assert [row["recipe"].split(",")[0] for row in csv.DictReader(table.open())] == ["linear+refit", "linear"]
    code, said, _ = call("report", out)
    assert code == 0 and said.strip().endswith("report.html")


def test_a_prefix_that_is_given_is_put_in(
    call: Call,  # noqa: F811
    models: Path,  # noqa: F811
    text: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Search, "UNIFORM", float("inf"))  # tokens of a random model stand out everywhere
    arguments = ("remove", models / "llama", "--data", text, "--budget", "0.2", "--prefix", "0, 7", *QUICK)
    code, said, err = call(*arguments, "--out", tmp_path / "run", "--keep", "*.0.*", "--json")
    assert code == 0, err
    result = json.loads(said)
    assert result["prefix"] == [0, 7] == result["fold"]["prefix"]
    assert all(".1." in name for name in result["fold"]["folded"])
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["fold"]["reasons"]["model.layers.0.input_layernorm"] == "it was to be kept"
    page = check((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    assert "Tokens 0, 7 stand in front of every text" in page.text


def test_a_budget_that_is_missed_is_exit_code_3_and_the_model_is_there(call, models, text, tmp_path, monkeypatch):  # noqa: F811
    """Half of the validation tokens are made to fail."""
    measure = removal._Work.measure

    def worse(self: Any, model: Any, label: str, fast: bool = False) -> Any:
        found = measure(self, model, label, fast)
        if label != "original":
            found["losses"]["validation"]["loss"] *= 1.02
            found["losses"]["validation"]["nonfinite"] = 3
            found["losses"]["validation"]["p999"] *= 1.2
        return found

    monkeypatch.setattr(removal._Work, "measure", worse)
    out = tmp_path / "run"
    code, said, err = call("remove", models / "llama", "--data", text, "--out", out, "--budget", "0.01", *QUICK)
    assert code == 3 and "norms removed" in said
    assert "The loss of 3 tokens of the validation text is not finite" in err
    assert re.search(r"rose by \d\.\d+ %, and the budget is 1 %", err)
    assert re.search(
        r"99\.9th percentile of token losses rose by [12]\d % on validation text, 10 % was to be the most", err
    )
    assert (out / "model" / "config.json").is_file()
    page = check((out / "report.html").read_text(encoding="utf-8"))
    assert "Failed. The loss of 3 tokens" in page.text and "3 tokens of" in page.text


def test_when_nothing_goes_it_says_so(call: Call, models, text, tmp_path, monkeypatch) -> None:  # noqa: F811
    def nothing(model: Any, *_: Any, **__: Any) -> tn.Removal:
        names, losses = [site.name for site in tn.find_sites(model)], summarise(torch.ones(10))
        values: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(tn.Removal)), ())
        values |= {"kept": tuple(names), "costs": dict.fromkeys(names[:-1], 0.5), "before": losses, "after": losses}
        return tn.Removal(**values | {"loss_before": 1.0, "loss_after": 1.0, "fold": None, "seconds": 1.0})

    monkeypatch.setattr(removal, "remove_", nothing)
    out = tmp_path / "run"
    code, said, err = call("remove", models / "llama", "--data", text, "--out", out, *QUICK)
    assert code == 0, err
    assert "0 of 4" in said
    page = check((out / "report.html").read_text(encoding="utf-8"))
    assert "Not one of 4 norms of llama goes without training under a loss budget of 1 %" in page.text
    assert tn.from_pretrained(out / "model")[0] is not None


BAD = {
    "budget of one": (["--budget", "1"], "write 1% for 1 %"),
    "budget of nothing": (["--budget", "0%"], "must be above 0"),
    "no budget": (["--budget", "little"], "a percentage such as 1%"),
    "unknown prefix": (["--prefix", "atuo"], "did you mean 'auto'"),
    "prefix outside the vocabulary": (["--prefix", "9999"], "outside the model's vocabulary"),
    "too long a prefix": (["--prefix", "1,2,3,4,5"], "1 to 4 token ids"),
    "keep matches nothing": (["--keep", "h.*"], "matches none"),
    "too little to fit on": (["--fit-tokens", "10"], "at least 1,024"),
    "no such column": (["--text-column", "txt"], "did you mean 'text'"),
    "no such split": (["--split", "trian"], "did you mean 'train'"),
    "no such other data": (["--other-data", "/nowhere.txt"], "no such file or folder"),
    "a table of another kind": (["--csv", "{other}"], "has other columns (a, b)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(call: Call, models, text, tmp_path: Path, case: str) -> None:  # noqa: F811
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    arguments, expected = BAD[case]
    given = [a.format(other=tmp_path / "other.csv") for a in arguments]
    out = tmp_path / "run"
    code, said, err = call("remove", models / "llama", "--data", text, "--out", out, *QUICK, *given)
    assert code == 2 and said == "" and not out.exists()
    assert expected in err and err.count("\n") == 1 and err.startswith("tapernorm: ")


@pytest.mark.parametrize(
    ("model", "expected"),
    [("bert", "post-norm"), ("mute", "has no tokenizer beside it"), ("empty", "is not a model folder")],
)
def test_models_that_cannot_be_taken(call: Call, models, text, tmp_path: Path, model: str, expected: str) -> None:  # noqa: F811
    code, _, err = call("remove", models / model, "--data", text, "--out", tmp_path / "run", *QUICK)
    assert code == 2 and expected in err and err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_budgets_and_prefixes_are_read() -> None:
    assert removal.read_budget("1%") == removal.read_budget(" 1 % ") == removal.read_budget(0.01) == 0.01
    assert removal.read_budget("0.5%") == 0.005
    assert removal.read_prefix("auto") is None and removal.read_prefix("NONE") == ()
    assert removal.read_prefix("0, 504") == (0, 504) and removal.read_prefix("7") == (7,)


def test_the_largest_activation_is_found_where_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU(), torch.nn.Linear(4, 4, bias=False))
    for layer, size in ((model[0], 100.0), (model[2], 0.01)):
        torch.nn.init.constant_(layer.weight, 0.0)
        layer.weight.data.fill_diagonal_(size)

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            return self.body(torch.nn.functional.one_hot(input_ids, 4).float())

    value, where = largest_activation(Reads(), torch.tensor([[0, 1, 2, 3]]))
    assert value == 100 and where == "body.0 (output)"
    model[0].weight.data.fill_(float("inf"))
    assert largest_activation(Reads(), torch.tensor([[0]]))[0] == float("inf")


def test_headroom_says_what_to_do() -> None:
    def said(value: float | None) -> str:
        return removal_report.headroom({"after": {"largest": {"value": value, "where": "x"}}})["said"]

    assert "Nothing comes near" in said(12.0) and "Below half" in said(20_000.0)
    assert "bfloat16" in said(60_000.0) and "bfloat16" in said(70_000.0) and "bfloat16" in said(None)


def test_half_a_record_makes_a_page(tmp_path: Path) -> None:
    for name, record in {
        "begun": {"kind": "remove", "status": "running", "settings": {"budget": 0.01, "model": "<b>"}},
        "odd": {
            "kind": "remove", "sites_total": 2, "settings": {"budget": 0.01},
            "fold": {"folded": ["a"], "kept": ["b"], "kinds": {"a": "rms", "b": "rms"}, "c": {"a": float("nan")}},
            "removal": {"costs": {"a": 0.1, "b": None}, "loss_before": 2.0, "tried": [[2, None], [1, 2.01]]},
            "before": {"losses": {"validation": {"loss": 2.0, "p999": 9.0}}},
            "after": {
                "losses": {"validation": {"loss": None, "nonfinite": 4, "tokens": 10}},
                "largest": {"value": None, "where": "h"},
            },
        },
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(record))
        page = check(report.write_report(tmp_path / name).read_text(encoding="utf-8"))
        assert "not measured" in page.text.lower()
