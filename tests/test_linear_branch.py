"""A fixed branch that is a matrix: fitted at the end of warm-up, mixed, trained, folded exactly."""

import copy

import pytest
import torch

import tapernorm as tn
from folding import ROW
from llama import tiny
from norms import D, residual
from tapernorm.linear_branch import LinearBranches
from tapernorm.modules import FixedLinear, TaperNorm, taper_norms
from tapernorm.probe import probe
from tapernorm.soundness import FoldError
from zoo import logits, randomise

LINEAR = tn.TaperConfig(fixed="linear", warmup_steps=3, taper_steps=2)
RIDGE = 0.3


def site(kind, dtype=torch.float64, seed=0):
    norm = torch.nn.LayerNorm(D) if kind == "layer" else torch.nn.RMSNorm(D, 1e-5)
    probed = probe(norm.to(dtype), D)
    assert probed is not None
    return randomise(TaperNorm(norm, probed, D, linear=True).to(dtype), seed)


def by_hand(module, h):
    """(n̂, r, h or h − μ) of each token."""
    x = h - h.mean(-1, keepdim=True) if module.probed.kind == "layer" else h
    r = (x.pow(2).mean(-1, keepdim=True) + module.probed.eps).sqrt()
    return x / r, r, x


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_mix(kind, cap):
    module, h = site(kind), residual(2, 5) * torch.linspace(0.2, 6, 5, dtype=torch.float64)[:, None]
    module.cap = cap
    n, r, x = by_hand(module, h)
    c, weight = module.fixed_norm.c.double(), module.fixed_norm.weight
    held = 1 if cap is None else (cap / (c * r)).clamp(max=1)
    assert cap is None or bool((held < 1).any() and (held == 1).any())
    bias, fixed_bias = (0, 0) if kind == "rms" else (module.norm.bias, module.fixed_norm.bias)
    for g, training in ((1.0, True), (0.3, True), (0.3, False), (0.0, False), (0.0, True)):
        module.set_gate(g)
        module.train(training)
        g = module.gate.double()
        is_held = g > 0 or training  # the belt is for what learns: a model that is done does without it
        fixed = c * (x * (held if is_held else 1)) @ weight.T + fixed_bias
        wanted = g * (n * module.norm.weight + bias) + (1 - g) * fixed
        torch.testing.assert_close(module(h), wanted, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(module(h).sum(), list(module.fixed_norm.parameters()))
    assert all(bool(grad.any()) for grad in gradients)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_fit_is_the_ridge_regression(kind, monkeypatch):
    """A = (Σ n̂ n̂ᵀ/r + λ s c I)(Σ n̂ n̂ᵀ + λ s I)⁻¹ over all tokens but padding, Γ̃ = diag(γ) A / c."""
    monkeypatch.setattr("tapernorm.linear_branch.choose.__defaults__", ((RIDGE,),))
    module, h = site(kind), residual(400) * torch.linspace(0.5, 2, 400, dtype=torch.float64)[:, None]
    n, r, x = by_hand(module, h)
    mask = torch.arange(400) % 7 != 0
    x[~mask] = torch.nan
    branches = LinearBranches({"norm": module}, decay=0.5)
    branches.add("norm", x[:200], mask[:200])  # two micro-batches of a step
    branches.add("norm", x[200:], mask[200:])
    branches.commit()
    n, r = n[mask], r[mask]
    gram, cross, c = n.T @ n, (n / r).T @ n, module.fixed_norm.c.double()
    eye = torch.eye(D, dtype=torch.float64) * RIDGE * gram.diagonal().mean()
    a = (cross + c * eye) @ torch.linalg.inv(gram + eye)
    torch.testing.assert_close(branches.solve("norm"), module.norm.weight[:, None] * a / c, rtol=1e-5, atol=1e-6)


def test_what_no_fit_improves_is_the_diagonal():
    module = site("rms")
    branches = LinearBranches({"norm": module}, decay=0.5)
    assert torch.equal(branches.solve("norm"), torch.diag(module.norm.weight))
    generator = torch.Generator().manual_seed(0)
    n = torch.nn.functional.normalize(torch.randn(4000, D, generator=generator).double(), dim=-1) * D**0.5
    module.fixed_norm.c.fill_(0.5)
    branches.add("norm", 2 * n, None)  # all of one scale, r = 2: c alone is exact
    branches.commit()
    torch.testing.assert_close(branches.solve("norm"), torch.diag(module.norm.weight), rtol=1e-3, atol=1e-3)


def warm(model, controller, steps, seed=0, optimizer=None):
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        ids = torch.randint(3, 64, (4, 32), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        controller.step()


def test_it_serves_tokens_of_different_scales_better():
    """Some embeddings are large along a direction of their own; the model's own norm is what is aimed at."""
    model = tiny().double()
    with torch.no_grad():
        model.model.embed_tokens.weight[3:13] += 4 * torch.nn.functional.one_hot(torch.tensor(0), 16)
    errors = {}
    for fixed in ("diagonal", "linear"):
        twin = copy.deepcopy(model)
        controller = tn.taper_(twin, tn.TaperConfig(fixed=fixed, warmup_steps=3, taper_steps=2))
        warm(twin, controller, 3)
        module = taper_norms(twin)["model.layers.0.input_layernorm"]
        h = twin.model.embed_tokens.weight.detach()
        errors[fixed] = (module.fixed_norm(h) - module.norm(h)).detach().pow(2).mean().item()
    assert errors["linear"] < 0.5 * errors["diagonal"], errors


def test_a_life_and_a_fold():
    """Warm-up, taper, training of the matrix, fold; what the optimizer held of an idle matrix is forgotten."""
    model = tiny().double()
    controller = tn.taper_(model, LINEAR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    controller.attach_optimizer(optimizer)
    modules = taper_norms(model)
    warm(model, controller, 3, optimizer=optimizer)
    assert all(module.fixed_norm.weight not in optimizer.state for module in modules.values())
    fitted = {name: module.fixed_norm.weight.detach().clone() for name, module in modules.items()}
    assert all(not torch.equal(w, torch.diag(w.diagonal())) for w in fitted.values())
    warm(model, controller, 4, seed=1, optimizer=optimizer)
    assert controller.phase == "done"
    assert all(not torch.equal(fitted[name], module.fixed_norm.weight) for name, module in modules.items())
    before = logits(model.eval(), torch.arange(3, 35)[None])
    report = tn.fold_(model)
    assert len(report.folded) == 4 and report.c == {}
    torch.testing.assert_close(logits(model, torch.arange(3, 35)[None]), before, rtol=1e-11, atol=1e-11)


@ROW
def test_folds_exactly(row):
    model = row.build()
    tn.taper_(model, tn.TaperConfig(arm="all", fixed="linear"))
    randomise(model.double())
    for module in taper_norms(model).values():
        assert isinstance(module.fixed_norm, FixedLinear)
        module.set_gate(0.0)
    before = logits(model.eval())
    tn.fold_(model)
    assert not taper_norms(model)
    torch.testing.assert_close(logits(model), before, rtol=1e-10, atol=1e-10)


def test_warm_up_goes_on_where_it_was(tmp_path):
    whole, parts = tiny(), tiny()
    controller = tn.taper_(whole, LINEAR)
    warm(whole, controller, 2)
    first = tn.taper_(parts, LINEAR)
    warm(parts, first, 2)
    tn.save_pretrained(parts, tmp_path / "half")
    parts, _ = tn.from_pretrained(tmp_path / "half")
    second = tn.get_controller(parts)
    for model, each in ((whole, controller), (parts, second)):
        model.zero_grad()
        warm(model, each, 1, seed=5)
    assert controller.phase == second.phase == "taper"
    for a, b in zip(taper_norms(whole).values(), taper_norms(parts).values(), strict=True):
        assert torch.equal(a.fixed_norm.weight, b.fixed_norm.weight)
        assert bool(a.fixed_norm.weight.any())
    tn.save_pretrained(parts, tmp_path / "tapered")
    again, _ = tn.from_pretrained(tmp_path / "tapered")
    assert torch.equal(
        taper_norms(again)["model.layers.1.input_layernorm"].fixed_norm.weight,
        taper_norms(parts)["model.layers.1.input_layernorm"].fixed_norm.weight,
    )


def test_shards_are_for_diagonals(tmp_path):
    from tapernorm.shards import fold_folder

    model = tiny()
    controller = tn.taper_(model, LINEAR)
    warm(model, controller, 5)
    tn.save_pretrained(model, tmp_path / "tapered")
    with pytest.raises(FoldError, match="is a matrix, which is folded in memory"):
        fold_folder(tmp_path / "tapered", tmp_path / "out")
