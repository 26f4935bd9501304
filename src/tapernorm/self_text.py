"""Text that a model writes itself, at temperature 1: for where there is no text at hand.

It is like what the model was trained on as far as the model knows it, so what a removal is fitted on and judged by is
the model's own distribution. Text of the kind that the model is used on is better.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from tapernorm.data import TextData
from tapernorm.generate import decode
from tapernorm.progress import bar
from tapernorm.sites import context_length

NAME = "text that the model wrote itself"
LEAST = 4096  # tokens: a quarter is for validation, and with fewer the numbers say nothing
_LENGTH, _ROWS = 512, 32  # tokens in a document at most, documents written together
_HELD_OUT = 0.25  # of the tokens: much, for they are few
# A document of a model that knows no token to begin with begins with one of these.
_OPENINGS = ("The", "I", "In", "A", "It", "We", "This", "He", "She", "When", "You", "What", "There", "If", "To", "On")


def write_text(model: Any, tokenizer: Any, tokens: int, seed: int = 0, rows: int = _ROWS) -> TextData:
    """Documents sampled from `model` until they hold `tokens` tokens; the last quarter of the tokens for validation.

    Each begins with the token that begins a text (bos, or else eos; a common word where there is neither) and ends with
    eos, or where 512 tokens or the context are full. The same seed gives the same text on the same machine: nothing but
    temperature 1 changes the model's probabilities, whatever its generation config says.

    Args:
        model: a causal language model; runs where it is. tokenizer: its own.
        tokens: how many, at least 4,096; rows: documents written together.

    Raises:
        ValueError: too few tokens asked for; a model that cannot generate; probabilities that are not finite; texts
            that end at once, or are blank.
    """
    if tokens < LEAST:
        raise ValueError(f"--self-generate {tokens}: at least {LEAST:,} tokens, or the numbers say nothing")
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} cannot generate, so it cannot write its own text; pass --data")
    length = min(_LENGTH, context_length(model) - 1)
    counted, end = 0, tokenizer.eos_token_id
    documents: list[tuple[str, int]] = []
    rounds = 8 * (tokens // (rows * length) + 1)  # as many as texts of an eighth of the length need
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(), bar("the model writes text", tokens) as advance:
        torch.manual_seed(seed)
        for _ in range(rounds):
            made = _sample(model, _starts(model, tokenizer, rows, generator), length, end, advance)
            for row in made.tolist():
                ids = row[1 : row.index(end, 1)] if end in row[1:] else row[1:]
                text = tokenizer.decode(ids, skip_special_tokens=True)
                if text.strip():
                    documents.append((text, len(ids)))
                    counted += len(ids)
            if counted >= tokens:
                return _split(documents, tokens)
    raise ValueError(
        f"the model wrote {counted:,} tokens in {rounds * rows:,} texts, of {tokens:,} that were wanted: it ends them "
        "too soon; pass --data FILE"
    )


def _sample(model: Any, starts: Tensor, length: int, end: int | None, advance: Any) -> Tensor:
    """Ids of a document a row, the first token included. [rows, 1 + at most length]"""
    fill = 0 if end is None else end
    plain = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length, eos_token_id=end, pad_token_id=fill
    )
    # What an argument leaves open is taken from the model's own config, such as a penalty for repetition.
    kept, model.generation_config = model.generation_config, plain
    try:
        # Compiled, the step's last digits differ, and with them the text.
        return decode(
            model,
            starts.to(model.device),
            callback=lambda token: advance(len(token) if end is None else int((token != end).sum())),
            compile=False,
            attention_mask=torch.ones_like(starts).to(model.device),
        ).sequences.cpu()
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise ValueError("the model's probabilities are not finite, so it cannot write its own text") from error
    finally:
        model.generation_config = kept


def _starts(model: Any, tokenizer: Any, rows: int, generator: torch.Generator) -> Tensor:
    """The first token of each document. [rows, 1]"""
    named = next((t for t in (tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None), None)
    if named is not None:
        return torch.full((rows, 1), named)
    words = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in _OPENINGS]
    known = [word[0] for word in words if len(word) == 1]
    known = known or [t for t in range(model.config.vocab_size) if t not in tokenizer.all_special_ids]
    return torch.tensor(known)[torch.randint(len(known), (rows, 1), generator=generator)]


def _split(documents: list[tuple[str, int]], tokens: int) -> TextData:
    """The documents up to three quarters of the tokens, and the rest."""
    train: list[str] = []
    counted = 0
    while counted < (1 - _HELD_OUT) * tokens and len(train) < len(documents) - 1:
        train.append(documents[len(train)][0])
        counted += documents[len(train) - 1][1]
    return TextData(train, [text for text, _ in documents[len(train) :]], NAME)


def save_text(text: TextData, folder: Path) -> None:
    """A folder that `load_text` reads as it was: train.jsonl and validation.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        lines = (json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in getattr(text, name))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
