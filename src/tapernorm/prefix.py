"""A short constant prefix that takes the role of attention sink, so that no token of the text has to.

In pretrained language models a token or two, nearly always the first, carries a residual hundreds of times the usual
one. A fixed scale cannot serve such a token and the others. p tokens (1 to 4) in front take its place: their keys
and values depend on nothing but the weights, so they are computed once, by the model with all its norms, at the
positions −p … −1, and become constants of the attention layers. The text keeps the positions 0, 1, …; with learned
positions the table loses its first p rows and the context p tokens. A prompt's own beginning-of-text token is a token
like any other, after the prefix; a tokenizer that writes one itself no longer does (`tapernorm.bos`).

What the layers do with the constants is in `tapernorm.modeling_tapernorm`, since a saved model needs it too.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm import modeling_tapernorm as modeling
from tapernorm.config import MASSIVE_RATIO
from tapernorm.modules import evaluation
from tapernorm.scales import token_scales
from tapernorm.sites import NormSite, context_length, find_sites

_RECORD = "tapernorm_record"
_FEW = 8  # rows of text: most prefixes fail on these already
# By which the body's output may differ. Rotary angles and most norms are float32 in a float64 model too.
_AGREE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One prefix that was tried. ratio: the largest r / median over sites and tokens of the text, or of its first
    rows where that was too much already; site, token: where, and the token's id."""

    prefix: tuple[int, ...]
    ratio: float
    site: str
    token: int


def find_prefix(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str] | Tensor,
    ratio: float = MASSIVE_RATIO,
    sites: list[NormSite] | None = None,
) -> tuple[int, ...]:
    """The shortest prefix with which no token of `texts` stands above `ratio` times its site's median; () if none is
    needed.

    Args:
        model: a causal language model with its norms.
        tokenizer: its tokenizer; special tokens are tried first, then with one or two common tokens behind.
        texts: a few texts, or [N, T] ids of them; some 2,000 tokens are looked at.

    Raises:
        ValueError: no prefix that was tried is clean, with the best one and the token that still stands out.
    """
    trials = search_prefix(model, tokenizer, sample(tokenizer, texts, model), ratio, sites)
    best = min(trials, key=lambda trial: trial.ratio)
    if best.ratio > ratio:
        raise ValueError(
            f"none of {len(trials)} prefixes leaves every token below {ratio:g} times its site's median; with the "
            f"best, {list(best.prefix)}, token {tokenizer.decode([best.token])!r} stands at {best.ratio:.0f} times "
            f"before {best.site}. If the text spells out special tokens, take them out; or go without: prefix=(), "
            "--prefix none"
        )
    return trials[-1].prefix


def sample(tokenizer: Any, texts: Iterable[str] | Tensor, model: Any, tokens: int = 2048, block: int = 32) -> Tensor:
    """Short blocks of ids, cut anywhere in the text, as a user's prompts would begin anywhere. [N, block]"""
    block = min(block, context_length(model) - 4)
    stream: list[int] = []
    if isinstance(texts, Tensor):
        bos = own_bos(tokenizer)
        stream, texts = [token for token in texts.flatten()[: 2 * tokens].tolist() if token != bos], []
    for text in texts:
        stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(stream) >= tokens:
            break
    count = min(tokens, len(stream)) // block
    if count < 1:
        raise ValueError(f"the texts hold {len(stream)} tokens; at least {block} are needed to look for a prefix")
    return torch.tensor(stream[: count * block]).view(count, block)


def search_prefix(
    model: Any, tokenizer: Any, ids: Tensor, ratio: float = MASSIVE_RATIO, sites: list[NormSite] | None = None
) -> list[Trial]:
    """Every prefix that was tried, in order; the last one is clean, if any is. ids: [N, T], without the token that the
    tokenizer may begin a text with: where there is no prefix it stands in front of each row, as of each prompt."""
    sites = [s for s in (sites or find_sites(model)) if s.role in ("internal", "final", "other") and s.probed]
    bos = own_bos(tokenizer)
    begun = ids if bos is None else nn.functional.pad(ids, (1, 0), value=bos)
    trials = []
    for prefix in _candidates(tokenizer, ids):
        text = ids if prefix else begun
        trials.append(_try(model, sites, text[:_FEW], prefix))
        if trials[-1].ratio <= ratio and len(ids) > _FEW:
            trials[-1] = _try(model, sites, text, prefix)
        if trials[-1].ratio <= ratio:
            break
    return trials


def own_bos(tokenizer: Any) -> int | None:
    """The beginning-of-text token, where the tokenizer itself puts it in front of every text."""
    bos: int | None = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [bos] else None


