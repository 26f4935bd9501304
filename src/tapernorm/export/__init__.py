"""Ship a model to where models run: one module a format, one function, one command.

onnx              a graph for onnxruntime and what builds on it; the cache is its inputs and outputs
pt2               torch.export programs for a prompt and a step, and what AOTInductor compiles of them
openvino          the ONNX graph as OpenVINO reads it
executorch        a step as a program for phones
as-normed         a stock checkpoint whose norms do nothing, for tools that know stock models alone
transformer-lens  a HookedTransformer without normalization
spec              what the model computes: operations, depth, ranges
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from tapernorm import _folder
from tapernorm._callable import call_module
from tapernorm.config import nearest
from tapernorm.export.folder import Exported, free_folder, write_record
from tapernorm.export.norms import ExportError as ExportError
from tapernorm.export.norms import norms_of

# format -> the module that writes it
FORMATS = {
    "onnx": "onnx",
    "pt2": "pt2",
    "openvino": "openvino",
    "executorch": "executorch",
    "as-normed": "normed",
    "transformer-lens": "lens",
    "spec": "spec",
}


def export(
    model: Any,
    out: str | os.PathLike[str],
    format: str = "onnx",
    tokenizer: Any = None,
    overwrite: bool = False,
    **options: Any,
) -> Exported:
    """Write a folded (or stock) model into a folder, in a format that other tools run; checked before it is there.

    Args:
        model: a model in memory; it is not changed.
        out: a new or empty folder.
        format: one of `FORMATS`.
        tokenizer: written beside the model when given.
        overwrite: replace what an earlier export left in the folder.
        options: of the format; see the `write` of its module.

    Raises:
        ValueError: the format is unknown or cannot hold such a model; the model is tapered and not folded; a package
            is missing; the folder is taken.
        ExportError: what was written is not the same function. The folder is not there then.
    """
    refuse_format(format)
    target = free_folder(out, overwrite)
    norms = norms_of(model, options.get("example"))
    writer = importlib.import_module(f"tapernorm.export.{FORMATS[format]}")
    with _folder.staged(target) as staging:
        made = writer.write(model, tokenizer, norms, staging, **options)
        return write_record(made, norms, format, staging, target)


def refuse_format(name: str) -> None:
    """Raises ValueError for a format that is not there, and says why where there is a reason."""
    if name in REFUSED:
        raise ValueError(REFUSED[name])
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}{nearest(name, FORMATS)}; there are: {', '.join(FORMATS)}")


# format -> why it is not there
REFUSED = {
    "gguf": "a GGUF file would be run by llama.cpp, which normalises in every architecture that it knows: norms would "
    "be there again. --format as-normed writes a stock checkpoint whose norms do nothing, to be converted like any "
    "other; it is no faster than the original",
}


call_module(__name__, export)
