"""At gate 0 the fixed scales go into the weights that read them, and the norms become nothing.

    RMS:    W' = W · diag(c γ̃)
    Layer:  W' = W · diag(c γ̃) · (I − 11ᵀ/D),    b' = b + W β̃

W: [out, D] (a Conv1D holds its transpose). Products in float64, rounded once to the weight's dtype. Everything is
audited before anything changes, and the folded model is compared with the unfolded one before it is handed over.
(arXiv 2602.10408, section 3.)
"""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tapernorm.convert import get_controller, guard_saving, release
from tapernorm.modules import FixedLinear, TaperNorm, evaluation, taper_norms
from tapernorm.prefix import prefix_of
from tapernorm.sites import NormSite, default_example, find_sites, run
from tapernorm.trace import Consumer, tensors

log = logging.getLogger(__name__)

# Largest relative error of the logits against the unfolded model; half precision is judged by its noise instead.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}
SIGNAL_TO_NOISE = 30.0  # dB, for bfloat16 and float16


class FoldError(RuntimeError):
    """A refused fold. The model is as it was before."""


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """What `fold_` did. Names are full module or parameter names.

    folded, kept: norms that are gone, and norms that stay. reasons: why, for each kept one. new_biases: biases that
    were made. untied: heads cut loose from the embedding. max_abs_logit_error: largest absolute difference between
    the folded and the unfolded model's output on the example; relative_error: the same divided by the largest
    absolute output; bound: what it was held to. c, kinds, roles: by site.
    """

    folded: tuple[str, ...]
    kept: tuple[str, ...]
    reasons: dict[str, str]
    new_biases: tuple[str, ...]
    untied: tuple[str, ...]
    prefix: tuple[int, ...]
    max_abs_logit_error: float
    relative_error: float
    bound: float
    c: dict[str, float]
    kinds: dict[str, str]
    roles: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def fold_(model: nn.Module, example: Any = None) -> FoldReport:
    """Fold every TaperNorm of `model` into the weights that read it. In place, checked, or refused and untouched.

    Args:
        model: a tapered model whose gates are all 0.
        example: inputs for the comparison, as for `find_sites`; the more they are like real use, the better the
            check. None makes random token ids.

    Raises:
        FoldError: nothing to fold; a gate that is not 0; a norm whose readers are not all known linear maps any
            more; weights on the meta device, quantized or wrapped; a scaled weight that overflows its dtype; an
            output that is not finite; an error above the bound.
    """
    tapered = taper_norms(model)
    if not tapered:
        raise FoldError("nothing to fold: the model has no TaperNorm (it was never tapered, or is folded already)")
    inputs = default_example(model, batch=2, length=16) if example is None else example
    plan, sites = _audit(model, tapered, inputs)
    with evaluation(model):
        before = _outputs(model, inputs)
        if not before:
            raise FoldError("the model's output on the example holds no floating-point tensor: nothing to compare")
        if not all(torch.isfinite(t).all() for t in before):
            raise FoldError("the unfolded model's output on the example is not finite; nothing was folded")
        with tempfile.TemporaryDirectory(prefix="tapernorm-") as folder:
            undo = _Undo(model, Path(folder) / "before.safetensors", plan)
            try:
                new_biases, untied = _apply(model, plan)
                error, relative, bound = _check(before, _outputs(model, inputs))
            except BaseException:
                undo()
                raise
    for site, module in plan:
        model.get_submodule(site.name).train(module.training)
    release(model)
    guard_saving(model)
    kept = {site.name: site.reason or "it was not tapered" for site in sites if site.name not in tapered}
    return FoldReport(
        folded=tuple(site.name for site, _ in plan),
        kept=tuple(kept),
        reasons=kept,
        new_biases=tuple(new_biases),
        untied=tuple(untied),
        prefix=prefix_of(model),
        max_abs_logit_error=error,
        relative_error=relative,
        bound=bound,
        c={site.name: float(module.fixed_norm.c) for site, module in plan},
        kinds={site.name: site.kind for site in sites},
        roles={site.name: site.role for site in sites},
    )


Plan = list[tuple[NormSite, TaperNorm]]


