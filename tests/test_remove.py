"""Removal without training: the chain of blocks, the fits, and what `remove_` leaves behind."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tapernorm as tn
from tapernorm.chain import Chain
from tapernorm.prefix import room
from tapernorm.ridge import Fit, fit_map
from tapernorm.search import Search
from tapernorm.statistics import robust_scale
from tapernorm.verify import evaluate, summarise, token_losses
from zoo import BY_NAME, D, assert_same, logits, randomise, relative, snapshot

ROWS = [pytest.param(BY_NAME[name], id=name) for name in ("llama", "llama-tied", "gpt2", "gpt2-untied")]
NOTHING = summarise(torch.zeros(9))
IDS = torch.randint(D, (12, 16), generator=torch.Generator().manual_seed(3))


def model_of(row, dtype=torch.float64):
    """A tiny model whose norms matter: the text is far from uniform, and gains and biases are random."""
    return randomise(row.build()).to(dtype)


def parallel():
    """GPT-NeoX: both branches of a block are added at once."""
    sizes = {"hidden_size": D, "intermediate_size": D, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("gpt_neox", vocab_size=D, use_parallel_residual=True, **sizes)
    return randomise(AutoModelForCausalLM.from_config(config).eval()).double()


# The chain


@pytest.mark.parametrize("row", ROWS)
def test_a_forward_can_begin_and_end_at_any_block(row):
    model = model_of(row)
    chain = Chain(model, tn.find_sites(model), IDS, batch=5)
    wanted, hidden = logits(model, IDS), chain.start(IDS)
    for index in range(len(chain.blocks)):
        assert torch.equal(chain.rest(index, IDS, hidden, lambda out, ids: out), wanted)
        hidden = chain.through(index, IDS, hidden)
    assert torch.equal(chain.head(IDS, hidden, lambda out, ids: out), wanted)
    assert torch.equal(logits(model, IDS), wanted)  # nothing is left behind
    assert not any("forward" in vars(block) or block._forward_pre_hooks for block in chain.blocks)


def test_what_is_handed_over_is_what_runs():
    model = model_of(BY_NAME["llama"])
    chain = Chain(model, tn.find_sites(model), IDS)
    hidden = chain.start(IDS)
    changed = chain.rest(1, IDS, chain.through(0, IDS, 2 * hidden), lambda out, ids: out)
    handle = model.model.embed_tokens.register_forward_hook(lambda m, args, out: 2 * out)
    wanted = logits(model, IDS)
    handle.remove()
    assert torch.equal(changed, wanted)
    inside = chain.inside(1, IDS, hidden, {"model.layers.1.mlp.down_proj": "input"})
    assert inside["model.layers.1.mlp.down_proj"].shape == (*IDS.shape, D)


def test_norms_outside_a_list_of_blocks_are_refused():
    model = model_of(BY_NAME["llama"])
    sites = [site for site in tn.find_sites(model) if site.role == "final"]
    with pytest.raises(ValueError, match="do not sit in a list of blocks"):
        Chain(model, sites, IDS)


# The fit


def test_a_linear_map_is_found_again():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator, dtype=torch.float64)
    wanted = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    found = fit_map(x, x @ wanted.T, torch.zeros_like(wanted), ridges=(1e-12, 1.0))
    assert found.ridge == 1e-12
    assert relative(found.weight, wanted) < 1e-9
    assert found.after < 1e-18 * found.before


def test_the_fit_is_the_minimum_of_its_objective():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(100, n, generator=generator, dtype=torch.float64) for n in (6, 4))
    prior = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    x[:25] = x[25:50]  # so that the held-out quarter agrees with what is fitted, and a ridge is chosen
    y[:25] = y[25:50]
    found = fit_map(x, y, prior, ridges=(0.1,))
    xs, ys = x[25:], y[25:]
    weight = found.weight.clone().requires_grad_()
    size = xs.pow(2).sum(0).mean()
    loss = (ys - xs @ weight.T).pow(2).sum() + 0.1 * size * (weight - prior).pow(2).sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert found.ridge == 0.1
    assert gradient.abs().max() < 1e-9 * loss.item()


def test_noise_leaves_the_prior():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 30, generator=generator, dtype=torch.float64)
    prior = torch.eye(30, dtype=torch.float64)
    y = x + 0.5 * torch.randn(40, 30, generator=generator, dtype=torch.float64)
    found = fit_map(x, y, prior, ridges=(1e-6,))
    assert found.ridge == float("inf")
    assert found.weight is prior


def test_the_robust_scale_is_that_of_the_statistics():
    generator = torch.Generator().manual_seed(3)
    h, gain = torch.randn(2, 9, D, generator=generator) * 3 + 1, torch.rand(D, generator=generator) + 0.5
    r = (h.pow(2).mean(-1) + 1e-6).sqrt()
    e = (h * gain).pow(2).sum(-1)
    assert relative(robust_scale(h, gain, "rms", 1e-6), (e / r**3).sum() / (e / r**2).sum()) < 1e-6
    x = h - h.mean(-1, keepdim=True)
    s = (x.pow(2).mean(-1) + 1e-6).sqrt()
    e = (x * gain).pow(2).sum(-1)
    assert relative(robust_scale(h, gain, "layer", 1e-6), (e / s**3).sum() / (e / s**2).sum()) < 1e-6


# Removal


@pytest.mark.parametrize("row", ROWS)
def test_what_is_removed_is_folded_within_the_budget(row):
    model = model_of(row)
    before, parameters = copy.deepcopy(model), {n: p.clone() for n, p in model.named_parameters()}
    removal = tn.remove_(model, IDS, budget=0.05, tail=1.0)
    assert removal.folded
    assert set(removal.folded) | set(removal.kept) == set(row.sites)
    assert row.final in removal.kept
    assert removal.fold is not None
    assert removal.fold.relative_error < 1e-10
    assert {type(model.get_submodule(name)) for name in removal.folded} == {torch.nn.Identity}
    assert all(type(model.get_submodule(n)) is type(before.get_submodule(n)) for n in removal.kept)
    check = IDS[: round(len(IDS) * 6144 / (6144 + 16384))]
    assert evaluate(before, check).loss == pytest.approx(removal.loss_before, abs=1e-12)
    assert evaluate(model, check).loss == pytest.approx(removal.loss_after, abs=1e-9)
    assert removal.loss_after <= removal.loss_before * 1.05
    readers = {weight for name in removal.folded for weight in row.sites[name]}
    touched = readers | {w.replace(".weight", ".bias") for w in readers} | {f"{w}.weight" for w in removal.refitted}
    for name, parameter in model.named_parameters():
        if name in parameters and name not in touched:
            assert torch.equal(parameter, parameters[name]), name
    assert set(removal.costs) == set(row.sites) - {row.final}


def test_without_refitting_only_the_readers_change():
    row = BY_NAME["llama"]
    model = model_of(row)
    parameters = {n: p.clone() for n, p in model.named_parameters()}
    removal = tn.remove_(model, IDS, budget=0.2, tail=5.0, refit=False)
    assert removal.folded
    assert removal.refitted == ()
    readers = {weight for name in removal.folded for weight in row.sites[name]}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, parameters[name]) == (name not in readers), name


@pytest.mark.parametrize("row", ROWS)
def test_no_budget_leaves_every_bit(row):
    model = model_of(row)
    before = snapshot(model)
    removal = tn.remove_(model, IDS, budget=1e-12, tail=0.0)
    if removal.folded:  # a fit may lower the loss by chance
        return
    assert_same(before, snapshot(model))
    assert removal.loss_after == removal.loss_before
    assert removal.fold is None


def test_a_parallel_residual():
    model = parallel()
    wanted = copy.deepcopy(model)
    removal = tn.remove_(model, IDS, budget=0.1, tail=5.0)
    assert removal.folded
    assert removal.fold is not None
    assert removal.fold.relative_error < 1e-10
    assert relative(logits(model, IDS), logits(wanted, IDS)) < 1


def test_the_writers_are_the_maps_that_write_the_residual():
    model = model_of(BY_NAME["llama"])
    sites = [site for site in tn.find_sites(model) if site.role == "internal"]
    search = Search(model, sites, IDS[4:], IDS[:4], True, None)
    assert search.writers == {
        f"model.layers.{i}.{norm}": f"model.layers.{i}.{writer}"
        for i in (0, 1)
        for norm, writer in (("input_layernorm", "self_attn.o_proj"), ("post_attention_layernorm", "mlp.down_proj"))
    }


def test_the_fits_lower_the_loss_of_a_removal():
    """All norms at once: the fitted maps against the paper's diagonal scale alone."""
    sites = [site for site in tn.find_sites(model_of(BY_NAME["llama"])) if site.role == "internal"]
    losses = {}
    for name in ("fitted", "diagonal"):
        model = model_of(BY_NAME["llama"])
        search = Search(model, sites, IDS[4:], IDS[:4], name == "fitted", None)
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
    sites = [site for site in tn.find_sites(model) if site.role == "internal"]
    search = Search(model, sites, IDS[4:], IDS[:4], True, None)
    search.LIMIT = 0.0
    search.remove(set(search.norms))
    assert search.gone() == []