def _candidates(tokenizer: Any, ids: Tensor) -> Iterator[tuple[int, ...]]:
    """Nothing; special tokens; one of them and a common token; two of them and that; common tokens alone."""
    named = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    special = list(dict.fromkeys(t for t in [*named, *sorted(tokenizer.all_special_ids)] if t is not None))[:4]
    words = [tokenizer(w, add_special_tokens=False)["input_ids"] for w in ("The", "\n", ".", " the")]
    frequent = [token for token, _ in collections.Counter(ids.flatten().tolist()).most_common(3)]
    common = [w[0] for w in words if len(w) == 1] + frequent
    common = list(dict.fromkeys(t for t in common if t not in special))[:5]
    yield ()
    yield from ((s,) for s in special)
    yield from ((s, c) for c in common for s in special)
    yield from ((s, t) for s in special for t in special)
    yield from ((s, a, b) for s in special for a in common[:3] for b in common[:3])
    yield from ((s, a, b, a) for s in special for a in common[:2] for b in common[:3])


def _try(model: Any, sites: list[NormSite], ids: Tensor, prefix: tuple[int, ...]) -> Trial:
    front = torch.tensor(prefix, dtype=torch.long).expand(len(ids), -1)
    scales = token_scales(model, sites, torch.cat([front, ids], dim=1))
    worst = Trial(prefix, 0.0, "", -1)
    for name, r in scales.items():
        text = r[:, len(prefix) :]
        of_median = torch.nan_to_num(text / text.median(), nan=torch.inf)
        at = int(of_median.argmax())
        if float(of_median.flatten()[at]) > worst.ratio:
            worst = Trial(prefix, float(of_median.flatten()[at]), name, int(ids.flatten()[at]))
    return worst


# Putting it in


def attach_prefix(model: Any, prefix: Sequence[int]) -> Callable[[], None]:
    """Make the keys and values of `prefix` constants of `model`. In place; checked against the prefix as tokens.

    Args:
        model: a causal transformers model whose attention goes through transformers' attention interface, before any
            norm of it is gone.
        prefix: 1 to 4 token ids.

    Returns:
        What takes it all back, with the rows that a learned position table lost.

    Raises:
        ValueError: the model has a prefix already; it is of a kind that cannot hold one (recurrent, bidirectional,
            with relative position biases, several text models in one, its own attention code); ids outside the
            vocabulary. The model is untouched then.
    """
    prefix = tuple(int(token) for token in prefix)
    refuse_prefix(model, prefix)
    tables = position_tables(model)
    front = torch.tensor(prefix)[None]
    seen = _record(model, front, start=0 if tables else -len(prefix))
    text = _some_ids(model, len(prefix))
    wanted = _hidden(model, torch.cat([front.expand(len(text), -1), text], dim=1))[:, len(prefix) :]
    undo = _put_in(model, prefix, seen, tables)
    try:
        made = _hidden(model, text)
        error = float((made.double() - wanted.double()).abs().max() / wanted.double().abs().max())
        if not error <= _AGREE[wanted.dtype]:
            raise ValueError(
                f"{type(model).__name__}: what it makes of a text with a constant prefix differs from the same tokens "
                f"in front by {error:.1g}, so its attention needs more than keys and values at places before 0 "
                "(relative position biases, a table of angles that begins at 0); leave the prefix out"
            )
    except BaseException:
        undo()
        raise
    return undo


def _put_in(
    model: Any, prefix: tuple[int, ...], seen: dict[str, tuple[Tensor, Tensor]], tables: list[nn.Embedding]
) -> Callable[[], None]:
    """Constants, position tables and config; returns what takes all of that back."""
    weights, context = [module.weight for module in tables], context_length(model)

    def undo() -> None:
        detach_prefix(model)
        for module, weight in zip(tables, weights, strict=True):
            module.weight, module.num_embeddings = weight, len(weight)
        if tables:
            model.config.max_position_embeddings = context

    shapes: dict[str, list[int]] = {}
    for name, (key, value) in seen.items():
        attention = model.get_submodule(name)
        shapes[name] = [*key.shape[1:], value.shape[3]]
        modeling.hold_prefix(attention, *shapes[name])
        attention.prefix_key.copy_(key)
        attention.prefix_value.copy_(value)
    for module, weight in zip(tables, weights, strict=True):
        module.weight = nn.Parameter(weight.detach()[len(prefix) :].clone(), weight.requires_grad)
        module.num_embeddings -= len(prefix)
    if tables:
        model.config.max_position_embeddings = context - len(prefix)
    model.config.constant_prefix, model.config.prefix_shapes = list(prefix), _starred(shapes)
    modeling.guard_attention(model)
    model.set_attn_implementation(model.config._attn_implementation)
    return undo


def detach_prefix(model: Any) -> None:
    """Take the constants out again. Rows of a learned position table do not come back."""
    for module in list(model.modules()):
        for name in ("prefix_key", "prefix_value"):
            module._buffers.pop(name, None)
        vars(module).pop("set_attn_implementation", None)
    name = model.config._attn_implementation
    for field in ("constant_prefix", "prefix_shapes"):
        vars(model.config).pop(field, None)
    model.set_attn_implementation(name.removeprefix(modeling.ATTENTION))


