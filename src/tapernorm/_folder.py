"""Write a model folder as a whole or not at all, and never over what is not a model's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

# The files of this package that a saved model brings along, for transformers alone: config.json leads to the first,
# which imports the others by relative imports. transformers copies what is imported so, and this list says the same.
CODE = ("modeling_tapernorm.py", "fused_tapernorm.py")

_TYPE_PREFIX = "tapernorm_"
# What an earlier save may have written, and a later one may replace.
_OWN_FILES = re.compile(
    r"(config|generation_config|taper|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|"
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|taper\.safetensors|"
    r"merges\.txt|vocab\.txt|[\w.]+\.model|chat_template\.(jinja|json)|additional_chat_templates|"
    + "|".join(map(re.escape, CODE))
)

CARD = "README.md"
CARD_MARK = "This card was written by tapernorm. Without this line it is yours, and is not written over."


def copy_code(folder: Path) -> None:
    """Put a copy of each file of `CODE` into a model folder."""
    for name in CODE:
        shutil.copyfile(Path(__file__).with_name(name), folder / name)


def refuse_missing_code(folder: Path) -> None:
    """Raises ValueError where the code in a folder imports a file that is not there. Earlier versions wrote one file,
    which imports none."""
    for path in (folder / name for name in CODE):
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        for needed in re.findall(r"^from \.(\w+) import", text, flags=re.MULTILINE):
            if not (folder / f"{needed}.py").is_file():
                raise ValueError(
                    f"{folder / needed}.py is missing, which {path.name} beside it imports: transformers alone cannot "
                    "load the model; load it with tapernorm.from_pretrained and save it again, which writes the file"
                )


def is_own_card(path: Path) -> bool:
    """Whether a README.md is one that `tapernorm.card` wrote."""
    try:
        return CARD_MARK in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _is_own(path: Path) -> bool:
    return is_own_card(path) if path.name == CARD else is_own_file(path.name)


def refuse_unwritable(target: Path) -> None:
    """Raises ValueError where no folder of that name could be made or written: before the work, not after it."""
    place = next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"{place} is a file; give the name of a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{target}: no permission to write into {place}; give another place")


def refuse_occupied(target: Path, overwrite: bool) -> None:
    """Raises ValueError for a file, and for a folder with anything that no earlier save wrote."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give the name of a folder")
    entries = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    if not entries or overwrite:
        return
    foreign = [name for name in entries if not _is_own(target / name)]
    if foreign or not model_type(target).startswith(_TYPE_PREFIX):
        found = ", ".join((foreign or entries)[:3])
        raise ValueError(
            f"{target} is not empty (it holds {found}) and was not written by an earlier save of a tapered or "
            "norm-free model; choose a new folder, or pass overwrite=True to replace the model in it"
        )


def model_type(folder: Path) -> str:
    """The model type in a folder's config.json; an empty string when there is none."""
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, which takes its place when the block ends, and is removed when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    staging.mkdir()
    try:
        yield staging
        take_place(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def take_place(staging: Path, target: Path) -> None:
    """Rename a finished folder to `target`, whose own files go; what is not a model's is the user's, and stays."""
    old = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
    try:
        if target.exists():
            target.rename(old)
        staging.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    if old.exists():
        for path in old.iterdir():
            if not _is_own(path) and (path.name == CARD or not (target / path.name).exists()):
                path.replace(target / path.name)
        shutil.rmtree(old)


def is_weights(name: str) -> bool:
    """Whether a file of a model folder holds weights or says where they are."""
    return re.fullmatch(r"(model(-\d+-of-\d+)?|taper)\.safetensors(\.index\.json)?", name) is not None


def is_own_file(name: str) -> bool:
    """Whether a save may have written a file of this name."""
    return _OWN_FILES.fullmatch(name) is not None
