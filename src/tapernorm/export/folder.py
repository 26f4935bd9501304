"""The folder of an export: what every format puts beside its own files, and what it says of itself."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tapernorm import _folder
from tapernorm.export.norms import Norms
from tapernorm.layout import stock_config


@dataclasses.dataclass(frozen=True)
class Exported:
    """What an export wrote. files: names in the folder. checks: measured numbers by name. notes: sentences that the
    user must know. details: what only this format has, plain JSON values."""

    format: str
    folder: str
    files: tuple[str, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    prefix: tuple[int, ...]
    checks: dict[str, Any]
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class Made:
    """What a format hands back before the folder is in its place: measured checks, notes, and its own details."""

    checks: dict[str, Any]
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


def free_folder(out: str | os.PathLike[str], overwrite: bool) -> Path:
    """The target as a full path.

    Raises:
        ValueError: it is a file, cannot be written, or has something in it and `overwrite` is false.
    """
    target = Path(out).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give the name of a folder")
    _folder.refuse_unwritable(target)
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ValueError(f"{target} is not empty; choose a new folder, or overwrite=True (--overwrite)")
    if target.is_dir() and any(target.glob("model*.safetensors")) and not (target / "export.json").exists():
        raise ValueError(f"{target} holds a model's weights, which the export would replace; choose another folder")
    return target


def write_companions(model: Any, tokenizer: Any, norms: Norms, folder: Path) -> None:
    """config.json, generation_config.json and the tokenizer, for the tools that read them.

    The config is the stock one, since runtimes know the stock model types only, with what was removed noted in it.
    No weights that a stock class could read are beside it, so none can grow norms back.
    """
    if isinstance(model, PreTrainedModel):
        config = stock_config(model.config)
        config.architectures = [getattr(type(model), "stock_class", type(model)).__name__]
        config.tapernorm = {"removed_norms": list(norms.removed), "constant_prefix": list(norms.prefix)}
        config.dtype = "float32"
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_record(made: Made, norms: Norms, name: str, folder: Path, target: Path) -> Exported:
    """export.json, and the same as an object. folder: where it is written; target: where that will be."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    record = Exported(
        format=name,
        folder=str(target),
        files=(*files, "export.json"),
        removed=norms.removed,
        kept=tuple(site.name for site in norms.kept),
        prefix=norms.prefix,
        checks=made.checks,
        notes=made.notes if norms.removed else (norms.sentence(), *made.notes),
        details=made.details,
    )
    values = {k: v for k, v in record.to_dict().items() if k != "folder"}  # the folder may be moved
    (folder / "export.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return record
