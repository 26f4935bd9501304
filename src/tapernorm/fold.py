"""At gate 0 the fixed scales go into the weights that read them, and the norms become nothing.

    RMS:    W' = W · diag(c γ̃)
    Layer:  W' = W · diag(c γ̃) · (I − 11ᵀ/D),    b' = b + W β̃

W: [out, D] (a Conv1D holds its transpose), or a stack of them. A post-norm, on the output of a linear map that nothing
else reads, is folded backwards, with P = I − 11ᵀ/D:

    RMS:    W' = diag(c γ̃) · W,        b' = c γ̃ · b
    Layer:  W' = diag(c γ̃) · P · W,    b' = c γ̃ · P b + β̃

Products in float64, rounded once to the weight's dtype. Everything is audited before anything changes, and the folded
model is compared with the unfolded one before it is handed over. (arXiv 2602.10408, section 3.)
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tapernorm import adapters
from tapernorm.convert import get_controller, guard_saving, release
from tapernorm.fuse import find_groups, fuse_groups
from tapernorm.modules import NO_EPS, FixedLinear, TaperNorm, evaluation, taper_norms
from tapernorm.prefix import prefix_of
from tapernorm.products import backwards, claims, forwards, refuse_no_bias, rounded, targets
from tapernorm.shorten import shorten_
from tapernorm.sites import NormSite, default_example, examine, run
from tapernorm.soundness import FoldError, refuse_held, refuse_lost
from tapernorm.trace import Consumer, tensors

log = logging.getLogger(__name__)

# Largest relative error of the logits against the unfolded model; half precision is judged by its noise instead.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}
# A float64 model whose own code computes something in float32, such as a kept norm or a router, rounds there: one
# unit in the last place of float32, 6e-8, wherever the folded value falls on the other side of a tie.
NARROWED = 1e-6
SIGNAL_TO_NOISE = 30.0  # dB, for bfloat16 and float16


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """What `fold_` did. Names are full module or parameter names.

    folded, kept: norms that are gone, and norms that stay. reasons: why, for each kept one. new_biases: biases that
    were made. untied: heads cut loose from the embedding. max_abs_logit_error: largest absolute difference between
    the folded and the unfolded model's output on the example; relative_error: the same divided by the largest
    absolute output; bound: what it was held to. c (of those with a scale), kinds, roles: by site. fused: linear maps
    that are one product now, by group; unfused: why others that read one tensor are not (`tapernorm.fuse`).
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
    fused: tuple[tuple[str, ...], ...] = ()
    unfused: dict[str, str] = dataclasses.field(default_factory=dict)
    shortened: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def fold_(model: nn.Module, example: Any = None, allow_tail: bool = False, fuse: bool = False) -> FoldReport:
    """Fold every TaperNorm of `model` into the weights that read it. In place, checked, or refused and untouched.

    Args:
        model: a tapered model whose gates are all 0.
        example: inputs for the comparison, as for `find_sites`; the more they are like real use, the better the
            check. None makes random token ids. With `labels` in it the loss of every token is looked at as well.
        allow_tail: fold although tokens of the example are lost (`tapernorm.soundness.refuse_lost`).
        fuse: also make one product of the linear maps that read one tensor, such as q, k and v (`tapernorm.fuse`).
            Where there are none the report says so; a model that is folded already: `tapernorm.fuse.fuse_`.

    Raises:
        FoldError: nothing to fold; a gate that is not 0; a norm whose readers are not all known linear maps any
            more; weights on the meta device, quantized, wrapped or sharded; a token that the seat belt would still
            hold; tokens that are lost; a scaled weight that overflows its dtype; an output that is not finite; an
            error above the bound.
    """
    tapered = taper_norms(model)
    if not tapered:
        raise FoldError("nothing to fold: the model has no TaperNorm (it was never tapered, or is folded already)")
    inputs = default_example(model, batch=2, length=16) if example is None else example
    plan, sites, narrowed = _audit(model, tapered, inputs)
    groups, unfused = find_groups(model, inputs) if fuse else ([], {})
    with evaluation(model):
        controller = get_controller(model)
        refuse_held(model, {**tapered, **(controller.held if controller else {})}, inputs)
        before = outputs_of(model, inputs)
        if not before:
            raise FoldError("the model's output on the example holds no floating-point tensor: nothing to compare")
        if not all(torch.isfinite(t).all() for t in before):
            raise FoldError("the unfolded model's output on the example is not finite; nothing was folded")
        if not allow_tail:
            refuse_lost(model, before[0], inputs)
        with tempfile.TemporaryDirectory(prefix="tapernorm-") as folder:
            undo = _Undo(model, Path(folder) / "before.safetensors", plan)
            take_apart = None
            try:
                new_biases, untied = _apply(model, plan)
                take_apart = fuse_groups(model, groups)
                shortened = shorten_(model, inputs) if groups else ()
                error, relative, bound = compare_outputs(before, outputs_of(model, inputs), narrowed)
            except BaseException:
                if take_apart is not None:
                    take_apart()
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
        c={s.name: float(m.fixed_norm.c) for s, m in plan if not isinstance(m.fixed_norm, FixedLinear)},
        kinds={site.name: site.kind for site in sites},
        roles={site.name: site.role for site in sites},
        fused=tuple(group.names for group in groups),
        unfused=unfused,
        shortened=shortened,
    )


