"""The seat belt: in the taper no token's r·c counts for more than κ, and at the end, in evaluation, it holds nobody."""

import copy

import pytest
import torch

import tapernorm as tn
from norms import formula, residual, taper_norm
from tapernorm.modules import taper_norms
from zoo import BY_NAME, IDS, tapered


@pytest.mark.parametrize("name", ["rms", "rms-zero-centred", "layer", "layer-no-bias", "layer-weightless"])
@pytest.mark.parametrize("gate", [0.4, 0.0])
@pytest.mark.parametrize("cap", [2.0, 1e9])
def test_the_seat_belt_caps_the_fixed_branch(name, cap, gate):
    """c·min(1, κ/(c·r)) for each token, in value and gradient; a belt that is never reached changes nothing."""
    module, h = taper_norm(name, gate), residual(3, 6)
    h[1, 2] *= 100
    module.cap = cap
    x = h - h.mean(-1, keepdim=True) if module.probed.kind == "layer" else h
    r = (x.pow(2).mean(-1, keepdim=True) + module.probed.eps).sqrt()
    c = module.fixed_norm.c.double()
    assert bool((c * r > cap).any()) == (cap < 1e9) and bool((c * r < cap).any())

    def wanted(h):
        x = h - h.mean(-1, keepdim=True) if module.probed.kind == "layer" else h
        r = (x.pow(2).mean(-1, keepdim=True) + module.probed.eps).sqrt()
        held = torch.minimum(torch.ones_like(r), cap / (c * r))
        # by linearity: the whole is the formula at c = 1, 0 and what lies between
        module.fixed_norm.c.fill_(1.0)
        one = formula(module, h, gate)
        module.fixed_norm.c.fill_(0.0)
        zero = formula(module, h, gate)
        module.fixed_norm.c.copy_(c)
        return zero + (one - zero) * c * held

    inputs = [h.clone().requires_grad_() for _ in range(2)]
    outputs = [module(inputs[0]), wanted(inputs[1])]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-11, atol=1e-11)
    weights = residual(3, 6, seed=5)
    for y in outputs:
        (y * weights).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-9, atol=1e-9)
    if cap == 1e9:
        module.cap = None
        torch.testing.assert_close(outputs[0], module(h), rtol=1e-12, atol=1e-12)
    for end, path in ((1.0, "exact"), (0.0, "fixed")):  # there is no belt where nothing is fixed, or learns
        module.set_gate(end)
        module.train(path == "exact")
        assert module.path == path
        module.cap = cap
        belted = module(h)
        module.cap = None
        assert torch.equal(belted, module(h))


@pytest.mark.parametrize("name", ("llama", "gpt2-untied"))
def test_folding_refuses_a_token_that_is_still_held(name):
    model = tapered(BY_NAME[name], gate=0.0)
    largest = {}
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, site=site: largest.update({site: float(scale(m, args[0]).max() * m.fixed_norm.c)})
        )
        for site, module in taper_norms(model).items()
    ]
    model(input_ids=IDS)
    for handle in handles:
        handle.remove()
    site = max(largest, key=largest.__getitem__)
    for factor, is_refused in ((0.99, True), (1.01, False)):
        twin = copy.deepcopy(model)
        before = {key: value.clone() for key, value in twin.state_dict().items()}
        for module in taper_norms(twin).values():
            module.cap = factor * largest[site]
        if is_refused:
            with pytest.raises(tn.FoldError, match=rf"^{site}: a token of the example has r·c = .*the seat belt"):
                tn.fold_(twin, example={"input_ids": IDS})
            assert all(torch.equal(value, before[key]) for key, value in twin.state_dict().items())
        else:
            assert tn.fold_(twin, example={"input_ids": IDS}).folded


def scale(module, h):
    x = h - h.mean(-1, keepdim=True) if module.probed.kind == "layer" else h
    return (x.pow(2).mean(-1) + module.probed.eps).sqrt()


def test_the_controller_puts_it_on():
    model = BY_NAME["llama"].build()
    tn.taper_(model, tn.TaperConfig(cap=3.0))
    assert {module.cap for module in taper_norms(model).values()} == {3.0}
