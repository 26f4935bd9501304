"""TaperNorm: bit-equal at gate 1, and the formulas of the method in between, in value, gradient and dtype."""

import copy
import itertools

import pytest
import torch
from torch import nn

import tapernorm as tn
from norms import NORM, PATHS, ROW, formula, residual, taper_norm
from tapernorm.modules import _Mix, _MixCentred, taper_norms
from zoo import IDS, D, logits, randomise, tapered

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "autocast": torch.float32}


# Gate 1


def gradients(model, autocast, seed=7):
    torch.manual_seed(seed)  # dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@ROW
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_one_is_the_norm_to_the_bit(row, dtype, training):
    stock = randomise(row.build()).to(DTYPES[dtype]).train(training)
    model = copy.deepcopy(stock)
    tn.taper_(model, tn.TaperConfig(arm="all"))
    assert len(taper_norms(model)) == len(row.sites)
    assert all(m.training == training for m in model.modules())
    wanted, wanted_grads = gradients(stock, dtype == "autocast")
    found, grads = gradients(model, dtype == "autocast")
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert wanted.std() > 0.1  # not a model whose output is constant
    for name, wanted_grad in wanted_grads.items():
        parent, _, leaf = name.rpartition(".")
        grad = grads[f"{parent}.norm.{leaf}" if parent in row.sites else name]
        assert torch.equal(grad, wanted_grad), name
        assert wanted_grad.abs().max() > 0, name


@NORM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gate_one_is_any_norm_to_the_bit(name, dtype):
    module, h = taper_norm(name, dtype=dtype), residual(2, 5, dtype=dtype)
    assert torch.equal(module(h), module.norm(h))
    assert torch.equal(module.train()(h), module.norm(h))


# Between


@NORM
@pytest.mark.parametrize("gate", [0.0, 1e-3, 0.3, 0.5, 0.8, 0.999])
def test_the_paths_compute_the_formula(name, gate):
    module, h = taper_norm(name, gate), residual(2, 5)
    assert module.path == ("mixed" if gate else "fixed")
    wanted = formula(module, h, gate)
    assert (module(h) - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    assert module(h).dtype == torch.float64


@NORM
def test_the_mixed_path_meets_the_other_two(name):
    module, h = taper_norm(name), residual(3, 4)
    exact = module.norm(h)
    module.path = "mixed"
    assert (module(h) - exact).abs().max() < 1e-6  # some norms work in float32 whatever they are given
    module.set_gate(0.0)
    fixed = module(h)
    module.path = "mixed"
    assert (module(h) - fixed).abs().max() <= 1e-14 * fixed.abs().max()


@NORM
@pytest.mark.parametrize("part", ["norm", "fixed_norm", "c", "gate"])
def test_every_part_of_the_mixture_counts(name, part):
    module, h = taper_norm(name, 0.4), residual(2, 5)
    before = module(h)
    with torch.no_grad():
        changed = {"c": [module.fixed_norm.c], "gate": [module.gate]}.get(part)
        for tensor in changed if changed is not None else module.get_submodule(part).parameters():
            old = tensor.clone()
            tensor[0] += 0.1
            assert (module(h) - before).abs().max() > 1e-3
            tensor.copy_(old)
    assert torch.equal(module(h), before)


@NORM
@pytest.mark.parametrize("gate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_the_formula(name, gate, training):
    module = taper_norm(name, gate).train(training)
    h = residual(2, 3).requires_grad_()
    other = copy.deepcopy(module)
    weights = residual(2, 3, seed=5)
    (module(h) * weights).sum().backward()
    h2 = h.detach().clone().requires_grad_()
    (formula(other, h2, gate) * weights).sum().backward()
    bound = 1e-5 if gate == 1 else 1e-10  # the norm itself may work in float32
    torch.testing.assert_close(h.grad, h2.grad, rtol=bound, atol=bound)
    for (key, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        if p.grad is None:
            assert not training and (q.grad is None or not q.grad.any()), key
        else:
            wanted = torch.zeros_like(q) if q.grad is None else q.grad
            torch.testing.assert_close(p.grad, wanted, rtol=bound, atol=bound)


def test_the_hand_written_backward():
    def random(*shape, seed):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    x, a, k = random(2, 3, 5, seed=0), random(5, seed=1), random(5, seed=2)
    inputs = [t.requires_grad_() for t in (x, a, k)]
    assert torch.autograd.gradcheck(lambda x, a, k: _Mix.apply(x, a, k, 1e-3), inputs)
    inputs.append(random(5, seed=3).requires_grad_())
    assert torch.autograd.gradcheck(lambda x, a, k, b: _MixCentred.apply(x, a, k, b, 1e-3), inputs)


def test_the_mixed_backward_under_autocast_is_not_in_half_precision():
    module, h = taper_norm("rms", 0.5, torch.float32), residual(8, 9, dtype=torch.float32)
    grads = []
    for autocast in (False, True):
        module.zero_grad()
        x = h.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in module.parameters())])
    for plain, cast in zip(*grads, strict=True):
        torch.testing.assert_close(cast, plain, rtol=1e-6, atol=1e-6 * float(plain.abs().max()))


@NORM
@pytest.mark.parametrize("path", ["mixed", "fixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(name, path, dtype):
    module, h = taper_norm(name, PATHS[path], dtype), residual(4, 9, dtype=dtype)
    y, wanted = module(h), formula(module, h, PATHS[path])
    assert y.dtype == dtype == module.norm(h).dtype
    # half a unit in the last place, and a little for float32
    assert ((y.double() - wanted).abs() <= wanted.abs() * torch.finfo(dtype).eps / 2 + 1e-5).all()


@NORM
@pytest.mark.parametrize("path", PATHS)
def test_all_paths_give_one_dtype_under_autocast(name, path):
    module, h = taper_norm(name, PATHS[path], torch.float32), residual(2, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(h).dtype == module.norm(h).dtype


def test_the_fixed_path_has_no_per_token_scale():
    module, h = taper_norm("rms", 0.0), residual(2, 5)
    assert torch.allclose(module(3 * h), 3 * module(h), rtol=1e-14)
    module = taper_norm("layer", 0.0)
    assert torch.allclose(module(3 * h) - module.fixed_norm.bias, 3 * (module(h) - module.fixed_norm.bias), rtol=1e-12)
    assert torch.allclose(module(h + 2), module(h), rtol=1e-12)  # but the mean is taken off


def test_a_weightless_norm_in_a_half_precision_model():
    """It has no parameter to take the dtype from: the fixed branch must not widen what follows."""
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D, elementwise_affine=False), nn.Linear(D, D), nn.Linear(D, D))
    model = model.bfloat16()
    h = residual(2, 5, dtype=torch.bfloat16)
    tn.taper_(model, tn.TaperConfig(arm="all", anchor_weight=0), example=h)
    (module,) = taper_norms(model).values()
    assert module.fixed_norm.weight.dtype == torch.bfloat16
    for gate in PATHS.values():
        module.set_gate(gate)
        assert model(h).dtype == torch.bfloat16


@ROW
def test_intermediate_gates_move_the_logits(row):
    outputs = [logits(tapered(row, gate=gate)) for gate in (1.0, 0.6, 0.2, 0.0)]
    for a, b in itertools.pairwise(outputs):
        assert torch.isfinite(b).all()
        assert (a - b).abs().max() > 1e-2
