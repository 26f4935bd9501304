"""The beginning-of-text token that a tokenizer writes itself (Llama's, Gemma's), which a constant prefix takes over.

Such a token is massive wherever it stands, so the fixed scales cannot serve it, and behind the prefix it would be a
second one. Where a prefix is put in, the tokenizer no longer writes it, in text and in chats, and is saved so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tapernorm.prefix import attach_prefix, own_bos, prefix_of


def take_over(model: Any, tokenizer: Any, prefix: tuple[int, ...]) -> Callable[[], None] | None:
    """Put the prefix into the model and leave the token out of the tokenizer, where it writes one. Both in place.

    Returns:
        What takes both back; None where the tokenizer writes none, and nothing was done.

    Raises:
        ValueError: as `attach_prefix`; a tokenizer that goes on writing it.
    """
    if own_bos(tokenizer) is None or not prefix or prefix == prefix_of(model):
        return None
    take_out = attach_prefix(model, prefix)
    try:
        put_back = leave_out(tokenizer)
    except ValueError:
        take_out()
        raise

    def undo() -> None:
        put_back()
        take_out()

    return undo


def leave_out(tokenizer: Any) -> Callable[[], None]:
    """Let a tokenizer that writes the token write it no more, in text and in chats; returns what takes that back.

    Raises:
        ValueError: it goes on writing it.
    """
    template = getattr(tokenizer, "chat_template", None)

    def undo() -> None:
        tokenizer.add_bos_token, tokenizer.chat_template = True, template

    tokenizer.add_bos_token = False
    tokenizer.chat_template = _silent(template)
    if own_bos(tokenizer) is not None:
        undo()
        raise ValueError(
            f"{type(tokenizer).__name__} goes on writing {tokenizer.bos_token!r} in front of every text, of which the "
            "constant prefix takes the place; give a tokenizer that can leave it out (add_bos_token=False), or go "
            "without: prefix=(), --prefix none"
        )
    return undo


def _silent(template: Any) -> Any:
    """A chat template, or several by name, in which the token is nothing."""
    if isinstance(template, dict):
        return {name: _silent(each) for name, each in template.items()}
    return re.sub(r"\bbos_token\b", "''", template) if isinstance(template, str) else template


def without_bos(ids: Tensor, bos: int | None) -> Tensor:
    """The same text in blocks of the same length, without the token. ids: [N, T]; [N', T] with N' ≤ N."""
    if bos is None:
        return ids
    stream = ids[ids != bos]
    return stream[: len(stream) // ids.shape[1] * ids.shape[1]].view(-1, ids.shape[1])
