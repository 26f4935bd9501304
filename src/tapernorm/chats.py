"""Rows that are chats: rendered with the tokenizer's chat template, and it is known which tokens are answers.

A row is a chat where its data set has a column `messages`, a list of {"role", "content"}, or the columns `prompt` and
`completion`, each a text or such a list. Answers are what the template marks as generated (`{% generation %}`). Where
it marks nothing, they are found by rendering without them: an answer is what comes between the chat before it, with
the template's generation prompt, and the chat with it. An earlier answer that the template shows otherwise once the
chat goes on (without its reasoning, say) does not count then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PAIR = ("prompt", "completion")


class Rendered(str):
    """The text of a chat, with its tokens and, for each of them, whether it is of an answer."""

    ids: list[int]
    answers: list[bool]


class Chats(Sequence[str]):
    """The rows of a table, each rendered where it is asked for."""

    def __init__(self, table: Any, tokenizer: Any, where: str) -> None:
        self._table, self._tokenizer, self._where = table, tokenizer, where

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return render(self._tokenizer, messages_of(self._table[index]), f"{self._where}, row {index}")


def columns_of(table: Any, column: str) -> list[str]:
    """The columns that hold chats; [] where the rows are text. A column that was named, not `text`, is the only one."""
    names = table.column_names
    if column != "text" and column in names:
        return [column] if _is_messages(table, column) else []
    if "messages" in names and _is_messages(table, "messages"):
        return ["messages"]
    return list(_PAIR) if set(_PAIR) <= set(names) else []


def _is_messages(table: Any, column: str) -> bool:
    """By the first row that is not empty."""
    first = next((row for batch in table.select_columns(column).iter(1000) for row in batch[column] if row), None)
    return isinstance(first, list) and isinstance(first[0], dict) and "role" in first[0]


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row's messages, without the fields that are empty because another row has them."""
    if set(_PAIR) <= set(row):
        turns = [
            message
            for name, role in zip(_PAIR, ("user", "assistant"), strict=True)
            for message in ([{"role": role, "content": row[name]}] if isinstance(row[name], str) else row[name] or [])
        ]
    else:
        (turns,) = row.values()
    return [{key: value for key, value in message.items() if value is not None} for message in turns or []]


def answered(table: Any, where: str) -> tuple[list[int], list[int]]:
    """(the rows that are not empty, how many characters each has).

    Raises:
        ValueError: a row without an answer.
    """
    rows, sizes = [], []
    names = table.column_names
    for at, values in enumerate(zip(*(_values(table, name) for name in names), strict=True)):
        messages = messages_of(dict(zip(names, values, strict=True)))
        if not messages:
            continue
        if not any(message.get("role") == "assistant" and message.get("content") for message in messages):
            raise ValueError(
                f"{where}, row {at}: a chat without an answer of the assistant; leave such rows out, or name a column "
                "of text (--text-column)"
            )
        rows.append(at)
        sizes.append(sum(len(str(message.get("content", ""))) for message in messages))
    return rows, sizes


def _values(table: Any, name: str) -> Iterator[Any]:
    for batch in table.select_columns(name).iter(1000):
        yield from batch[name]


def refuse_mute(tokenizer: Any, where: str) -> None:
    """Raises ValueError where there is no template to render chats with."""
    if tokenizer is None:
        raise ValueError(
            f"{where}: its rows are chats, which are for a model with a tokenizer and a chat template; name a column "
            "of text (--text-column)"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{where}: its rows are chats, and the tokenizer has no chat template; put a chat_template.jinja beside "
            "it, or name a column of text (--text-column)"
        )


def render(tokenizer: Any, messages: list[dict[str, Any]], where: str = "a chat") -> Rendered:
    """A chat as its template shows it.

    Raises:
        ValueError: the template refuses it; no token of it is of an answer.
    """
    try:
        text = Rendered(tokenizer.apply_chat_template(messages, tokenize=False))
        if _MARK.search(tokenizer.get_chat_template()) and getattr(tokenizer, "is_fast", False):
            made = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
            )
            text.ids, text.answers = list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]]
        else:
            text.ids = _tokens(tokenizer, text)
            text.answers = _compared(tokenizer, messages, text)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"{where}: the chat template refuses it: {error}; mend or leave out the row") from error
    if not any(text.answers):
        raise ValueError(f"{where}: the chat template shows no answer of the assistant; leave the row out")
    return text


def _compared(tokenizer: Any, messages: list[dict[str, Any]], text: Rendered) -> list[bool]:
    """Which tokens are answers, from renderings that end before and behind each."""
    marks = [False] * len(text.ids)
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        upto = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        if not text.startswith(upto):
            continue
        before = ""
        if turn:  # a template need not take a chat without messages
            before = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        start, end = (_shared(text.ids, _tokens(tokenizer, part)) for part in (before, upto))
        marks[start:end] = [True] * (end - start)
    return marks


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []


def _shared(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
