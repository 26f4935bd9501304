"""Which readers of a norm are followed and which refused, on hand-made modules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tapernorm as tn
from sites import refusals
from tapernorm.sites import find_sites
from zoo import REFUSED, REFUSED_SQUARE, REMOVABLE, SQUARE, D, PlainNorm, Quark, Toy, X


@pytest.mark.parametrize("name", REMOVABLE)
def test_linear_readers_are_followed(name):
    function, readers = REMOVABLE[name]
    sites = find_sites(Toy(function), X)
    assert [(site.name, site.reason, site.consumers) for site in sites] == [("norm", "", readers)]
    assert (sites[0].role, sites[0].removable) == ("internal", True)


@pytest.mark.parametrize("name", REFUSED)
def test_other_readers_are_refused(name):
    function, reason = REFUSED[name]
    found = refusals(Toy(function), X)
    assert "norm" in found
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found["norm"])


@pytest.mark.parametrize("name", REFUSED_SQUARE)
def test_a_transpose_of_a_square_is_seen(name):
    function, reason = REFUSED_SQUARE[name]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refusals(Toy(function), SQUARE).get("norm"))


def test_the_reason_says_where():
    class Strange(nn.Module):
        def forward(self, x):
            return x.sin()

    model = Toy(lambda m, x: x + m.strange(m.norm(x)))
    model.strange = Strange()
    assert refusals(model, X) == {"norm": "its output is also read by sin in strange (Strange)"}


@pytest.mark.parametrize("kind", [PlainNorm, Quark])
def test_the_name_of_the_class_does_not_matter(kind):
    (site,) = find_sites(Toy(REMOVABLE["linear"][0], norm=kind), X)
    assert (site.kind, site.eps, site.removable) == ("rms", pytest.approx(1e-5), True)


def test_a_class_called_norm_that_is_none():
    class CubeNorm(nn.Module):
        def __init__(self, width):
            super().__init__()

        def forward(self, x):
            return x**3

    (site,) = find_sites(Toy(REMOVABLE["linear"][0], norm=CubeNorm), X)
    assert (site.kind, site.removable) == ("unknown", False)
    assert site.reason == "what it computes (CubeNorm) is neither an RMS norm nor a layer norm"


def test_norms_inside_a_container_that_is_called_norm():
    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fn = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

        def forward(self, x):
            return self.fn(self.norm(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = PreNorm()

        def forward(self, x):
            return x + self.block(x)

    (site,) = find_sites(Net(), X)
    assert (site.name, site.consumers, site.removable) == ("block.norm", ("block.fn.0.weight",), True)


def test_a_model_without_norms():
    model = nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D))
    assert find_sites(model, X) == []
    with pytest.raises(ValueError, match="no normalization layers"):
        tn.taper_(model, example=X)


def test_two_modules_that_share_a_weight():
    model = Toy(lambda m, x: x + m.down((m.up(m.norm(x)) + m.head(m.norm.weight * x)).relu()))
    model.head.weight = model.up.weight
    assert "up.weight" in refusals(model, X)["norm"]
    model = Toy(REMOVABLE["linear"][0])
    model.unused = nn.Linear(D, D)
    model.unused.weight = model.up.weight
    assert refusals(model, X)["norm"] in (
        "up.weight is shared with unused.weight",
        "unused.weight is shared with up.weight",
    )


def test_a_norm_that_is_registered_twice():
    model = Toy(lambda m, x: x + m.up(m.norm(x)).relu() + m.head(m.other(x)).relu())
    model.other = model.norm
    assert "runs 2 times" in refusals(model, X)["norm"]


def test_quantized_weights_are_refused():
    class Int8(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-9, 9, (D, D), dtype=torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(D, 1))

        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype) * self.scale)

    model = Toy(REMOVABLE["linear"][0])
    model.up = Int8()
    assert "whose weight is not a parameter" in refusals(model, X)["norm"]
    Int8.forward = lambda self, x: F.linear(x, self.weight.to(x.dtype)) * self.scale.T
    assert "whose weight is quantized (torch.int8)" in refusals(model, X)["norm"]


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_parametrized_weights_are_refused(wrap):
    model = Toy(REMOVABLE["linear"][0])
    wrap(model.up)
    assert "whose weight is not a parameter" in refusals(model, X)["norm"]


def test_a_bias_that_has_nowhere_to_go():
    """A LayerNorm's bias becomes a bias of its readers; a bare matrix cannot be given one. Known before training."""
    model = Toy(lambda m, x: x + m.down((m.norm(x) @ m.matrix).relu()))
    assert "matrix" in refusals(model, X)["norm"]
    assert "bias" in refusals(model, X)["norm"]
    model = Toy(model.function, norm=PlainNorm)
    assert refusals(model, X) == {}


def test_a_bias_that_two_maps_share():
    model = Toy(lambda m, x: x + m.down((m.up(m.norm(x)) + m.head(x)).relu()))
    model.head.bias = model.up.bias
    assert "up.bias" in refusals(model, X)["norm"]


