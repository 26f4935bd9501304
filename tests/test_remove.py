"""Removal without training: the fits, and what `remove_` leaves behind."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tapernorm as tn
from removing import IDS, model_of
from tapernorm.prefix import room
from tapernorm.ridge import Fit, fit_map
from tapernorm.search import Search
from tapernorm.statistics import robust_scale
from tapernorm.verify import evaluate
from zoo import BY_NAME, D, assert_same, logits, randomise, relative, snapshot

ROWS = [pytest.param(BY_NAME[name], id=name) for name in ("llama", "llama-tied", "gpt2", "gpt2-untied")]
NOTHING = torch.zeros(4, 15)


def parallel():
    """GPT-NeoX: both branches of a block are added at once."""
    sizes = {"hidden_size": D, "intermediate_size": D, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("gpt_neox", vocab_size=D, use_parallel_residual=True, **sizes)
    return randomise(AutoModelForCausalLM.from_config(config).eval()).double()


# The fit


def test_a_linear_map_is_found_again():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator, dtype=torch.float64)
    wanted = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    found = fit_map(x, x @ wanted.T, torch.zeros_like(wanted), ridges=(1e-12, 1.0))
    assert found.ridge == 1e-12
    assert relative(found.weight, wanted) < 1e-9
    assert found.after < 1e-12 * found.before


def test_the_fit_is_the_minimum_of_its_objective():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(100, n, generator=generator, dtype=torch.float64) for n in (6, 4))
    prior = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    x[:25] = x[25:50]  # so that the held-out quarter agrees with what is fitted, and a ridge is chosen
    y[:25] = y[25:50]
    found = fit_map(x, y, prior, ridges=(0.1,))
    weight = found.weight.clone().requires_grad_()
    size = x.pow(2).sum(0).mean()
    loss = (y - x @ weight.T).pow(2).sum() + 0.1 * size * (weight - prior).pow(2).sum()
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
    check = IDS[: -(2 * len(IDS) // 3)]  # two thirds are fitted
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
    wanted = robust_scale(h, norm.gain(), row.kind, norm.probed.eps) * x * norm.gain()
    if row.kind == "layer":
        wanted = wanted + norm.norm.bias
    assert relative(norm(h), wanted) < 1e-6


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
        tn.remove_(model, IDS, budget=2.0, tail=5.0, prefix=(3, 5))
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
