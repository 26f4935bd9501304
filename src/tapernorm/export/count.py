"""What a forward computes: operations by kind and module, and how deep the products of unknown values are nested.

Both are counted at the level of torch's own operations, so nothing of a model's code has to be known. A value is
`unknown` (encrypted, or simply not a constant of the chip) when it depends on the input; weights, constants and angles
of positions are known. Three depths are followed, each the longest chain of its own kind from the input:

    products    unknown × unknown: queries · keys, weights of attention · values, gates, squares
    scalings    unknown × known: linear maps, gains, constants
    functions   what is no polynomial: exp, 1/x, 1/√x, an activation (silu counts once, and once more as a product)

Softmax is exp, a sum, 1/x and a product. Sums and copies cost no depth.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tapernorm.operations import tensors

Counts = dict[str, int]
KINDS = (
    "multiply-adds with weights", "multiply-adds of activations", "multiplications", "additions", "reductions",
    "divisions", "square roots", "exponentials", "activation functions", "sines and cosines", "table look-ups",
)  # fmt: skip
_WEIGHTS, _ACTIVATIONS, _TIMES, _PLUS, _SUMS, _OVER, _ROOTS, _EXPS, _FUNCTIONS, _ANGLES, _LOOKUPS = KINDS
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_grouped_mm": (0, 1), "mv": (0, 1)}
_ELEMENTWISE = {
    "add": _PLUS, "add_": _PLUS, "sub": _PLUS, "rsub": _PLUS, "neg": _PLUS, "mul": _TIMES, "mul_": _TIMES,
    "square": _TIMES, "exp": _EXPS, "sqrt": _ROOTS, "reciprocal": _OVER, "sin": _ANGLES, "cos": _ANGLES,
    "silu": _FUNCTIONS, "gelu": _FUNCTIONS, "relu": _FUNCTIONS, "tanh": _FUNCTIONS, "sigmoid": _FUNCTIONS,
    "erf": _FUNCTIONS, "softplus": _FUNCTIONS, "hardtanh": _FUNCTIONS, "clamp": _FUNCTIONS, "elu": _FUNCTIONS,
    "leaky_relu": _FUNCTIONS, "log": _FUNCTIONS,
}  # fmt: skip
_REDUCTIONS = {"mean", "sum", "amax", "amin", "max", "min", "var", "std", "prod", "argmax", "topk", "sort", "norm"}
_REDUCTIONS |= {"linalg_vector_norm", "logsumexp"}
_GATED = {"silu", "gelu"}  # x times a function of x


@dataclasses.dataclass(frozen=True)
class Depth:
    """The longest chains that lead to a value."""

    products: int = 0
    scalings: int = 0
    functions: int = 0

    def plus(self, products: int = 0, scalings: int = 0, functions: int = 0) -> Depth:
        """A chain that goes on."""
        return Depth(self.products + products, self.scalings + scalings, self.functions + functions)

    def minus(self, other: Depth) -> Depth:
        """What was added since."""
        return Depth(self.products - other.products, self.scalings - other.scalings, self.functions - other.functions)

    @staticmethod
    def deepest(depths: list[Depth]) -> Depth:
        """Each chain by itself."""
        return Depth(*(max(values) for values in zip(*map(dataclasses.astuple, depths), strict=True)))


class Counter(TorchDispatchMode):
    """Counts what runs inside its `with` block. counts: kind by module; `depth(tensor)`: of what was seen."""

    def __init__(self, unknown: Any = ()) -> None:
        super().__init__()
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.strange: collections.Counter[str] = collections.Counter()
        self.stack: list[str] = [""]
        self._depths: dict[int, tuple[Tensor, Depth]] = {}  # alive, so that an identity is not used twice
        for tensor in tensors(unknown):
            if tensor.is_floating_point():
                self._note(tensor, Depth())

    def total(self) -> Counts:
        """By kind, over all modules."""
        summed = sum(self.counts.values(), collections.Counter())
        return {kind: summed[kind] for kind in KINDS}

    def depth(self, value: Any) -> Depth:
        """Of the deepest tensor in a nest; zero where all of it is known."""
        return Depth.deepest([self._depths[id(t)][1] for t in tensors(value) if id(t) in self._depths] or [Depth()])

    def _note(self, tensor: Tensor, depth: Depth) -> None:
        self._depths[id(tensor)] = (tensor, depth)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = list(tensors(out))
        inputs = list(tensors([args, kwargs or {}]))
        floats = made and made[0].is_floating_point()
        unknown = [t for t in inputs if id(t) in self._depths]
        if floats or name in ("argmax", "topk", "sort"):
            self._count(name, args, inputs, unknown, made)
        if name == "embedding":
            self._note(out, Depth())
        elif unknown:
            depth = self._deeper(name, args, unknown, Depth.deepest([self._depths[id(t)][1] for t in unknown]))
            for tensor in made:
                if tensor.is_floating_point():
                    self._note(tensor, depth)
            if name.endswith("_") and isinstance(args[0], Tensor):
                self._note(args[0], depth)
        return out

    def _count(self, name: str, args: Any, inputs: list[Tensor], unknown: list[Tensor], made: list[Tensor]) -> None:
        counted, size = self.counts[self.stack[-1]], made[0].numel()
        if name in _PRODUCTS:
            left, right = (args[i] for i in _PRODUCTS[name])
            both = id(left) in self._depths and id(right) in self._depths
            counted[_ACTIVATIONS if both else _WEIGHTS] += size * left.shape[-1]
            if name in ("addmm", "baddbmm"):
                counted[_PLUS] += size
        elif name == "convolution":
            counted[_WEIGHTS] += size * args[1][0].numel()
        elif name in _REDUCTIONS:
            counted[_SUMS] += size
            counted[_ROOTS] += size * (name in ("std", "norm", "linalg_vector_norm"))
        elif name in ("_softmax", "_safe_softmax", "_log_softmax"):
            rows = size // max(made[0].shape[-1], 1)
            counted.update({_EXPS: size, _OVER: size, _SUMS: 2 * rows})
        elif name in ("native_layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm"):
            rows = size // max(made[0].shape[-1], 1)
            centred = "layer" in name or "group" in name
            counted.update({_SUMS: rows * (1 + centred), _ROOTS: rows, _OVER: rows})
            counted.update({_TIMES: 3 * size, _PLUS: 2 * size * centred})
        elif name == "rsqrt":
            counted.update({_ROOTS: size, _OVER: size})
        elif name in ("div", "div_", "true_divide"):
            counted[_OVER if isinstance(args[1], Tensor) and args[1].dim() else _TIMES] += size
        elif name == "pow":
            self._count_power(args, size)
        elif name == "embedding":
            counted[_LOOKUPS] += size // made[0].shape[-1]
        elif name in _ELEMENTWISE:
            counted[_ELEMENTWISE[name]] += size
        elif unknown and name.startswith(("_scaled_dot_product", "_flash", "_efficient")):
            self.strange[name] += 1

    def _count_power(self, args: Any, size: int) -> None:
        counted, power = self.counts[self.stack[-1]], args[1] if isinstance(args[0], Tensor) else None
        if isinstance(power, int | float) and power in (2, 3, 4):
            counted[_TIMES] += size * (int(power) // 2 if power != 3 else 2)
        elif power in (0.5, -0.5):
            counted[_ROOTS] += size
            counted[_OVER] += size * (power < 0)
        else:
            counted[_FUNCTIONS] += size

    def _deeper(self, name: str, args: Any, unknown: list[Tensor], depth: Depth) -> Depth:
        several = len(unknown) > 1
        if name in _PRODUCTS:
            both = all(id(args[i]) in self._depths for i in _PRODUCTS[name])
            return depth.plus(products=1) if both else depth.plus(scalings=1)
        if name in ("mul", "mul_"):
            return depth.plus(products=1) if several else depth.plus(scalings=1)
        if name in ("convolution", "mean"):
            return depth.plus(scalings=1)
        if name in ("div", "div_", "true_divide"):
            by_unknown = isinstance(args[1], Tensor) and id(args[1]) in self._depths
            return depth.plus(products=1, functions=1) if by_unknown else depth.plus(scalings=1)
        if name == "pow":
            power = args[1] if isinstance(args[1], int | float) else 0.5
            whole = float(power).is_integer() and power > 1
            return depth.plus(products=math.ceil(math.log2(power))) if whole else depth.plus(functions=1)
        if name in ("_softmax", "_safe_softmax", "_log_softmax"):
            return depth.plus(products=1, functions=2)
        if name in ("native_layer_norm", "_fused_rms_norm", "rms_norm"):
            return depth.plus(products=2, scalings=2, functions=1)
        if name in ("rsqrt", "reciprocal") or _ELEMENTWISE.get(name) in (_EXPS, _ROOTS, _FUNCTIONS):
            return depth.plus(products=int(name in _GATED), functions=1)
        if name in ("amax", "max", "amin", "min", "topk", "sort"):
            return depth.plus(functions=1)
        return depth.plus(products=1) if name == "square" else depth


@contextlib.contextmanager
def by_module(model: nn.Module, counter: Counter) -> Iterator[None]:
    """Attribute what is counted to the module whose forward runs, by its full name."""

    def leave(*_: Any) -> None:  # what a hook returns would replace the output
        counter.stack.pop()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: counter.stack.append(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