def test_the_final_norm_of_a_hand_made_model():
    """Known by where its readers' outputs go, for a model that does not say which its head is."""
    model = Toy(lambda m, x: m.head(m.other(x + m.down(m.up(m.norm(x)).relu()))))
    assert [(site.name, site.role) for site in find_sites(model, X)] == [("norm", "internal"), ("other", "final")]
    model = Toy(lambda m, x: {"logits": m.head(m.other(x + m.down(m.up(m.norm(x)).relu()))[:, -1]).float()[..., :3]})
    assert [(site.name, site.role) for site in find_sites(model, X)] == [("norm", "internal"), ("other", "final")]


def test_no_internal_norm_is_final_because_a_value_is_put_out():
    model = Toy(lambda m, x: (x + m.down((m.up(y := m.norm(x)) * (v := m.conv(y))).relu()), v))
    assert [(site.name, site.role) for site in find_sites(model, X)] == [("norm", "internal")]


# Readers that one forward may not show


class Experts(nn.Module):
    """A list of linear maps, of which a token takes one."""

    def __init__(self, container=nn.ModuleList):
        super().__init__()
        torch.manual_seed(0)
        self.norm = PlainNorm(D)
        maps = [nn.Linear(D, D) for _ in range(3)]
        self.experts = container({str(i): m for i, m in enumerate(maps)} if container is nn.ModuleDict else maps)
        self.down = nn.Linear(D, D)

    def forward(self, x, which=(0, 1)):
        y = self.norm(x)
        items = list(self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts)
        return x + self.down(torch.stack([items[i](y) for i in which]).sum(0).relu())


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_an_expert_that_did_not_run(container):
    (site,) = find_sites(Experts(container), {"x": X})
    assert not site.removable
    assert site.reason == ("experts.2 did not run on the example, and may read it too: pass an example that reaches it")
    (site,) = find_sites(Experts(container), {"x": X, "which": (2, 0, 1)})
    assert site.removable
    assert len(site.consumers) == 3


def test_unknown_readers_are_refused_by_their_type():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, D))

        def forward(self, x):
            return torch.fft.rfft(x @ self.weight).real

    model = Toy(lambda m, x: x.sum() + m.spectral(m.norm(x)).sum())
    model.spectral = Spectral()
    assert "matmul" not in refusals(model, X)["norm"]  # it has a bias, for which there is no place
    assert "spectral.weight (Spectral) has none that could take it up" in refusals(model, X)["norm"]
    model = Toy(lambda m, x: x + m.conv1(m.norm(x).mT).mT)
    model.conv1 = nn.Conv1d(D, D, 1)
    assert "takes the features apart" in refusals(model, X)["norm"]
    model = Toy(lambda m, x: x + m.bilinear(m.norm(x), x))
    model.bilinear = nn.Bilinear(D, D, D)
    assert "bilinear in bilinear (Bilinear)" in refusals(model, X)["norm"]


def test_a_stack_of_experts():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.weight = PlainNorm(D), nn.Parameter(torch.randn(3, D, D))
            self.down = nn.Linear(D, D)

        def forward(self, x):
            y = self.norm(x).flatten(0, 1)
            return x + self.down(self.read(y).relu()).view_as(x)

    ways = {
        "loop": (lambda m, y: sum(F.linear(y, m.weight[i]) for i in range(3)), 2),
        "loop-transposed": (lambda m, y: sum(y @ m.weight[torch.tensor(i)] for i in range(3)), 1),
        "unbound": (lambda m, y: sum(y @ w.mT for w in m.weight.unbind(0)), 2),
        "batched": (lambda m, y: torch.bmm(y.unsqueeze(0).expand(3, -1, -1), m.weight).sum(0), 1),
        "batched-transposed": (lambda m, y: (y.unsqueeze(0) @ m.weight.transpose(1, 2)).sum(0), 2),
        "chosen": (lambda m, y: torch.bmm(m.weight[torch.arange(len(y)) % 3], y.unsqueeze(-1)).squeeze(-1), 2),
    }
    for name, (read, axis) in ways.items():
        model = Stack()
        model.read = lambda y, read=read, model=model: read(model, y)
        (site,) = find_sites(model, X)
        assert (site.reason, [link.axis for link in site.links]) == ("", [axis]), name
    model.read = lambda y: torch.bmm(model.weight[:1], y.unsqueeze(-1)[:1]).squeeze(-1) * y
    assert find_sites(model, X)[0].reason


def test_a_number_on_the_way():
    """T5 scales the last norm's output down before its head."""
    model = Toy(lambda m, x: x + m.down(m.up(m.norm(x) * 0.5 / 3).relu()))
    (site,) = find_sites(model, X)
    assert site.removable and site.links[0].factor == pytest.approx(0.5 / 3)
    model = Toy(lambda m, x: x + m.down((m.up(y := m.norm(x)) + m.up(2 * y)).relu()))
    assert "reads it in two ways" in refusals(model, X)["norm"]
    model = Toy(lambda m, x: x + m.down(m.up(m.norm(x) + 1).relu()))
    assert "also read by add" in refusals(model, X)["norm"]
    model = Toy(lambda m, x: x + m.down(m.up(1 / m.norm(x)).relu()))
    assert "norm" in refusals(model, X)


def test_a_mean_over_tokens():
    (site,) = find_sites(Toy(lambda m, x: m.head(m.norm(x).mean(1))), X)
    assert (site.role, site.removable) == ("final", True)
    assert "mean" in refusals(Toy(lambda m, x: m.head(m.norm(x).mean(-1))), SQUARE)["norm"]