def test_a_prefix_stays_in_the_model(tmp_path):
    model = model_of(BY_NAME["llama"], torch.float32)
    removal = tn.remove_(model, IDS, budget=0.2, tail=5.0, prefix=(3, 5))
    assert removal.prefix == (3, 5)
    assert removal.fold is not None
    assert removal.fold.prefix == (3, 5)
    tn.save_pretrained(model, tmp_path / "out")
    again, _ = tn.from_pretrained(tmp_path / "out")
    assert relative(logits(again, IDS), logits(model, IDS)) < 1e-6
    assert list(again.config.constant_prefix) == [3, 5]


def test_saved_and_loaded_again(tmp_path):
    model = model_of(BY_NAME["gpt2"], torch.float32)
    removal = tn.remove_(model, IDS, budget=0.2, tail=5.0)
    tn.save_pretrained(model, tmp_path / "out")
    again, _ = tn.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    assert removal.folded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "budget=0.0 must be above 0"),
        ({"texts": ["some text"]}, "texts need a tokenizer"),
        ({"texts": IDS[:2]}, "at least 4 are needed"),
        ({"keep": ("nothing.*",)}, "matches none of the model's norms"),
        ({"prefix": (1, 2, 3, 4, 5)}, "1 to 4 token ids"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    model = model_of(BY_NAME["llama"])
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        tn.remove_(model, **{"texts": IDS, **options})
    assert_same(before, snapshot(model))


def test_a_tapered_model_is_refused():
    model = model_of(BY_NAME["llama"])
    tn.taper_(model, tn.TaperConfig())
    with pytest.raises(ValueError, match="the model is tapered"):
        tn.remove_(model, IDS)


@pytest.mark.parametrize("row", [pytest.param(BY_NAME[name], id=name) for name in ("llama", "gpt2")])
def test_what_a_map_is_drawn_towards_is_the_papers_scale(row, monkeypatch):
    """Where nothing can be learned the branch is c (h − mean(h)) γ + β, the mean of a layer norm alone."""
    monkeypatch.setattr("tapernorm.search.fit_map", lambda x, y, prior: Fit(prior, float("inf"), 0.0, 0.0))
    model = model_of(row)
    site = next(site for site in tn.find_sites(model) if site.role == "internal")
    search = Search(model, [site], IDS[4:], IDS[:4], False, None)
    h = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 1
    norm = search.norms[site.name]
    search._install(site.name, h, h)
    x = h - h.mean(-1, keepdim=True) if row.kind == "layer" else h
    wanted = norm.fixed_norm.c.double() * x * norm.gain()
    if row.kind == "layer":
        wanted = wanted + norm.norm.bias
    assert relative(norm(h), wanted) < 1e-6


def test_how_a_branch_grows_without_its_norm():
    """A gated MLP by the square of its input; attention, and an MLP whose activation is linear far out, as it does."""
    for name, power in (("llama", 2.0), ("gpt2", 1.0)):
        model = model_of(BY_NAME[name])
        sites = [site for site in tn.find_sites(model) if site.role == "internal"]
        search = Search(model, sites, IDS[4:], IDS[:4], True, None)
        search.costs()
        grown = {site: search.growth[site] for site in search.norms}
        mlp = [value for site, value in grown.items() if site.endswith(("post_attention_layernorm", "ln_2"))]
        attention = [value for site, value in grown.items() if site.endswith(("input_layernorm", "ln_1"))]
        assert len(mlp) == len(attention) == 2
        assert all(abs(value - power) < 0.1 for value in mlp), grown
        assert all(abs(value - 1) < 0.1 for value in attention), grown


def test_fast_growing_branches_keep_their_distance():
    model = model_of(BY_NAME["llama"])
    sites = [site for site in tn.find_sites(model) if site.role == "internal"]
    search = Search(model, sites, IDS[4:], IDS[:4], False, None)
    attention, mlp = (
        [s.name for s in sites if s.name.endswith(end)] for end in ("input_layernorm", "attention_layernorm")
    )
    search.growth = dict.fromkeys(attention, 1.0) | dict.fromkeys(mlp, 2.0)
    costs = {mlp[1]: 0.1, attention[0]: 0.2, mlp[0]: 0.3, attention[1]: 0.4}
    assert search.order(costs) == [mlp[1], attention[0], attention[1]]
    search.growth = dict.fromkeys([*attention, *mlp], 1.0)
    assert search.order(costs) == sorted(costs, key=lambda name: costs[name])


@pytest.mark.parametrize("row", [pytest.param(BY_NAME[name], id=name) for name in ("llama", "gpt2")])
@pytest.mark.parametrize("broken", ["fold_", "Search"])
def test_an_error_on_the_way_leaves_the_model_as_it_came(row, broken, monkeypatch):
    """With a prefix, which takes rows of GPT-2's position table; before and after weights were fitted."""

    def fail(*args, **kwargs):
        raise tn.FoldError("on purpose")

    monkeypatch.setattr(f"tapernorm.remove.{broken}", fail)
    model = model_of(row)
    before, wanted = snapshot(model), logits(model)
    with pytest.raises(tn.FoldError, match="on purpose"):
        tn.remove_(model, IDS, budget=0.2, tail=5.0, prefix=(3, 5))
    assert_same(before, snapshot(model))
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("row", [pytest.param(BY_NAME[name], id=name) for name in ("llama", "gpt2")])
def test_where_nothing_goes_no_prefix_stays(row, monkeypatch):
    monkeypatch.setattr(Search, "remove", lambda self, wanted: NOTHING)  # as if each were taken back
    model = model_of(row)
    before = snapshot(model)
    removal = tn.remove_(model, IDS, prefix=(3, 5))
    assert removal.folded == removal.prefix == removal.refitted == ()
    assert removal.fold is None
    assert removal.loss_after == removal.loss_before
    assert_same(before, snapshot(model))


def test_learned_positions_leave_room_for_a_prefix():
    """Of sixty-four positions a prefix takes its own, or four while it is sought."""
    assert room(model_of(BY_NAME["gpt2"]), (3, 5)) == 62
    assert room(model_of(BY_NAME["gpt2"]), None) == 60
    assert room(model_of(BY_NAME["gpt2"]), ()) == 64
    assert room(model_of(BY_NAME["llama"]), None) == 64
