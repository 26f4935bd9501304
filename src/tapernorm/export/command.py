"""The body of `tapernorm export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tapernorm import from_pretrained
from tapernorm.commands import blocks_of
from tapernorm.export import export, refuse_format
from tapernorm.export.folder import Exported, free_folder
from tapernorm.output import console, print_json
from tapernorm.sites import context_length

# option of the command line -> the formats that have it
_ONLY = {"opset": ("onnx",), "context": ("pt2", "executorch"), "compile": ("pt2",)}
_LENGTH, _BLOCKS = 64, 4


def run(options: dict[str, Any]) -> None:
    """`export`, from the options of the command line."""
    source, out, name = options["model"], options["out"], options["format"]
    refuse_format(name)
    chosen = {}
    for option, formats in _ONLY.items():
        if options[option]:
            if name not in formats:
                raise ValueError(f"--{option} is for --format {' and '.join(formats)}; this is {name}")
            chosen[option] = options[option]
    free_folder(out, options["overwrite"])
    if Path(source).is_dir() and Path(source).resolve() == Path(out).resolve():
        raise ValueError(f"--out {out} is the model itself; choose another folder")
    model, tokenizer = from_pretrained(source)
    if options["data"] is not None:
        length = min(_LENGTH, context_length(model))
        blocks = blocks_of(model, tokenizer, options["data"], options["text_column"], options["split"], length, _BLOCKS)
        chosen["ids"] = blocks.ids
    record = export(model, out, name, tokenizer=tokenizer, overwrite=options["overwrite"], **chosen)
    if options["as_json"]:
        return print_json(record.to_dict())
    show(record)
    return None


def show(record: Exported) -> None:
    """What was written, checked and is to be known, for the terminal."""
    gone, kept = len(record.removed), record.kept
    print(f"{record.format}: {record.folder}")
    print(f"  {', '.join(record.files)}")
    if gone:
        print(f"  {gone} norms gone, {len(kept)} kept" + (f": {', '.join(kept[:3])}" if kept else ""))
    for name, value in record.checks.items():
        print(f"  {name}: {_told(value)}")
    if record.format == "spec":
        from tapernorm.export.spec import table

        console().print(table(record.details))
    for note in record.notes:
        print(f"  note: {note}")


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_told(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1e}" if isinstance(value, float) else str(value)
