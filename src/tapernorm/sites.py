"""Where the norms of a model are, who reads them, and which can go.

One small forward is traced. A norm can go only if everything that reads its output, followed through views and
casts, is a linear map with a known weight that reads nothing else, and the output does not leave the model. Names
of classes and modules decide nothing: `post_attention_layernorm` is a pre-norm in Llama and a post-norm in Gemma 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tapernorm.modules import TaperNorm, evaluation, taper_norms
from tapernorm.probe import Norm, probe
from tapernorm.trace import Consumer, Trace, hooks

Role = Literal["internal", "final", "qk", "post", "embedding", "other"]


@dataclasses.dataclass(frozen=True)
class NormSite:
    """A norm found in a model, in the order of execution.

    `removable` says whether its fixed scale can be folded away; `reason` says why not ("" if it can).
    `consumers` are the names of the weights that read it.
    """

    name: str
    kind: str  # "rms", "layer", or "unknown"
    role: Role
    removable: bool
    reason: str
    consumers: tuple[str, ...]
    zero_centered: bool
    eps: float
    width: int
    links: tuple[Consumer, ...] = dataclasses.field(repr=False)
    probed: Norm | None = dataclasses.field(repr=False)


def find_sites(model: nn.Module, example: Any = None) -> list[NormSite]:
    """Trace one forward and list the norms of `model`. The model is left as it was; meta tensors will do.

    Args:
        model: any module; transformers models bring their own example.
        example: inputs for one forward: a mapping of keyword arguments, a tuple of arguments or one tensor. None
            makes token ids (or what the model's config asks for).

    Raises:
        ValueError: no example was given and none could be made.
    """
    inputs = default_example(model) if example is None else example
    shapes: dict[str, tuple[Any, ...]] = {}
    with evaluation(model):
        with hooks(model, before=lambda name, args: shapes.setdefault(name, args)):
            run(model, inputs)
        norms = _probe_all(model, shapes)
        trace = Trace(model, set(norms))
        with trace.watch(), trace:
            output = run(model, inputs)
    escaped = trace.finish(output)
    sites = [_judge(trace, name, norms[name], name in escaped) for name in trace.calls]
    post = next((site.name for site in sites if site.role == "post" and trace.made_by[site.name] == "residual"), None)
    if post is None:
        return sites
    reason = f"the model is post-norm: {post} normalises the residual stream itself"
    return [dataclasses.replace(s, removable=False, reason=reason) if s.removable else s for s in sites]


def default_example(model: nn.Module, batch: int = 1, length: int = 5) -> dict[str, Any]:
    """Random token ids for a model that takes `input_ids`, on its device.

    Raises:
        ValueError: the model takes something else, or does not say.
    """
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if getattr(model, "main_input_name", None) != "input_ids" or not isinstance(vocabulary, int):
        raise ValueError(
            f"{type(model).__name__} does not say what inputs it takes; pass example=..., such as "
            'example={"input_ids": ids}'
        )
    length = min(length, context_length(model))
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    device = next(model.parameters()).device
    example = {"input_ids": ids.to(device)}
    if device.type == "meta":  # transformers looks into any other mask, and meta tensors cannot be looked into
        example["attention_mask"] = torch.ones(batch, 1, length, length, dtype=torch.bool, device=device)
    return example


def context_length(model: Any) -> int:
    """The most tokens that the model takes; a very large number where its config sets no bound."""
    return int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or 1 << 30)


def run(model: nn.Module, inputs: Any) -> Any:
    """One forward of `model` on an example, without a key-value cache where the model has one."""
    if isinstance(inputs, Mapping):
        extra = {}
        if hasattr(getattr(model, "config", None), "use_cache") and "use_cache" not in inputs:
            extra["use_cache"] = False
        return model(**inputs, **extra)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _probe_all(model: nn.Module, shapes: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Norm | None, int]]:
    """The norms among the modules that ran: TaperNorms, what the probe explains, and what is named a norm."""
    found: dict[str, tuple[Norm | None, int]] = {}
    parts = tuple(f"{name}." for name in taper_norms(model))
    for name, args in shapes.items():
        module = model.get_submodule(name)
        if isinstance(module, TaperNorm):
            found[name] = (module.probed, module.width)
        elif name.startswith(parts):
            continue
        elif len(args) == 1 and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].dim() > 1:
            width = args[0].shape[-1]
            if next(module.children(), None) is not None:
                continue  # a container, whose parts are looked at one by one, though it be called PreNorm
            probed = probe(module, width)
            if probed is not None or type(module).__name__.lower().endswith("norm"):
                found[name] = (probed, width)
    return found


def _judge(trace: Trace, name: str, found: tuple[Norm | None, int], escaped: bool) -> NormSite:
    probed, width = found
    links = tuple(trace.links[name].values())
    reason = _reason(trace, name, probed, links, escaped)
    return NormSite(
        name=name,
        kind=probed.kind if probed else "unknown",
        role=_role(trace, name, links, escaped),
        removable=not reason,
        reason=reason,
        consumers=tuple(link.weight for link in links),
        zero_centered=bool(probed and probed.zero_centered),
        eps=probed.eps if probed else 0.0,
        width=width,
        links=links,
        probed=probed,
    )


def _reason(trace: Trace, name: str, probed: Norm | None, links: tuple[Consumer, ...], escaped: bool) -> str:
    if probed is None:
        kind = type(trace.model.get_submodule(name)).__name__
        return f"what it computes ({kind}) is neither an RMS norm nor a layer norm"
    if trace.calls[name] > 1:
        return f"it runs {trace.calls[name]} times in one forward"
    if escaped:
        return "its output is an output of the model"
    if trace.others[name]:
        return f"its output is also read by {trace.others[name].most_common(1)[0][0]}"
    if not links:
        return "nothing was seen to read its output"
    for link in links:
        parameter = trace.model.get_parameter(link.weight)
        readers = trace.readers[id(parameter)] - {name}
        names = trace.names[id(parameter)]
        if readers and not (readers == {"embedding"} and _is_head(trace, link)):
            return f"{link.weight} also reads something else ({', '.join(filter(None, readers)) or 'not a norm'})"
        if len(names) > 1 and not _is_head(trace, link):
            return f"{link.weight} is shared with {next(n for n in names if n != link.weight)}"
        if probed.bias and (reason := _bias_reason(trace, link)):
            return reason
    return ""


def _bias_reason(trace: Trace, link: Consumer) -> str:
    """Why the norm's bias cannot go into the reader's."""
    if link.bias is None:
        owner = trace.model.get_submodule(link.owner)
        if isinstance(owner, nn.Linear):
            return ""
        return f"it has a bias, and {link.weight} ({type(owner).__name__}) has none that could take it up"
    others = trace.added_to[id(trace.model.get_parameter(link.bias))] - {id(trace.model.get_parameter(link.weight))}
    return f"{link.bias} is also the bias of another weight than {link.weight}" if others else ""


def _is_head(trace: Trace, link: Consumer) -> bool:
    """Whether the link is the model's output head, which can be untied from the embedding."""
    get = getattr(trace.model, "get_output_embeddings", None)
    head = get() if get else None
    return head is not None and trace.model.get_submodule(link.owner) is head


def _role(trace: Trace, name: str, links: tuple[Consumer, ...], escaped: bool) -> Role:
    weights = {link.weight for link in links}
    if escaped or any(_is_head(trace, link) for link in links) or (weights and weights == trace.put_out[name]):
        return "final"
    made_by, others = trace.made_by.get(name, ""), " ".join(trace.others[name])
    if made_by == "linear":
        return "post" if "add" in others else "qk" if others else "internal"
    if not others:
        return "internal"
    if made_by == "embedding":
        return "embedding"
    return "post" if "add" in others else "other"
