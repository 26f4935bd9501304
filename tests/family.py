"""A row of families.py: what a tiny model of a family is, which of its norms can go, and which stay and why.

In a pattern a star stands for a layer's index, and {a,b} for a or b.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from vit import TimmViT
from zoo import D, randomise

_BUILT: dict[str, nn.Module] = {}  # a copy is quicker than a model


@dataclasses.dataclass(frozen=True)
class Family:
    """One row.

    goes: patterns of the norms that can go, between spaces. stays: pattern -> a part of the reason. head: the class
    that is built. post: post-norms go too. float32: why
    float64 rounds at 1e-6 here, "" where it does not. wide: its code makes constants of torch's default type, which
    must be float64 as well.
    """

    name: str
    model_type: str
    config: dict[str, Any]
    goes: str
    stays: dict[str, str] = dataclasses.field(default_factory=dict)
    head: str = "AutoModelForCausalLM"
    post: bool = False
    float32: str = ""
    wide: bool = False

    def build(self, **changes: Any) -> Any:
        """A model in evaluation mode, every parameter random: gains, biases and a residual with a mean of its own."""
        key = f"{self.name} {changes}"
        if key not in _BUILT:
            torch.manual_seed(0)
            _BUILT[key] = enliven(self._fresh(changes).eval())
        return copy.deepcopy(_BUILT[key])

    def _fresh(self, changes: dict[str, Any]) -> Any:
        if self.model_type == "timm":
            return TimmViT(**self.config)
        config = transformers.AutoConfig.for_model(self.model_type, **copy.deepcopy(self.config))
        kinds = getattr(transformers, self.head)
        build = kinds.from_config if self.head.startswith("Auto") else kinds._from_config
        return build(config, **changes)

    @property
    def is_moe(self) -> bool:
        return any("expert" in key for key in self.config)

    @property
    def example(self) -> dict[str, Tensor]:
        """Inputs. The context is short, so that relative positions and windows matter."""
        return example_of(self.model_type, self.config)

    def expected(self, names: list[str]) -> dict[str, str]:
        """norm -> "" if it can go, else a part of the reason. A pattern that matches nothing is an error."""
        found = {}
        for pattern, reason in [*((p, "") for p in patterns(self.goes)), *self.stays.items()]:
            for spelling in patterns(pattern):
                hits = [name for name in names if re.fullmatch(re.escape(spelling).replace(r"\*", r"\d+"), name)]
                assert hits, f"{self.name}: {spelling} matches none of {names}"
                found |= dict.fromkeys(hits, reason)
        return found


def patterns(text: str) -> list[str]:
    """`"a.{b,c} d"` -> `["a.b", "a.c", "d"]`."""
    found = []
    for word in text.split():
        parts = [part.split(",") for part in re.split(r"[{}]", word)]
        found += ["".join(choice) for choice in itertools.product(*parts)]
    return found


def example_of(model_type: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Random inputs of two examples."""
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(D, (2, length), generator=generator) for length in (11, 7))
    images = torch.randn(2, 3, 8, 8, generator=generator) + 0.5
    if model_type == "timm":
        return {"x": images}
    if model_type == "whisper":
        return {"input_features": torch.randn(2, 8, 16, generator=generator), "decoder_input_ids": labels}
    if "vision_config" in config:
        return {"input_ids": ids, "pixel_values": images}
    if "image_size" in config:
        return {"pixel_values": images}
    return {"input_ids": ids, "decoder_input_ids": labels} if model_type in ("t5", "bart") else {"input_ids": ids}


@torch.no_grad()
def enliven(model: nn.Module) -> nn.Module:
    """`zoo.randomise`, and a mean for what images and sounds are embedded with."""
    randomise(model)
    for name, parameter in model.named_parameters():
        if any(
            part in name
            for part in (
                "cls_token",
                "position_emb",
                "pos_embed",
                "projection.bias",
                "patch",
                "embeddings_layernorm.bias",
                "pre_layrnorm.bias",
            )
        ):
            parameter.add_(1)
    return model


@contextlib.contextmanager
def arithmetic(row):
    """A few families make constants of torch's default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if row.wide else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(row, **changes):
    if row.is_moe:  # grouped products have no float64
        changes.setdefault("experts_implementation", "eager")
    return row.build(**changes).double()


def inputs_of(row, dtype=torch.float64):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in row.example.items()}


def error(new, old):
    assert len(new) == len(old)
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in zip(new, old, strict=True)
    )
