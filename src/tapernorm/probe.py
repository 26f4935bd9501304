"""What a norm computes, measured by feeding it inputs rather than read off its class name.

    rms:    y = h / sqrt(mean(h²) + eps) · γ
    layer:  y = (h − mean(h)) / sqrt(var(h) + eps) · γ + β

with γ the weight w itself, 1 + w (zero-centred: Gemma, Nemotron, Qwen3-Next) or nothing. Class names do not tell:
transformers has some forty norm classes, and two that share a name may differ in the gain's convention.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any, Literal

import torch
from torch import Tensor, nn

_TOKENS = (4, 8)  # [B, T]: fed two dimensions, a norm over the tokens (GroupNorm(1, T)) would look like one over D
_TINY = 1e-6  # scale of the input at which eps shows; its square is far below every eps in use


@dataclasses.dataclass(frozen=True)
class Norm:
    """What the probe found. `gain` and `bias` are the names of the module's parameters, None where it has none."""

    kind: Literal["rms", "layer"]
    eps: float
    zero_centered: bool
    gain: str | None
    bias: str | None


@torch.no_grad()
def probe(module: nn.Module, width: int) -> Norm | None:
    """Explain `module` as an RMS or a layer norm over the last dimension, or return None.

    Works on a CPU copy with random parameters, so neither the module nor its values matter: a module on the
    meta device is explained as well.

    Args:
        module: a module without submodules that maps [..., width] to [..., width].
        width: size of the last dimension of its input.
    """
    pairs = _parameter_names(module, width)
    twin = _cpu_twin(module) if pairs else None
    if twin is None:
        return None
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parameters = dict(twin.named_parameters())
    for parameter in parameters.values():
        parameter.copy_((0.3 * normal(width) + 0.7).view(parameter.shape))
    dtype = next((p.dtype for p in parameters.values()), torch.float32)
    values = {name: parameter.double().reshape(-1) for name, parameter in parameters.items()}
    blank = torch.zeros(width, dtype=torch.float64)

    # Large inputs with a mean of their own: eps vanishes, and a layer norm differs from an RMS norm.
    large = 1e3 * (normal(*_TOKENS, width) + 0.5)
    measured = _call(twin, large.to(dtype))
    if measured is None:
        return None
    units = {"rms": _unit(large), "layer": _unit(large - large.mean(-1, keepdim=True))}
    for kind, unit in units.items():
        for gain_name, bias_name, zero_centered in pairs:
            w, b = values.get(gain_name or "", 1 - blank), values.get(bias_name or "", blank)
            gain = 1 + w if zero_centered else w
            wanted = unit * gain + b
            if (measured - wanted).abs().max() > 1e-4 * wanted.abs().max():
                continue
            # y − b = s / sqrt(s² + eps) · (u γ) for an input s·u of unit scale u.
            random = normal(*_TOKENS, width)
            unit_input = _unit(random if kind == "rms" else _centred(random))
            small = _call(twin, (_TINY * unit_input).to(dtype))
            if small is None:
                return None
            direction = unit_input * gain
            ratio = float(((small - b) * direction).sum() / direction.pow(2).sum())
            if not 0 < ratio < 1 + 1e-4:
                return None
            eps = max(0.0, _TINY**2 * (1 / ratio**2 - 1))
            return Norm(kind, _nominal(module, eps), zero_centered, gain_name, bias_name)  # type: ignore[arg-type]
    return None


_OWN = set(vars(nn.Module()))  # what every module has
_PLAIN = (int, float, str, bool, type(None), torch.dtype)


def likeness(module: nn.Module, width: int) -> Any:
    """Equal for modules that compute the same up to the values of their parameters; None where that is not sure.

    A large model has hundreds of norms and one or two kinds of them, and only the kinds need to be measured.
    """
    own = [(name, value) for name, value in sorted(vars(module).items()) if name not in _OWN]
    parts = [part for _, value in own for part in (value if isinstance(value, tuple) else (value,))]
    plain = all(isinstance(part, _PLAIN) for part in parts)
    if not plain or next(module.buffers(), None) is not None or next(module.children(), None) is not None:
        return None
    parameters = [(name, p.shape, p.dtype, p.is_meta) for name, p in module.named_parameters()]
    return type(module), width, tuple(own), tuple(parameters)


def gain(module: nn.Module, norm: Norm, width: int) -> Tensor:
    """γ of a norm, in float32 or wider: its weight, one plus its weight, or ones. [width]"""
    weight = getattr(module, norm.gain) if norm.gain else None
    if weight is None:
        anchor = next(module.parameters(), torch.empty(0))
        return torch.ones(width, device=anchor.device)
    wide = weight.reshape(width).to(torch.promote_types(weight.dtype, torch.float32))
    return 1 + wide if norm.zero_centered else wide


def _parameter_names(module: nn.Module, width: int) -> list[tuple[str | None, str | None, bool]]:
    """Every (gain, bias, whether one is added to the gain) that the module's parameters can be. Names do not count."""
    if next(module.children(), None) is not None:
        return []
    names = []
    for name, parameter in module.named_parameters():
        if parameter.numel() != width or parameter.shape[-1] != width:
            return []
        names.append(name)
    found: list[tuple[str | None, str | None, bool]] = []
    for gain_name, bias_name in itertools.permutations([*names, *[None] * (2 - len(names))], 2):
        if {gain_name, bias_name} >= set(names):
            found += [(gain_name, bias_name, one) for one in ((False, True) if gain_name else (False,))]
    return list(dict.fromkeys(found))


def _cpu_twin(module: nn.Module) -> nn.Module | None:
    """A copy on the CPU, in float32 or float64, without hooks. None for what cannot be copied."""
    try:
        twin = copy.deepcopy(module)
    except Exception:  # a module that holds a generator, a lock, ... is no norm
        return None
    for hooks in (twin._forward_hooks, twin._forward_pre_hooks, twin._backward_hooks):
        hooks.clear()
    if any(buffer.is_meta for buffer in twin.buffers()):  # an eps, say, of which nobody knows the value
        return None
    on_meta = any(t.is_meta for t in twin.parameters())
    twin = twin.to_empty(device="cpu") if on_meta else twin.cpu()
    dtypes = {p.dtype for p in twin.parameters()}
    return (twin if dtypes == {torch.float64} else twin.float()).eval()


def _call(module: nn.Module, x: Tensor) -> Tensor | None:
    try:
        y = module(x)
    except Exception:  # not a module of one tensor
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape or not torch.isfinite(y).all():
        return None
    return y.double()


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _unit(x: Tensor) -> Tensor:
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


def _nominal(module: nn.Module, measured: float) -> float:
    """The number that the module was given, where one of its attributes agrees with the measurement."""
    if measured < 1e-3 * _TINY**2:
        return 0.0
    numbers = [float(buffer) for buffer in module.buffers() if buffer.numel() == 1 and not buffer.is_meta]
    for value in [*vars(module).values(), *numbers]:
        if isinstance(value, float) and abs(value - measured) <= 1e-2 * measured:
            return value
    return measured