def _audit(model: nn.Module, tapered: dict[str, TaperNorm], inputs: Any) -> tuple[Plan, list[NormSite]]:
    """Every refusal that can be known beforehand."""
    for name, module in tapered.items():
        if module.gate.is_meta:
            raise FoldError(f"{name} is on the meta device: load the weights first")
        gate = float(module.gate)
        if gate != 0:
            controller = get_controller(model)
            when = f" at step {controller.step_count} of {controller.config.total_steps}" if controller else ""
            raise FoldError(f"{name}: the gate is {gate:.4g}{when}; fold when the taper is done and it is 0")
    sites = {site.name: site for site in find_sites(model, inputs)}
    claimed: dict[str, str] = {}
    for name in tapered:
        if name not in sites:
            raise FoldError(f"{name}: it did not run on the example, so nobody knows what reads it; pass example=...")
        if not sites[name].removable:
            raise FoldError(f"{name}: it can no longer be folded: {sites[name].reason}")
        for link in sites[name].links:
            if link.weight in claimed:
                raise FoldError(f"{link.weight} reads both {claimed[link.weight]} and {name}")
            claimed[link.weight] = name
            _audit_consumer(model, name, link, needs_bias=tapered[name].fixed_norm.bias is not None)
    return [(sites[name], module) for name, module in tapered.items()], list(sites.values())


def _audit_consumer(model: nn.Module, name: str, link: Consumer, needs_bias: bool) -> None:
    from transformers.pytorch_utils import Conv1D  # imported late: slow

    weight, owner = model.get_parameter(link.weight), model.get_submodule(link.owner)
    kind = type(owner).__name__
    if weight.is_meta:
        raise FoldError(f"{link.weight} is on the meta device: load the weights first")
    if hasattr(weight, "ds_id") or type(weight.data) is not Tensor:
        raise FoldError(f"{link.weight} ({type(weight.data).__name__}) is sharded or wrapped: gather it before folding")
    if hasattr(owner, "parametrizations"):
        raise FoldError(f"{link.owner} is parametrized: remove its parametrizations before folding")
    if needs_bias and link.bias is None and not isinstance(owner, nn.Linear | Conv1D):
        raise FoldError(f"{link.owner}: {name} has a bias, and a {kind} without one cannot be given one")


def _apply(model: nn.Module, plan: Plan) -> tuple[list[str], list[str]]:
    """Fold; returns the names of the biases made and of the heads untied."""
    new_biases, untied = [], []
    for site, module in plan:
        scale, bias = _fixed_branch(module)
        for link in site.links:
            weight, owner = model.get_parameter(link.weight), model.get_submodule(link.owner)
            w = weight.detach().double()
            w = w if link.axis == 1 else w.T  # [out, D]
            if bias is not None and torch.any(bias != 0):
                shift = w @ bias
                if link.bias is None:
                    made = nn.Parameter(_rounded(shift, weight.dtype, f"{link.owner}.bias"), weight.requires_grad)
                    owner.register_parameter("bias", made)
                    new_biases.append(f"{link.owner}.bias")
                else:
                    old = model.get_parameter(link.bias)
                    old.data.copy_(_rounded(old.detach().double() + shift, old.dtype, link.bias))
            w = w * scale if scale.dim() == 1 else w @ scale
            if getattr(module.fixed_norm, "centred", False):
                w = w - w.mean(1, keepdim=True)
            w = _rounded(w if link.axis == 1 else w.T, weight.dtype, link.weight)
            if _is_tied(model, link):
                setattr(owner, link.weight.rpartition(".")[2], nn.Parameter(w, weight.requires_grad))
                untied.append(link.weight)
            else:
                weight.data.copy_(w)
        model.set_submodule(site.name, nn.Identity())
    for name in untied:
        _untie_configs(model, name)
    return new_biases, untied


def _fixed_branch(module: TaperNorm) -> tuple[Tensor, Tensor | None]:
    """(c γ̃ [D] or A [D, D], β̃ [D] or None) in float64."""
    fixed = module.fixed_norm
    bias = fixed.bias.detach().double() if fixed.bias is not None else None
    if isinstance(fixed, FixedLinear):
        return fixed.weight.detach().double(), bias
    return fixed.c.double() * fixed.weight.detach().double(), bias


