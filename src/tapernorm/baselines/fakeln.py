"""FakeLN: layer norms of a GPT-2 are switched off one after another while it is fine-tuned.

    on:   (h − μ) / σ  · γ + β
    off:  (h − μ) / σ̄ · γ + β

with σ̄ a fixed average of the tokens' standard deviations, from a running mean that is frozen at the switch. The order:
ln_2 of all blocks, then ln_1 for queries and keys, then ln_1 for values, then the final norm. The first position, and
end-of-text tokens, stand far from the rest, so they have a σ̄ of their own, which is given up in the last two switches.
All the while an auxiliary loss pulls the standard deviations of the final norm's input together:

    L_aux = λ · E[(σ − m)²],    m: the mean of σ over ordinary tokens, without gradient.

Source: Baroni et al., "Transformers Don't Need LayerNorm at Inference Time", arXiv 2507.02559, written here from its
description. Their step counts and λ are not known to us: those of `FakeLNConfig` are ours.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tapernorm.fold import FoldReport, fold_
from tapernorm.modules import TaperNorm, first_input, in_backward, taper_norms
from tapernorm.probe import probe
from tapernorm.statistics import Average, token_scale

Kind = Literal["mlp", "qk", "v", "final", "eot", "bos"]
_GAPS: tuple[Kind, ...] = ("mlp", "qk", "v", "final", "eot", "bos")  # in the order in which they are switched


@dataclasses.dataclass(frozen=True)
class FakeLNConfig:
    """When what is switched off, in optimizer steps; gaps may be fractions of one.

    Args:
        start: steps before the first switch, in which the running means settle; at least 1.
        mlp: steps from one block to the next, for ln_2.
        qk: the same for ln_1 as queries and keys see it.
        v: the same for ln_1 as values do.
        final: steps from the last block's values to the final norm.
        eot: steps from there to the end of the special treatment of end-of-text tokens.
        bos: steps from there to the end of that of the first position.
        weight: λ of the auxiliary loss; 0 turns it off.
        decay: of the running means, per optimizer step.

    Raises:
        ValueError: a value out of its range.
    """

    start: int = 20
    mlp: float = 2
    qk: float = 2
    v: float = 3
    final: float = 3
    eot: float = 5
    bos: float = 5
    weight: float = 0.1
    decay: float = 0.9

    def __post_init__(self) -> None:
        if self.start < 1:
            raise ValueError(f"start={self.start!r} must be at least 1: a mean of nothing has no value")
        for field in (*_GAPS, "weight"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field}={getattr(self, field)!r} must be a finite number, at least 0")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r} must be at least 0 and below 1")

    @classmethod
    def within(cls, steps: int, layers: int, share: float = 0.45, **others: Any) -> FakeLNConfig:
        """The default gaps, stretched or pressed together so that the last switch is at `share` of `steps`.

        Raises:
            ValueError: a share that is not above 0 and below 1; too few steps for a start.
        """
        if not 0 < share < 1:
            raise ValueError(f"share={share!r} must be above 0 and below 1")
        start, plain = max(1, round(steps / 15)), cls()
        room = share * steps - start
        if room <= 0:
            raise ValueError(f"steps={steps} leave no room between start={start} and {share:g} of them; raise steps")
        times = {kind: layers if kind in ("mlp", "qk", "v") else 1 for kind in _GAPS}
        before_first = plain.mlp  # no gap
        unit = room / (sum(getattr(plain, kind) * count for kind, count in times.items()) - before_first)
        return cls(start=start, **{kind: getattr(plain, kind) * unit for kind in _GAPS}, **others)


@dataclasses.dataclass(frozen=True)
class Switch:
    """What is switched off when the count of optimizer steps reaches `step`; block: −1 for what is of no block."""

    step: int
    kind: Kind
    block: int


def plan(config: FakeLNConfig, layers: int) -> tuple[Switch, ...]:
    """All switches in their order: for L blocks 3 L + 3 of them."""
    made, clock = [], float(config.start)
    for kind in _GAPS:
        of_blocks = kind in ("mlp", "qk", "v")
        for block in range(layers) if of_blocks else (-1,):
            if made:
                clock += getattr(config, kind)
            made.append(Switch(math.ceil(clock - 1e-9), kind, block))
    return tuple(made)


@dataclasses.dataclass
class _Tokens:
    """Which tokens of the present forward are special. Written by a hook on the model, read by every norm."""

    eot: int | None
    keep_eot: bool = True  # they have a σ̄ of their own still
    keep_bos: bool = True
    special: Tensor | None = None  # [B, T] of booleans, None where no token is

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook on the model."""
        names = ("input_ids", "inputs_embeds")
        given = args[0] if args else next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
        self.special = None
        if given is None or not (self.keep_bos or self.keep_eot):
            return
        special = torch.zeros(given.shape[:2], dtype=torch.bool, device=given.device)
        if self.keep_eot and self.eot is not None and given.dim() == 2:
            special |= given == self.eot
        cache = kwargs.get("past_key_values")
        if self.keep_bos and (cache is None or cache.get_seq_length() == 0):
            special[:, 0] = True
        self.special = special


