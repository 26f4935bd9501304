"""`tapernorm remove --minutes`: what is left is trained away, and the verdict covers both."""

from __future__ import annotations

import json

import pytest

import tapernorm as tn
from tapernorm import go_on, removal
from tapernorm.search import Search
from test_cli import Call, call, models, text  # noqa: F401  (fixtures)

QUICK = ("--fit-tokens", 1024, "--eval-tokens", 1024, "--budget", "20%", "--json")


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "_ROUNDS", 1)
    monkeypatch.setattr(Search, "UNIFORM", float("inf"))  # tokens of a random model stand out everywhere
    monkeypatch.setattr(go_on, "_seconds_per_step", lambda *_: 2.0)


def a_removal_of_two(monkeypatch) -> None:
    """Only the norms of the first block go; the others have the costs 0.3 and none that is finite."""
    whole = removal.remove_

    def some(model, *arguments, **options):
        second = [f"model.layers.1.{name}" for name in ("input_layernorm", "post_attention_layernorm")]
        found = whole(model, *arguments, **options | {"keep": ("model.layers.1.*",)})
        found.costs.update(zip(second, (float("nan"), 0.3), strict=True))
        return found

    monkeypatch.setattr(removal, "remove_", some)


def test_the_rest_is_trained_away(call: Call, models, text, tmp_path, monkeypatch) -> None:  # noqa: F811
    a_removal_of_two(monkeypatch)
    out = tmp_path / "run"
    code, said, err = call("remove", models / "llama", "--data", text, "--out", out, "--minutes", 1, *QUICK)
    assert code == 0, err
    trained = json.loads(said)["trained"]
    assert trained["steps"] == 22 and len(trained["folded"]) == 2 and trained["verified"]
    model, _ = tn.from_pretrained(trained["model"])
    assert [site.name for site in tn.find_sites(model)] == ["model.norm"]
    settings = json.loads((out / "trained" / "run.json").read_text())["settings"]
    order = {"model.layers.1.post_attention_layernorm": 0.0, "model.layers.1.input_layernorm": 1.0}
    assert settings["order"] == order and settings["stagger"] == 0.5 and settings["data"] == str(text)
    record = json.loads((out / "run.json").read_text())
    assert record["trained"] == trained and record["status"] == "done"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Then 2 norms more were trained away in 22 steps" in page and "could still go" not in page


def test_too_few_minutes_are_told_and_the_removal_stands(call: Call, models, text, tmp_path, monkeypatch) -> None:  # noqa: F811
    a_removal_of_two(monkeypatch)
    out = tmp_path / "run"
    code, said, err = call("remove", models / "llama", "--data", text, "--out", out, "--minutes", 0.1, *QUICK)
    assert code == 0, err
    assert "0.1 minutes hold 2 of them, and 20 are the least; --minutes 1" in json.loads(said)["trained"]["stopped"]
    assert (out / "model" / "config.json").is_file() and not (out / "trained").exists()
    code, _, err = call("remove", models / "llama", "--data", text, "--out", out, "--minutes", 0, *QUICK)
    assert code == 2 and "--minutes 0 must be above 0" in err


def test_where_nothing_is_left_it_says_so(call: Call, models, text, tmp_path) -> None:  # noqa: F811
    out = tmp_path / "run"
    given = ("--keep", "model.layers.1.*", "--budget", "90%")
    code, said, err = call("remove", models / "llama", "--data", text, "--out", out, "--minutes", 1, *QUICK, *given)
    assert code == 0, err
    assert json.loads(said)["trained"]["stopped"] == "There is nothing left to train away."
