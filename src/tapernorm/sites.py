"""Where the norms of a model are, who reads them, and which can go.

One small forward is traced. A norm can go only if everything that reads its output, followed through views and
casts, is a linear map with a known weight that reads nothing else, and the output does not leave the model. Names
of classes and modules decide nothing: `post_attention_layernorm` is a pre-norm in Llama and a post-norm in Gemma 2.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from torch import Tensor, nn

from tapernorm import adapters
from tapernorm.inputs import context_length, default_example, run
from tapernorm.modules import TaperNorm, evaluation, taper_norms
from tapernorm.probe import Norm, likeness, probe
from tapernorm.trace import Consumer, Trace, hooks

__all__ = ["NormSite", "context_length", "default_example", "examine", "find_sites", "run"]

Role = Literal["internal", "final", "qk", "post", "embedding", "other"]


@dataclasses.dataclass(frozen=True)
class NormSite:
    """A norm found in a model, in the order of execution.

    `removable` says whether its fixed scale can be folded away; `reason` says why not ("" if it can).
    `consumers` are the names of the weights that read it. `producer` is the linear map whose output the norm alone
    reads, where its scale could be folded backwards into that (None where it could not).
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
    producer: Consumer | None = dataclasses.field(repr=False, default=None)


def find_sites(model: nn.Module, example: Any = None) -> list[NormSite]:
    """Trace one forward and list the norms of `model`. The model is left as it was; meta tensors will do.

    Args:
        model: any module; transformers models bring their own example.
        example: inputs for one forward: a mapping of keyword arguments, a tuple of arguments or one tensor. None
            makes token ids (or what the model's config asks for).

    Raises:
        ValueError: no example was given and none could be made.
    """
    return examine(model, example)[0]


def examine(model: nn.Module, example: Any = None) -> tuple[list[NormSite], str]:
    """`find_sites`, and where a float64 model first computes in a narrower type ("" where it does not)."""
    inputs = default_example(model) if example is None else example
    read: dict[str, tuple[int, int]] = {}
    with evaluation(model):
        with hooks(model, before=lambda name, args: read.setdefault(name, (len(args), _width(args)))):
            run(model, inputs)
        norms = _probe_all(model, read)
        trace = Trace(model, set(norms))
        trace.start(inputs)
        with trace.watch(), trace:
            output = run(model, inputs)
    escaped = trace.finish(output)
    sites = [_judge(trace, name, norms[name], name in escaped) for name in trace.calls]
    post = next((site.name for site in sites if site.role == "post" and trace.made_by[site.name] == "residual"), None)
    if post is not None:
        reason = f"the model is post-norm: {post} normalises the residual stream itself"
        sites = [dataclasses.replace(s, removable=False, reason=reason) if s.removable else s for s in sites]
    return sites, trace.narrowed


def _width(args: tuple[Any, ...]) -> int:
    """D where the first argument is a stream [..., D], else 0."""
    h = args[0] if args else None
    return h.shape[-1] if isinstance(h, Tensor) and h.is_floating_point() and h.dim() > 1 else 0


def _probe_all(model: nn.Module, read: dict[str, tuple[int, int]]) -> dict[str, tuple[Norm | None, int]]:
    """The norms among the modules that ran: TaperNorms, what the probe explains, and what is named a norm.

    read: for each module, the number of its arguments, and the width of the first.
    """
    found: dict[str, tuple[Norm | None, int]] = {}
    known: dict[Any, Norm | None] = {}
    parts = tuple(f"{name}." for name in taper_norms(model))
    for name, (arguments, width) in read.items():
        module = model.get_submodule(name)
        if isinstance(module, TaperNorm):
            found[name] = (module.probed, module.width)
        elif name.startswith(parts):
            continue
        elif width:
            if next(module.children(), None) is not None:
                continue  # a container, whose parts are looked at one by one, though it be called PreNorm
            probed = None
            if arguments == 1:  # what takes more than the stream, such as a gate, is no norm alone
                kind = likeness(module, width)
                probed = known[kind] if kind in known else probe(module, width)
                if kind is not None:
                    known[kind] = probed
            if probed is not None or _is_called_norm(module):
                found[name] = (probed, width)
    return found


def _is_called_norm(module: nn.Module) -> bool:
    """Such as RMSNorm, RMSNormGated, LayerNorm1P."""
    return re.search(r"Norm(Gated|\d\w*)?\Z|norm\Z", type(module).__name__) is not None


