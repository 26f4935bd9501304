"""Belts: no token goes in too large or pulls too hard, in training; where norms went before the taper too."""

import copy

import pytest
import torch

import tapernorm as tn
from llama import tiny
from tapernorm.belts import bound_gradient
from tapernorm.held import Held, gone
from tapernorm.modules import taper_norms
from test_rates import IDS, without
from zoo import randomise


def gradient(h, weights, times):
    leaf = h.clone().requires_grad_()
    (bound_gradient(leaf, times) * weights).sum().backward()
    return leaf.grad


def test_a_gradient_is_bounded_by_the_median_tokens():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)
    weights[0, 1] *= 100
    weights[1, 4] = 0  # padding
    lengths = weights.norm(dim=-1)
    median = lengths[lengths > 0].median()
    wanted = weights * torch.clamp(3 * median / lengths.clamp(min=1e-300), max=1)[..., None]
    found = gradient(h, weights, 3.0)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)
    assert float(found[0, 1].norm()) == pytest.approx(3 * float(median)) and torch.equal(found[0, 2], weights[0, 2])
    assert torch.equal(bound_gradient(h, 3.0), h)
    for bad in (torch.nan, torch.inf):
        spoiled = weights.clone()
        spoiled[0, 1, 2] = bad
        found = gradient(h, spoiled, 3.0)
        assert not found[0, 1].any() and bool(torch.isfinite(found).all()) and torch.equal(found[0, 2], weights[0, 2])
    assert not gradient(h, torch.zeros_like(h), 3.0).any()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_held_token(kind):
    """By the formula in value and gradient, in training; nothing at all in evaluation."""
    h = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    h[1, 2] *= 50
    held, module = Held(2.0, kind), torch.nn.Identity()
    held.cap = 1.5
    module.register_forward_pre_hook(held)
    inputs = [h.clone().requires_grad_() for _ in range(2)]
    x = inputs[1] - inputs[1].mean(-1, keepdim=True) if kind == "layer" else inputs[1]
    r = x.pow(2).mean(-1, keepdim=True).sqrt()
    assert 0 < int((r > 3.0).sum()) < r.numel()
    outputs = module(inputs[0]), inputs[1] * torch.clamp(1.5 * 2.0 / r, max=1)
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=0)
    for y in outputs:
        y.pow(3).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-10)
    assert module.eval()(h) is h


def halved(**config):
    """A model that has lost the norms of its first block, and is tapered for the others; its controller."""
    model = without(randomise(tiny()).double(), keep=("model.layers.1.*",)).train()
    found = gone(model, IDS)
    controller = tn.taper_(model, tn.TaperConfig(warmup_steps=1, taper_steps=2, allow_massive=True, **config))
    controller.hold(model, found)
    return model, controller, found


def test_what_is_gone_is_measured():
    model = without(randomise(tiny()).double(), keep=("model.layers.1.*",))
    read = {}
    name = "model.layers.0.post_attention_layernorm"
    model.get_submodule(name).register_forward_pre_hook(lambda m, args: read.update(h=args[0]))
    found = gone(model, IDS)
    assert sorted(found) == ["model.layers.0.input_layernorm", name] and found[name].kind == "rms"
    assert found[name].r == pytest.approx(float(read["h"].pow(2).mean(-1).sqrt().median()), rel=1e-6)


def test_the_mean_of_a_centred_norm_is_left_out():
    from zoo import BY_NAME

    model = randomise(BY_NAME["gpt2-untied"].build(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()
    ids = IDS[:, :8] % 16
    controller = tn.taper_(model, tn.TaperConfig(warmup_steps=1, taper_steps=1, allow_massive=True))
    for _ in range(2):
        model.train()(input_ids=ids)
        controller.step()
    tn.fold_(model, example={"input_ids": ids})
    found = gone(model, ids)
    assert found and {each.kind for each in found.values()} == {"layer"}


def test_the_controller_holds_them_until_the_fold():
    model, controller, found = halved(cap=1.01, uniformity_weight=0.5, gradient_cap=4.0)
    bare = copy.deepcopy(model)
    bare_controller = tn.get_controller(bare)
    bare_controller.detach()
    assert list(controller.held) == list(found)
    with torch.no_grad():
        assert not torch.allclose(model(input_ids=IDS).logits, bare(input_ids=IDS).logits)
        assert torch.equal(model.eval()(input_ids=IDS).logits, bare.eval()(input_ids=IDS).logits)
    model.train()
    for _ in range(4):
        loss = model(input_ids=IDS, labels=IDS).loss + controller.auxiliary_loss()
        loss.backward()
        controller.step()
    assert controller.phase == "done"
    places = {**controller.sites, **controller.held}
    read, handles = {}, []
    for name in places:
        module = model.get_submodule(name)
        note = lambda m, args, name=name: read.update({name: args[0].detach()})  # noqa: E731
        handles.append(module.register_forward_pre_hook(note, prepend=True))  # before the belt
    model(input_ids=IDS)
    for handle in handles:
        handle.remove()
    terms = {}
    for name, h in read.items():
        c, _, eps = places[name].ruler
        terms[name] = float((c * (h.pow(2).mean(-1) + eps).sqrt()).log().pow(2).sum())
    total, tokens = controller.take_losses()
    assert float(total.detach()) == pytest.approx(0.5 * sum(terms.values()), rel=1e-9) and float(tokens) == IDS.numel()
    assert all(terms[name] > 1e-3 for name in found)
    with pytest.raises(tn.FoldError, match=r"r·c = .*the seat belt"):
        tn.fold_(model, example={"input_ids": IDS})
    for part in (*taper_norms(model).values(), *controller.held.values()):
        part.cap = 1e9
    tn.fold_(model, example={"input_ids": IDS})
    model.train()
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


def test_a_held_token_above_the_belt_is_refused():
    """The belt of norms that went before is off after the fold, as that of the others."""
    model, controller, found = halved(cap=1e6)
    for _ in range(3):
        model(input_ids=IDS)
        controller.step()
    name = next(iter(found))
    controller.held[name].cap = 1.0001
    with pytest.raises(tn.FoldError, match=rf"^{name}: a token of the example has r·c"):
        tn.fold_(model, example={"input_ids": IDS})


@pytest.mark.parametrize("loosen", [0, 3])
def test_the_belt_grows_wider_after_the_taper(loosen):
    model, controller, _ = halved(cap=2.0, loosen_steps=loosen)
    caps = []
    for _ in range(11):
        (cap,) = {part.cap for part in (*taper_norms(model).values(), *controller.held.values())}
        caps.append(cap)
        model(input_ids=IDS)
        controller.step()
    assert caps == ([2.0] * 11 if not loosen else [2.0] * 6 + [4.0] * 3 + [8.0] * 2)


def test_a_gradient_belt_on_a_tapered_norm():
    """A token that pulls a thousand times as hard as the others counts for twice the median."""
    grads = {}
    for times in (None, 2.0):
        model = randomise(tiny()).double().train()
        controller = tn.taper_(model, tn.TaperConfig(warmup_steps=1, taper_steps=1, gradient_cap=times))
        h = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        weights = torch.randn(h.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        weights[0, 4] *= 1000
        module = next(iter(controller.sites.values()))
        leaf = h[..., : module.width].clone().requires_grad_()
        (module(leaf) * weights[..., : module.width]).sum().backward()
        grads[times] = leaf.grad.norm(dim=-1)[0]
    assert float(grads[None][4] / grads[None].median()) > 100
    assert float(grads[2.0][4]) == pytest.approx(2 * float(grads[None].median()))
