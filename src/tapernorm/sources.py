"""The text of a run: what it names, mixed where that is more than one thing, and what the model writes itself.

RUN/text/    what the model wrote, as train.jsonl and validation.jsonl: `--data RUN/text` takes it again
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tapernorm.data import TextData, load_text


class Asked(Protocol):
    """What a run says of its text, such as `RunConfig`."""

    @property
    def data(self) -> str | tuple[str, ...] | None: ...
    @property
    def text_column(self) -> str: ...
    @property
    def split(self) -> str | None: ...
    @property
    def self_generate(self) -> int | None: ...
    @property
    def out(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The text of a run. own: the part that the model wrote, if any; sources: the names of all parts."""

    text: TextData
    own: TextData | None = None
    sources: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says of where the text comes from."""
        told: dict[str, Any] = {"name": self.text.name}
        if len(self.sources) > 1:
            told["sources"] = list(self.sources)
        if self.own is not None:
            told["self_generated"] = True
        return told

    def save(self, out: str | Path) -> None:
        """Keep what the model wrote in the run's folder."""
        if self.own is not None:
            from tapernorm.self_text import save_text

            save_text(self.own, Path(out) / "text")


class _Shuffled(Sequence[str]):
    """The documents of several sequences in one random order, always the same; each is read where it is asked for."""

    def __init__(self, parts: Sequence[Sequence[str]]) -> None:
        self._parts = parts
        self._places = [(part, row) for part, rows in enumerate(parts) for row in range(len(rows))]
        random.Random(0).shuffle(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._parts[part][row] for part, row in self._places[index]]
        part, row = self._places[index]
        return self._parts[part][row]


def mix(texts: Sequence[TextData]) -> TextData:
    """All documents of several texts, shuffled; one alone stays as it is. Validation stays validation."""
    if len(texts) == 1:
        return texts[0]
    train, validation = (_Shuffled([getattr(text, name) for text in texts]) for name in ("train", "validation"))
    return TextData(train, validation, " + ".join(text.name for text in texts))


def gather(
    asked: Asked, model: Any = None, tokenizer: Any = None, device: Any = None, resume: bool = False
) -> Gathered:
    """The text that a run asks for, read or written. Says on stderr that the model writes.

    Args:
        model, tokenizer: of a run that may ask the model to write, or whose text are chats; device: where it writes.
        resume: take what the model wrote for the run in `asked.out`, where that is there.

    Raises:
        ValueError: as `load_text` and `tapernorm.self_text.write_text`.
    """
    named = (asked.data,) if isinstance(asked.data, str) else asked.data or ()
    texts = [load_text(source, asked.text_column, asked.split, tokenizer=tokenizer) for source in named]
    own = None
    if asked.self_generate is not None:
        own = _own(asked, model, tokenizer, device, Path(asked.out) / "text" if resume else None)
        texts.append(own)
    return Gathered(mix(texts), own, tuple(text.name for text in texts))


def _own(asked: Asked, model: Any, tokenizer: Any, device: Any, earlier: Path | None) -> TextData:
    from tapernorm import self_text

    if earlier is not None and earlier.is_dir():
        return dataclasses.replace(load_text(earlier), name=self_text.NAME)
    tokens = asked.self_generate or 0
    why = "beside --data" if asked.data else "for want of --data; text like what the model is for would serve it better"
    print(f"tapernorm: the model writes {tokens:,} tokens of text itself, {why}", file=sys.stderr)
    home = next(model.parameters()).device
    try:
        return self_text.write_text(model.to(device or home), tokenizer, tokens)
    finally:
        model.to(home)