def _judge(trace: Trace, name: str, found: tuple[Norm | None, int], escaped: bool) -> NormSite:
    probed, width = found
    links = tuple(trace.links[name].values())
    links += tuple(twin for link in links for twin in adapters.twins(trace.model, link))
    reason, role = _reason(trace, name, probed, links, escaped), _role(trace, name, links, escaped)
    producer = _producer(trace, name, probed) if role == "post" and probed else ""
    if reason and role in _WHAT:
        reason = f"{_WHAT[role]}: {reason}"
    if reason and isinstance(producer, Consumer):
        reason += f"; post=True folds it backwards into {producer.weight}"
    elif reason and producer:
        reason += f"; nor can it be folded backwards: {producer}"
    return NormSite(
        name=name,
        kind=probed.kind if probed else "unknown",
        role=role,
        removable=not reason,
        reason=reason,
        consumers=tuple(link.weight for link in links),
        zero_centered=bool(probed and probed.zero_centered),
        eps=probed.eps if probed else 0.0,
        width=width,
        links=links,
        probed=probed,
        producer=producer if isinstance(producer, Consumer) else None,
    )


_WHAT = {
    "qk": "it normalises queries or keys",
    "post": "it is a post-norm",
    "embedding": "it normalises the embeddings",
}


def _reason(trace: Trace, name: str, probed: Norm | None, links: tuple[Consumer, ...], escaped: bool) -> str:
    """Why the norm's scale cannot go into what reads it."""
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
        if reason := adapters.refusal(trace.model, trace.ran, name, link):
            return reason
        parameter = trace.model.get_parameter(link.weight)
        readers = trace.readers[id(parameter)] - {name}
        names = trace.names[id(parameter)]
        if readers and not (readers == {"embedding"} and _is_head(trace, link)):
            return f"{link.weight} also reads something else ({', '.join(filter(None, readers)) or 'not a norm'})"
        if len(names) > 1 and not _is_head(trace, link):
            return f"{link.weight} is shared with {next(n for n in names if n != link.weight)}"
        if probed.bias and (reason := _bias_reason(trace, link)):
            return reason
        if reason := _idle_sibling(trace, name, link, links):
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


def _idle_sibling(trace: Trace, name: str, link: Consumer, links: tuple[Consumer, ...]) -> str:
    """Why the reader may not be the only one: it is one of a list, such as experts, of which some did not run."""
    parts, norm = link.owner.split("."), name.split(".")
    common = 0
    while common < min(len(parts), len(norm)) and parts[common] == norm[common]:
        common += 1
    for end in range(common, len(parts)):
        group = trace.model.get_submodule(".".join(parts[:end]))
        if not isinstance(group, nn.ModuleList | nn.ModuleDict) or (end == common and norm[end:]):
            continue
        for key, sibling in group.named_children():
            full = ".".join([*parts[:end], key])
            if any(f"{other.owner}.".startswith(f"{full}.") for other in links):
                continue
            if full not in trace.ran and any(True for _ in sibling.parameters()):
                return f"{full} did not run on the example, and may read it too: pass an example that reaches it"
    return ""


def _producer(trace: Trace, name: str, probed: Norm) -> Consumer | str:
    """The linear map whose rows could take up the norm's scale, or why there is none."""
    product = trace.producer.get(name)
    if product is None:
        return "it does not read the product of one linear map"
    if product.link is None:
        return f"it reads {product.what}, whose weight is not one matrix"
    others = [reader for reader, times in product.readers.items() if reader != f"the norm {name}" or times > 1]
    if trace.calls[name] > 1 or others:
        return f"what it reads is also read by {(others or [f'the norm {name}'])[0]}"
    link = product.link
    parameter = trace.model.get_parameter(link.weight)
    if trace.uses[id(parameter)] > 1 or len(trace.names[id(parameter)]) > 1:
        return f"{link.weight} is used in more than one place"
    if link.bias is None:
        owner = trace.model.get_submodule(link.owner)
        if probed.bias and not isinstance(owner, nn.Linear):
            return f"it has a bias, and {link.weight} ({type(owner).__name__}) has none that could take it up"
    elif len(trace.added_to[id(trace.model.get_parameter(link.bias))]) > 1:
        return f"{link.bias} is also the bias of another weight than {link.weight}"
    return link


def _is_head(trace: Trace, link: Consumer) -> bool:
    """Whether the link is the model's output head, which can be untied from the embedding."""
    get = getattr(trace.model, "get_output_embeddings", None)
    head = get() if get else None
    if head is None:
        return False
    return trace.model.get_submodule(link.owner) in (head, getattr(head, "original_module", None))


def _role(trace: Trace, name: str, links: tuple[Consumer, ...], escaped: bool) -> Role:
    weights = set(trace.links[name])
    if any(_is_head(trace, link) for link in links) or (weights and weights == trace.put_out[name]):
        return "final"
    made_by, others = trace.made_by.get(name, ""), " ".join(trace.others[name])
    if escaped:  # an encoder's last norm, which the decoder reads, comes before no head
        return "other" if links else "final"
    if made_by == "linear":
        return "post" if "add" in others else "qk" if others else "internal"
    if not others:
        return "internal"
    if made_by == "embedding":
        return "embedding"
    return "post" if "add" in others else "other"
