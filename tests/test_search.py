"""The search for what goes without training: what grows, what keeps its distance, what is watched and taken back."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from removing import IDS, model_of, search_on
from tapernorm.statistics import robust_scale
from tapernorm.verify import summarise, token_losses
from zoo import BY_NAME, logits, randomise


def test_the_writers_are_the_maps_that_write_the_residual():
    model = model_of(BY_NAME["llama"])
    search = search_on(model)
    assert search.writers == {
        f"model.layers.{i}.{norm}": f"model.layers.{i}.{writer}"
        for i in (0, 1)
        for norm, writer in (("input_layernorm", "self_attn.o_proj"), ("post_attention_layernorm", "mlp.down_proj"))
    }


def test_the_fits_lower_the_loss_of_a_removal():
    """All norms at once: the fitted maps against the paper's diagonal scale alone."""
    losses = {}
    for name in ("fitted", "diagonal"):
        model = model_of(BY_NAME["llama"])
        search = search_on(model, refit=name == "fitted")
        search.LIMIT = float("inf")
        if name == "diagonal":
            search._install = lambda norm, h, y, s=search: _diagonal(s, norm, h)
        losses[name] = search.remove(set(search.norms)).loss
    original = summarise(token_losses(logits(model_of(BY_NAME["llama"]), IDS[:4]), IDS[:4])).loss
    assert abs(losses["fitted"] - original) < abs(losses["diagonal"] - original)


def _diagonal(search, name, h):
    norm = search.norms[name]
    norm.fixed_norm.c.fill_(float(robust_scale(h, norm.gain(), "rms", norm.probed.eps)))
    norm.fixed_norm.weight.data.copy_(norm.gain())
    norm.set_gate(0.0)


def test_a_token_that_runs_away_keeps_the_norm():
    model = model_of(BY_NAME["llama"])
    search = search_on(model)
    search.LIMIT = 0.0
    search.remove(set(search.norms))
    assert search.gone() == []


def test_how_a_branch_grows_without_its_norm():
    """A gated MLP by the square of its input; attention, and an MLP whose activation is linear far out, as it does."""
    for name, power in (("llama", 2.0), ("gpt2", 1.0)):
        model = model_of(BY_NAME[name])
        search = search_on(model)
        search.costs()
        grown = {site: search.growth[site] for site in search.norms}
        mlp = [value for site, value in grown.items() if site.endswith(("post_attention_layernorm", "ln_2"))]
        attention = [value for site, value in grown.items() if site.endswith(("input_layernorm", "ln_1"))]
        assert len(mlp) == len(attention) == 2
        assert all(abs(value - power) < 0.1 for value in mlp), grown
        assert all(abs(value - 1) < 0.1 for value in attention), grown


def test_fast_growing_branches_keep_their_distance():
    model = model_of(BY_NAME["llama"])
    search = search_on(model, refit=False)
    attention, mlp = (
        [n for n in search.norms if n.endswith(end)] for end in ("input_layernorm", "attention_layernorm")
    )
    search.growth = dict.fromkeys(attention, 1.0) | dict.fromkeys(mlp, 2.0)
    costs = {mlp[1]: 0.1, attention[0]: 0.2, mlp[0]: 0.3, attention[1]: 0.4}
    assert search.order(costs) == [mlp[1], attention[0], attention[1]]
    search.growth = dict.fromkeys([*attention, *mlp], 1.0)
    assert search.order(costs) == sorted(costs, key=lambda name: costs[name])


def deep(layers=6):
    """A Llama of six blocks, whose MLPs are said to grow by the square."""
    config = copy.deepcopy(BY_NAME["llama"].build().config)
    config.num_hidden_layers = layers
    search = search_on(randomise(AutoModelForCausalLM.from_config(config).eval()).double(), refit=False)
    mlp = [name for name in search.norms if name.endswith("post_attention_layernorm")]
    search.growth = {name: 2.0 if name in mlp else 1.0 for name in search.norms}
    return search, mlp


def test_where_a_gated_mlp_has_to_keep_its_norm_the_next_one_is_tried(monkeypatch):
    """Block 1's has to stay, so block 2's goes; block 4's would be too near to it, so block 5's goes."""
    search, mlp = deep()
    search.LIMIT = float("inf")
    install = search._install

    def stays(name, h, target):
        search.LIMIT = 0.0 if name == mlp[1] else float("inf")
        install(name, h, target * (9 if name == mlp[1] else 1))

    monkeypatch.setattr(search, "_install", stays)
    search.remove({mlp[1], mlp[4]})
    assert search.gone() == [mlp[2], mlp[5]]


def test_after_the_last_block_there_is_no_next():
    search, mlp = deep()
    search.LIMIT = 0.0
    search.remove({mlp[5]})
    assert search.gone() == []


def test_the_tokens_furthest_off_are_watched(monkeypatch):
    """The token that runs away may be in any of the held-out sequences."""
    search, mlp = deep()
    search.WATCHED = 1
    seen = []
    through = search.chain.through
    monkeypatch.setattr(
        search.chain, "through", lambda index, ids, hidden: seen.append((index, ids)) or through(index, ids, hidden)
    )
    ours = {}
    handle = search.model.get_submodule("model.layers.1").register_forward_hook(
        lambda m, args, out: ours.update(out=out)
    )
    push = search.model.get_submodule("model.layers.0.input_layernorm")
    forward = push.forward
    row = search.check[2]

    def off(h=None, **named):  # in the one sequence that the third one is
        return forward(h) * (1 if h.shape[0] < len(search.check) else torch.tensor([1.0, 1, 5, 1])[:, None, None])

    monkeypatch.setattr(push, "forward", off)
    search.remove({search.by_block[0][0], mlp[3]})
    handle.remove()
    watched = [ids for index, ids in seen if index == 3 and len(ids) == 1]
    assert len(watched) == 2 and all(torch.equal(ids[0], row) for ids in watched)


def test_trials_end_when_the_budget_is_used(monkeypatch):
    """Of four norms that cost as much each, three fit a budget of 3.5: the first guess is one too many."""
    search = search_on(model_of(BY_NAME["llama"]))
    names = list(search.norms)
    search.growth = dict.fromkeys(names, 1.0)
    tried = []

    def remove(wanted):
        search._restore(search.norms)
        for name in wanted:
            search.norms[name].set_gate(0.0)
        tried.append(len(wanted))
        return summarise(torch.full((9,), 1.0 + 0.01 * len(wanted)))

    monkeypatch.setattr(search, "remove", remove)
    losses = search.longest(dict.fromkeys(names, 0.008), 1.0, 0.035, lambda losses: losses.loss <= 1.035)
    assert tried == [4, 3]
    assert losses.loss == pytest.approx(1.03) and len(search.gone()) == 3
