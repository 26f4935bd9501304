"""The two modules of the method: a norm that can be turned down, and what is left of it at the end.

    TaperNorm, rms:    g · h/r · γ            + (1 − g) · c · h · γ̃
    TaperNorm, layer:  g · ((h−μ)/σ · γ + β)  + (1 − g) · (c · (h−μ) · γ̃ + β̃)

With a seat belt κ (`TaperConfig.cap`) a token's c is c · min(1, κ/(c r)), while 0 < g < 1 and, in training, at g = 0: a
token that runs away where nothing holds it takes the whole batch along, and is never brought back.

(arXiv 2602.10408, section 3). h: [..., D]; γ, γ̃, β, β̃: [D]; g and c: one number a site, float32 always. With a linear
fixed branch (`TaperConfig.fixed`) a matrix Γ̃, [D, D], stands for γ̃: c · Γ̃ h.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tapernorm.belts import bound_gradient
from tapernorm.probe import Norm, gain

Path = Literal["exact", "mixed", "fixed"]
# nn.TransformerEncoderLayer reads the epsilons of its norms, and where they are equal also the gains: it then computes
# the norms itself, past their modules. This one is equal to no other.
NO_EPS = float("nan")
uncompiled: Any = torch.compiler.disable  # Any: as a decorator of methods its type binds to nothing


class FixedScale(nn.Module):
    """c · h · γ̃, or c · (h − mean(h)) · γ̃ + β̃: a norm's fixed branch, with no per-token scale.

    Computed in float32, or wider if h is, and rounded once.
    """

    c: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone()) if bias is not None else None
        self.centred = centred
        self.register_buffer("c", torch.ones(1, dtype=torch.float32, device=weight.device))

    def forward(self, h: Tensor) -> Tensor:
        x = h.to(torch.promote_types(h.dtype, torch.float32))
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        y = x * (self.c * self.weight)
        if self.bias is not None:
            y = y + self.bias
        return y.to(torch.promote_types(h.dtype, self.weight.dtype))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FixedScale:
        return _apply_but_keep_float32(self, fn, recurse)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, bias={self.bias is not None}, centred={self.centred}"


class FixedLinear(FixedScale):
    """c · Γ̃ h, or c · Γ̃ (h − mean(h)) + β̃: a fixed branch that is a full matrix. It folds at the same cost, none.

    weight: Γ̃, [D, D]. The product is made in the dtype of h and weight, or in autocast's, as that of any linear map.
    """

    def forward(self, h: Tensor) -> Tensor:
        x = h.to(torch.promote_types(h.dtype, self.weight.dtype))
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, (self.c * self.weight).to(x.dtype), bias)


class TaperNorm(nn.Module):
    """A norm and its fixed branch, mixed by a gate.

    Three paths, chosen by a plain attribute, so that a gate that moves never recompiles: `"exact"` calls the
    replaced norm itself, so that its output is the same to the bit in every dtype and cast order; `"mixed"`
    reads the gate from a buffer; `"fixed"` computes no statistics (in training with a seat belt, `"mixed"` at gate 0).

    The names of the parts are chosen for stock optimizers: transformers' Trainer takes parameters whose names
    contain `norm.` or `_norm.` out of weight decay, wherever this module sits.

    Args:
        norm: the module that is replaced; it becomes the submodule `norm`.
        probed: what `norm` computes, from `tapernorm.probe.probe`.
        width: D.
        like: a tensor of the model's dtype and device, for a norm that has no parameter to take them from.
        linear: the fixed branch is a matrix.
    """

    gate: Tensor
    fixed_norm: Any  # a FixedScale

    def __init__(
        self, norm: nn.Module, probed: Norm, width: int, like: Tensor | None = None, linear: bool = False
    ) -> None:
        super().__init__()
        self.norm = norm
        self.probed = probed
        self.width = width
        g = gain(norm, probed, width)
        bias = getattr(norm, probed.bias).reshape(width) if probed.bias else None
        own = next(norm.parameters(), g if like is None else like)
        kind, weight = (FixedLinear, torch.diag(g)) if linear else (FixedScale, g)
        fixed = kind(weight.to(own.device, own.dtype), bias, centred=probed.kind == "layer")
        # What its owner froze stays frozen; a norm without parameters goes with what surrounds it.
        fixed.requires_grad_(own.requires_grad or not isinstance(own, nn.Parameter))
        self.fixed_norm = fixed
        self.register_buffer("gate", torch.ones(1, dtype=torch.float32, device=own.device))
        self.path: Path = "exact"
        self.cap: float | None = None  # κ of the seat belt
        self.gradient_cap: float | None = None
        self.eps = NO_EPS
        # Set by the controller while statistics are gathered; called with the input of every training forward.
        self.observer: Callable[[Tensor], None] | None = None
        # Set by the controller where there is a uniformity loss: h -> h, with a gradient of its own.
        self.pull: Callable[[Tensor], Tensor] | None = None
        self._handle = _handle_of(self)
        self.train(norm.training)

    def forward(self, h: Tensor | None = None, **named: Tensor) -> Tensor:
        if h is None:  # a model that passes its norms' input by name
            (h,) = named.values()
        if self.training:
            if torch.compiler.is_compiling():
                # Not asked whether there is an observer: that changes once more than the path does, and a third of
                # the three compilations of a run would become a fourth.
                if self.path == "exact":
                    torch.ops.tapernorm.observe(h, self._handle)
            elif self.observer is not None and not in_backward():
                self.observer(h)
            if self.pull is not None:
                h = self.pull(h)
            if self.gradient_cap is not None:
                h = bound_gradient(h, self.gradient_cap)
        if self.path == "exact":
            return self._hold(self.norm(h), self.fixed_norm)
        if self.path == "fixed" and not (self.training and self.cap is not None):
            return self._hold(self.fixed_norm(h), self.norm)
        return self._mix(h)

    @property
    def ruler(self) -> tuple[Tensor, str, float]:
        """c, and the kind and ε by which a token's scale is measured."""
        return self.fixed_norm.c, self.probed.kind, self.probed.eps

    def gain(self) -> Tensor:
        """γ in float32 or wider, with the one added where the norm's gain is zero-centred. [D]"""
        return gain(self.norm, self.probed, self.width).to(self.gate.device)

    def _mix(self, h: Tensor) -> Tensor:
        fixed = self.fixed_norm
        x = h.to(torch.promote_types(h.dtype, torch.float32))
        gate = self.gate.to(x.dtype)  # 1 − g in float32 would be the largest error of a float64 model
        if isinstance(fixed, FixedLinear):
            return self._mix_linear(h, gate)
        a, k = (gate * self.gain()).to(x.dtype), ((1 - gate) * fixed.c * fixed.weight).to(x.dtype)
        shift = None
        if fixed.bias is not None:
            bias = getattr(self.norm, str(self.probed.bias)).reshape(self.width)
            shift = (gate * bias + (1 - gate) * fixed.bias).to(x.dtype)
        if self.cap is not None:
            y: Any = self._mix_capped(x, a, k, shift, self.cap)
        elif self.probed.kind == "rms":
            y = _Mix.apply(x, a, k, self.probed.eps)
        else:
            y = _MixCentred.apply(x, a, k, torch.zeros_like(k) if shift is None else shift, self.probed.eps)
        return y.to(torch.promote_types(h.dtype, fixed.weight.dtype))

    def _mix_linear(self, h: Tensor, gate: Tensor) -> Tensor:
        fixed, x = self.fixed_norm(h), h.to(gate.dtype)
        if self.cap is not None:
            x = x - x.mean(-1, keepdim=True) if self.probed.kind == "layer" else x
            r = torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.probed.eps)
            held = (self.cap / (self.fixed_norm.c.to(x.dtype) * r)).clamp(max=1)
            shift = 0 if self.fixed_norm.bias is None else self.fixed_norm.bias
            fixed = held * (fixed - shift) + shift
        y = torch.lerp(fixed.to(x.dtype), self.norm(h).to(x.dtype), gate)
        return y.to(torch.promote_types(h.dtype, self.fixed_norm.weight.dtype))

    def _mix_capped(self, x: Tensor, a: Tensor, k: Tensor, shift: Tensor | None, cap: float) -> Tensor:
        if self.probed.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        r = torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.probed.eps)
        y = x * torch.addcmul(a / r, k, (cap / (self.fixed_norm.c.to(x.dtype) * r)).clamp(max=1))
        return y if shift is None else y + shift

    def _hold(self, y: Tensor, unused: nn.Module) -> Tensor:
        """y, with the parameters of the branch that this path leaves out kept in the graph with zero gradient.

        DistributedDataParallel stops when a parameter that had a gradient gets none after a change of path.
        """
        if not (self.training and y.requires_grad and torch.is_grad_enabled()):
            return y
        parameters = [p for p in unused.parameters() if p.requires_grad]
        return _Hold.apply(y, *parameters) if parameters else y  # type: ignore[return-value]

    def set_gate(self, value: float) -> None:
        """Write the gate in place and choose the path that computes it: 1 exact, 0 fixed, mixed between."""
        self.gate.fill_(value)
        self.path = "exact" if value == 1 else "fixed" if value == 0 else "mixed"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TaperNorm:
        return _apply_but_keep_float32(self, fn, recurse)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = _handle_of(self)  # a copy is observed for itself

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not self.gate.is_meta:  # the state dict is the authority for the gate, and the path follows it
            self.set_gate(float(self.gate))

    def extra_repr(self) -> str:
        return f"{self.probed.kind}, path={self.path}"


