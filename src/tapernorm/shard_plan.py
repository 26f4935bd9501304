"""What a fold from disk to disk does to each tensor: made on the meta device, carried out in parts of tensors.

The equations are those of `tapernorm.fold`; so are the order of the products and the rounding, because the bits are to
be the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from tapernorm import untrusted
from tapernorm.fold import is_tied, untie_configs
from tapernorm.modules import taper_norms
from tapernorm.products import backwards, claims, forwards, refuse_no_bias, rounded, targets
from tapernorm.sites import NormSite, find_sites
from tapernorm.soundness import FoldError
from tapernorm.streaming import DTYPES, Fill, Index, Stored, parts, stored
from tapernorm.trace import Consumer

NUMBERS = 1 << 18  # in flight: 2 MB in float64, which a processor's cache holds
_LARGEST_SLICE = 1 << 26  # numbers that cannot be cut further, 512 MB in float64
# W β̃, and means down the columns of a Conv1D, are taken of so many numbers at once: a part is added up in another order
# than the whole, so in a weight with more of them the last bit of float64 may differ from what `fold_` makes, before it
# is rounded to the weight's dtype.
_AT_ONCE = 1 << 24
_ROWS = 4  # of a scaled weight that are looked at again


@dataclasses.dataclass(frozen=True)
class Branch:
    """A fixed branch, as it is in the checkpoint. weight: γ̃ [D], bias: β̃ [D] or None, scale: c γ̃ [D]; float64."""

    c: float
    scale: Tensor
    bias: Tensor | None


@dataclasses.dataclass(frozen=True)
class Step:
    """One norm taken up by one weight: forwards, W · diag(scale), or backwards, diag(scale) · W, along `axis`."""

    axis: int
    kind: str
    forwards: bool
    branch: Branch
    factor: float

    def apply(self, w: Tensor, index: Index) -> Tensor:
        """w: a part of the weight in float64; index: which part."""
        fold_into, scale = forwards if self.forwards else backwards, self.branch.scale[index[self.axis]]
        return fold_into(w.movedim(self.axis, -1), scale, self.kind).movedim(-1, self.axis)

    @property
    def needs_all(self) -> bool:
        """Whether it needs the whole of its axis at a time."""
        return self.kind == "layer" or (self.forwards and self.branch.bias is not None)


@dataclasses.dataclass(frozen=True)
class Out:
    """A tensor of the output: where it comes from, and what is done to it."""

    source: Stored
    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    bias_of: tuple[tuple[str, Step], ...] = ()  # (weight, step) for each norm whose shift a bias takes up
    made: bool = False  # a bias where there was none; `source` is then its weight's

    @property
    def changed(self) -> bool:
        return bool(self.steps or self.bias_of)

    @property
    def dtype(self) -> str:
        return self.source.dtype

    @property
    def nbytes(self) -> int:
        return dataclasses.replace(self.source, shape=self.shape).nbytes


class Plan:
    """What is written where, and the means to compute it.

    sites: what is folded; kept: name -> reason; shards: file name -> tensor name -> Out; new_biases, untied: names.
    """

    def __init__(self, model: Any, tensors: dict[str, Stored], names: dict[str, str]) -> None:
        self.tensors, self.names = tensors, names
        self.steps: dict[str, list[Step]] = {}
        self.shifted: dict[str, list[tuple[str, Step]]] = {}
        self._shifts: dict[tuple[str, int], Tensor] = {}
        self.new_biases: list[str] = []
        self.untied: list[str] = []
        self.shards: dict[str, dict[str, Out]] = {}
        tapered = taper_norms(model)
        found = find_sites(model)
        self.kinds = {site.name: site.kind for site in found}
        self.roles = {site.name: site.role for site in found}
        self.kept = {s.name: s.reason or "it was not tapered" for s in found if s.name not in tapered}
        by_name = {site.name: site for site in found}
        missing = next((name for name in tapered if name not in by_name), None)
        if missing is not None:
            raise FoldError(f"{missing}: it did not run on the example, so nobody knows what reads it")
        self.sites = [(by_name[name], self._branch(name)) for name in tapered]

    def _branch(self, name: str) -> Branch:
        whole = (slice(None),)
        gate = float(self.tensors[f"{name}.gate"].read(whole))
        if gate != 0:
            raise FoldError(f"{name}: the gate is {gate:.4g}; fold when the taper is done and it is 0")
        c = self.tensors[f"{name}.fixed_norm.c"].read(whole).double()
        stored = self.tensors[f"{name}.fixed_norm.weight"]
        if len(stored.shape) != 1:
            raise FoldError(f"{name}: its fixed branch is a matrix, which is folded in memory alone (--no-stream)")
        weight = stored.read(whole).double()
        bias = self.tensors.get(f"{name}.fixed_norm.bias")
        branch = Branch(float(c), c * weight, None if bias is None else bias.read(whole).double())
        if not all(t is None or bool(torch.isfinite(t).all()) for t in (branch.scale, branch.bias)):
            raise FoldError(f"{name}: its fixed branch is not finite")
        return branch

    def claim(self, model: Any) -> None:
        """Give every weight its steps. Raises FoldError where `fold_` would refuse."""
        branches = {site.name: branch for site, branch in self.sites}
        for site, link in claims(site for site, _ in self.sites):
            self._claim(model, site, branches[site.name], link)
        for weight in self.steps:
            self.pieces(weight)  # refuses what cannot be cut

    def _claim(self, model: Any, site: NormSite, branch: Branch, link: Consumer) -> None:
        if branch.bias is not None:
            refuse_no_bias(model.get_submodule(link.owner), site.name, link)
        axis = link.axis % len(self._source(link.weight).shape)
        step = Step(axis, site.kind, site.removable, branch, link.factor)
        self.steps.setdefault(link.weight, []).append(step)
        if step.forwards and branch.bias is None:
            return
        self.shifted.setdefault(link.bias or f"{link.owner}.bias", []).append((link.weight, step))

    def _source(self, name: str) -> Stored:
        return self.tensors[self.names[name]]

    def _whole(self, weight: str) -> set[int]:
        """The axes along which a weight is not cut."""
        return {step.axis for step in self.steps[weight] if step.needs_all}

    def pieces(self, weight: str) -> Iterator[Index]:
        """The parts in which a weight is scaled."""
        shape, whole = self._source(weight).shape, self._whole(weight)
        smallest = math.prod(shape[axis] for axis in whole)
        if smallest > _LARGEST_SLICE:
            raise FoldError(f"{weight}: {smallest:,} numbers of it are needed at a time; fold it in memory, with fold_")
        upright = any(axis != len(shape) - 1 for axis in whole)
        return parts(shape, whole, _AT_ONCE if upright else NUMBERS)

    def scaled(self, weight: str, index: Index, upto: Step | None = None) -> Tensor:
        """A part of a folded weight, in its dtype; or in float64 as it is before the step `upto`."""
        source = self._source(weight)
        dtype = DTYPES[source.dtype]
        w = source.read(index)
        for step in self.steps[weight]:
            if step is upto:
                return w.double()
            wide = w.float().double() if w.dtype == torch.bfloat16 else w.double()  # the same; twice as quick
            w = rounded(step.apply(wide, index), dtype, weight)
        return w

    def shift(self, weight: str, step: Step) -> Tensor:
        """factor · W β̃ of a step forwards, in float64; W as it is when the step comes. [outputs..]"""
        key = weight, id(step)
        if key not in self._shifts:
            assert step.branch.bias is not None
            shape = self._source(weight).shape
            out = torch.empty([n for axis, n in enumerate(shape) if axis != step.axis], dtype=torch.float64)
            for index in parts(shape, self._whole(weight), _AT_ONCE):
                w = self.scaled(weight, index, upto=step).movedim(step.axis, -1)
                out[tuple(part for axis, part in enumerate(index) if axis != step.axis)] = w @ step.branch.bias
            self._shifts[key] = step.factor * out
        return self._shifts[key]

    def bias(self, name: str, out: Out) -> Tensor:
        """A folded bias, rounded as often as `fold_` rounds it."""
        dtype = DTYPES[out.dtype]
        value = torch.zeros(out.shape, dtype=dtype) if out.made else out.source.read((slice(None),) * len(out.shape))
        for weight, step in out.bias_of:
            b = value.double()
            if step.forwards:
                b = b + self.shift(weight, step)
            else:
                b = backwards(b, step.branch.scale, step.kind) + (0 if step.branch.bias is None else step.branch.bias)
            value = rounded(b, dtype, name)
        return value

    def filler(self, name: str, out: Out) -> Fill:
        """What writes a changed tensor."""

        def fill(target: Stored, file: BinaryIO) -> None:
            if out.bias_of:
                target.write((slice(None),) * len(out.shape), self.bias(name, out), file)
                return
            for index in self.pieces(name):
                target.write(index, self.scaled(name, index), file)

        return fill

    def apply(self, model: Any) -> None:
        """Fold the model on the meta device, and lay out the files: every tensor in the shard that it came from."""
        for weight in self.steps:
            link = next(link for site, _ in self.sites for link in targets(site) if link.weight == weight)
            if is_tied(model, link):
                setattr(model.get_submodule(link.owner), weight.rpartition(".")[2], _fresh(model.get_parameter(weight)))
                self.untied.append(weight)
        for bias in self.shifted:
            if bias not in self.names and self.bias(bias, out := self._made(bias)).any():  # none is made to hold zeros
                made = nn.Parameter(torch.empty(out.shape, device="meta", dtype=torch.bfloat16))
                model.get_submodule(bias.rpartition(".")[0]).register_parameter("bias", made)
                self.new_biases.append(bias)
        for site, _ in self.sites:
            model.set_submodule(site.name, nn.Identity())
        for name in self.untied:
            untie_configs(model, name)
        self._lay_out(model)

    def _made(self, bias: str) -> Out:
        """A bias where there was none."""
        weight, step = self.shifted[bias][0]
        source = self._source(weight)
        outputs = tuple(n for axis, n in enumerate(source.shape) if (axis == step.axis) != step.forwards)
        return Out(source, outputs, bias_of=tuple(self.shifted[bias]), made=True)

    def _lay_out(self, model: Any) -> None:
        ties = set(getattr(model, "all_tied_weights_keys", None) or ())
        groups: dict[int, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            groups.setdefault(id(tensor), []).append(name)
        for group in groups.values():
            name = next((n for n in group if n not in ties), group[0])
            if name in self.new_biases:
                out = self._made(name)
            else:
                source, steps, shifts = self._source(name), self.steps.get(name, ()), self.shifted.get(name, ())
                out = Out(source, source.shape, tuple(steps), tuple(shifts))
            self.shards.setdefault(out.source.file.name, {})[name] = out
        self.shards = dict(sorted(self.shards.items()))

    def look(self, folder: Path) -> tuple[int, float]:
        """Read rows of every weight that takes up one norm again, from both files; compare them by other arithmetic.

        Returns (rows, the largest error relative to the row). Raises FoldError where it is more than rounding.
        """
        written: dict[str, Stored] = {}
        for path in untrusted.weight_files(folder):
            written |= stored(path)
        rows, worst = 0, 0.0
        for weight, steps in self.steps.items():
            if len(steps) > 1:
                continue  # lines along one axis do not tell what was done along another
            step = steps[0]
            scale = step.branch.scale
            for index in _some_rows(self._source(weight).shape, step.axis):
                pair = (t.read(index).double().movedim(step.axis, -1) for t in (self._source(weight), written[weight]))
                old, new = (t.reshape(-1, len(scale)) for t in pair)
                wanted = old * scale
                if step.kind == "layer":  # the mean as a product with a vector, taken off behind
                    ones = torch.ones_like(scale)
                    wanted -= (
                        (old @ scale)[:, None] / len(scale)
                        if step.forwards
                        else (old @ ones)[:, None] / len(scale) * scale
                    )
                error = float((new - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))
                rows, worst = rows + len(wanted), max(worst, error)
                if not error <= 4 * torch.finfo(DTYPES[written[weight].dtype]).eps:
                    raise FoldError(f"{weight}: a row that was written is off by {error:.2g} of its size")
        return rows, worst


def make_plan(model: Any, tensors: dict[str, Stored], names: dict[str, str]) -> Plan:
    """The plan for a tapered model on the meta device, which is folded here.

    Args:
        tensors: what the files hold, by name. names: each name in the model's state dict -> the one in the files.

    Raises:
        FoldError: as `tapernorm.shards.fold_folder`.
    """
    plan = Plan(model, tensors, names)
    plan.claim(model)
    plan.apply(model)
    return plan


def _fresh(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)


def _some_rows(shape: tuple[int, ...], axis: int) -> Iterator[Index]:
    """A few lines along `axis`, spread over the others: first, last and between."""
    others = [dim for dim in range(len(shape)) if dim != axis]
    for number in range(_ROWS):
        at = {dim: (shape[dim] - 1) * number // max(_ROWS - 1, 1) for dim in others}
        yield tuple(slice(None) if dim == axis else slice(at[dim], at[dim] + 1) for dim in range(len(shape)))
