"""TaperNorm: bit-equal at gate 1, the formulas of the method in between, and float32 state that nothing rounds."""

import copy
import itertools

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tapernorm as tn
from tapernorm.modules import FixedScale, TaperNorm, _Mix, _MixCentred, in_backward, taper_norms
from tapernorm.probe import probe
from zoo import IDS, ROWS, D, logits, randomise, tapered

ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "autocast": torch.float32}
PATHS = {"exact": 1.0, "mixed": 0.3, "fixed": 0.0}


def rms(eps=1e-6):
    return LlamaRMSNorm(D, eps)


NORMS = {
    "rms": rms,
    "rms-zero-centred": lambda: GemmaRMSNorm(D),
    "rms-torch": lambda: nn.RMSNorm(D, 1e-5),
    "rms-weightless": lambda: nn.RMSNorm(D, 1e-5, elementwise_affine=False),
    "layer": lambda: nn.LayerNorm(D),
    "layer-no-bias": lambda: nn.LayerNorm(D, bias=False),
    "layer-weightless": lambda: nn.LayerNorm(D, elementwise_affine=False),
}
NORM = pytest.mark.parametrize("name", NORMS)


def taper_norm(name, gate=1.0, dtype=torch.float64, seed=0):
    norm = NORMS[name]().to(dtype)
    probed = probe(norm, D)
    assert probed is not None
    module = randomise(TaperNorm(norm, probed, D).to(dtype), seed)
    module.set_gate(gate)
    return module


def residual(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, D, generator=generator, dtype=torch.float64) * 1.5 + 1.5).to(dtype)


def formula(module, h, g):
    """DESIGN: the definition, in float64, written down once more."""
    h = h.double()
    gain = module.norm.weight.double() if module.probed.gain else torch.ones(D, dtype=torch.float64)
    gain = 1 + gain if module.probed.zero_centered else gain
    c, fixed_gain = module.fixed_norm.c.double(), module.fixed_norm.weight.double()
    g = torch.tensor(g, dtype=torch.float32).double()
    if module.probed.kind == "rms":
        r = (h.pow(2).mean(-1, keepdim=True) + module.probed.eps).sqrt()
        return g * h / r * gain + (1 - g) * c * h * fixed_gain
    centred = h - h.mean(-1, keepdim=True)
    sigma = (centred.pow(2).mean(-1, keepdim=True) + module.probed.eps).sqrt()
    has_bias = module.probed.bias is not None
    bias = module.norm.bias.double() if has_bias else 0
    fixed_bias = module.fixed_norm.bias.double() if has_bias else 0
    return g * (centred / sigma * gain + bias) + (1 - g) * (c * centred * fixed_gain + fixed_bias)


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


# Parameters stay in the graph


@ROW
@pytest.mark.parametrize("path", PATHS)
def test_every_parameter_has_a_gradient_on_every_path(row, path):
    model = tapered(row, gate=PATHS[path], dtype=torch.float32).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    unused = {"exact": ".fixed_norm.", "fixed": ".norm.weight"}.get(path)
    site = next(iter(row.sites))
    for name, parameter in model.get_submodule(site).named_parameters(prefix=site):
        is_unused = unused is not None and unused in name
        if name.endswith("weight"):
            assert bool(parameter.grad.any()) != is_unused, name


@pytest.mark.parametrize("path", ["exact", "fixed"])
def test_nothing_is_held_in_evaluation(path):
    module, h = taper_norm("layer", PATHS[path]).train(), residual(2, 5)
    assert "Hold" in type(module(h.requires_grad_()).grad_fn).__name__
    with torch.no_grad():
        assert module(h).grad_fn is None
    assert "Hold" not in type(module.eval()(h).grad_fn).__name__


def test_frozen_parameters_are_not_held():
    module, h = taper_norm("layer").train(), residual(2, 5)
    module.fixed_norm.requires_grad_(False)
    module(h.requires_grad_()).sum().backward()
    assert module.fixed_norm.weight.grad is None
    assert module.norm.weight.grad is not None


@NORM
def test_a_frozen_norm_gives_a_frozen_fixed_branch(name):
    norm = NORMS[name]()
    norm.requires_grad_(False)
    module = TaperNorm(norm, probe(norm, D), D)
    wanted = not list(norm.parameters())  # nothing was frozen where there is nothing
    assert {p.requires_grad for p in module.fixed_norm.parameters()} == {wanted}


@pytest.mark.parametrize("path", PATHS)
def test_the_input_may_be_given_by_name(path):
    module, h = taper_norm("rms", PATHS[path]), residual(2, 5)
    assert torch.equal(module(hidden_states=h), module(h))


# State


