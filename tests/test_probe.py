"""The probe: what a norm computes, whatever it is called, and what is no norm."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tapernorm.probe import Norm, gain, likeness, probe
from zoo import D


class Anything(nn.Module):
    """A module of one function, with a weight and a bias where they are asked for."""

    def __init__(self, function, weight=None, bias=None, **attributes):
        super().__init__()
        self.function = function
        for name in (weight, bias):
            if name:
                self.register_parameter(name, nn.Parameter(torch.ones(D)))
        self.names = weight, bias
        vars(self).update(attributes)

    def forward(self, x):
        return self.function(x, *(getattr(self, name) for name in self.names if name))


def rms(x, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def standardise(x, correction=0):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, correction=correction, keepdim=True) + 1e-5)


# module, kind, eps, zero-centred, gain, bias
NORMS = {
    "layer": (nn.LayerNorm(D), "layer", 1e-5, False, "weight", "bias"),
    "layer-no-bias": (nn.LayerNorm(D, bias=False), "layer", 1e-5, False, "weight", None),
    "layer-weightless": (nn.LayerNorm(D, elementwise_affine=False), "layer", 1e-5, False, None, None),
    "layer-1e-12": (nn.LayerNorm(D, eps=1e-12), "layer", 1e-12, False, "weight", "bias"),
    "layer-1e-6": (nn.LayerNorm(D, eps=1e-6), "layer", 1e-6, False, "weight", "bias"),
    "layer-1e-3": (nn.LayerNorm(D, eps=1e-3), "layer", 1e-3, False, "weight", "bias"),
    "layer-eps-0": (nn.LayerNorm(D, eps=0.0), "layer", 0.0, False, "weight", "bias"),
    "rms": (nn.RMSNorm(D, 1e-5), "rms", 1e-5, False, "weight", None),
    "rms-weightless": (nn.RMSNorm(D, 1e-6, elementwise_affine=False), "rms", 1e-6, False, None, None),
    "rms-eps-0": (nn.RMSNorm(D, 0.0), "rms", 0.0, False, "weight", None),
    "llama": (LlamaRMSNorm(D, 1e-5), "rms", 1e-5, False, "weight", None),
    "llama-1e-12": (LlamaRMSNorm(D, 1e-12), "rms", 1e-12, False, "weight", None),
    "gemma": (GemmaRMSNorm(D, 1e-6), "rms", 1e-6, True, "weight", None),
    "scale": (Anything(lambda x, w: w * rms(x), "scale"), "rms", 1e-6, False, "scale", None),
    "gamma-beta": (
        Anything(lambda x, w, b: rms(x) * w + b, "gamma", "beta", eps=1e-6), "rms", 1e-6, False, "gamma", "beta",
    ),
    "bias-only": (Anything(lambda x, b: standardise(x) + b, None, "bias"), "layer", 1e-5, False, None, "bias"),
    "zero-centred-layer": (
        Anything(lambda x, w, b: standardise(x) * (1 + w) + b, "weight", "bias"), "layer", 1e-5, True, "weight", "bias",
    ),
    "unit-length": (Anything(lambda x: nn.functional.normalize(x, dim=-1) * D**0.5), "rms", 0.0, False, None, None),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_explained(name, dtype):
    module, kind, eps, zero_centered, gain_name, bias_name = NORMS[name]
    found = probe(copy.deepcopy(module).to(dtype), D)
    assert found is not None
    assert found == Norm(kind, found.eps, zero_centered, gain_name, bias_name)
    assert found.eps == pytest.approx(eps, rel=2e-2, abs=1e-14)
    if any(value == eps for value in vars(module).values()):
        assert found.eps == eps  # the very number, where the module has it as an attribute


def test_eps_none_is_that_of_the_dtype():
    found = probe(nn.RMSNorm(D, None), D)
    assert (found.kind, found.gain) == ("rms", "weight")
    assert found.eps == pytest.approx(torch.finfo(torch.float32).eps, rel=2e-2)
    assert probe(nn.RMSNorm(D, None).double(), D).eps < 1e-14


@pytest.mark.parametrize("values", [0.0, 1.0, 5.0, "random"])
def test_the_values_of_the_parameters_do_not_matter(values):
    for module in (nn.LayerNorm(D), LlamaRMSNorm(D), GemmaRMSNorm(D)):
        wanted = probe(copy.deepcopy(module), D)
        for parameter in module.parameters():
            nn.init.normal_(parameter) if values == "random" else nn.init.constant_(parameter, values)
        assert probe(module, D) == wanted is not None


@pytest.mark.parametrize("width", [2, 8, 64, 1000])
def test_other_widths(width):
    assert probe(nn.LayerNorm(width), width) == Norm("layer", 1e-5, False, "weight", "bias")
    assert probe(nn.RMSNorm(width, 1e-6), width) == Norm("rms", 1e-6, False, "weight", None)


@pytest.mark.parametrize("width", [8, 1000])
def test_another_width_than_the_module_has(width):
    assert probe(nn.LayerNorm(D), width) is None


NOT_NORMS = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "tanh": nn.Tanh(),
    "dropout": nn.Dropout(0.5),
    "linear": nn.Linear(D, D),
    "identity": nn.Identity(),
    "batch-norm": nn.BatchNorm1d(D),
    "batch-norm-no-affine": nn.BatchNorm1d(D, affine=False),
    "softmax": nn.Softmax(-1),
    "embedding": nn.Embedding(D, D),
    "sequential": nn.Sequential(nn.LayerNorm(D)),
    "group-norm-of-halves": nn.GroupNorm(2, D),
    "l2": Anything(lambda x: nn.functional.normalize(x, dim=-1)),
    "l2-weight": Anything(lambda x, w: nn.functional.normalize(x, dim=-1) * w, "weight"),
    "other-constant": Anything(lambda x: nn.functional.normalize(x, dim=-1) * 3.9),
    "sample-variance": Anything(lambda x, w: standardise(x, correction=1) * w, "weight"),
    "max-norm": Anything(lambda x: x / x.abs().amax(-1, keepdim=True)),
    "mean-of-magnitudes": Anything(lambda x: x / x.abs().mean(-1, keepdim=True)),
    "partial-rms": Anything(lambda x: x * torch.rsqrt(x[..., : D // 4].pow(2).mean(-1, keepdim=True) + 1e-6)),
    "over-tokens": Anything(lambda x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),
    "over-dimension-1": Anything(lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
    "over-everything": Anything(lambda x: x * torch.rsqrt(x.pow(2).mean() + 1e-6)),
    "group-norm-of-tokens": nn.GroupNorm(1, D),
    "squared-gain": Anything(lambda x, w: rms(x) * w * w, "weight"),
    "tanh-after": Anything(lambda x: rms(x).tanh()),
    "dynamic-tanh": Anything(lambda x, w, b: torch.tanh(0.5 * x) * w + b, "weight", "bias"),
    "scale-without-statistics": Anything(lambda x, w: x * w, "weight"),
    "reversed": Anything(lambda x, w: rms(x).flip(-1) * w, "weight"),
    "two-gains": Anything(lambda x, v, w: rms(x) * v * w, "first", "second"),
    "another-shape": Anything(lambda x: rms(x)[..., :1]),
    "not-a-tensor": Anything(lambda x: (rms(x),)),
    "not-finite": Anything(lambda x: rms(x) / 0),
    "raises": Anything(lambda x: rms(x, y=1)),
    "two-inputs": nn.Bilinear(D, D, D),
}


@pytest.mark.parametrize("name", NOT_NORMS)
def test_what_is_no_norm_is_not_explained(name):
    assert probe(NOT_NORMS[name], D) is None


def test_a_norm_on_meta():
    assert probe(LlamaRMSNorm(D, 1e-5).to("meta"), D) == Norm("rms", 1e-5, False, "weight", None)
    assert probe(nn.LayerNorm(D, device="meta", dtype=torch.bfloat16), D) == Norm(
        "layer", 1e-5, False, "weight", "bias"
    )


@pytest.mark.parametrize("name", ["layer", "gemma", "rms-weightless"])
def test_the_module_is_untouched(name):
    module = copy.deepcopy(NORMS[name][0]).bfloat16().train()
    called = []
    handle = module.register_forward_hook(lambda *args: called.append(args))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    pointers = [p.data_ptr() for p in module.parameters()]
    state = torch.get_rng_state()
    assert probe(module, D) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    assert called == []
    assert list(module._forward_hooks) == [handle.id]
    assert [p.data_ptr() for p in module.parameters()] == pointers
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    for key, value in module.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, before[key])


def test_a_dropout_leaves_the_random_state():
    state = torch.get_rng_state()
    assert probe(nn.Dropout(0.5).train(), D) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_that_cannot_be_copied():
    module = Anything(rms, lock=iter([]).__iter__())
    module.generator = (x for x in ())
    assert probe(module, D) is None


@pytest.mark.parametrize("name", NORMS)
def test_the_gain(name):
    module = copy.deepcopy(NORMS[name][0])
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    found = probe(module, D)
    bias = getattr(module, found.bias).detach() if found.bias else 0
    x = 100 * torch.randn(3, D, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(-1, keepdim=True)
    wanted = x / x.pow(2).mean(-1, keepdim=True).sqrt() * gain(module, found, D).detach() + bias
    torch.testing.assert_close(module(x).detach(), wanted, rtol=1e-4, atol=1e-4)


def test_the_gain_is_wide():
    module = GemmaRMSNorm(D).bfloat16()
    nn.init.constant_(module.weight, 2**-10)
    found = probe(module, D)
    assert gain(module, found, D).dtype == torch.float32
    assert torch.equal(gain(module, found, D), torch.full((D,), 1 + 2**-10))  # would be 1 in bfloat16
    assert gain(module.double(), found, D).dtype == torch.float64


# Norms of anybody's making


class Own(nn.Module):
    """A class and attributes of any name."""

    def __init__(self, eps=None, buffer=None, shape=(D,), gain="alpha", shift=None, centred=False):
        super().__init__()
        self.tiny, self.centred, self.names = eps, centred, (gain, shift)
        for name in (gain, shift):
            if name:
                self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        if buffer is not None:
            self.register_buffer("smallest", torch.tensor(buffer))

    def forward(self, x):
        eps = (
            self.smallest if hasattr(self, "smallest") else torch.finfo(x.dtype).eps if self.tiny is None else self.tiny
        )
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        gain, shift = (getattr(self, name) if name else None for name in self.names)
        x = x if gain is None else x * gain
        return x if shift is None else x + shift


OWN = {
    "another-name": (Own(eps=3e-5), Norm("rms", 3e-5, False, "alpha", None)),
    "buffer": (Own(buffer=2e-5), Norm("rms", 2e-5, False, "alpha", None)),
    "zero": (Own(eps=0.0), Norm("rms", 0.0, False, "alpha", None)),
    "two-of-any-name": (Own(eps=1e-5, shift="zeta"), Norm("rms", 1e-5, False, "alpha", "zeta")),
    "names-that-mislead": (
        Own(eps=1e-5, gain="bias", shift="weight", centred=True), Norm("layer", 1e-5, False, "bias", "weight"),
    ),
    "shift-alone": (Own(eps=1e-5, gain=None, shift="bias"), Norm("rms", 1e-5, False, None, "bias")),
    "leading-ones": (Own(eps=1e-5, shape=(1, 1, D), shift="beta"), Norm("rms", 1e-5, False, "alpha", "beta")),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_norms_of_anybodys_making(name):
    module, wanted = OWN[name]
    found = probe(module, D)
    assert found is not None
    assert dataclasses.replace(found, eps=wanted.eps) == wanted
    assert found.eps == pytest.approx(wanted.eps, rel=1e-6)
    assert gain(module, found, D).shape == (D,)


def test_an_eps_that_is_none():
    found = probe(Own(), D)
    assert found is not None and found.eps == pytest.approx(torch.finfo(torch.float32).eps, rel=1e-2)


def test_an_eps_that_nobody_knows():
    """A buffer on the meta device has no value."""
    assert probe(Own(buffer=2e-5).to("meta"), D) is None
    assert probe(Own(eps=2e-5).to("meta"), D) == Norm("rms", 2e-5, False, "alpha", None)


def test_what_is_alike():
    assert likeness(nn.LayerNorm(D), D) == likeness(nn.LayerNorm(D), D) is not None
    assert likeness(LlamaRMSNorm(D), D) == likeness(LlamaRMSNorm(D), D) is not None
    others = [nn.LayerNorm(D, eps=1e-3), nn.LayerNorm(D, bias=False), nn.LayerNorm(D, device="meta"), nn.RMSNorm(D)]
    assert len({likeness(norm, D) for norm in [nn.LayerNorm(D), *others]}) == 5
    assert likeness(nn.LayerNorm(D), D + 1) != likeness(nn.LayerNorm(D), D)
    assert likeness(Own(buffer=1e-5), D) is None  # its value is not looked at
    assert likeness(nn.Sequential(nn.LayerNorm(D)), D) is None
    patched = nn.LayerNorm(D)
    patched.forward = lambda x: x
    assert likeness(patched, D) is None