class FakeNorm(nn.Module):
    """A layer norm that is switched off for each of its readers by itself.

    h: [B, T, D] -> [B, T, D] for one reader, [B, T, 2 D] for two, what the first reads before what the second does.
    """

    c: Tensor

    def __init__(self, norm: nn.LayerNorm, readers: tuple[Kind, ...], tokens: _Tokens) -> None:
        super().__init__()
        self.norm = norm
        self.readers = readers
        self.tokens = tokens
        self.off: set[Kind] = set()
        # 1/σ̄ by reader, of ordinary and of special tokens: the readers are switched at different times
        self.register_buffer("c", torch.ones(len(readers), 2, dtype=torch.float32, device=norm.weight.device))
        self.sums = torch.zeros(2, 2)  # of ordinary and special tokens of this step: Σ σ, tokens
        self.train(norm.training)

    def forward(self, h: Tensor) -> Tensor:
        if self.training and len(self.off) < len(self.readers) and not in_backward():
            self._note(h)
        first = self._read(h, 0)
        if len(self.readers) == 1:
            return first
        alike = not self.off  # then it is the norm itself for both
        return torch.cat([first, first if alike else self._read(h, 1)], -1)

    def _read(self, h: Tensor, number: int) -> Tensor:
        if self.readers[number] not in self.off:
            return self.norm(h)
        c = self.c[number].to(torch.promote_types(h.dtype, torch.float32))
        special = self.tokens.special
        scale = c[0] if special is None else torch.where(special, c[1], c[0])[..., None]
        y = (h - h.mean(-1, keepdim=True)) * scale * self.norm.weight + self.norm.bias
        return y.to(h.dtype)

    @torch.no_grad()
    def _note(self, h: Tensor) -> None:
        sigma = token_scale(h, "layer", self.norm.eps)
        special = self.tokens.special
        special = torch.zeros_like(sigma, dtype=torch.bool) if special is None else special
        found = [[torch.where(which, sigma, 0).sum(), which.sum()] for which in (~special, special)]
        self.sums = self.sums.to(h.device) + torch.stack([torch.stack([s.float(), n.float()]) for s, n in found])

    def switch(self, reader: Kind, sigma: Tensor) -> None:
        """Turn the norm off for one reader. sigma: σ̄ of ordinary and of special tokens, [2]"""
        self.c[self.readers.index(reader)] = sigma.reciprocal().to(self.c)
        self.off.add(reader)


