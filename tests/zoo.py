"""Tiny models, one row each, on which every invariant runs.

Every matrix is square where the family allows it (width = intermediate = vocabulary = D), so that a wrong axis
raises nothing and changes numbers. `randomise` must follow: on fresh weights the gains are 1 and the biases 0, and a
wrong fold changes nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import tapernorm as tn
from tapernorm.modules import TaperNorm, taper_norms

D = 16
LAYERS = 2
_BUILT: dict[tuple[str, ...], Any] = {}  # a copy is quicker than a model
IDS = torch.randint(D, (2, 9), generator=torch.Generator().manual_seed(1))


@dataclasses.dataclass(frozen=True)
class Row:
    """One tiny model.

    model_type, config: what transformers builds it from. kind: of its norms. layer: the name of a block, with {} for
    its number. norms: each norm of a block in the order of execution, with the linear maps that read it. final: the
    norm before the head. tied: whether the head is the embedding's transpose.
    """

    name: str
    model_type: str
    config: dict[str, Any]
    kind: str
    layer: str
    norms: dict[str, tuple[str, ...]]
    final: str
    embedding: str
    tied: bool
    head: str = "lm_head"

    def build(self, **changes: Any) -> nn.Module:
        """A fresh model with random weights, in evaluation mode."""
        key = self.name, str(changes)
        if key not in _BUILT:
            ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
            config = transformers.AutoConfig.for_model(self.model_type, **{**ends, **self.config, **changes})
            torch.manual_seed(0)
            _BUILT[key] = transformers.AutoModelForCausalLM.from_config(config).eval()
        return copy.deepcopy(_BUILT[key])

    @property
    def sites(self) -> dict[str, tuple[str, ...]]:
        """Every norm and the weights that read it, in the order of execution."""
        found = {}
        for layer in map(self.layer.format, range(LAYERS)):
            for norm, readers in self.norms.items():
                found[f"{layer}.{norm}"] = tuple(f"{layer}.{reader}.weight" for reader in readers)
        return {**found, self.final: (f"{self.head}.weight",)}


_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "kind": "rms",
    "layer": "model.layers.{}",
    "norms": {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    },
    "final": "model.norm",
    "embedding": "model.embed_tokens.weight",
}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "kind": "layer",
    "layer": "transformer.h.{}",
    "norms": {"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
    "final": "transformer.ln_f",
    "embedding": "transformer.wte.weight",
}
_LLAMA_SHAPE = {
    "vocab_size": D, "hidden_size": D, "intermediate_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GPT2_SHAPE = {"vocab_size": D, "n_embd": D, "n_inner": D, "n_layer": LAYERS, "n_head": 2, "n_positions": 64}

ROWS = (
    Row("llama-tied", **_LLAMA, config=_LLAMA_SHAPE | {"tie_word_embeddings": True}, tied=True),
    Row("llama", **_LLAMA, config=_LLAMA_SHAPE | {"tie_word_embeddings": False}, tied=False),
    Row("llama-bias", **_LLAMA, config=_LLAMA_SHAPE | {"attention_bias": True, "mlp_bias": True}, tied=False),
    Row("gpt2", **_GPT2, config=_GPT2_SHAPE, tied=True),
    Row("gpt2-untied", **_GPT2, config=_GPT2_SHAPE | {"tie_word_embeddings": False}, tied=False),
)
BY_NAME = {row.name: row for row in ROWS}


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Make every gain, bias, c and weight random and different, and the residual's mean about its deviation.

    Gains lie in [0.5, 1.5], biases have a deviation of 0.3, c lies in [0.3, 0.8], embeddings have mean 1 and
    deviation 1. In place.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    def uniform(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator, dtype=torch.float64)

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings:
            parameter.copy_(normal(parameter) + 1)
        elif "bias" in name:
            parameter.copy_(0.3 * normal(parameter))
        elif parameter.dim() == 1:
            parameter.copy_(uniform(parameter) + 0.5)
        else:
            parameter.copy_(normal(parameter) * D**-0.5 * 0.7)
    for module in taper_norms(model).values():
        module.fixed_norm.c.copy_(0.5 * uniform(module.fixed_norm.c) + 0.3)
    return model


def tapered(row: Row, arm: str = "all", gate: float = 0.0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tapered model with random gains, biases and c, its gates set by hand."""
    key = row.name, arm, str(changes)
    if key not in _BUILT:
        _BUILT[key] = row.build(**changes)
        tn.taper_(_BUILT[key], tn.TaperConfig(arm=arm))  # type: ignore[arg-type]
        randomise(_BUILT[key].double())
    model = copy.deepcopy(_BUILT[key]).to(dtype)
    for module in taper_norms(model).values():
        module.set_gate(gate)
    return model


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    """[B, T, V], without a graph."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def relative(new: Tensor, old: Tensor) -> float:
    """The largest difference, over the largest value."""
    return float((new.double() - old.double()).abs().max() / old.double().abs().max())


def decibels(new: Tensor, old: Tensor) -> float:
    """Signal to noise."""
    return float(20 * torch.log10(old.double().norm() / (new.double() - old.double()).norm()))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a refusal must leave as it was: values, identities, order, flags, hooks and config."""
    config = getattr(model, "config", None)
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "keys": list(model.state_dict()),
        "modules": [(name, id(m), type(m), m.training) for name, m in model.named_modules(remove_duplicate=False)],
        "parameters": [(n, id(p), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)],
        "hooks": [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()],
        "paths": [(n, m.path, m.observer) for n, m in model.named_modules() if isinstance(m, TaperNorm)],
        "attributes": {k: v for k, v in vars(model).items() if "tie" in k},
        "names": set(vars(model)),
        "config": None if config is None else config.to_dict(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Two snapshots are equal, bit for bit."""
    states = before["state"], after["state"]
    for key in before:
        if key != "state":
            assert before[key] == after[key], key
    for key, value in states[0].items():
        assert value.dtype == states[1][key].dtype, key
        if not value.is_meta:
            torch.testing.assert_close(states[1][key], value, rtol=0, atol=0, equal_nan=True, msg=key)


# Hand-made modules: one function each of a norm, an input and some linear maps.


class Toy(nn.Module):
    """What a function makes of `norm`, `other` (a second norm), three linear maps and two bare parameters."""

    def __init__(self, function: Callable[[Any, Tensor], Any], norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.norm, self.other = norm(D), norm(D)
        self.up, self.down, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.conv = Conv1D(D, D)
        self.drop = nn.Dropout(0.5)
        self.matrix, self.vector = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class PlainNorm(nn.Module):
    """An RMS norm whose class says nothing to anyone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale


class Quark(PlainNorm):
    """The same, and not even called a norm."""


X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(2)) + 1
SQUARE = torch.randn(2, D, D, generator=torch.Generator().manual_seed(3)) + 1  # as many tokens as features
PERMUTATION = torch.arange(D - 1, -1, -1)


