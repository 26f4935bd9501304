"""A teacher: a frozen model with all its norms, to whose next tokens and blocks the tapered model is held.

    weight · KL(p ‖ q) a token,    KL = Σ_i p_i log(p_i / q_i) + p_rest log(p_rest / q_rest)
    match · 1/(L − 1) Σ_l log(1 + ‖h_l − h*_l‖² / ‖h*_l‖²) a token

h_l: [D] is the residual behind block l of L, h*_l the teacher's.

p is what the teacher makes of the tokens so far, q what the student makes of them; i goes over the k tokens that the
teacher finds likeliest, and the rest of the vocabulary counts as one. So both sides are proper distributions: the KL
is 0 where they agree, never above that of the whole vocabulary (the data-processing inequality), and equal to it where
k is the vocabulary.

The second is a target for every block at once, where the KL has to come down through all of them: it keeps a token
from running away in the first block in which it would; one that has run away already counts by its logarithm, or it
would be all that a step sees. The last block has the KL itself. Where norms take a mean away,
both residuals are without it: nothing reads it, and a fold of layer norms leaves it out.

Every token of the attention mask counts, the last of a sequence too, and the mean is over those of an optimizer step.

Without `match`, the k likeliest tokens of a sequence are computed when it is seen first, rounded to float16, and kept
on disk where `keep` was called and all of them fit (4 GiB, and half of what is free there): the teacher then runs once
a sequence. With `match`, without `keep`, beyond that size and in several processes it runs in every step.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TOP = 64
_MOST = 4 << 30  # bytes on disk
_KEY = 16  # bytes


def coarsen(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens, and the log probabilities of these and of the rest; at least float32.

    logits: [..., V] -> ids [..., k], logs [..., k + 1]; k is V where that is less, and the rest then −∞.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = wide.topk(min(k, wide.shape[-1]), dim=-1)
    logs = found.values - wide.logsumexp(-1, keepdim=True)
    rest = _rest(logs) if found.indices.shape[-1] < wide.shape[-1] else torch.full_like(logs[..., :1], -math.inf)
    return found.indices, torch.cat([logs, rest], dim=-1)


def divergence(logits: Tensor, ids: Tensor, logs: Tensor) -> Tensor:
    """KL(p ‖ q) of each token in nats, with p from `coarsen` and q the softmax of `logits`. At least float32.

    logits: [..., V]; ids: [..., k]; logs: [..., k + 1] -> [...]
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = wide.gather(-1, ids) - wide.logsumexp(-1, keepdim=True)
    own = torch.cat([own, _rest(own)], dim=-1)
    logs = logs.to(own.dtype)
    p = logs.exp()
    return (p * (torch.where(p > 0, logs, 0.0) - own)).sum(-1)


def mismatch(ours: Sequence[Tensor], theirs: Sequence[Tensor], centred: bool = False) -> Tensor:
    """log(1 + ‖h − h*‖² / ‖h*‖²) of each token, its mean over blocks. At least float32.

    ours, theirs: [..., D] of each block; centred: less their means over D. -> [...]
    """
    total: Any = 0
    for h, wanted in zip(ours, theirs, strict=True):
        h, wanted = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (h, wanted))
        if centred:
            h, wanted = (x - x.mean(-1, keepdim=True) for x in (h, wanted))
        wanted = wanted.to(h.device)
        total = total + ((h - wanted).pow(2).sum(-1) / wanted.pow(2).sum(-1).clamp(min=1e-12)).log1p()
    return total / len(ours)


def _rest(logs: Tensor) -> Tensor:
    """log(1 − Σ exp(logs)), and a finite number where nothing is left. [..., k] -> [..., 1]"""
    left = 1 - logs.exp().sum(-1, keepdim=True)
    return left.clamp(min=torch.finfo(logs.dtype).eps).log()