def prefix_of(model: Any) -> tuple[int, ...]:
    """The token ids of a model's constant prefix; () without one."""
    return tuple(getattr(getattr(model, "config", None), "constant_prefix", ()) or ())


def refuse_prefix(model: Any, prefix: tuple[int, ...]) -> None:
    """Raises ValueError for what can be known before anything runs."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"a constant prefix needs a transformers model, and this is a {type(model).__name__}")
    if not 1 <= len(prefix) <= 4:
        raise ValueError(f"prefix={prefix!r} must hold 1 to 4 token ids")
    if any(not 0 <= token < config.vocab_size for token in prefix):
        raise ValueError(f"prefix={prefix!r} holds ids outside the model's vocabulary of {config.vocab_size}")
    if prefix_of(model):
        raise ValueError(f"the model has a constant prefix already, {list(prefix_of(model))}")
    kind = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        raise ValueError(f"{kind} is more than one causal language model; a constant prefix is for those alone")
    if not model._can_set_attn_implementation():
        raise ValueError(f"{kind} does not use transformers' attention interface, so it cannot hold a constant prefix")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{config._attn_implementation} attention cannot hold a constant prefix: load the model with "
            'attn_implementation="sdpa" or "eager"'
        )


def _some_ids(model: Any, prefix: int = 0) -> Tensor:
    """Random ids, few enough that no sliding window loses sight of `prefix` tokens in front. [2, at most 12]"""
    generator = torch.Generator().manual_seed(0)
    window = getattr(model.config, "sliding_window", None) or context_length(model)
    length = max(2, min(12, window - prefix, context_length(model) - 4))
    return torch.randint(model.config.vocab_size, (2, length), generator=generator)


def _record(model: Any, ids: Tensor, start: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Keys and values of every attention module for one sequence at the places from `start` on, by module name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    names = {module: name for name, module in model.named_modules()}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    before = model.config._attn_implementation
    attention, mask = modeling.ATTENTIONS[before]

    def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if getattr(module, "is_causal", True) is False:
            raise ValueError(f"{names[module]} is not causal: what it sees of a prefix depends on the text behind it")
        if names[module] in seen:
            raise ValueError(f"{names[module]} attends twice in one forward; it cannot hold a constant prefix")
        seen[names[module]] = key.detach().clone(), value.detach().clone()
        return attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(_RECORD, record)
    AttentionMaskInterface.register(_RECORD, mask)
    kind, device = type(model).__name__, next(model.parameters()).device
    places = torch.arange(start, start + ids.shape[1], device=device)[None]
    try:
        model.set_attn_implementation(_RECORD)
        with evaluation(model):
            model.base_model(input_ids=ids.to(device), position_ids=places, use_cache=False)
    except (IndexError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{kind} cannot hold a constant prefix: it does not run at places {start} … ({error})"
        ) from error
    finally:
        model.set_attn_implementation(before)
        AttentionInterface.register(_RECORD, attention)  # lets go of the model
    layers = getattr(model.config, "num_hidden_layers", len(seen))
    if len(seen) < layers:
        raise ValueError(
            f"{kind} has {layers} layers, and {len(seen)} of them attend in a way that can hold a constant prefix; a "
            "layer that carries a state of its own (recurrent, convolutional) cannot"
        )
    return seen


def _hidden(model: Any, ids: Tensor) -> Tensor:
    """What the body makes of a text, whatever the head. [B, T, D]"""
    with evaluation(model):
        return model.base_model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)[0]


def position_tables(model: Any) -> list[nn.Embedding]:
    """Learned tables of absolute positions: the embeddings that are read at 0, 1, 2, …, up to an offset."""
    tables: list[nn.Embedding] = []
    text = _some_ids(model)[:1]
    tokens = model.get_input_embeddings()

    def note(module: Any, args: Any, output: Tensor) -> None:
        rows = output.reshape(-1, output.shape[-1])
        length = text.shape[1]
        offset = module.num_embeddings - context_length(model)
        if module is tokens or not 0 <= offset < 4 or len(rows) != length:
            return
        if torch.equal(rows, module.weight[offset : offset + length].to(rows.dtype)):
            tables.append(module)

    handles = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        with evaluation(model):
            model.base_model(input_ids=text.to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return tables


def room(model: Any, prefix: Sequence[int] | None) -> int:
    """The most tokens of text beside a prefix, of which None is one that is still looked for: up to four tokens.

    Rotary positions leave the context as it is; a learned table gives its first rows to the prefix.
    """
    taken = 4 if prefix is None else len(prefix)
    return context_length(model) - (taken if taken and position_tables(model) else 0)


def _starred(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """One entry for all layers where they are alike."""
    short: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        if short.setdefault(modeling.starred(name), shape) != shape:
            return shapes
    return short