def _rounded(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    rounded = value.to(dtype).contiguous()
    if not torch.isfinite(rounded).all():
        raise FoldError(f"{name} does not fit {dtype} after scaling (largest value {value.abs().max():.3g})")
    lost = (rounded.abs() < torch.finfo(dtype).tiny) & (value.abs() >= torch.finfo(dtype).tiny * 1e-3)
    if dtype == torch.float16 and lost.any():
        log.warning("%s: %d values become subnormal in %s", name, int(lost.sum()), dtype)
    return rounded


def _is_tied(model: nn.Module, link: Consumer) -> bool:
    weight = model.get_parameter(link.weight)
    return sum(p is weight for _, p in model.named_parameters(remove_duplicate=False)) > 1


def _configs(model: nn.Module) -> list[Any]:
    """The configs of a model that hold the flag by which the head is tied to the embedding."""
    config: Any = getattr(model, "config", None)
    holders = [config, *(getattr(config, sub, None) for sub in getattr(config, "sub_configs", {}))]
    return [holder for holder in holders if hasattr(holder, "tie_word_embeddings")]


def _untie_configs(model: Any, name: str) -> None:
    """The tie flag goes off in every config that holds it, or the next `tie_weights()` would undo the fold."""
    for config in _configs(model):
        config.tie_word_embeddings = False
    ties = getattr(model, "_tied_weights_keys", None)
    if isinstance(ties, dict):
        model._tied_weights_keys = {k: v for k, v in ties.items() if k != name} or None
    if getattr(model, "all_tied_weights_keys", None):
        model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k != name}


class _Undo:
    """Brings a model back to where it was. Weights wait in a file, so that folding needs no second copy in memory."""

    def __init__(self, model: nn.Module, path: Path, plan: Plan) -> None:
        self.model, self.path, self.plan = model, path, plan
        links = [link for site, _ in plan for link in site.links]
        names = {link.weight for link in links} | {link.bias for link in links if link.bias}
        self.parameters = {name: model.get_parameter(name) for name in sorted(names)}
        self.no_bias = [link.owner for link in links if link.bias is None]
        # Those of this object: what it has from its class is not its own to put back.
        self.attributes = {k: vars(model).get(k) for k in ("_tied_weights_keys", "all_tied_weights_keys")}
        self.ties = [(config, config.tie_word_embeddings) for config in _configs(model)]
        save_file({name: p.detach().contiguous().clone() for name, p in self.parameters.items()}, path)

    def __call__(self) -> None:
        saved = load_file(self.path)
        for name, parameter in self.parameters.items():
            parameter.data.copy_(saved[name])
            owner, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(owner), attribute, parameter)
        for name in self.no_bias:
            self.model.get_submodule(name).register_parameter("bias", None)
        for site, module in self.plan:
            self.model.set_submodule(site.name, module)
        for config, flag in self.ties:
            config.tie_word_embeddings = flag
        for name, value in self.attributes.items():
            if value is not None:
                setattr(self.model, name, value)
            elif name in vars(self.model):
                delattr(self.model, name)


def _outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The logits, or whatever else the model puts out."""
    output = run(model, inputs)
    logits = getattr(output, "logits", None)
    return [t.detach().clone() for t in tensors(output if logits is None else logits) if t.is_floating_point()]


def _check(before: list[Tensor], after: list[Tensor]) -> tuple[float, float, float]:
    """(largest absolute error, relative error, bound); for half precision the bound is that of 30 dB.

    Raises:
        FoldError: the error is above the bound.
    """
    worst = (0.0, 0.0, math.inf)
    for old, new in zip(before, after, strict=True):
        dtype = old.dtype
        old, new = old.double(), new.double()
        error = float((new - old).abs().max())
        if dtype in BOUNDS:
            relative, bound = error / max(float(old.abs().max()), 1e-30), BOUNDS[dtype]
        else:
            relative, bound = float((new - old).norm() / old.norm()), 10 ** (-SIGNAL_TO_NOISE / 20)
        if not relative <= bound:
            raise FoldError(
                f"the folded model's output differs by {relative:.2g} of its size, more than the {bound:.2g} that "
                f"{dtype} allows; the model was put back as it was. Fold in float64 to see whether it is rounding"
            )
        worst = max(worst, (error, relative, bound))
    return (worst[0], worst[1], worst[2] if before else 0.0)