def _residual(read: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """x + down(relu(read(norm(x))))"""
    return lambda m, x: x + m.down(read(m, m.norm(x)).relu())


# name -> (function, the weights that read `norm`)
REMOVABLE: dict[str, tuple[Callable[[Any, Tensor], Any], tuple[str, ...]]] = {
    "linear": (_residual(lambda m, y: m.up(y)), ("up.weight",)),
    "no-bias": (_residual(lambda m, y: m.head(y)), ("head.weight",)),
    "conv1d": (_residual(lambda m, y: m.conv(y)), ("conv.weight",)),
    "two": (_residual(lambda m, y: m.up(y) * m.head(y)), ("up.weight", "head.weight")),
    "functional": (_residual(lambda m, y: F.linear(y, m.matrix, m.vector)), ("matrix",)),
    "keywords": (_residual(lambda m, y: F.linear(y, weight=m.matrix, bias=m.vector)), ("matrix",)),
    "input-keyword": (_residual(lambda m, y: F.linear(input=y, weight=m.matrix, bias=m.vector)), ("matrix",)),
    "addmm": (_residual(lambda m, y: torch.addmm(m.vector, y.flatten(0, 1), m.matrix).view_as(y)), ("matrix",)),
    "addmm-transposed": (
        _residual(lambda m, y: torch.addmm(m.vector, y.view(-1, D), m.matrix.T).view_as(y)), ("matrix",),
    ),
    "transposed-thrice": (_residual(lambda m, y: F.linear(y, m.matrix.t().transpose(0, 1).mT, m.vector)), ("matrix",)),
    "contiguous": (_residual(lambda m, y: F.linear(y, m.matrix.T.contiguous(), m.vector)), ("matrix",)),
    "last-token": (_residual(lambda m, y: m.up(y[:, -1:])), ("up.weight",)),
    "some-tokens": (_residual(lambda m, y: m.up(y[:, torch.tensor([3, 1, 1, 0, 2])])), ("up.weight",)),
    "chosen-tokens": (_residual(lambda m, y: m.up(y.index_select(1, torch.tensor([4, 3, 2, 1, 0])))), ("up.weight",)),
    "one-sequence": (_residual(lambda m, y: m.up(y.unbind(0)[0])), ("up.weight",)),
    "tokens-split": (_residual(lambda m, y: torch.cat([m.up(t) for t in y.split(2, 1)], 1)), ("up.weight",)),
    "time-first": (_residual(lambda m, y: m.up(y.transpose(0, 1)).transpose(0, 1)), ("up.weight",)),
    "flat": (_residual(lambda m, y: m.up(y.reshape(-1, D)).unflatten(0, y.shape[:2])), ("up.weight",)),
    "widened": (_residual(lambda m, y: m.up(y.unsqueeze(1).expand(-1, 3, -1, -1)).sum(1)), ("up.weight",)),
    "cast": (_residual(lambda m, y: m.up(y.double().to(m.up.weight.dtype))), ("up.weight",)),
    "dropout": (_residual(lambda m, y: m.up(m.drop(y).clone().contiguous())), ("up.weight",)),
    "scaled": (_residual(lambda m, y: m.up(0.5 * y / 3)), ("up.weight",)),
    "averaged": (_residual(lambda m, y: m.up(y.mean(1, keepdim=True))), ("up.weight",)),
    "repeated": (_residual(lambda m, y: m.up(y.repeat_interleave(2, 0))[::2]), ("up.weight",)),
    "output-in-a-nest": (lambda m, x: {"a": [x + m.down(m.up(m.norm(x)).relu())]}, ("up.weight",)),
}  # fmt: skip


@dataclasses.dataclass
class Result:
    """An output that is neither a mapping nor a sequence."""

    hidden: Tensor
    answer: Tensor


def _and(read: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """As `_residual` with the map `up`, and something else that reads the norm."""

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        return x + m.down(m.up(y).relu()) + read(m, y)

    return function


# name -> (function, what the reason says)
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "added": (_and(lambda m, y: y), "also read by add"),
    "multiplied": (_residual(lambda m, y: m.up(y) * y), "also read by mul"),
    "activated": (_residual(lambda m, y: m.up(y.relu())), "also read by relu"),
    "changed-in-place": (_residual(lambda m, y: m.up(y.mul_(2))), "also read by mul_"),
    "concatenated": (_and(lambda m, y: torch.cat([y[:1], y[1:]])), "also read by cat"),
    "written": (_and(lambda m, y: torch.zeros_like(y).index_copy(0, torch.tensor([1, 0]), y)), "read by index_copy"),
    "one-number": (_and(lambda m, y: y[0, 0, 0]), "features apart"),
    "detached": (_and(lambda m, y: y.detach().sin()), "also read by sin"),
    "data": (_and(lambda m, y: y.data.sin()), "also read by sin"),
    "another-norm": (_residual(lambda m, y: m.up(m.other(y))), "also read by the norm other"),
    "output": (lambda m, x: m.norm(x + m.up(x)), "an output of the model"),
    "output-too": (lambda m, x: (x + m.up(y := m.norm(x)).relu(), y), "an output of the model"),
    "output-in-a-nest": (lambda m, x: {"a": x + m.up(y := m.norm(x)).relu(), "b": [(y,)]}, "an output of the model"),
    "output-in-a-dataclass": (lambda m, x: Result(x + m.up(y := m.norm(x)).relu(), y), "an output of the model"),
    "output-of-a-view": (lambda m, x: (x + m.up(y := m.norm(x)).relu(), y[:, -1]), "an output of the model"),
    "output-detached": (lambda m, x: (x + m.up(y := m.norm(x)).relu(), y.detach()), "an output of the model"),
    "called-twice": (lambda m, x: x + m.up(m.norm(x)).relu() + m.head(m.norm(2 * x)).relu(), "runs 2 times"),
    "shared-by-norms": (lambda m, x: x + (m.up(m.norm(x)) + m.up(m.other(x))).relu(), r"up.weight .* else \(other\)"),
    "fed-otherwise": (lambda m, x: x + (m.up(m.norm(x)) + m.up(x)).relu(), "up.weight also reads something else"),
    "fed-before": (lambda m, x: x + m.up(m.up(x) + m.up(m.norm(x))).relu(), "up.weight also reads something else"),
    "computed-weight": (_residual(lambda m, y: F.linear(y, m.matrix * 2)), "whose weight is not a parameter"),
    "computed-bias": (_residual(lambda m, y: F.linear(y, m.matrix, 2 * m.vector)), "whose bias is not a parameter"),
    "no-weight": (_residual(lambda m, y: y @ y.mT @ m.up(y)), "features apart"),
    "gram": (_residual(lambda m, y: (y @ y.transpose(1, 2)) @ m.up(y)), "takes the features apart"),
    "from-the-left": (_residual(lambda m, y: (m.matrix @ y[0].T).T), "takes the features apart|matmul"),
    "batched": (_residual(lambda m, y: torch.bmm(y, m.matrix.expand(2, D, D))), "bmm"),
    "einsum": (_residual(lambda m, y: torch.einsum("btd,de->bte", y, m.matrix)), "einsum"),
    "heads": (_residual(lambda m, y: m.up(y.view(*y.shape[:2], 2, -1).transpose(2, 3).flatten(2))), "features apart"),
    "halves": (_residual(lambda m, y: m.up(torch.cat(y.chunk(2, -1)[::-1], -1))), "features apart"),
    "reversed": (_residual(lambda m, y: m.up(y.flip(-1))), "flip"),
    "permuted": (_residual(lambda m, y: m.up(y[..., PERMUTATION])), "features apart"),
    "permuted-again": (_residual(lambda m, y: m.up(y.index_select(-1, PERMUTATION))), "features apart"),
    "permuted-by-2": (_residual(lambda m, y: m.up(y.index_select(2, PERMUTATION))), "features apart"),
    "no-reader": (lambda m, x: x + m.down(m.up(x).relu() + 0 * m.norm(x).numel()), "nothing was seen to read"),
}  # fmt: skip
# the same with as many tokens as features, where a transpose keeps every shape
REFUSED_SQUARE: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "transposed": (_residual(lambda m, y: m.up(y.transpose(1, 2))), "features apart"),
    "mixed-over-tokens": (_residual(lambda m, y: m.up(y.mT).mT), "features apart"),
    "permuted-axes": (_residual(lambda m, y: m.up(y.permute(0, 2, 1).contiguous()).permute(0, 2, 1)), "features apart"),
    "matrix-from-the-left": (_residual(lambda m, y: m.matrix @ y), "whose weight is not a parameter"),
    "flat-and-transposed": (_residual(lambda m, y: m.up(y[0].T)), "features apart"),
    "old-transpose": (_residual(lambda m, y: m.up(y[0].t()).t()), "t in"),
}