# Compiled code calls the observer through an operator, which is opaque to the compiler. A module is named by a tensor,
# because a number would be compiled in, for every layer anew.
_HANDLES: weakref.WeakValueDictionary[int, TaperNorm] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def _handle_of(module: TaperNorm) -> Tensor:
    number = next(_NUMBERS)
    _HANDLES[number] = module
    return torch.tensor([number])


@torch.library.custom_op("tapernorm::observe", mutates_args=("handle",))  # said to change it, or it would be dropped
def _observe(h: Tensor, handle: Tensor) -> None:
    module = _HANDLES.get(int(handle))
    if module is not None and module.observer is not None and not in_backward():
        module.observer(h)


class _Mix(torch.autograd.Function):
    """x · (a/r + k), r = sqrt(mean(x²) + eps): both branches of a TaperNorm at the cost of the norm alone.

    x: [..., D]; a = g γ and k = (1 − g) c γ̃: [D]. One reduction forward; written out backward because autograd's
    own would pass over [..., D] twice as often:

        ∂x = dy · (a/r + k) − x / (D r³) · Σ_d dy x a,    ∂a = Σ_tokens dy x / r,    ∂k = Σ_tokens dy x
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, k: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, a, k, inverse)
        return x * torch.addcmul(k, inverse, a)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a, k, inverse = ctx.saved_tensors
        dy = grads[0]
        dyx = (dy * x).reshape(-1, x.shape[-1])
        flat = inverse.reshape(-1, 1)
        with torch.autocast(x.device.type, enabled=False):  # or the products would be taken in half precision
            pull = (dyx @ a).view_as(inverse) * inverse.pow(3) / -x.shape[-1]
            da = dyx.mT @ flat
        dx = torch.addcmul(dy * torch.addcmul(k, inverse, a), x, pull)
        return dx, da.reshape(-1), dyx.sum(0), None


class _MixCentred(torch.autograd.Function):
    """n · (a + k σ) + b with n = (x − mean(x)) / σ: the same for a layer norm, on top of its fused kernel.

    ∂x comes from that kernel's backward for n, and from ∂σ = Σ_d dy n k with ∂σ/∂x = n / D.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, k: Tensor, b: Tensor, eps: float) -> Tensor:
        n, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        sigma = inverse.reciprocal()
        ctx.save_for_backward(x, a, k, n, mean, inverse, sigma)
        return torch.addcmul(b, n, torch.addcmul(a, sigma, k))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a, k, n, mean, inverse, sigma = ctx.saved_tensors
        dy, width = grads[0], x.shape[-1]
        dyn = (dy * n).reshape(-1, width)
        with torch.autocast(x.device.type, enabled=False):
            pull = (dyn @ k).view_as(sigma) / width
            dk = dyn.mT @ sigma.reshape(-1, 1)
        dn = dy * torch.addcmul(a, sigma, k)
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            dn, x, x.shape[-1:], mean, inverse, None, None, [True, False, False]
        )
        return torch.addcmul(dx, n, pull), dyn.sum(0), dk.reshape(-1), dy.reshape(-1, width).sum(0), None


class _Hold(torch.autograd.Function):
    """Identity on the first input; zero gradient for the others."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return (grads[0], *(torch.zeros_like(p) for p in ctx.saved_tensors))


def in_backward() -> bool:
    """True inside a backward pass, where gradient checkpointing runs a forward for the second time.

    Not told by the grad mode: the first pass of reentrant checkpointing has it off.
    """
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own training flag comes back afterwards."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a hook's module reads: a norm's one input may come by name."""
    return next(iter((*args, *kwargs.values())))


def taper_norms(model: nn.Module) -> dict[str, TaperNorm]:
    """Every TaperNorm of a model by its full name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TaperNorm)}


def _apply_but_keep_float32(module: Any, fn: Callable[..., Any], recurse: bool) -> Any:
    """`nn.Module._apply`, but buffers follow to another device only: `.bfloat16()` must not round gate and c."""
    before = dict(module._buffers)
    nn.Module._apply(module, fn, recurse)
    for name, old in before.items():
        new = module._buffers[name]
        if new.dtype != old.dtype:
            module._buffers[name] = torch.empty_like(old, device=new.device) if old.is_meta else old.to(new.device)
    return module
