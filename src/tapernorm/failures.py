"""What went wrong, in one line and an exit code, where a user can do something about it. Loads nothing heavy.

The rest, mistakes of this library's own, keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator

from tapernorm.output import INPUT, INTERRUPTED, NUMERICAL

_RESUMABLE = ("taper", "pretrain")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHECKS = ("FoldError", "ExportError", "MassiveTokenError", "Diverged", "GuardStop")
_EXTRAS = {  # module -> the extra that brings it
    "executorch": "executorch", "gguf": "gguf", "lightning": "lightning", "onnx": "onnx", "onnxruntime": "onnx",
    "onnxscript": "onnx", "openvino": "openvino", "peft": "peft", "tensorboard": "tensorboard",
    "transformer_lens": "lens", "trl": "trl",
}  # fmt: skip
_ADVICE = {
    errno.EACCES: "give another place, or change the permissions there",
    errno.EPERM: "give another place, or change the permissions there",
    errno.EROFS: "give another place; nothing can be written there",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOTDIR: "a part of that path is a file; give another",
}


def told(error: BaseException, command: str = "") -> tuple[str, int] | None:
    """(one line, "" for silence; exit code), or None for what has to show its traceback.

    command: the subcommand; `taper` and `pretrain` can be resumed.
    """
    chain = list(_chain(error))
    if isinstance(error, KeyboardInterrupt):
        if command in ("watch", "generate"):  # the way to end it: there is nothing to say
            return "", INTERRUPTED
        hint = "; the same command with --resume goes on from the last checkpoint" if command in _RESUMABLE else ""
        hint = "; the same command goes on with the run that was stopped" if command == "study" else hint
        return f"stopped{hint}", INTERRUPTED
    if any(_is_full(link) for link in chain):
        then = ", then go on with --resume" if command in _RESUMABLE else ""
        return f"no space left on device{_where(chain)}; make room{then}, or give --out on another disk", INPUT
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory{_first_line(error, ': ')}; lower --batch or --block, or take a smaller model", INPUT
    if isinstance(error, ValueError):
        return str(error), INPUT
    if isinstance(error, RuntimeError) and type(error).__name__ in _CHECKS:
        return str(error), NUMERICAL
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _EXTRAS:
        package = str(error.name).partition(".")[0]
        return f"this needs {package}: pip install 'tapernorm[{_EXTRAS[package]}]'", INPUT
    if isinstance(error, OSError) and error.errno is not None:
        what, advice = error.strerror or type(error).__name__, _ADVICE.get(error.errno)
        place = _where([error]).removeprefix(" at ")
        return "; ".join(filter(None, [f"{place}: {what}" if place else what, advice])), INPUT
    return None


def flush() -> None:
    """Write out what was printed. A full disk or a closed pipe is to be told now, not by the interpreter at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _is_full(error: BaseException) -> bool:
    """Whether a disk is full. safetensors and torch have errors of their own for that."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return type(error).__name__ in ("SafetensorError", "RuntimeError") and "No space left on device" in str(error)


def _where(chain: list[BaseException]) -> str:
    name = next((link.filename for link in chain if isinstance(link, OSError) and link.filename), None)
    return f" at {os.fsdecode(name)}" if isinstance(name, str | bytes) else ""


def _first_line(error: BaseException, before: str) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return before + line if line else ""
