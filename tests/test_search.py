"""The search for what goes without training: what grows, what keeps its distance, what is watched and taken back."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from removing import IDS, model_of, search_on
from tapernorm.search import likely_rise
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
        losses[name] = float(search.remove(set(search.norms)).mean())
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


def deep(layers=6):
    """A Llama of six blocks, whose MLPs are said to grow by the square."""
    config = copy.deepcopy(BY_NAME["llama"].build().config)
    config.num_hidden_layers = layers
    search = search_on(randomise(AutoModelForCausalLM.from_config(config).eval()).double(), refit=False)
    mlp = [name for name in search.norms if name.endswith("post_attention_layernorm")]
    search.growth = {name: 2.0 if name in mlp else 1.0 for name in search.norms}
    return search, mlp


def told(search, monkeypatch, kept, gone):
    """Let the search see these drifts, (stressed tokens, rough tokens), before and after each removal."""
    monkeypatch.setattr(search, "_watch", lambda *args: iter([kept, gone]).__next__)


@pytest.mark.parametrize(
    ("kept", "gone", "goes"),
    [
        (0.2, 0.9, True),  # not by more than its own length
        (0.2, 1.1, False),
        (2.0, 2.1, True),  # it had run away before
        (0.2, float("inf"), False),
    ],
)
def test_a_token_may_not_run_away(kept, gone, goes, monkeypatch):
    """kept, gone: the largest drift of the stressed tokens before and after a removal."""
    search, mlp = deep()
    monkeypatch.setattr(search, "_watch", lambda *args: iter([kept, gone]).__next__)
    search.remove({mlp[3]})
    assert search.gone() == ([mlp[3]] if goes else [])
    assert search.refused == (set() if goes else {mlp[3]})


def test_what_is_watched():
    """The held-out sequences that hold the tokens furthest off, twice as far."""
    search, mlp = deep()
    search.WATCHED = 2
    search.remove({mlp[0]})
    theirs = search.teacher.through(0, search.check, search.teacher.start(search.check))
    right = search.teacher.through(1, search.check, theirs)
    ours = theirs.clone()
    for row, size in ((1, 0.3), (2, 0.1), (3, 0.2)):
        ours[row, 5] *= 1 + size
    rows = [1, 3]
    far = theirs[rows] + 2.0 * (ours[rows] - theirs[rows])
    off = search.chain.through(1, search.check[rows], far) - right[rows]
    wanted = float((off.norm(dim=-1) / right[rows].norm(dim=-1)).max())
    assert search._watch(1, theirs, ours, right, 2.0)() == pytest.approx(wanted) and wanted > 0


def test_only_a_fast_branch_is_asked_for_a_drift_twice_as_large(monkeypatch):
    search, mlp = deep()
    stresses = []
    monkeypatch.setattr(search, "_watch", lambda *args: stresses.append(args[-1]) or (lambda: 0.0))
    search.growth = {mlp[1]: 2.0}
    search.remove({mlp[1], mlp[1].replace("post_attention", "input")})
    assert stresses == [1.0, search.STRESS] and search.STRESS > 1


def test_a_fast_branch_needs_its_norm_before_the_last_site_where_a_token_stands_out():
    search, mlp = deep()
    attention = [name.replace("post_attention", "input") for name in mlp]
    costs = {name: 1.0 + number for number, name in enumerate([*mlp, *attention])}
    search.stands_out = dict.fromkeys(search.norms, 1.4)
    assert search.order(costs) == [*mlp, *attention]
    assert search.order(costs | {mlp[1]: 0.5}) == [mlp[1], mlp[0], *mlp[2:], *attention]
    search.stands_out[attention[3]] = 2.1
    assert search.order(costs) == [*mlp[3:], *attention]
    search.stands_out[mlp[5]] = 2.1
    assert search.order(costs) == attention


def test_who_stands_out_is_measured_on_the_original():
    search = search_on(model_of(BY_NAME["llama"]))
    search.costs()
    seen = {}
    for name in search.norms:
        norm = search.original.get_submodule(name)
        norm.register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args[0]}))
    logits(search.original, search.check)
    for name, h in seen.items():
        r = h.pow(2).mean(-1).sqrt()
        assert search.stands_out[name] == pytest.approx(float(r.max() / r.float().median()), rel=1e-3)


ONES = torch.ones(3, 3, dtype=torch.float64)


def pretended(monkeypatch, each, refused=()):
    """A search in which `remove` costs `each` nats a norm, and some are refused; and what it is asked for."""
    search = search_on(model_of(BY_NAME["llama"]))
    names = list(search.norms)
    search.growth = dict.fromkeys(names, 1.0)
    asked = []

    def remove(wanted):
        search._restore(search.norms)
        search.refused.update(names[number] for number in refused)
        for name in wanted - search.refused:
            search.norms[name].set_gate(0.0)
        asked.append(wanted)
        return torch.full((3, 3), 1.0 + each * len(search.gone()), dtype=torch.float64)

    monkeypatch.setattr(search, "remove", remove)
    return search, names, asked


def test_what_was_refused_is_not_asked_for_again(monkeypatch):
    search, names, asked = pretended(monkeypatch, 0.001, refused=[0])
    costs = {name: 0.01 * (1 + number) for number, name in enumerate(names)}
    losses = search.longest(costs, ONES, 0.04, lambda losses: True)
    assert asked == [set(names[:2]), set(names[1:])]
    assert losses.mean() == pytest.approx(1.003) and search.gone() == names[1:]


def test_trials_end_when_the_budget_is_used(monkeypatch):
    """Of four norms that cost as much each, three fit a budget of 3.5: the first guess is one too many."""
    search, names, asked = pretended(monkeypatch, 0.01)
    losses = search.longest(dict.fromkeys(names, 0.008), ONES, 0.035, lambda losses: losses.mean() <= 1.035)
    assert [len(wanted) for wanted in asked] == [4, 3]
    assert losses.mean() == pytest.approx(1.03) and len(search.gone()) == 3


def test_a_rise_is_likely_by_its_spread_over_sequences():
    before = torch.zeros(4, 2, dtype=torch.float64)
    after = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 1.0], [0.0, 4.0]], dtype=torch.float64)
    assert likely_rise(after, before) == pytest.approx(1 + 2 * (2 / 3) ** 0.5 / 2)  # rises of 0, 1, 1 and 2
    assert likely_rise(after + 1, before + 1) == likely_rise(after, before)
    assert likely_rise(after[:1], before[:1]) == 0
    after[2, 1] = torch.nan
    assert likely_rise(after, before) == float("inf")
