"""What is exported in the tests: small folded models, and a decoding loop over onnxruntime that shares no code with
the library's own."""

from __future__ import annotations

import copy

import numpy as np
import torch

import tapernorm as tn
from prefixed import build, trained
from tapernorm.modules import taper_norms
from zoo import BY_NAME, randomise

_MADE = {}


def folded(row="llama-tied", arm="all", model=None, example=None, fold=True, prefix=(), dtype=torch.float32):
    """A folded model whose gains, biases and c were random and different at every site."""
    key = row, arm, fold, prefix, dtype
    if model is not None or key not in _MADE:
        made = copy.deepcopy(model) if model is not None else BY_NAME[row].build()
        randomise(made.double())
        if fold:
            made_for = {} if example is None else {"example": example.double()}
            tn.taper_(made, tn.TaperConfig(arm=arm, prefix=prefix), **made_for)
            randomise(made, seed=1)
            for module in taper_norms(made).values():
                module.set_gate(0.0)
            tn.fold_(made, **made_for)
        made = made.to(dtype).eval()
        if model is not None:
            return made
        _MADE[key] = made
    return copy.deepcopy(_MADE[key])


def prefixed(family="llama", arm="all"):
    """A folded model with a constant prefix of three tokens."""
    model, _ = trained(family, arm=arm)
    tn.fold_(model)
    return model.float().eval()


def sliding():
    """Every other layer sees five tokens and no more; norms of queries and keys and of outputs stay."""
    model = build("gemma3_text")
    tn.taper_(model, tn.TaperConfig(arm="all"))
    randomise(model, seed=1)
    for module in taper_norms(model).values():
        module.set_gate(0.0)
    tn.fold_(model)
    return model.float().eval()


GRAPH = {
    "all": folded,
    "internal": lambda: folded(arm="internal"),
    "gpt2": lambda: folded("gpt2"),
    "prefix": prefixed,
    "sliding": sliding,
}


def _empty(session, batch):
    past = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    return {i.name: np.zeros((batch, i.shape[1], 0, i.shape[3]), np.float32) for i in past}


def padded_feed(session, ids, pads):
    """A prompt behind `pads` padding tokens."""
    feed = {"input_ids": np.concatenate([np.zeros((1, pads), np.int64), ids.numpy()], axis=1)}
    feed["attention_mask"] = np.concatenate([np.zeros((1, pads), np.int64), np.ones_like(ids.numpy())], axis=1)
    if "position_ids" in {i.name for i in session.get_inputs()}:
        feed["position_ids"] = np.maximum(np.arange(pads + ids.shape[1]) - pads, 0)[None]
    return feed | _empty(session, 1)


def run_steps(session, ids, count):
    """(logits of the prompt [B, T, V], greedy tokens [B, count]), token by token through the cache."""
    names = [o.name for o in session.get_outputs()]
    has_places = "position_ids" in {i.name for i in session.get_inputs()}
    cache, seen, step, first, made = _empty(session, len(ids)), 0, ids.numpy(), None, []
    while len(made) < count:
        batch, length = step.shape
        feed = {"input_ids": step, "attention_mask": np.ones((batch, seen + length), np.int64), **cache}
        if has_places:
            feed["position_ids"] = np.tile(np.arange(seen, seen + length), (batch, 1))
        out = dict(zip(names, session.run(None, feed), strict=True))
        first = out["logits"] if first is None else first
        cache = {k.replace("present", "past_key_values"): v for k, v in out.items() if k != "logits"}
        step, seen = out["logits"][:, -1:].argmax(-1), seen + length
        made.append(step)
    return first, np.concatenate(made, axis=1)