class Apart(nn.Module):
    """GPT-2's one product for queries, keys and values, with values read from the second half of [B, T, 2 D]."""

    def __init__(self, conv: Any, norm: FakeNorm) -> None:
        super().__init__()
        self.conv = conv  # a Conv1D: weight [D, 3 D]
        self._off = norm.off  # the same set: whether the halves differ

    def forward(self, x: Tensor) -> Tensor:
        for_qk, for_v = (half.contiguous() for half in x.chunk(2, -1))
        if not self._off:
            return self.conv(for_qk)
        weight, bias, width = self.conv.weight, self.conv.bias, for_qk.shape[-1]
        parts = [(for_qk, slice(0, 2 * width)), (for_v, slice(2 * width, None))]
        return torch.cat([h @ weight[:, columns] + bias[columns] for h, columns in parts], -1)


class FakeLNController:
    """Drives the switches of one model. Made by `attach`; call `step()` after each optimizer step."""

    def __init__(self, model: Any, config: FakeLNConfig, eot: int | None) -> None:
        self.model, self.config = model, config
        body = model.transformer
        self.plan = plan(config, len(body.h))
        self.step_count = 0
        self.switched = 0  # how many of the plan's
        self._tokens = _Tokens(eot)
        self.norms: dict[str, FakeNorm] = {}
        for number, block in enumerate(body.h):
            name = f"transformer.h.{number}"
            self._put(f"{name}.ln_1", ("qk", "v"))
            self._put(f"{name}.ln_2", ("mlp",))
            block.attn.c_attn = Apart(block.attn.c_attn, self.norms[f"{name}.ln_1"])
        self._put("transformer.ln_f", ("final",))
        self._average = Average(2 * len(self.norms), 1, config.decay)
        self._loss: Tensor | None = None
        self._forwards = 0
        self._handles = [
            model.register_forward_pre_hook(self._tokens.hook, with_kwargs=True),
            body.ln_f.register_forward_pre_hook(self._note_final, with_kwargs=True),
        ]

    def _put(self, name: str, readers: tuple[Kind, ...]) -> None:
        norm: Any = self.model.get_submodule(name)
        self.norms[name] = FakeNorm(norm, readers, self._tokens)
        self.model.set_submodule(name, self.norms[name])

    def _note_final(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook on the final norm: the auxiliary loss of this forward."""
        if not module.training or not torch.is_grad_enabled() or not self.config.weight:
            return
        sigma = token_scale(first_input(args, kwargs), "layer", self.norms["transformer.ln_f"].norm.eps)
        special = self._tokens.special
        ordinary = sigma.detach() if special is None else sigma.detach()[~special]
        mean = ordinary.mean() if ordinary.numel() else sigma.detach().mean()
        loss = (sigma - mean).pow(2).mean()
        self._loss = loss if self._loss is None else self._loss + loss
        self._forwards += 1

    @property
    def done(self) -> bool:
        """Whether everything is switched off."""
        return self.switched == len(self.plan)

    def auxiliary_loss(self) -> Tensor:
        """λ times the auxiliary loss, averaged over the training forwards since the last call, which it consumes."""
        loss, forwards = self._loss, self._forwards
        self._loss, self._forwards = None, 0
        return torch.zeros((), device=self.model.device) if loss is None else self.config.weight * loss / forwards

    def step(self, skipped: bool = False, loss: Any = None) -> None:
        """Count one optimizer step, enter its statistics, and switch off what is due.

        Args:
            skipped: the optimizer did not step: nothing is counted, and what was gathered is dropped.
            loss: not looked at; it is there because `TaperController.step` has it.

        Raises:
            RuntimeError: a norm is to be switched off that never saw a finite token in training mode.
        """
        sums = torch.cat([norm.sums for norm in self.norms.values()])  # [2 · norms, 2]
        for norm in self.norms.values():
            norm.sums = torch.zeros_like(norm.sums)
        if skipped:
            return
        self.step_count += 1
        means = sums[:, :1] / sums[:, 1:]
        self._average.update(means, valid=torch.isfinite(means[:, 0]))
        while not self.done and self.plan[self.switched].step <= self.step_count:
            self._switch(self.plan[self.switched])
            self.switched += 1

    def _switch(self, switch: Switch) -> None:
        if switch.kind in ("eot", "bos"):
            setattr(self._tokens, f"keep_{switch.kind}", False)
            return
        where = {"mlp": "ln_2", "final": "ln_f"}.get(switch.kind, "ln_1")
        name = f"transformer.{where}" if switch.kind == "final" else f"transformer.h.{switch.block}.{where}"
        row = 2 * list(self.norms).index(name)
        sigma = self._average.value()[row : row + 2, 0]
        sigma = torch.where(torch.isnan(sigma), sigma[0], sigma)  # a text without special tokens
        if not torch.isfinite(sigma).all():
            raise RuntimeError(
                f"{name}: no finite statistics in {self.step_count} steps; is the model in training mode?"
            )
        self.norms[name].switch(switch.kind, sigma)

    def finish(self, example: Any = None) -> FoldReport:
        """Fold what is left of the norms into the weights that read them, and take everything of FakeLN off the model.

        Raises:
            ValueError: not everything is switched off yet.
            FoldError: as `tapernorm.fold.fold_`; the model then holds the fixed scales, as modules.
        """
        if not self.done:
            left = len(self.plan) - self.switched
            last = self.plan[-1].step
            raise ValueError(
                f"{left} of {len(self.plan)} switches are still to come (step {self.step_count} of {last})"
            )
        for handle in self._handles:
            handle.remove()
        for name, fake in self.norms.items():
            probed = probe(fake.norm, fake.norm.weight.numel())
            assert probed is not None  # a layer norm, as attach() saw
            left = TaperNorm(fake.norm, probed, fake.norm.weight.numel())
            left.fixed_norm.c.copy_(fake.c[0, :1])
            if len(fake.readers) == 2:
                self._join(name, fake)
            left.set_gate(0.0)
            self.model.set_submodule(name, left.train(fake.training))
        return fold_(self.model, example)

    @torch.no_grad()
    def _join(self, name: str, fake: FakeNorm) -> None:
        """One product again. What values read differs by c_v / c_qk from what queries and keys do: that goes into W."""
        attention = self.model.get_submodule(f"{name.rpartition('.')[0]}.attn")
        conv = attention.c_attn.conv
        ratio = (fake.c[1, 0].double() / fake.c[0, 0].double()).to(conv.weight.dtype)
        values = slice(2 * conv.weight.shape[0], None)
        # W_v (c_v x + β) = (W_v c_v / c_qk) (c_qk x + β) + (1 − c_v / c_qk) W_v β
        conv.bias[values] += (1 - ratio) * (fake.norm.bias @ conv.weight[:, values])
        conv.weight[:, values] *= ratio
        attention.c_attn = conv


def attach(model: Any, config: FakeLNConfig | None = None, eot: int | None = None) -> FakeLNController:
    """Make the layer norms of a GPT-2 ready to be switched off. In place; the output stays the same bits.

    Args:
        model: a `GPT2LMHeadModel`, or another model with its body as `transformer`.
        config: when what is switched off; `FakeLNConfig()` if None. `FakeLNConfig.within` fits it to a budget.
        eot: the id of the end-of-text token, None if the text has none.

    Raises:
        ValueError: the model is no GPT-2, is tapered, or has been attached to already; nothing is changed then.
    """
    config = config or FakeLNConfig()
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    body = getattr(model, "transformer", None)
    if kind != "gpt2" or body is None or model.config.add_cross_attention:
        raise ValueError(f"FakeLN is for GPT-2 decoders with a head, and this is {kind}; use tapernorm.taper_")
    if taper_norms(model):
        raise ValueError("the model is tapered: tapernorm.restore_(model) first")
    norms = [(n, m) for n, m in body.named_modules() if n.rpartition(".")[2] in ("ln_1", "ln_2", "ln_f")]
    odd = next((n for n, m in norms if not isinstance(m, nn.LayerNorm)), None)
    if odd is not None:
        raise ValueError(f"transformer.{odd} is no layer norm any more ({type(body.get_submodule(odd)).__name__})")
    return FakeLNController(model, config, eot)
