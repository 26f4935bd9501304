"""Packages that an export needs, and their chatter."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator


def require(*packages: str, extra: str) -> None:
    """Raises ValueError that says what to install."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"this export needs {', '.join(missing)}: pip install 'tapernorm[{extra}]'")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the exporters say about packages that nothing here uses."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "torch")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
