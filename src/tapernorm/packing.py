"""Blocks to train and to measure on, with labels: of a text every token counts, of a chat the answers do.

Text is laid end to end and cut, as in `tapernorm.data.pack`. Chats stay whole: each goes into the block that is open
and has the least room for it, and what is left of a block in the end is padding. A chat longer than a block is cut,
and pieces without an answer are left out. Documents of one block see those before them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tapernorm.data import documents, refuse_size

IGNORED = -100
_OPEN = 16  # blocks that chats go into at a time
_DISTURBED, _WHOLE = 0.1, 8  # of the tokens of a disturbed block, behind its first


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tokens in blocks. ids: [N, T]; labels: ids, or −100 where a token does not count; mask: [N, T], 0 where there is
    padding, None where there is none."""

    ids: Tensor
    labels: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> Blocks:
        return Blocks(self.ids[rows], self.labels[rows], None if self.mask is None else self.mask[rows])

    @property
    def shape(self) -> tuple[int, int]:
        """(N, T)."""
        return (self.ids.shape[0], self.ids.shape[1])

    @property
    def tokens(self) -> int:
        """Without padding."""
        return self.ids.numel() if self.mask is None else int(self.mask.sum())

    @property
    def counted(self) -> int:
        """Tokens that the loss may count."""
        return int((self.labels != IGNORED).sum())

    def begun(self, bos: int) -> Blocks:
        """Each block behind a beginning-of-text token; what counts is what counted before."""

        def pad(x: Tensor, value: int) -> Tensor:
            return torch.nn.functional.pad(x, (1, 0), value=value)

        labels = self.labels.clone()
        labels[:, 0] = IGNORED  # a block's first token is never predicted, and now there is one before it
        return Blocks(pad(self.ids, bos), pad(labels, IGNORED), None if self.mask is None else pad(self.mask, 1))

    def rows(self) -> list[dict[str, Tensor]]:
        """A data set for a Trainer."""
        columns = {"input_ids": self.ids, "labels": self.labels}
        columns |= {} if self.mask is None else {"attention_mask": self.mask}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def disturbed(blocks: Blocks, share: float, seed: int) -> Blocks:
    """The blocks, in `share` of which a tenth of the tokens are others of the text.

    Behind the first eight tokens nothing of such a block counts for the cross-entropy: what a teacher makes of it is
    what is to be learned.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(len(blocks), generator=generator) < share)[:, None] & (torch.arange(blocks.shape[1]) >= _WHOLE)
    known = blocks.ids.unique()
    others = known[torch.randint(len(known), blocks.shape, generator=generator)]
    hit = chosen & (torch.rand(blocks.shape, generator=generator) < _DISTURBED)
    labels = torch.where(chosen, IGNORED, blocks.labels)
    return Blocks(torch.where(hit, others, blocks.ids), labels, blocks.mask)


def pack_labelled(texts: Iterable[str], tokenizer: Any, block: int, limit: int | None = None) -> Blocks:
    """Texts, chats or both in blocks of `block` tokens, at most `limit`, about in the order in which they come.

    Raises:
        ValueError: as `tapernorm.data.pack`.
    """
    refuse_size(block, limit)
    made: list[tuple[Tensor, Tensor, int]] = []  # ids, labels, how many tokens are real
    stream: list[int] = []
    filling: list[tuple[list[int], list[int]]] = []
    count = 0
    for ids, answers in documents(texts, tokenizer):
        count += len(ids)
        if answers is None:
            stream += ids
            whole = len(stream) // block * block
            made += [(cut, cut, block) for cut in torch.tensor(stream[:whole], dtype=torch.int64).split(block) if whole]
            stream = stream[whole:]
        else:
            for piece in _pieces(ids, answers, block):
                _place(filling, piece, block)
            if len(filling) > _OPEN:
                made.append(_closed(filling.pop(_fullest(filling)), block))
        if limit is not None and len(made) >= limit:
            break
    made += [_closed(each, block) for each in filling]
    made = made[:limit]
    if not made:
        raise ValueError(f"texts: {count} tokens are not one block of {block}; pass more text or a smaller block")
    ids, labels = (torch.stack([row[part] for row in made]) for part in (0, 1))  # type: ignore[arg-type]
    real = torch.tensor([row[2] for row in made])
    full = bool((real == block).all())
    return Blocks(ids, labels, None if full else (torch.arange(block) < real[:, None]).long())


def _pieces(ids: list[int], answers: list[bool], block: int) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of a chat in pieces that fit; a block's first token is never predicted."""
    labels = [token if counts else IGNORED for token, counts in zip(ids, answers, strict=True)]
    cuts = [slice(at, at + block) for at in range(0, len(ids), block)]
    return [(ids[cut], labels[cut]) for cut in cuts if any(answers[cut][1:])]


def _place(filling: list[tuple[list[int], list[int]]], piece: tuple[list[int], list[int]], block: int) -> None:
    fits = [(block - len(ids), at) for at, (ids, _) in enumerate(filling) if len(ids) + len(piece[0]) <= block]
    if not fits:
        filling.append(([], []))
        fits = [(block, len(filling) - 1)]
    for whole, part in zip(filling[min(fits)[1]], piece, strict=True):
        whole += part


def _fullest(filling: list[tuple[list[int], list[int]]]) -> int:
    return max(range(len(filling)), key=lambda at: len(filling[at][0]))


def _closed(row: tuple[list[int], list[int]], block: int) -> tuple[Tensor, Tensor, int]:
    """A block with its padding, which nobody sees: any token that the model knows."""
    ids, labels = row
    left = block - len(ids)
    return torch.tensor(ids + ids[-1:] * left), torch.tensor(labels + [IGNORED] * left), len(ids)
