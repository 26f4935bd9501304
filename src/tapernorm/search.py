"""The search of `tapernorm.remove`: norms replaced by fitted maps in the order of depth, and which, and how many.

Two models run side by side, block by block: the original, and the one that loses its norms, in which every chosen norm
is a TaperNorm (gate 1: the norm itself; gate 0: the fitted map).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tapernorm.chain import Chain
from tapernorm.logits import batch_within, divergence, log_probabilities, token_losses
from tapernorm.modules import FixedLinear, FixedScale, TaperNorm
from tapernorm.ridge import fit_map
from tapernorm.scales import token_scales
from tapernorm.sites import NormSite
from tapernorm.statistics import robust_scale

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


class Search:
    """The model with every chosen norm a TaperNorm (gate 1: the norm; gate 0: its map), and the original beside it."""

    # A held-out token whose residual is off by more than its own length has run away; behind a branch of a higher power
    # so has one that gets there from a drift STRESS times as large as the one it has: the rare token that was not seen
    # here drifts further. Asked of the WATCHED sequences that hold the tokens furthest off. One that has run away may
    # not go SLACK times further.
    LIMIT, STRESS, WATCHED, SLACK = 1.0, 2.0, 16, 1.1
    # Trials end when so much of the budget is used. Costs are measured on so many tokens, of what was fitted on more.
    TRIALS, USED = 4, 0.85
    COST_TOKENS, COST_FIT = 1024, 4096
    # A branch of a higher power than LINEAR loses its norm only where from there on no token stands above UNIFORM times
    # the median scale of any norm.
    LINEAR, UNIFORM = 1.4, 1.4

    def __init__(
        self, model: Any, chosen: list[NormSite], fit: Tensor, check: Tensor, refit: bool, progress: Progress | None
    ) -> None:
        self.model, self.fit, self.check = model, fit, check
        self.refused: set[str] = set()  # whose absence let a token run away
        self.progress = progress or (lambda what, share: None)
        self.original = copy.deepcopy(model)
        self.chain = Chain(model, chosen, fit, batch_within(model, fit.shape[1], most=4), fast=True)
        self.teacher = Chain(self.original, chosen, fit, self.chain.batch)
        self.sites = [site for site in chosen if self.chain.block_of(site.name) is not None]
        self.norms: dict[str, TaperNorm] = {}
        for site in self.sites:
            assert site.probed is not None
            reader = model.get_parameter(site.links[0].weight)
            self.norms[site.name] = TaperNorm(model.get_submodule(site.name), site.probed, site.width, like=reader)
            model.set_submodule(site.name, self.norms[site.name])
        self.by_block = {
            index: [site.name for site in self.sites if self.chain.block_of(site.name) == index]
            for index in range(len(self.chain.blocks))
        }
        self.writers = self._find_writers() if refit else {}
        self.teacher.fast = self.chain.fast
        self.saved = {w: model.get_submodule(w).weight.detach().clone() for w in self.writers.values()}
        self.growth: dict[str, float] = {}
        self.stands_out: dict[str, float] = {}  # the largest r / median at each norm of the original
        self.tried: list[tuple[int, float]] = []
        self.best: dict[str, FixedScale] = {}
        self.best_writers: dict[str, Tensor] = {}

    def _find_writers(self) -> dict[str, str]:
        """For each norm, the linear map whose output is all that is added to the residual until the next point."""
        found: dict[str, str] = {}
        ids = self.fit[:1, :8]
        hidden = self.teacher.start(ids)
        for index, names in self.by_block.items():
            block = f"{self.teacher.name}.{index}"
            kinds = nn.Linear | Conv1D
            inside = self.original.get_submodule(block).named_modules(prefix=block)
            linears = [name for name, module in inside if isinstance(module, kinds)]
            take = {**dict.fromkeys(names, "input"), **dict.fromkeys(linears, "output"), block: "output"}
            seen = self.teacher.inside(index, ids, hidden, take)
            points = [*names, block]
            for name, following in zip(names, points[1:], strict=True):
                added = seen[following] - seen[name]
                for linear in linears:
                    y = seen[linear]
                    if y.shape == added.shape and torch.allclose(y, added, rtol=1e-3, atol=1e-3 * float(added.std())):
                        found[name] = linear
            hidden = seen[block]
        return found

    # One norm

    @torch.no_grad()
    def _install(self, name: str, h: Tensor, target: Tensor) -> None:
        """Fit A and b for a norm and switch it to them. h, target: [N, T, D]"""
        norm = self.norms[name]
        layer = norm.probed.kind == "layer"
        gain = norm.gain().float()
        c = robust_scale(h, gain, norm.probed.kind, norm.probed.eps)
        prior = torch.diag(c * gain)
        bias = getattr(norm.norm, norm.probed.bias).detach().float() if norm.probed.bias else None
        if layer:
            prior = prior - prior.mean(1, keepdim=True)
        x, y = h.flatten(0, -2).float(), target.flatten(0, -2).float()
        found = fit_map(x, y if bias is None else y - bias, prior)
        like = norm.fixed_norm.weight
        fixed = FixedLinear(found.weight.to(like), bias if bias is None else bias.to(like))
        norm.fixed_norm = fixed.requires_grad_(False)
        norm.set_gate(0.0)

    @torch.no_grad()
    def _refit(self, writer: str, z: Tensor, wrong: Tensor) -> None:
        """Fit the map that writes the result, so that it adds what is wrong with the residual too."""
        module = self.model.get_submodule(writer)
        weight = module.weight.detach()
        old = weight.T if isinstance(module, Conv1D) else weight
        x = z.flatten(0, -2).float()
        y = x @ old.float().T + wrong.flatten(0, -2).float()
        found = fit_map(x, y, old.float())
        new = found.weight.T if isinstance(module, Conv1D) else found.weight
        module.weight.data.copy_(new)

    def _restore(self, names: Iterable[str]) -> None:
        for name in names:
            self.norms[name].set_gate(1.0)
            if name in self.writers:
                self.model.get_submodule(self.writers[name]).weight.data.copy_(self.saved[self.writers[name]])

    def _remove(self, index: int, name: str, ids: Tensor, target: Tensor, goal: Tensor, hidden: Tensor) -> None:
        """Replace a norm of block `index`, which reads `hidden`, and fit its writer. [N, T, D] each"""
        h = self.chain.inside(index, ids, hidden, {name: "input"})[name]
        self._install(name, h, target)
        writer = self.writers.get(name)
        if writer is None:
            return
        following = self._next_point(index, name)
        what = "output" if following == f"{self.chain.name}.{index}" else "input"
        seen = self.chain.inside(index, ids, hidden, {writer: "input", following: what})
        self._refit(writer, seen[writer], goal - seen[following])

    def _next_point(self, index: int, name: str) -> str:
        names = self.by_block[index]
        at = names.index(name) + 1
        return names[at] if at < len(names) else f"{self.chain.name}.{index}"

    def _targets(self, index: int, ids: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """What the original makes in block `index`: each norm's output, each point of the residual, the result."""
        block, names = f"{self.teacher.name}.{index}", self.by_block[index]
        points = self.teacher.inside(index, ids, hidden, {**dict.fromkeys(names, "input"), block: "output"})
        with torch.no_grad():
            outputs = {f"{n} out": self.original.get_submodule(n)(points[n]) for n in names}
        return points | outputs

    # All of them

    def costs(self) -> dict[str, float]:
        """What each norm costs when it alone is replaced: mean over tokens of KL(original ‖ replaced), in nats.

        Where a model is calibrated that is the loss that it will have more, and a thousand tokens tell it as well as
        some ten thousand would tell a difference of losses: the noise of the text itself is not in it.
        """
        text = self.fit[: max(3, self.COST_FIT // self.fit.shape[1])]
        ids = self.check[: max(1, self.COST_TOKENS // self.check.shape[1])]
        hidden = self.teacher.start(text)
        check = self.chain.start(ids)
        base = self.chain.rest(0, ids, check, log_probabilities)
        scales = token_scales(self.original, self.sites, self.check[: self.WATCHED], batch=self.teacher.batch)
        self.stands_out = {name: float(r.max() / r.median()) for name, r in scales.items()}
        costs: dict[str, float] = {}
        for index, names in self.by_block.items():
            points = self._targets(index, text, hidden)
            for name in names:
                goal = points[self._next_point(index, name)]
                self._remove(index, name, text, points[f"{name} out"], goal, hidden)
                costs[name] = divergence(base, self.chain.rest(index, ids, check, log_probabilities))
                self.growth[name] = self._growth(index, name, ids, check)
                self._restore([name])
                self.progress("cost of each norm", len(costs) / len(self.sites))
            hidden = points[f"{self.teacher.name}.{index}"]
            check = self.chain.through(index, ids, check)
        return costs

    def _growth(self, index: int, name: str, ids: Tensor, hidden: Tensor) -> float:
        """The power by which what a norm's branch adds grows with a large residual, once the norm is gone: 1 for
        attention (an average of values, each linear in its token) and for a ReLU, 2 for a gated MLP."""
        following = self._next_point(index, name)
        take = {name: "input", following: "output" if following == f"{self.chain.name}.{index}" else "input"}
        once, twice = (self.chain.inside(index, ids, scale * hidden, take) for scale in (16, 32))
        added = [(seen[following] - seen[name]).float().norm(dim=-1) for seen in (once, twice)]
        return float(torch.log2(added[1] / added[0].clamp(min=1e-12)).median())

    def order(self, costs: dict[str, float]) -> list[str]:
        """Norms from the cheapest on, less those of branches that grow fast and need theirs: where a token stands out,
        here or at any later norm."""
        names = list(self.norms)
        may = {n for n in costs if not self._grows_fast(n) or self._is_uniform(names[names.index(n) :])}
        return sorted(may, key=lambda name: costs[name])

    def _is_uniform(self, names: list[str]) -> bool:
        return max(self.stands_out.get(name, 1.0) for name in names) <= self.UNIFORM

    def remove(self, wanted: set[str]) -> Tensor:
        """Remove `wanted` in the order of depth, less those that let a token run away. Returns the losses of held-out
        tokens, [N, T − 1]."""
        self._restore(self.norms)
        first = min(i for i, names in self.by_block.items() if wanted & set(names))
        streams = {"fit": self.fit, "check": self.check}
        theirs = {k: self.teacher.start(ids) for k, ids in streams.items()}
        ours: dict[str, Tensor] = {k: v.clone() for k, v in theirs.items()}
        for index, names in self.by_block.items():
            block = f"{self.teacher.name}.{index}"
            here = [name for name in names if name in wanted]
            if not here:
                for k, ids in streams.items():
                    same = index < first
                    theirs[k] = self.teacher.through(index, ids, theirs[k])
                    ours[k] = theirs[k] if same else self.chain.through(index, ids, ours[k])
                continue
            points = self._targets(index, self.fit, theirs["fit"])
            right = self.teacher.through(index, self.check, theirs["check"])
            for name in here:
                stress = self.STRESS if self._grows_fast(name) else 1.0
                worst = self._watch(index, theirs["check"], ours["check"], right, stress)
                goal, kept = points[self._next_point(index, name)], worst()
                self._remove(index, name, self.fit, points[f"{name} out"], goal, ours["fit"])
                gone = worst()
                if gone > max(self.LIMIT, self.SLACK * kept):
                    log.info("%s: a token runs away (%.2g, with the norm %.2g); it stays", name, gone, kept)
                    self._restore([name])
                    self.refused.add(name)
            theirs = {"fit": points[block], "check": right}
            ours = {k: self.chain.through(index, ids, ours[k]) for k, ids in streams.items()}
            self.progress(f"removing {len(wanted)}", (index + 1) / len(self.by_block))
        losses = self.chain.head(self.check, ours["check"], token_losses).view(len(self.check), -1)
        self.tried.append((len(self.gone()), float(losses.double().mean())))
        return losses

    def _watch(self, index: int, theirs: Tensor, ours: Tensor, right: Tensor, stress: float) -> Callable[[], float]:
        """Tells the largest drift behind block `index` as the block is then, had tokens drifted `stress` times so far.

        theirs, ours: what the block reads of the held-out text; right: what the original makes of it. [N, T, D]
        """
        drifts = _drift(ours, theirs).amax(1)
        rows = drifts.topk(min(self.WATCHED, len(drifts))).indices
        stressed = theirs[rows] + stress * (ours[rows] - theirs[rows])
        return lambda: float(_drift(self.chain.through(index, self.check[rows], stressed), right[rows]).max())

    def _grows_fast(self, name: str) -> bool:
        return self.growth.get(name, 1.0) > self.LINEAR

    def gone(self) -> list[str]:
        """Norms that are replaced now."""
        return [name for name, norm in self.norms.items() if float(norm.gate) == 0]

    def longest(
        self, costs: dict[str, float], base: Tensor, budget: float, sound: Callable[[Tensor], bool]
    ) -> Tensor | None:
        """Remove the longest row of norms, cheapest first, that is sound. Costs alone say where to look first.

        base: the losses of held-out tokens before, [N, T − 1]; budget: how far their mean may rise, in nats.
        """
        low, high, factor = 0, len(costs), 0.8  # of the sum of divergences, which the loss then rises by
        best: Tensor | None = None
        for _ in range(self.TRIALS):
            order = self.order({name: cost for name, cost in costs.items() if name not in self.refused})
            total = torch.tensor([max(costs[name], 0.0) for name in order]).cumsum(0)
            high = min(high, len(order))
            if high <= low:
                break
            guess = int((total * factor <= budget).sum())
            count = min(max(guess, low + 1), high)
            losses = self.remove(set(order[:count]))
            gone = len(self.gone())
            if sound(losses) and gone >= max(1, len(self.best)):
                low, best = gone, losses
                self._remember()
            else:
                high = gone - 1
            rise = likely_rise(losses, base)
            if sound(losses) and rise >= self.USED * budget:
                break
            spent = sum(max(costs[name], 0.0) for name in self.gone())
            if 0 < rise < torch.inf and spent > 0:
                factor = rise / spent
        self._recall()
        return best

    @property
    def refitted(self) -> tuple[str, ...]:
        """The linear maps that were fitted again for the norms that go."""
        return tuple(sorted(self.writers[name] for name in self.best if name in self.writers))

    def _remember(self) -> None:
        self.best = {name: norm.fixed_norm for name, norm in self.norms.items() if float(norm.gate) == 0}
        self.best_writers = {w: self.model.get_submodule(w).weight.detach().clone() for w in self.saved}

    def _recall(self) -> None:
        self._restore(self.norms)
        for name, fixed in self.best.items():
            self.norms[name].fixed_norm = fixed
            self.norms[name].set_gate(0.0)
            if name in self.writers:
                writer = self.writers[name]
                self.model.get_submodule(writer).weight.data.copy_(self.best_writers[writer])

    def finish(self) -> tuple[str, ...]:
        """Put the norms back that stay; what goes is left at gate 0, to be folded."""
        gone = tuple(self.gone())
        for name, norm in self.norms.items():
            if name not in gone:
                self.model.set_submodule(name, norm.norm)
        return gone

    def undo(self) -> None:
        """The model as it came: its own norms, and the weights that it had."""
        self._restore(self.norms)
        for name, norm in self.norms.items():
            self.model.set_submodule(name, norm.norm)


def likely_rise(after: Tensor, before: Tensor) -> float:
    """How far the mean loss rises on other text of the kind, but for one time in forty: the mean over sequences and two
    of its standard errors. ∞ where a loss is not finite. [N, T] each"""
    rises = (after - before).double().mean(1)
    error = float(rises.std()) / len(rises) ** 0.5 if len(rises) > 1 else 0.0
    return float(torch.nan_to_num(rises.mean() + 2 * error, nan=torch.inf))


def _drift(ours: Tensor, theirs: Tensor) -> Tensor:
    """How far each token's residual is from the original's, over its length; NaN counts as ∞. [N, T, D] -> [N, T]"""
    off = (ours - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1).clamp(min=1e-12)
    return torch.nan_to_num(off, nan=torch.inf)
