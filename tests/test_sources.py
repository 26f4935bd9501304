"""Several texts mixed, what a run says of them, and what is refused."""

from __future__ import annotations

import json

import pytest

from stories import STORIES, write
from tapernorm.data import TextData
from tapernorm.removal import RemovalConfig
from tapernorm.run_config import RunConfig
from tapernorm.sources import gather, mix
from test_cli import QUICK, Call, call, models, text  # noqa: F401  (fixtures)


def test_documents_of_all_texts_are_mixed_and_none_is_lost() -> None:
    one, two = TextData(STORIES[:10], STORIES[10:12], "one"), TextData(STORIES[12:30], STORIES[30:33], "two")
    both = mix([one, two])
    assert both.name == "one + two" and mix([one]) is one
    assert sorted(both.train) == sorted([*one.train, *two.train])
    assert sorted(both.validation) == sorted([*one.validation, *two.validation])
    places = [index for index, story in enumerate(both.train) if story in one.train]
    assert places != list(range(10)) and max(places) > 12, "shuffled, not one behind the other"
    assert list(both.train) == list(mix([one, two]).train), "the same order each time"
    assert both.train[2:4] == list(both.train)[2:4] and both.train[-1] == list(both.train)[-1]


def test_a_run_reads_all_its_texts(tmp_path) -> None:
    paths = [str(write(tmp_path / f"{name}.jsonl", STORIES[at : at + 15])) for name, at in (("a", 0), ("b", 15))]
    config = RunConfig(kind="pretrain", data=tuple(paths), out="x")
    found = gather(config)
    assert sorted([*found.text.train, *found.text.validation]) == sorted(STORIES[:30])
    assert found.facts == {"name": "a.jsonl + b.jsonl", "sources": ["a.jsonl", "b.jsonl"]}
    assert RunConfig(**json.loads(json.dumps(config.to_dict()))) == config
    alone = RunConfig(kind="pretrain", data=(paths[0],), out="x")
    assert alone.data == paths[0] and gather(alone).facts == {"name": "a.jsonl"}


def test_no_text_is_refused_but_where_the_model_can_write() -> None:
    with pytest.raises(ValueError, match=r"there is no text: pass --data FILE$"):
        RunConfig(kind="pretrain", data=None, out="x")
    with pytest.raises(ValueError, match="or --self-generate N to let the model write"):
        RunConfig(kind="taper", model="m", data=(), out="x")
    with pytest.raises(ValueError, match="nothing to write yet"):
        RunConfig(kind="pretrain", data="a.txt", out="x", self_generate=5000)
    with pytest.raises(ValueError, match=r"a\.txt is given twice"):
        RunConfig(kind="pretrain", data=("a.txt", "b.txt", "a.txt"), out="x")
    config = RemovalConfig(model="m", data=None, out="x")
    assert config.self_generate == 32_768 and config.fit_tokens == 16_384 and config.eval_tokens == 8192
    config = RemovalConfig(model="m", data="a.txt", out="x", self_generate=8000)
    assert config.fit_tokens == 49_152 and config.eval_tokens == 65_536


def test_pretrain_and_remove_take_several_texts(call: Call, models, text, tmp_path) -> None:  # noqa: F811
    other = write(tmp_path / "other.jsonl", STORIES)
    options = tmp_path / "options.yaml"
    options.write_text(f"data: {text}\n")  # one text in a file needs no list
    arguments = ("--size", "demo", "--arm", "rms", *QUICK, "--vocab-size", 300)
    code, _, err = call("pretrain", "--config", options, "--out", tmp_path / "one", *arguments)
    assert code == 0, err
    record = json.loads((tmp_path / "one" / "run.json").read_text())
    assert record["settings"]["data"] == str(text) and record["data"]["name"] == "stories.jsonl"
    quick = ("--fit-tokens", 1024, "--eval-tokens", 1024, "--budget", "20%")
    given = ("--data", text, "--data", other)
    code, _, err = call("remove", models / "llama", *given, "--out", tmp_path / "two", *quick)
    assert code == 0, err
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    assert record["settings"]["data"] == [str(text), str(other)]
    assert record["data"]["sources"] == ["stories.jsonl", "other.jsonl"] and "self_generated" not in record["data"]
    assert "stories.jsonl + other.jsonl" in (tmp_path / "two" / "report.html").read_text(encoding="utf-8")