Plan = list[tuple[NormSite, TaperNorm]]


def _audit(model: nn.Module, tapered: dict[str, TaperNorm], inputs: Any) -> tuple[Plan, list[NormSite], str]:
    """Every refusal that can be known beforehand; also where a float64 model computes in float32."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or isinstance(parameter, DTensor) or type(parameter).__name__ == "FlatParameter":
            raise FoldError(
                f"{name} ({type(parameter).__name__}) is sharded or wrapped: gather it before folding, with a full "
                "state dict loaded into a model of one process (examples/multi_node.md)"
            )
    for name, module in tapered.items():
        if module.gate.is_meta:
            raise FoldError(f"{name} is on the meta device: load the weights first")
        gate = float(module.gate)
        if gate != 0:
            controller = get_controller(model)
            when = f" at step {controller.step_count} of {controller.config.total_steps}" if controller else ""
            raise FoldError(f"{name}: the gate is {gate:.4g}{when}; fold when the taper is done and it is 0")
    found, narrowed = examine(model, inputs)
    sites = {site.name: site for site in found}
    missing = next((name for name in tapered if name not in sites), None)
    if missing is not None:
        raise FoldError(f"{missing}: it did not run on the example, so nobody knows what reads it; pass example=...")
    for site, link in claims(sites[name] for name in tapered):
        _audit_consumer(model, site.name, link, needs_bias=tapered[site.name].fixed_norm.bias is not None)
    return [(sites[name], module) for name, module in tapered.items()], found, narrowed


def _audit_consumer(model: nn.Module, name: str, link: Consumer, needs_bias: bool) -> None:
    weight, owner = model.get_parameter(link.weight), model.get_submodule(link.owner)
    if weight.is_meta:
        raise FoldError(f"{link.weight} is on the meta device: load the weights first")
    if hasattr(weight, "ds_id") or type(weight.data) is not Tensor:
        raise FoldError(f"{link.weight} ({type(weight.data).__name__}) is sharded or wrapped: gather it before folding")
    if hasattr(owner, "parametrizations"):
        raise FoldError(f"{link.owner} is parametrized: remove its parametrizations before folding")
    if needs_bias:
        refuse_no_bias(owner, name, link)


def _apply(model: nn.Module, plan: Plan) -> tuple[list[str], list[str]]:
    """Fold; returns the names of the biases made and of the heads untied."""
    new_biases, untied = [], []
    for site, module in plan:
        fold_into = _forwards if site.removable else _backwards
        for link in targets(site):
            weight, owner = model.get_parameter(link.weight), model.get_submodule(link.owner)
            w = weight.detach().double().movedim(link.axis, -1)  # [.., D], the other dimensions as they are stored
            w, taker, change = fold_into(model, site, link, w, *_fixed_branch(module))
            new_biases += _change_bias(model, taker, change)
            w = rounded(w.movedim(-1, link.axis), weight.dtype, link.weight).contiguous()
            if is_tied(model, link):
                setattr(owner, link.weight.rpartition(".")[2], nn.Parameter(w, weight.requires_grad))
                untied.append(link.weight)
            else:
                weight.data.copy_(w)
        gone: Any = nn.Identity()
        gone.eps = NO_EPS
        model.set_submodule(site.name, gone)
    for name in untied:
        untie_configs(model, name)
    adapters.declare_biases(model)
    return new_biases, untied


Change = Callable[[Tensor], Tensor]  # of a bias, in float64; it is given zeros where there is none


def _forwards(
    model: nn.Module, site: NormSite, link: Consumer, w: Tensor, scale: Tensor, bias: Tensor | None
) -> tuple[Tensor, Consumer, Change]:
    """Into a reader: (W', the linear map whose bias takes up β̃, how). w: [.., D]"""
    new = forwards(w, scale, site.kind) if scale.dim() == 1 else w @ scale
    if bias is None:
        return new, link, lambda b: b
    shift = adapters.carried(model, link, link.factor * (w @ bias))
    return new, adapters.taker(model, link), lambda b: b + shift


def _backwards(
    model: nn.Module, site: NormSite, link: Consumer, w: Tensor, scale: Tensor, bias: Tensor | None
) -> tuple[Tensor, Consumer, Change]:
    """Into the linear map that a post-norm reads. w: [.., D], D its outputs."""
    shift = 0 if bias is None else bias
    if scale.dim() == 2:
        return w @ scale.T, link, lambda b: b.expand(len(scale)) @ scale.T + shift
    return backwards(w, scale, site.kind), link, lambda b: backwards(b, scale, site.kind) + shift


def _change_bias(model: nn.Module, link: Consumer, change: Change) -> list[str]:
    """Write a bias anew, rounded once; returns the name of one that had to be made (none is, only to hold zeros)."""
    weight, owner = model.get_parameter(link.weight), model.get_submodule(link.owner)
    name = link.bias or f"{link.owner}.bias"
    if link.bias is not None or isinstance(getattr(owner, "bias", None), nn.Parameter):
        bias = model.get_parameter(name)
        bias.data.copy_(rounded(change(bias.detach().double()), bias.dtype, name))
        return []
    made = change(torch.zeros((), dtype=torch.float64, device=weight.device))
    if not torch.any(made != 0):
        return []
    owner.register_parameter("bias", nn.Parameter(rounded(made, weight.dtype, name), weight.requires_grad))
    return [name]


def _fixed_branch(module: TaperNorm) -> tuple[Tensor, Tensor | None]:
    """(c γ̃ [D] or A [D, D], β̃ [D] or None) in float64."""
    fixed = module.fixed_norm
    bias = fixed.bias.detach().double() if fixed.bias is not None else None
    scale = fixed.c.double() * fixed.weight.detach().double()
    if isinstance(fixed, FixedLinear) and fixed.centred:
        scale = scale - scale.mean(-1, keepdim=True)
    return scale, bias


def is_tied(model: nn.Module, link: Consumer) -> bool:
    weight = model.get_parameter(link.weight)
    return sum(p is weight for _, p in model.named_parameters(remove_duplicate=False)) > 1


def _configs(model: nn.Module) -> list[Any]:
    """The configs of a model that hold the flag by which the head is tied to the embedding."""
    config: Any = getattr(model, "config", None)
    holders = [config, *(getattr(config, sub, None) for sub in getattr(config, "sub_configs", {}))]
    return [holder for holder in holders if hasattr(holder, "tie_word_embeddings")]


def untie_configs(model: nn.Module, name: str) -> None:
    """The tie flag goes off in every config that holds it, or the next `tie_weights()` would undo the fold.

    Not where other ties remain, as between the embeddings of T5's encoder and decoder: there the model's own table
    of ties, without this one, is what `tie_weights()` goes by.
    """
    inner = adapters.unwrapped(model)
    name = next(n for n, p in inner.named_parameters() if p is model.get_parameter(name))
    ties = getattr(inner, "_tied_weights_keys", None)
    left = {k: v for k, v in ties.items() if k != name} if isinstance(ties, dict) else {}
    if isinstance(ties, dict):
        inner._tied_weights_keys = left or None
    if getattr(inner, "all_tied_weights_keys", None):
        inner.all_tied_weights_keys = {k: v for k, v in inner.all_tied_weights_keys.items() if k != name}
    if not left:
        for config in _configs(inner):
            config.tie_word_embeddings = False


class _Undo:
    """Brings a model back to where it was. Weights wait in a file, so that folding needs no second copy in memory."""

    def __init__(self, model: nn.Module, path: Path, plan: Plan) -> None:
        self.model, self.path, self.plan = model, path, plan
        self.inner: Any = adapters.unwrapped(model)  # it holds the tables of ties
        links = [link for site, _ in plan for link in targets(site)]
        links += [other for link in links if (other := adapters.taker(model, link)) is not link]
        names = {link.weight for link in links} | {link.bias for link in links if link.bias}
        self.parameters = {name: model.get_parameter(name) for name in sorted(names)}
        # A bias may be made where there is an empty place for one (nowhere else would it be read).
        owners = {link.owner: model.get_submodule(link.owner) for link in links if link.bias is None}
        self.no_bias = [name for name, owner in owners.items() if getattr(owner, "bias", None) is None]
        # Those of this object: what it has from its class is not its own to put back.
        self.attributes = {k: vars(self.inner).get(k) for k in ("_tied_weights_keys", "all_tied_weights_keys")}
        self.ties = [(config, config.tie_word_embeddings) for config in _configs(self.inner)]
        distinct = {id(p): (name, p) for name, p in self.parameters.items()}  # tied ones are written once
        save_file({name: _alone(p.detach()) for name, p in distinct.values()}, path)
        self.written = {name: distinct[id(p)][0] for name, p in self.parameters.items()}

    def __call__(self) -> None:
        with safe_open(self.path, "pt") as saved:
            for name, parameter in self.parameters.items():
                parameter.data.copy_(saved.get_tensor(self.written[name]))
                owner, _, attribute = name.rpartition(".")
                setattr(self.model.get_submodule(owner), attribute, parameter)
        for name in self.no_bias:
            self.model.get_submodule(name).register_parameter("bias", None)
        for site, module in self.plan:
            self.model.set_submodule(site.name, module)
        adapters.declare_biases(self.model)
        for config, flag in self.ties:
            config.tie_word_embeddings = flag
        for name, value in self.attributes.items():
            if value is not None:
                setattr(self.inner, name, value)
            elif name in vars(self.inner):
                delattr(self.inner, name)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor where it fills its storage, else a copy: what a file can hold."""
    fills = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if fills else tensor.clone(memory_format=torch.contiguous_format)


def outputs_of(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The logits, or whatever else the model puts out."""
    output = run(model, inputs)
    logits = getattr(output, "logits", None)
    return [t.detach().clone() for t in tensors(output if logits is None else logits) if t.is_floating_point()]


def compare_outputs(
    before: list[Tensor], after: list[Tensor], narrowed: str = "", left: str = "the model was put back as it was"
) -> tuple[float, float, float]:
    """(largest absolute error, largest relative error, its bound); for half precision that is the bound of 30 dB.

    narrowed: where the model computes in float32 though its weights are float64, if anywhere.
    left: what is left when the error is too large, for the message.

    Raises:
        FoldError: the error is above the bound.
    """
    largest = 0.0
    worst = (0.0, 0.0)  # relative to its bound
    for old, new in zip(before, after, strict=True):
        dtype = old.dtype
        old, new = old.double(), new.double()
        error = float((new - old).abs().max())
        if dtype in BOUNDS:
            relative, bound = error / max(float(old.abs().max()), 1e-30), BOUNDS[dtype]
            if dtype == torch.float64 and narrowed:
                bound = NARROWED
        else:
            relative, bound = float((new - old).norm() / old.norm()), 10 ** (-SIGNAL_TO_NOISE / 20)
        if not relative <= bound:
            raise FoldError(
                f"the folded model's output differs by {relative:.2g} of its size, more than the {bound:.2g} that "
                f"{dtype} allows; {left}. Fold in float64 to see whether it is rounding"
            )
        largest = max(largest, error)
        worst = max(worst, (relative, bound), key=lambda pair: pair[0] / pair[1] if pair[1] else -1.0)
    return largest, *worst
