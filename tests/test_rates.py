"""A weight that took up a norm's scale learns more slowly, by that scale."""

import copy

import pytest
import torch

import tapernorm as tn
from llama import tiny
from tapernorm.held import gone
from tapernorm.rates import lower_rates, rate_factors

IDS = torch.randint(3, 64, (3, 24), generator=torch.Generator().manual_seed(0))


def without(model, keep=()):
    """The model with its internal norms folded away but those in `keep`."""
    controller = tn.taper_(model, tn.TaperConfig(warmup_steps=1, taper_steps=1, keep=keep))
    for _ in range(2):
        model(input_ids=IDS)
        controller.step()
    tn.fold_(model)
    return model


def test_the_readers_of_norms_that_are_gone():
    model = without(tiny(), keep=("model.layers.1.*",))
    found = {name: each.readers for name, each in gone(model, IDS).items()}
    assert found == {
        "model.layers.0.input_layernorm": tuple(f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"),
        "model.layers.0.post_attention_layernorm": tuple(f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up")),
    }
    assert gone(tiny(), IDS) == {} and rate_factors({}) == {}


def test_the_factor_is_one_over_the_scale_that_they_read():
    model = tiny().double()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(70)
    without(model)
    read = {}
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        model.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: read.update({name: args[0]}))
    factors = rate_factors(gone(model, IDS))
    assert len(factors) == 10
    for name, h in read.items():
        r = torch.linalg.vector_norm(h, dim=-1) / h.shape[-1] ** 0.5
        assert factors[f"{name}.weight"] == pytest.approx(1 / float(r.median()), rel=1e-6)
    assert factors["model.layers.0.self_attn.q_proj.weight"] < 0.2


def test_a_step_is_that_of_the_map_behind_the_norm():
    """W = V / r: a step of Adam at rate η / r is the step of V at rate η, divided by r."""
    torch.manual_seed(0)
    r, h = 16.0, torch.randn(8, 5, dtype=torch.float64) * 16
    v = torch.nn.Linear(5, 4, bias=False).double()
    w = copy.deepcopy(v)
    with torch.no_grad():
        w.weight.div_(r)
    for model, x, factors in ((v, h / r, {}), (w, h, {"weight": 1 / r})):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=0)
        lower_rates(optimizer, model, factors)
        for _ in range(3):
            model(x).pow(3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(w.weight, v.weight / r, rtol=1e-12, atol=0)


def test_groups_keep_their_settings_and_schedule():
    model = without(tiny())
    factors = rate_factors(gone(model, IDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.03)
    lower_rates(optimizer, model, factors)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    schedule.step()
    named = {id(p): name for name, p in model.named_parameters()}
    rates = {named[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates.keys() == {name for name, _ in model.named_parameters()}
    assert all(group["weight_decay"] == 0.03 for group in optimizer.param_groups)
    for name, rate in rates.items():
        assert rate == pytest.approx(0.25 * factors.get(name, 1.0))
