"""Take out what goes without training: forward passes only, as many norms as a loss budget allows.

Each norm N is replaced by an affine map A h + b, fitted on text:

    A = argmin Σ ‖N(h*) − A h‖² + λ ‖A − c·diag(γ)‖²        h: the model as it is after the removals so far
                                                            h*: the original model, so errors are corrected
    W' = argmin Σ ‖y* − W' z‖² + λ ‖W' − W‖²                the linear map that writes the block's result back,
                                                            drawn towards the original's residual stream

with λ chosen on tokens that were not fitted (λ = ∞ is the paper's diagonal scale). Norms go in the order of depth,
those that cost least alone; how many is found by a few trials, on the loss of held-out text and on its tail.

Why the tail: a gated MLP is quadratic in its input, so a token a little above its usual scale grows from block to
block once nothing holds it, and takes its whole sequence along. So branches that grow faster than the residual
(measured, not named) lose their norm only where from there on no token stands out; and a removal that would let a token
of held-out text run away, were its drift twice as large, is taken back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tapernorm import data
from tapernorm.bos import take_over, without_bos
from tapernorm.chain import Chain
from tapernorm.config import TaperConfig
from tapernorm.convert import choose, get_controller
from tapernorm.fold import FoldReport, fold_
from tapernorm.logits import batch_within
from tapernorm.precision import fast_products
from tapernorm.prefix import attach_prefix, find_prefix, own_bos, prefix_of, room
from tapernorm.search import Progress, Search, likely_rise
from tapernorm.sites import find_sites
from tapernorm.verify import Losses, losses_of, summarise

TAIL = 0.1  # share by which the 99.9th percentile of the loss may rise


@dataclasses.dataclass(frozen=True)
class Removal:
    """What `remove_` did.

    folded, kept: norms that are gone, and that stay. costs: KL to the original's output, in nats a token, when a norm
    alone is replaced.
    loss_before, loss_after: of held-out text, in nats; before, after: the same with the tail. prefix: token ids of
    the constant prefix. refitted: linear maps that were fitted again. tried: (norms removed, loss) of every trial.
    """

    folded: tuple[str, ...]
    kept: tuple[str, ...]
    costs: dict[str, float]
    loss_before: float
    loss_after: float
    before: Losses
    after: Losses
    prefix: tuple[int, ...]
    refitted: tuple[str, ...]
    tried: tuple[tuple[int, float], ...]
    fold: FoldReport | None
    seconds: float

    @property
    def gap(self) -> float:
        """loss_after / loss_before − 1."""
        return self.loss_after / self.loss_before - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        return {**values, "gap": self.gap, "fold": self.fold.to_dict() if self.fold else None}


def remove_(
    model: Any,
    texts: Iterable[str] | Tensor,
    tokenizer: Any = None,
    budget: float = 0.01,
    prefix: tuple[int, ...] | None = None,
    keep: tuple[str, ...] = (),
    refit: bool = True,
    fit_tokens: int = 49_152,
    check_tokens: int = 24_576,
    block: int = 512,
    tail: float = TAIL,
    progress: Progress | None = None,
) -> Removal:
    """Remove norms of a pretrained causal language model without training. In place, folded and checked.

    Where nothing goes, and on any error, the model is as it came.

    Args:
        model: a transformers model with its norms.
        texts: texts like those that the model is for, or [N, T] token ids (which leave room for a prefix).
        tokenizer: needed for texts, and to look for a prefix. Where it begins every text with a token of its own, a
            prefix takes that over (`tapernorm.bos`): it no longer does, and the loss before is that with the prefix.
        budget: the loss may rise by this share. Held-out text decides, and a rise that is likely on other text: its
            mean and two standard errors.
        prefix: token ids of a constant prefix; () for none; None: one is looked for where tokens are massive.
        keep: glob patterns of norms to leave alone, as in `TaperConfig`. The final norm stays always.
        refit: also fit the linear maps that write into the residual stream; False changes nothing but what reads
            a norm.
        fit_tokens: how much text is fitted on; where there is less than both, in that share.
        check_tokens: how much is held out. It must be long: one token in ten thousand decides whether a model is sound.
        block: tokens in a sequence of either.
        tail: the 99.9th percentile of the loss may rise by this share.
        progress: called with what is being done and the share of it that is done.

    Raises:
        ValueError: no norm can go; too little text; budget not above 0; the model cannot hold a prefix; its blocks do
            not form a chain; it is tapered already.
        FoldError: see `fold_`.
    """
    if not budget > 0:
        raise ValueError(f"budget={budget!r} must be above 0, such as 0.01 for 1 %")
    if get_controller(model) is not None:
        raise ValueError("the model is tapered; remove_ takes one with its own norms (tn.restore_ takes a taper back)")
    started = time.perf_counter()
    sites = find_sites(model)
    chosen = choose(sites, TaperConfig(keep=keep))
    length = min(block, room(model, () if prefix_of(model) else prefix))
    ids = _pack(texts, tokenizer, length, fit_tokens + check_tokens)
    Chain(model, chosen, ids[:1])  # refuses what is no row of blocks
    if prefix is None:
        prefix = find_prefix(model, tokenizer, ids, sites=sites) if tokenizer is not None else ()
    with contextlib.ExitStack() as undo:
        if tokenizer is not None:
            bos, put_back = own_bos(tokenizer), take_over(model, tokenizer, prefix)
            if put_back is not None:
                undo.callback(put_back)
                ids = without_bos(ids, bos)
        share = fit_tokens / (fit_tokens + check_tokens)
        fitted = max(1, min(fit_tokens // length, int(share * len(ids))))
        check, fit = ids[:-fitted], ids[-fitted:]
        with fast_products(model):  # as in the search, for the two are compared
            batch = batch_within(model, length)
            base = losses_of(model, check, batch, progress=_told(progress, "loss as it is", len(check), batch))
        before = summarise(base)
        allowed, last = before.loss * budget, before.p999 * (1 + tail)

        def sound(losses: Tensor) -> bool:
            found = summarise(losses)
            return found.nonfinite == 0 and likely_rise(losses, base) <= allowed and found.p999 <= last

        if prefix and prefix != prefix_of(model):
            undo.callback(attach_prefix(model, prefix))
        search = Search(model, chosen, fit, check, refit, progress)
        undo.callback(search.undo)
        costs = search.costs()
        left = search.longest(costs, base, allowed, sound)
        folded, report = (), None
        if left is not None:
            folded = search.finish()
            report = fold_(model, example={"input_ids": check[:2].to(next(model.parameters()).device)})
            undo.pop_all()  # nothing is left that could go wrong, and something has gone
    after = before if left is None else summarise(left)
    return Removal(
        folded=folded,
        kept=tuple(site.name for site in sites if site.name not in folded),
        costs=costs,
        loss_before=before.loss,
        loss_after=after.loss,
        before=before,
        after=after,
        prefix=prefix_of(model),
        refitted=search.refitted,
        tried=tuple(search.tried),
        fold=report,
        seconds=time.perf_counter() - started,
    )


def _told(progress: Progress | None, what: str, count: int, batch: int) -> Callable[[], None] | None:
    """What `evaluate` calls after each batch, as the share of `what` that is done."""
    done = itertools.count(batch, batch)
    return progress and (lambda: progress(what, min(1.0, next(done) / count)))


def _pack(texts: Any, tokenizer: Any, block: int, tokens: int) -> Tensor:
    if isinstance(texts, Tensor):
        ids = texts
    elif tokenizer is None:
        raise ValueError("texts need a tokenizer: pass tokenizer=..., or [N, T] token ids in place of texts")
    else:
        ids = data.pack([texts] if isinstance(texts, str) else texts, tokenizer, block, limit=tokens // block + 1)
    if len(ids) < 4:
        raise ValueError(f"the texts make {len(ids)} blocks of {block} tokens; at least 4 are needed")
    return ids
