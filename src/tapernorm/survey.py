"""Look before removing: the scale r of every token at every norm of a model, and what each norm is worth.

A norm's cost is how far the output moves when that norm alone is replaced by its fixed scale, c · h · γ with the robust
c of the text, no training: mean over tokens of KL(original ‖ replaced), in nats, as in `tapernorm.remove`. Where a
model is calibrated that is what its loss rises by, without the noise of the text. Costs do not add up: what a norm held
back grows in the blocks behind it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tapernorm.bos import without_bos
from tapernorm.chain import Chain
from tapernorm.config import MASSIVE_RATIO
from tapernorm.logits import divergence, log_probabilities
from tapernorm.modules import TaperNorm
from tapernorm.prefix import Trial, attach_prefix, own_bos, prefix_of, sample, search_prefix
from tapernorm.scales import outstanding, token_scales
from tapernorm.sites import NormSite, context_length, find_sites
from tapernorm.statistics import robust_scale
from tapernorm.verify import evaluate

ABOVE, MASSIVE = 4.0, MASSIVE_RATIO  # times a site's median: counted, and too far for a fixed scale
CHEAP, COSTLY = 0.01, 0.1  # nats, alone
QUANTILES = (0.01, 0.05, 0.25, 0.75, 0.95, 0.99)
_DOTS = 24  # outliers that are drawn at one site

Progress = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class Spread:
    """r at one site over a text. median: of r. quantiles, largest, dots: of r / median; dots are the tokens above 4
    times the median, at most 24, the largest first. above, massive: how many tokens are above 4 and 20 times it."""

    median: float
    quantiles: tuple[float, ...]
    largest: float
    above: int
    massive: int
    dots: tuple[float, ...]
    position: int
    token: int


@dataclasses.dataclass(frozen=True)
class Survey:
    """What `survey` measured.

    before, after: site -> Spread, of the model as it is and with the prefix in front ({} without one). trials: every
    prefix that was tried. prefix: the one that is needed and clean, () if none is needed, None if none of them is
    clean. loss: mean loss of the text, nats; loss_prefix: with the prefix. costs: site -> nats, infinite where the
    output was not finite. tokens, positions: (which, how often above 4 times the median at some norm). notes: what
    could not be measured, and why.
    """

    sites: tuple[NormSite, ...]
    parts: dict[str, str]
    before: dict[str, Spread]
    after: dict[str, Spread]
    trials: tuple[Trial, ...]
    prefix: tuple[int, ...] | None
    loss: float
    loss_prefix: float | None
    costs: dict[str, float]
    c: dict[str, float]
    cost_tokens: int
    total: int
    block: int
    above: int
    massive: int
    tokens: tuple[tuple[int, int], ...]
    positions: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def survey(
    model: Any, tokenizer: Any, ids: Tensor, cost_tokens: int = 1024, progress: Progress | None = None
) -> Survey:
    """Measure scales, prefixes and costs of a causal language model. A prefix that is needed stays in the model.

    Args:
        model: a transformers model with its norms.
        tokenizer: its tokenizer, for the prefixes to try.
        ids: [N, T] blocks of a text, cut anywhere in it, as prompts begin anywhere.
        cost_tokens: how much of it the costs are measured on.
        progress: called with what is being done and the share of it that is done.

    Raises:
        ValueError: no norm of the model sees a text token by token.
    """
    tell = progress or (lambda what, share: None)
    sites = find_sites(model)
    read = [site for site in sites if site.role in ("internal", "final", "other") and site.probed is not None]
    notes: list[str] = []
    scales = token_scales(model, read, ids, progress=_steps(tell, "scale of every token", len(ids) / 8))
    if not scales:
        raise ValueError(f"{type(model).__name__}: none of its {len(sites)} norms reads the text token by token")
    common, places = outstanding(scales, ids, ABOVE)
    loss = evaluate(model, ids, progress=_steps(tell, "loss", len(ids) / 8)).loss
    trials, prefix = _prefixes(model, tokenizer, ids, read, notes, tell)
    after: dict[str, Spread] = {}
    loss_prefix, text = None, ids
    if prefix:
        try:
            attach_prefix(model, prefix)
        except ValueError as error:
            notes.append(f"the prefix cannot be put in: {error}")
        else:
            text = without_bos(ids, own_bos(tokenizer))
            again = token_scales(model, read, text, progress=_steps(tell, "scales with the prefix", len(text) / 8))
            after = {name: _spread(r, text) for name, r in again.items()}
            loss_prefix = evaluate(model, text).loss
    few = text[: max(1, cost_tokens // ids.shape[1])]
    costs: dict[str, float] = {}
    c: dict[str, float] = {}
    try:
        costs, c = norm_costs(model, [site for site in sites if site.removable], few, tell)
    except ValueError as error:
        notes.append(f"the cost of single norms was not measured: {error}")
    over = {ratio: int(torch.stack([r / r.median() > ratio for r in scales.values()]).any(0).sum())
            for ratio in (ABOVE, MASSIVE)}  # fmt: skip
    return Survey(
        sites=tuple(sites),
        parts=parts_of(sites),
        before={name: _spread(r, ids) for name, r in scales.items()},
        after=after,
        trials=tuple(trials),
        prefix=prefix,
        loss=loss,
        loss_prefix=loss_prefix,
        costs=costs,
        c=c,
        cost_tokens=few.numel(),
        total=ids.numel(),
        block=ids.shape[1],
        above=over[ABOVE],
        massive=over[MASSIVE],
        tokens=tuple(common.most_common(8)),
        positions=tuple(places.most_common(8)),
        notes=tuple(notes),
    )


def _prefixes(
    model: Any, tokenizer: Any, ids: Tensor, sites: list[NormSite], notes: list[str], tell: Progress
) -> tuple[list[Trial], tuple[int, ...] | None]:
    """The prefixes tried, and the one to use: () if none is needed, None if none is clean."""
    if prefix_of(model):
        notes.append(f"the model has a constant prefix already, {list(prefix_of(model))}; no other was looked for")
        return [], ()
    tell("looking for a prefix", 0.0)
    trials = search_prefix(model, tokenizer, sample(tokenizer, ids, model), MASSIVE, sites)
    tell("looking for a prefix", 1.0)
    return trials, trials[-1].prefix if trials[-1].ratio <= MASSIVE else None


@torch.no_grad()
def norm_costs(
    model: Any, sites: list[NormSite], ids: Tensor, progress: Progress | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """What each norm costs alone, in nats, and the c that stood in its place. Only blocks behind it run again.

    ids: [N, T]. The model is left as it was.

    Raises:
        ValueError: its norms do not sit in one list of blocks (`tapernorm.chain.Chain`).
    """
    tell = progress or (lambda what, share: None)
    chain = Chain(model, sites, ids, batch=max(1, 1024 // ids.shape[1]))
    last = len(chain.blocks)
    by_block: dict[int, list[NormSite]] = {index: [] for index in range(last + 1)}
    for site in sites:
        index = chain.block_of(site.name)
        if index is not None or site.role == "final":
            by_block[last if index is None else index].append(site)
    hidden = chain.start(ids)
    base = chain.rest(0, ids, hidden, log_probabilities)
    costs: dict[str, float] = {}
    scales: dict[str, float] = {}
    for index, here in by_block.items():
        for site in here:
            assert site.probed is not None
            norm = model.get_submodule(site.name)
            fixed = TaperNorm(norm, site.probed, site.width, like=model.get_parameter(site.links[0].weight))
            h = chain.inside(index, ids, hidden, {site.name: "input"})[site.name]
            fixed.fixed_norm.c.fill_(robust_scale(h, fixed.gain(), site.probed.kind, site.probed.eps))
            fixed.set_gate(0.0)
            model.set_submodule(site.name, fixed.eval())
            try:
                made = chain.rest(index, ids, hidden, log_probabilities)
            finally:
                model.set_submodule(site.name, norm)
            costs[site.name] = divergence(base, made)
            scales[site.name] = float(fixed.fixed_norm.c)
            tell("cost of each norm", len(costs) / len(sites))
        if index < last:
            hidden = chain.through(index, ids, hidden)
    return costs, scales


def parts_of(sites: list[NormSite]) -> dict[str, str]:
    """What each norm feeds: "attention", "MLP", "both" (a parallel block), "head" or "other"."""
    words = {"attention": r"attn|attention|q_proj|query|qkv", "MLP": r"mlp|ffn|ff\b|fc\d?|expert|moe|feed_?forward|ff_"}
    parts = {}
    for site in sites:
        names = " ".join(name.rpartition("layers.")[2] for name in site.consumers).lower()
        found = [part for part, pattern in words.items() if re.search(pattern, names)]
        part = "both" if len(found) == 2 else found[0] if found else "other"
        parts[site.name] = "head" if site.role == "final" else part
    return parts


def text_ids(model: Any, tokenizer: Any, texts: Any, tokens: int, block: int = 128) -> Tensor:
    """Blocks of a text for `survey`. [N, block]

    Raises:
        ValueError: fewer tokens than one block.
    """
    from tapernorm.data import pack

    block = min(block, context_length(model) - 4)  # a prefix takes up to four
    return pack(texts, tokenizer, block, limit=max(1, tokens // block))


def _spread(r: Tensor, ids: Tensor) -> Spread:
    median = r.median()
    of_median = torch.nan_to_num(r / median, nan=math.inf).flatten()
    at = int(of_median.argmax())
    out = of_median[of_median > ABOVE].sort(descending=True).values
    return Spread(
        median=float(median),
        quantiles=tuple(of_median.quantile(torch.tensor(QUANTILES)).tolist()),
        largest=float(of_median[at]),
        above=len(out),
        massive=int((of_median > MASSIVE).sum()),
        dots=tuple(out[:_DOTS].tolist()),
        position=at % ids.shape[1],
        token=int(ids.flatten()[at]),
    )


def _steps(tell: Progress, what: str, total: float) -> Callable[[], None]:
    """A counter for functions that report one step at a time."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        tell(what, min(1.0, done / max(1.0, total)))

    return step