CONVERSIONS = {
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "to-dtype": lambda m: m.to(torch.bfloat16),
    "to-both": lambda m: m.to("cpu", torch.float16),
    "there-and-back": lambda m: m.bfloat16().float().half().double(),
    "deepcopy": copy.deepcopy,
    "deepcopy-of-bfloat16": lambda m: copy.deepcopy(m.bfloat16()),
}
THIRD = torch.tensor([1 / 3])  # does not fit bfloat16


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_gate_and_c_stay_float32(conversion):
    module = taper_norm("layer", dtype=torch.float32)
    module.fixed_norm.c.copy_(THIRD * 0.7)
    module.set_gate(1 / 3)
    c = module.fixed_norm.c.clone()
    converted = CONVERSIONS[conversion](nn.Sequential(module))[0]
    for buffer, wanted in ((converted.gate, THIRD), (converted.fixed_norm.c, c)):
        assert buffer.dtype == torch.float32
        assert buffer.shape == (1,)
        assert torch.equal(buffer, wanted)
    assert converted.path == "mixed"
    assert dict(converted.named_buffers()).keys() == {"gate", "fixed_norm.c"}
    if conversion.endswith("bfloat16") and "deepcopy" not in conversion:
        assert converted.norm.weight.dtype == converted.fixed_norm.weight.dtype == torch.bfloat16


def test_a_module_from_meta_has_float32_buffers():
    norm = nn.LayerNorm(D, device="meta")
    module = TaperNorm(norm, probe(norm, D), D)
    assert module.fixed_norm.weight.is_meta
    module.bfloat16()
    module.to_empty(device="cpu")
    assert module.gate.dtype == module.fixed_norm.c.dtype == torch.float32
    assert module.gate.device.type == "cpu"


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("gate", [1.0, 1 / 3, 0.0])
def test_the_path_follows_a_loaded_gate(gate, assign):
    source, target = taper_norm("layer", gate, torch.float32), taper_norm("layer", 0.5, torch.float32, seed=3)
    source.fixed_norm.c.copy_(THIRD)
    target.bfloat16() if not assign else None
    target.load_state_dict(source.state_dict(), assign=assign)
    assert target.path == {1.0: "exact", 0.0: "fixed"}.get(gate, "mixed")
    assert torch.equal(target.gate, torch.tensor([gate]))
    assert torch.equal(target.fixed_norm.c, THIRD)
    assert target.gate.dtype == torch.float32


def test_the_gate_is_written_in_place():
    module = taper_norm("rms")
    gate = module.gate
    for value, path in ((0.7, "mixed"), (0.0, "fixed"), (1.0, "exact")):
        module.set_gate(value)
        assert module.gate is gate
        assert (float(gate), module.path) == (pytest.approx(value), path)


def test_deepcopy_is_independent():
    module = taper_norm("rms", 0.5)
    twin = copy.deepcopy(module)
    twin.set_gate(0.0)
    twin.fixed_norm.c.fill_(9)
    assert (float(module.gate), module.path) == (0.5, "mixed")
    assert float(module.fixed_norm.c) != 9


@ROW
def test_no_gate_is_shared_between_sites(row):
    model = row.build()
    tn.taper_(model, tn.TaperConfig(arm="all"))
    pointers = {m.gate.data_ptr() for m in taper_norms(model).values()}
    assert len(pointers) == len(row.sites)


@ROW
def test_stock_trainers_do_not_decay_what_was_added(row):
    from transformers import Trainer

    model = row.build()
    tn.taper_(model, tn.TaperConfig(arm="all"))
    decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    assert any("proj" in name or "c_fc" in name for name in decayed)
    for site in taper_norms(model):
        assert not [name for name in decayed if name.startswith(f"{site}.")]


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


# Observation


def test_the_observer_sees_training_forwards_only():
    module, h, seen = taper_norm("rms").train(), residual(2, 5), []
    module.observer = seen.append
    module(h)
    assert seen == [h]
    module.eval()(h)
    assert len(seen) == 1


def test_the_observer_sees_a_checkpointed_forward_once():
    module, seen = taper_norm("rms").train(), []
    module.observer = seen.append
    for reentrant in (False, True):
        h = residual(2, 5).requires_grad_()
        torch.utils.checkpoint.checkpoint(module, h, use_reentrant=reentrant).sum().backward()
        assert h.grad is not None
    assert len(seen) == 2
    assert not in_backward()


def test_the_gain_of_a_zero_centred_norm():
    module = taper_norm("rms-zero-centred", dtype=torch.bfloat16)
    assert torch.equal(module.gain(), 1 + module.norm.weight.float())
    assert module.gain().dtype == torch.float32
    fresh = TaperNorm(GemmaRMSNorm(D), module.probed, D)
    assert torch.equal(fresh.fixed_norm.weight, 1 + fresh.norm.weight)


def test_what_is_printed():
    assert "rms, path=mixed" in repr(taper_norm("rms", 0.5))
    assert "(16,), bias=True, centred=True" in repr(FixedScale(torch.ones(D), torch.ones(D), centred=True))


@ROW
def test_intermediate_gates_move_the_logits(row):
    outputs = [logits(tapered(row, gate=gate)) for gate in (1.0, 0.6, 0.2, 0.0)]
    for a, b in itertools.pairwise(outputs):
        assert torch.isfinite(b).all()
        assert (a - b).abs().max() > 1e-2