class Teacher:
    """What a `TaperTrainer(teacher=...)` holds its model to.

    Args:
        model: a causal language model with the student's vocabulary, on the device where training is; frozen here. One
            with a constant prefix, where the student has it: then a text has the same positions in both.
        weight: of the KL, beside the cross-entropy.
        k: how many tokens count one by one.
        match: weight of the distance of the residuals behind the blocks; the model's outputs must have them
            (`output_hidden_states`, which `TaperTrainer` asks for).
        centred: the norms take a mean away.

    Raises:
        ValueError: a weight or k out of range.
    """

    def __init__(
        self, model: nn.Module, weight: float = 1.0, k: int = TOP, match: float = 0.0, centred: bool = False
    ) -> None:
        if not (0 <= weight < math.inf and 0 <= match < math.inf and weight + match > 0):
            raise ValueError(
                f"weight={weight!r} and match={match!r} of a teacher must be finite numbers, and one of them above 0"
            )
        if k < 1:
            raise ValueError(f"k={k!r} must be at least 1: so many tokens of the teacher count one by one")
        self.model, self.weight = model.eval().requires_grad_(False), weight
        self.match, self.centred = match, centred
        self.k = min(k, getattr(getattr(model, "config", None), "vocab_size", None) or k)
        self.store: _Store | None = None
        self._mark = _mark(model, self.k)
        self._vocabulary: int | None = None  # seen when it runs
        self._theirs: tuple[Tensor, ...] | None = None  # the residuals of the last run
        self._sum: Tensor | None = None
        self._tokens = 0

    def keep(self, folder: str | Path, rows: int, length: int) -> bool:
        """Keep what is computed in `folder`, for `rows` sequences of `length` tokens; goes on with what is there.
        False, and nothing is kept, where that is `too_large`, there are several processes, or blocks are matched."""
        if self.match or too_large(folder, rows, length, self.k) or _world_size() > 1:
            return False
        self.store = _Store(Path(folder), rows, length, self.k)
        return True

    def loss(self, logits: Tensor, inputs: Mapping[str, Any], hidden: Sequence[Tensor] | None = None) -> Tensor:
        """Both losses with their weights, Σ over real tokens, for a caller that divides by those of a step. Scalar.

        logits: the student's, [B, T, V]; inputs: `input_ids` [B, T], and `attention_mask` [B, T] if there is padding;
        hidden: the student's `hidden_states`, [B, T, D] each, where blocks are matched.

        Raises:
            ValueError: the vocabularies differ; there are no `input_ids`, or no `hidden` where blocks are matched.
        """
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if not isinstance(ids, Tensor):
            raise ValueError("a teacher reads input_ids, and the batch has none; train without a teacher")
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if self.match and not hidden:
            raise ValueError(
                "match needs the residuals behind the blocks, and the model's output has no hidden_states; call it "
                "with output_hidden_states=True, or set match=0"
            )
        top, logs = self.targets(ids, mask)
        if self._vocabulary not in (None, logits.shape[-1]):
            raise ValueError(
                f"the teacher knows {self._vocabulary} tokens and the student {logits.shape[-1]}; they must have one "
                "vocabulary"
            )
        found = divergence(logits, top.to(logits.device), logs.to(logits.device))
        found = found.flatten() if mask is None else found[mask != 0]  # padding may hold anything
        total = found.sum()
        self._sum = total.detach() if self._sum is None else self._sum + total.detach()
        self._tokens += found.numel()
        theirs, self._theirs = self._theirs, None  # which would be held until the next step
        if not theirs:  # not asked for, or there is one block
            return self.weight * total
        # The first is the embedding, and the last has been through the final norm in most models.
        apart = mismatch(hidden[1:-1], theirs, self.centred)  # type: ignore[arg-type, index]
        apart = apart.flatten() if mask is None else apart[mask.to(apart.device) != 0]
        return self.weight * total + self.match * apart.sum()

    def mean(self) -> float | None:
        """The mean KL of a token since the last call; None where there was none."""
        found = float(self._sum) / self._tokens if self._sum is not None and self._tokens else None
        self._sum, self._tokens = None, 0
        return found

    def targets(self, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`coarsen` of what the teacher makes of a batch, rounded to float16 and normalised again.

        ids, mask: [B, T] -> [B, T, k], [B, T, k + 1] float32
        """
        keys = [self._key(row, None if mask is None else mask[at]) for at, row in enumerate(ids)] if self.store else []
        rows: list[tuple[Tensor, Tensor] | None] = [self.store.read(key) for key in keys] if self.store else []
        unknown = [at for at, row in enumerate(rows) if row is None] if rows else list(range(len(ids)))
        if unknown:
            few = torch.tensor(unknown, device=ids.device)
            top, logs = self._run(ids[few], None if mask is None else mask[few])
            if not rows:
                return top.long(), _normal(logs)
            for number, at in enumerate(unknown):
                rows[at] = (top[number], logs[number])
                self.store.write(keys[at], top[number], logs[number])  # type: ignore[union-attr]
        device = ids.device
        top, logs = (torch.stack([row[part].to(device) for row in rows if row is not None]) for part in (0, 1))
        return top.long(), _normal(logs)

    def _key(self, ids: Tensor, mask: Tensor | None) -> bytes:
        """What a sequence is found by."""
        told = hashlib.blake2b(ids.cpu().numpy().tobytes(), digest_size=_KEY, key=self._mark)
        if mask is not None and not bool((mask != 0).all()):
            told.update((mask != 0).cpu().numpy().tobytes())
        return told.digest()

    @torch.no_grad()
    def _run(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        masked = {} if mask is None else {"attention_mask": mask}
        asked = {"output_hidden_states": True} if self.match else {}
        made: Any = self.model(input_ids=ids, use_cache=False, **masked, **asked)
        self._theirs = made.hidden_states[1:-1] if self.match else None
        self._vocabulary = made.logits.shape[-1]
        top, logs = coarsen(made.logits, self.k)
        return top.int(), logs.half()


def too_large(folder: str | Path, rows: int, length: int, k: int = TOP) -> bool:
    """Whether `rows` sequences are too much to keep: int32 for each of k tokens, float16 for these and the rest."""
    path = Path(folder).absolute()
    place = next(parent for parent in (path, *path.parents) if parent.is_dir())
    size = rows * (length * (k * 4 + (k + 1) * 2) + _KEY)
    return size > min(_MOST, shutil.disk_usage(place).free // 2)


class _Store:
    """Sequences by the hash of their tokens, in three .npy files that are mapped, not read.

    top [N, T, k] int32, logs [N, T, k + 1] float16, keys [N, 16] bytes; a row whose key is 0 is free. The key is
    written last, so a run that is stopped leaves no half row behind.
    """

    def __init__(self, folder: Path, rows: int, length: int, k: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shapes = {
            "top": (np.int32, (rows, length, k)), "logs": (np.float16, (rows, length, k + 1)),
            "keys": (np.uint8, (rows, _KEY)),
        }  # fmt: skip
        files = {folder / f"{name}.npy": kind for name, kind in shapes.items()}
        if not all(_is_of(path, *kind) for path, kind in files.items()):
            for path, (dtype, shape) in files.items():
                np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        self.top, self.logs, self.keys = (np.lib.format.open_memmap(path, mode="r+") for path in files)
        used = self.keys.any(axis=1)
        self.places = {self.keys[row].tobytes(): row for row in np.flatnonzero(used).tolist()}
        self.free = np.flatnonzero(~used)[::-1].tolist()

    def read(self, key: bytes) -> tuple[Tensor, Tensor] | None:
        place = self.places.get(key)
        if place is None:
            return None
        return torch.from_numpy(self.top[place].copy()), torch.from_numpy(self.logs[place].copy())

    def write(self, key: bytes, top: Tensor, logs: Tensor) -> None:
        """Nothing where there is no room: a sequence of another length, or one more than was said."""
        if key in self.places or not self.free or tuple(top.shape) != self.top.shape[1:]:
            return
        place = self.free.pop()
        self.top[place], self.logs[place] = top.cpu().numpy(), logs.cpu().numpy()
        self.keys[place] = np.frombuffer(key, np.uint8)
        self.places[key] = place


def _is_of(path: Path, dtype: Any, shape: tuple[int, ...]) -> bool:
    """Whether a file holds an array of a kind; a broken one holds none."""
    try:
        found: Any = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError):
        return False
    return found.shape == shape and found.dtype == dtype


def _mark(model: nn.Module, k: int) -> bytes:
    """What a teacher is told from another by: the beginnings of its tensors."""
    told = hashlib.blake2b(f"{k}".encode(), digest_size=_KEY)
    for name, value in model.state_dict().items():
        told.update(name.encode() + value.detach().flatten()[:8].double().cpu().numpy().tobytes())
    return told.digest()


def _normal(logs: Tensor) -> Tensor:
    """Rounded logs add up to 1 no more."""
    return logs.float().log_softmax(-1)


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
