"""Post-norms, on the output of one linear map: folded backwards into its rows and its bias."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tapernorm as tn
from tapernorm import fold
from tapernorm.modules import taper_norms
from tapernorm.sites import find_sites
from zoo import PlainNorm, Toy, X, assert_same, randomise, relative, snapshot

CONFIG = tn.TaperConfig(post=True)
NORMS = {"layer": nn.LayerNorm, "rms": PlainNorm, "layer-no-bias": lambda d: nn.LayerNorm(d, bias=False)}


def hidden(m, x):
    return m.up(x).relu()


# name -> (function, the weight that the norm folds into)
BACKWARDS = {
    "linear": (lambda m, x: x + m.norm(m.down(hidden(m, x))), "down.weight"),
    "no-bias": (lambda m, x: x + m.norm(m.head(hidden(m, x))), "head.weight"),
    "conv1d": (lambda m, x: x + m.norm(m.conv(hidden(m, x))), "conv.weight"),
    "functional": (lambda m, x: x + m.norm(F.linear(hidden(m, x), m.matrix, m.vector)), "matrix"),
    "transposed": (
        lambda m, x: x + m.norm(torch.addmm(m.vector, hidden(m, x).flatten(0, 1), m.matrix).view_as(x)), "matrix",
    ),
    "dropout": (lambda m, x: x + m.norm(m.drop(m.down(hidden(m, x))).contiguous()), "down.weight"),
    "time-first": (lambda m, x: x + m.norm(m.down(hidden(m, x)).transpose(0, 1)).transpose(0, 1), "down.weight"),
    "read-twice": (lambda m, x: x + (y := m.norm(m.down(hidden(m, x)))) + y.sin(), "down.weight"),
    "after-a-norm": (lambda m, x: x + m.norm(m.down(m.other(x))), "down.weight"),
}  # fmt: skip

NO_MATRIX = "whose weight is not one matrix"
NO_PRODUCT = "it does not read the product of one linear map"
# name -> (function, what the reason says)
REFUSED = {
    "product-read-again": (lambda m, x: x + m.norm(y := m.down(hidden(m, x))) + y, "what it reads is also read by add"),
    "product-put-out": (lambda m, x: (x + m.norm(y := m.down(hidden(m, x))), y), "also read by the model's output"),
    "weight-used-twice": (
        lambda m, x: x + m.norm(m.down(hidden(m, x))) + m.down(x).relu(), "down.weight is used in more than one place",
    ),
    "activation": (lambda m, x: x + m.norm(m.down(hidden(m, x)).relu() + m.head(x)), NO_PRODUCT),
    "two-products": (lambda m, x: x + m.norm(m.down(hidden(m, x)) + m.head(x)), NO_PRODUCT),
    "scaled": (lambda m, x: x + m.norm(m.down(hidden(m, x)) * m.vector), NO_PRODUCT),
    "some-features": (lambda m, x: x + m.norm(m.down(hidden(m, x)).flip(-1) + m.head(x)), NO_PRODUCT),
    "computed-weight": (lambda m, x: x + m.norm(F.linear(hidden(m, x), m.matrix * 2)), NO_MATRIX),
    "shared-bias": (
        lambda m, x: x + m.norm(F.linear(hidden(m, x), m.matrix, m.vector)) + F.linear(x, m.down.weight, m.vector) ** 2,
        "vector is also the bias of another weight",
    ),
}  # fmt: skip


def site_of(model, x=X):
    return next(site for site in find_sites(model, x) if site.name == "norm")


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_post_norm_folds_into_what_it_reads(name, norm):
    function, weight = BACKWARDS[name]
    model = Toy(function, norm).double().eval()
    x = X.double()
    site = site_of(model, x)
    assert (site.role, site.removable) == ("post", False)
    assert f"post=True folds it backwards into {weight}" in site.reason
    tn.taper_(model, CONFIG, example=x)
    randomise(model)
    modules = taper_norms(model)
    assert "norm" in modules
    for module in modules.values():
        module.set_gate(0.0)
    with torch.no_grad():
        wanted = model(x)
        report = tn.fold_(model, example=x)
        assert relative(model(x), wanted) < 1e-13
    assert "norm" in report.folded
    assert isinstance(model.norm, nn.Identity)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_folded_backwards(name):
    function, reason = REFUSED[name]
    model = Toy(function)
    site = site_of(model)
    assert site.producer is None
    assert reason in site.reason
    before = snapshot(model)
    with pytest.raises(ValueError, match="none of the model's"):
        tn.taper_(model, CONFIG, example=X)
    assert_same(before, snapshot(model))


def test_a_bias_that_has_nowhere_to_go():
    model = Toy(lambda m, x: x + m.norm(F.linear(hidden(m, x), m.matrix)))
    assert "has none that could take it up" in site_of(model).reason
    assert site_of(Toy(model.function, PlainNorm)).producer is not None


def test_what_leaves_the_model_is_left_as_it_is():
    site = site_of(Toy(lambda m, x: (x + (y := m.norm(m.down(hidden(m, x)))), y)))
    assert site.producer is None
    assert site.reason == "its output is an output of the model"


def test_it_is_asked_for():
    model = Toy(BACKWARDS["linear"][0])
    with pytest.raises(ValueError, match="post=True folds it backwards into"):
        tn.taper_(model, tn.TaperConfig(), example=X)
    with pytest.raises(ValueError, match="post=True, but the model has no post-norms"):
        tn.taper_(Toy(lambda m, x: x + m.down(m.up(m.norm(x)).relu())), CONFIG, example=X)


def test_a_model_that_changed_since_is_refused():
    model = Toy(BACKWARDS["linear"][0]).double()
    x = X.double()
    tn.taper_(model, CONFIG, example=x)
    model.norm.set_gate(0.0)
    model.function = REFUSED["product-read-again"][0]
    before = snapshot(model)
    with pytest.raises(fold.FoldError, match=r"norm: it can no longer be folded: .*also read by add"):
        tn.fold_(model, example=x)
    assert_same(before, snapshot(model))


def test_a_failed_check_undoes_it(monkeypatch):
    model = Toy(BACKWARDS["no-bias"][0]).double()
    x = X.double()
    tn.taper_(model, CONFIG, example=x)
    randomise(model)
    model.norm.set_gate(0.0)
    original = fold._backwards
    monkeypatch.setattr(fold, "_backwards", lambda *args: (original(*args)[0].flip(0), *original(*args)[1:]))
    before = snapshot(model)
    with pytest.raises(fold.FoldError, match="put back as it was"):
        tn.fold_(model, example=x)
    assert_same(before, snapshot(model))
