"""The fixed-target scale loss, and two diagnostics of what it is for.

    absolute:  λ · E[(s(h) − s_tgt)²]            the paper's
    relative:  λ · E[(s(h) / s_tgt − 1)²]        free of the unit of h

on the pre-logit residual h, the input of the final norm; s = r for an RMS norm, σ for a layer norm; s_tgt is the
bias-corrected moving average of E[s], frozen at the end of warm-up. (arXiv 2602.10408, section 4.)

Why it is needed when the final norm goes: a norm is 0-homogeneous, so ⟨∇_h ℓ, h⟩ = 0 through it; without it a
correctly classified token's loss always falls as ‖h‖ grows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.config import TaperConfig
from tapernorm.logits import token_losses
from tapernorm.modules import evaluation, first_input, in_backward, uncompiled
from tapernorm.statistics import Average, Inputs, gather, token_scale


class ScaleAnchor:
    """Watches the final norm's input in training and turns it into the scale loss.

    Attached as a forward pre-hook, so it serves a final norm that is tapered and one that stays.
    """

    def __init__(self, kind: str, eps: float, config: TaperConfig, inputs: Inputs) -> None:
        self.kind, self.eps = kind, eps
        self.config = config
        self.inputs = inputs
        self.target: float | None = None  # s_tgt, None before it is frozen
        self.average = Average(1, 1, config.ema_decay)
        self._sums = torch.zeros(2)  # Σ s and tokens of this optimizer step
        self._loss: Tensor | None = None  # Σ over tokens of the loss, with its graph
        self._tokens: Tensor | None = None
        self.pending = 0  # training forwards that auxiliary_loss() has not taken yet

    @uncompiled
    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook on the final norm, whose one argument is h, [B, T, D]."""
        if not (module.training and self.inputs.training) or in_backward():
            return
        s = token_scale(first_input(args, kwargs), self.kind, self.eps).reshape(-1)
        mask = self.inputs.mask_for(s.numel())
        if mask is not None:
            s = s[mask]
        tokens = torch.tensor(float(s.numel()), device=s.device)
        self.pending += 1
        if self.target is None:
            total = s.detach().sum().float()
            if torch.isfinite(total):
                self._sums = self._sums.to(s.device) + torch.stack([total, tokens])
            return
        deviation = s - self.target if self.config.anchor == "absolute" else s / self.target - 1
        loss = deviation.pow(2).sum()
        self._loss = loss if self._loss is None else self._loss + loss
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no part in the graph of forwards that it did not see."""
        return vars(self) | {"_loss": None, "_tokens": None, "pending": 0}

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """(Σ of λ · loss over tokens, number of tokens) since the last call; (None, None) before s_tgt is frozen."""
        loss, tokens = self._loss, self._tokens
        self._loss = self._tokens = None
        self.pending = 0
        return (None if loss is None else self.config.weight * loss), tokens

    def commit(self) -> None:
        """Enter this optimizer step's mean of s into the moving average."""
        sums = gather(self._sums).sum(0)
        self.average.update((sums[:1] / sums[1:]).reshape(1, 1), valid=sums[1:] > 0)
        self._sums = torch.zeros_like(sums)

    def drop(self) -> None:
        """Forget the sums of a step that did not happen."""
        self._sums = torch.zeros_like(self._sums)
        self.take()

    def freeze(self) -> None:
        """Fix s_tgt at the moving average of E[s]."""
        self.target = float(self.average.value())


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """One look inside a model: the scale at each norm's input, and how the loss pulls on the pre-logit residual.

    scale: E[r] (E[σ] for layer norms) at the input of each site. prelogit_scale: the same at the final norm.
    logit_max: the largest |logit|. logit_std: their standard deviation. radial_gradient: the mean over tokens of
    ⟨∇_h ℓ, h⟩ with ℓ a token's own cross-entropy; 0 through a norm, negative where the loss asks for larger logits.
    """

    scale: dict[str, float]
    prelogit_scale: float
    logit_max: float
    logit_std: float
    radial_gradient: float


def diagnose(model: nn.Module, ids: Tensor, sites: dict[str, tuple[str, float]], final: str | None) -> Diagnosis:
    """Run one evaluation forward and a backward down to the final norm's input; nothing of the model changes.

    Args:
        model: a causal language model whose output has `.logits`.
        ids: [B, T] token ids.
        sites: the kind and eps of each norm to look at, by module name.
        final: the name of the final norm, or of what stands in its place; None if there is none.
    """
    seen: dict[str, float] = {}
    residual: list[Tensor] = []

    def watch(name: str, kind: str, eps: float) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = float(token_scale(first_input(args, kwargs).detach(), kind, eps).mean())

        return hook

    def cut(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A leaf: the gradient is asked for at h alone.
        h = first_input(args, kwargs).detach().requires_grad_()
        residual.append(h)
        return (
            ((h, *args[1:]), kwargs) if args else ((), dict(zip(kwargs, (h, *list(kwargs.values())[1:]), strict=True)))
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluation(model))
        hooks = [(name, watch(name, kind, eps)) for name, (kind, eps) in sites.items()]
        for name, hook in [*hooks, *([(final, cut)] if final is not None else [])]:
            handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        with torch.enable_grad():
            logits = model(input_ids=ids, use_cache=False).logits
            radial = float("nan")
            if residual:
                (gradient,) = torch.autograd.grad(token_losses(logits, ids).sum(), residual[0])
                radial = float((gradient * residual[0].detach()).sum() / ids[:, 1:].numel())
    logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    return Diagnosis(
        scale=seen,
        prelogit_scale=seen.get(final, float("nan")) if final is not None else float("nan"),
        logit_max=float(logits.abs().max()),
        logit_std=float(logits.std()),
        radial_gradient=radial,
    )
