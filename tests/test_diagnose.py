"""The pull of the loss along the residual: the mathematics that the scale loss answers, and `diagnose`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anchors import FAMILIES, past_warm_up, s_of, tiny
from tapernorm.losses import diagnose
from tapernorm.sites import find_sites
from tiny_models import ids

# The mathematics


def radial(loss, h):
    """⟨∇_h ℓ, h⟩ of every token. [N]"""
    (gradient,) = torch.autograd.grad(loss.sum(), h)
    return (gradient * h.detach()).sum(-1)


def head_and_tokens():
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    h = torch.randn(200, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    gamma, beta = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    return head, h, 1 + 0.3 * gamma, beta


@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_a_norm_hides_the_scale_from_the_loss(kind):
    head, h, gamma, beta = head_and_tokens()
    labels = torch.arange(200) % 40
    if kind == "rms":
        y = F.rms_norm(h, (16,), gamma, eps=0.0)
    else:
        y = F.layer_norm(h, (16,), gamma, beta, eps=0.0)
    pull = radial(F.cross_entropy(y @ head.T, labels, reduction="none"), h)
    assert float(pull.abs().max()) < 1e-12
    bare = radial(F.cross_entropy((h * gamma) @ head.T, labels, reduction="none"), h)
    assert float(bare.abs().max()) > 1


def test_without_a_norm_a_right_token_asks_for_more():
    """⟨∇_h ℓ, h⟩ ≤ −(1 − p_y) m for a token whose label leads by the margin m."""
    head, h, _, _ = head_and_tokens()
    logits = h @ head.T
    labels = logits.argmax(-1)
    top = logits.detach().topk(2, dim=-1).values
    margin = top[:, 0] - top[:, 1]
    p = logits.detach().softmax(-1).gather(1, labels[:, None])[:, 0]
    pull = radial(F.cross_entropy(logits, labels, reduction="none"), h)
    assert (margin > 0).all()
    assert (pull <= -(1 - p) * margin + 1e-12).all()
    assert (pull < 0).all()


# The diagnostics


def watched(model):
    sites = [site for site in find_sites(model) if site.role in ("internal", "final")]
    final = next(site.name for site in sites if site.role == "final")
    return {site.name: (site.kind, site.eps) for site in sites}, final


@pytest.mark.parametrize("family", FAMILIES)
def test_diagnose_against_a_direct_computation(family):
    model = tiny(family, torch.float64).eval()
    sites, final = watched(model)
    seen = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda m, a, name=name: seen.update({name: a[0].detach()}))
        for name in sites
    ]
    rows = ids(3)
    logits = model(input_ids=rows).logits.detach()
    for handle in handles:
        handle.remove()
    found = diagnose(model, rows, sites, final)
    for name, h in seen.items():
        assert found.scale[name] == pytest.approx(float(s_of(h, family).mean()), rel=1e-12)
    assert found.prelogit_scale == found.scale[final]
    assert found.logit_max == pytest.approx(float(logits.abs().max()), rel=1e-12)
    assert found.logit_std == pytest.approx(float(logits.std()), rel=1e-12)
    h = seen[final].clone().requires_grad_()
    head = model.get_output_embeddings()
    mine = head(model.get_submodule(final)(h))
    loss = F.cross_entropy(mine[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    wanted = float(radial(loss, h).sum() / loss.numel())
    assert found.radial_gradient == pytest.approx(wanted, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("family", FAMILIES)
def test_diagnose_sees_logit_chasing_without_the_final_norm_alone(family):
    model = tiny(family, torch.float64, eps=1e-30).eval()
    sites, final = watched(model)
    if family == "llama":  # transformers' own computes in float32 whatever it is given
        gain = model.model.norm.weight
        model.model.norm = nn.RMSNorm(16, eps=0.0, dtype=torch.float64)
        model.model.norm.weight = gain
    rows = ids(1, 2)
    with torch.no_grad():
        rows[0, 1] = int(model(input_ids=rows).logits[0, 0].argmax())
    assert abs(diagnose(model, rows, sites, final).radial_gradient) < 1e-10
    model.set_submodule(final, nn.Identity())
    with torch.no_grad():
        logits = model(input_ids=rows).logits[0, 0]
    label = int(logits.argmax())
    rows[0, 1] = label
    top = logits.topk(2).values
    bound = -(1 - float(logits.softmax(-1)[label])) * float(top[0] - top[1])
    assert bound < -1e-4
    assert diagnose(model, rows, sites, final).radial_gradient <= bound


def test_diagnose_without_a_final_norm():
    model = tiny().eval()
    sites, _ = watched(model)
    found = diagnose(model, ids(2), sites, None)
    assert found.radial_gradient != found.radial_gradient
    assert found.prelogit_scale != found.prelogit_scale
    assert len(found.scale) == 5


def test_diagnose_changes_nothing():
    model, controller = past_warm_up()
    sites, final = watched(model)
    rows = ids(2)
    (model(input_ids=rows, labels=rows).loss + controller.auxiliary_loss()).backward()
    model.model.layers[0].eval()  # a part that its owner froze
    before = {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "gradients": [p.grad.clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "flags": [m.training for m in model.modules()],
        "hooks": [len(m._forward_pre_hooks) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "controller": copy.deepcopy(controller.state_dict()),
    }
    diagnose(model, rows, sites, final)
    after = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "buffers": list(model.buffers()),
        "flags": [m.training for m in model.modules()],
        "hooks": [len(m._forward_pre_hooks) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "controller": controller.state_dict(),
    }
    for what in ("parameters", "gradients", "buffers"):
        assert all(torch.equal(a, b) for a, b in zip(before[what], after[what], strict=True)), what
    assert torch.equal(before["rng"], after["rng"])
    assert before["flags"] == after["flags"] and before["hooks"] == after["hooks"]
    for key, value in before["controller"].items():
        now = after["controller"][key]
        assert torch.equal(value, now) if isinstance(value, torch.Tensor) else value == now, key
    controller.step()  # nothing is pending of what diagnose ran


def test_diagnose_restores_the_flags_when_the_model_fails():
    model = tiny()
    sites, final = watched(model)
    with pytest.raises(IndexError):
        diagnose(model, torch.full((1, 4), 999), sites, final)
    assert all(m.training for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())
