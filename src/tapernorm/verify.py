"""Are two models the same function? And what do they lose, on average and at the tail?"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm._callable import call_module
from tapernorm.fold import BOUNDS, SIGNAL_TO_NOISE
from tapernorm.logits import token_losses
from tapernorm.modules import evaluation
from tapernorm.sites import context_length

_OVER = 10.0  # nats: a token this far off counts as lost


@dataclasses.dataclass(frozen=True)
class Losses:
    """Next-token losses in nats over a text: a mean alone would hide a model that fails on one token in a thousand.

    nonfinite counts tokens whose loss is not finite (left out of the rest), over_10 those above 10 nats.
    """

    loss: float
    median: float
    p99: float
    p999: float
    perplexity: float
    tokens: int
    nonfinite: int
    over_10: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` measured. greedy_match: share of greedy tokens that agree; cached_match: whether the second
    model writes the same tokens with and without its key-value cache; passed: relative_error ≤ bound."""

    max_abs_logit_error: float
    relative_error: float
    bound: float
    greedy_match: float
    cached_match: bool
    loss_a: float
    loss_b: float
    tokens: int
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def evaluate(
    model: nn.Module,
    blocks: Tensor,
    batch: int = 8,
    progress: Callable[[], None] | None = None,
    labels: Tensor | None = None,
) -> Losses:
    """The losses of a causal language model over token blocks. blocks: [N, T] ids; labels: [N, T], −100 where a token
    does not count (padding, at the end of a block alone, is such a one), or None: all count.

    Raises:
        ValueError: blocks are shorter than two tokens.
    """
    losses = losses_of(model, blocks, batch, progress)
    return summarise(losses if labels is None else losses[labels[:, 1:] != -100])


def losses_of(model: nn.Module, blocks: Tensor, batch: int = 8, progress: Callable[[], None] | None = None) -> Tensor:
    """The loss of every token but each block's first, in nats. blocks: [N, T] ids -> [N, T − 1]

    Raises:
        ValueError: as `evaluate`.
    """
    if blocks.dim() != 2 or blocks.shape[1] < 2 or not len(blocks):
        raise ValueError(f"evaluation needs blocks of at least two tokens, and got the shape {tuple(blocks.shape)}")
    made = [token_losses(_logits(model, rows), rows) for rows in _batches(blocks, batch, progress)]
    return torch.cat(made).view(len(blocks), -1)


def summarise(losses: Tensor) -> Losses:
    """Mean and tail of token losses in nats, of any shape."""
    losses = losses.flatten()
    finite = losses[torch.isfinite(losses)].double()
    if not len(finite):
        nan = float("nan")
        return Losses(nan, nan, nan, nan, nan, len(losses), len(losses), 0)
    ordered = finite.sort().values

    def quantile(q: float) -> float:
        return float(ordered[min(len(ordered) - 1, int(q * len(ordered)))])

    mean = float(finite.mean())
    return Losses(
        loss=mean,
        median=quantile(0.5),
        p99=quantile(0.99),
        p999=quantile(0.999),
        perplexity=float(torch.tensor(mean).double().exp()),
        tokens=len(losses),
        nonfinite=len(losses) - len(finite),
        over_10=int((finite > _OVER).sum()),
    )


def verify(
    a: nn.Module, b: nn.Module, blocks: Tensor, prompts: int = 4, new_tokens: int = 32, batch: int = 8
) -> Verification:
    """Compare two causal language models on token blocks and in greedy decoding.

    Args:
        a: the reference, such as the unfolded model.
        b: the model to judge, such as the folded one.
        blocks: [N, T] ids.
        prompts: how many blocks to start greedy decoding from, each from its first quarter.
        new_tokens: how many tokens to decode.
        batch: rows in one forward.

    Raises:
        ValueError: the models' vocabularies differ, or the blocks are empty.
    """
    if not len(blocks):
        raise ValueError("verification needs at least one block of tokens")
    error = largest = noise = signal = 0.0
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    dtype = next(b.parameters()).dtype
    for rows in _batches(blocks, batch, None):
        first, second = _logits(a, rows), _logits(b, rows)
        if first.shape != second.shape:
            raise ValueError(
                f"the models' outputs have different shapes, {tuple(first.shape)} and {tuple(second.shape)}: "
                "they are not variants of one model"
            )
        difference = (second.double() - first.double()).abs()
        # Not max(): it would lose a NaN, and with it the failure of the check.
        error = float(torch.tensor([error, float(difference.max())]).double().max())
        largest = max(largest, float(first.abs().max()))
        noise += float(difference.pow(2).sum())
        signal += float(first.double().pow(2).sum())
        for kept, logits in zip(losses, (first, second), strict=True):
            kept.append(token_losses(logits, rows))
    if dtype in BOUNDS:
        relative, bound = error / max(largest, 1e-30), BOUNDS[dtype]
    else:
        relative, bound = (noise / max(signal, 1e-30)) ** 0.5, 10 ** (-SIGNAL_TO_NOISE / 20)
    start = blocks[:prompts, : max(1, blocks.shape[1] // 4)]
    room = context_length(b) - start.shape[1]
    steps = max(1, min(new_tokens, room))
    greedy = [greedy_tokens(a, start, steps), greedy_tokens(b, start, steps)]
    uncached = greedy_tokens(b, start, steps, use_cache=False)
    return Verification(
        max_abs_logit_error=error,
        relative_error=relative,
        bound=bound,
        greedy_match=float((greedy[0] == greedy[1]).double().mean()),
        cached_match=bool(torch.equal(greedy[1], uncached)),
        loss_a=float(torch.cat(losses[0]).double().mean()),
        loss_b=float(torch.cat(losses[1]).double().mean()),
        tokens=int(blocks.numel()),
        passed=bool(relative <= bound),
    )


def greedy_tokens(model: Any, start: Tensor, new_tokens: int, use_cache: bool = True) -> Tensor:
    """The argmax continuation, with no stopping token. start: [B, T] -> [B, new_tokens]"""
    ids = start.to(next(model.parameters()).device)
    cache = new_cache(model) if use_cache else {}
    made, step = [], ids
    with evaluation(model):
        for _ in range(new_tokens):
            token = model(input_ids=step, use_cache=use_cache, **cache).logits[:, -1:].argmax(-1)
            made.append(token)
            ids = torch.cat([ids, token], dim=1)
            step = token if use_cache else ids
    return torch.cat(made, dim=1).cpu()


def new_cache(model: Any) -> dict[str, Any]:
    """An empty key-value cache, which forwards fill in place, under the name by which the model takes it."""
    from transformers import DynamicCache

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: DynamicCache(config=model.config)}


def _batches(blocks: Tensor, batch: int, progress: Callable[[], None] | None) -> Any:
    for rows in blocks.split(batch):
        yield rows
        if progress is not None:
            progress()


def _logits(model: Any, rows: Tensor) -> Tensor:
    """[B, T, vocabulary] in evaluation mode, as the model makes them."""
    with evaluation(model):
        return model(input_ids=rows.to(next(model.parameters()).device), use_cache=False).logits


call_module(__name__, verify)
