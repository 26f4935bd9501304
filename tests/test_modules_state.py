"""The state of TaperNorm: float32 buffers that nothing rounds, the path that follows the gate, copies apart."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

import tapernorm as tn
from norms import ROW, taper_norm
from tapernorm.modules import FixedScale, TaperNorm, taper_norms
from tapernorm.probe import probe
from zoo import D

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


def test_the_gain_of_a_zero_centred_norm():
    module = taper_norm("rms-zero-centred", dtype=torch.bfloat16)
    assert torch.equal(module.gain(), 1 + module.norm.weight.float())
    assert module.gain().dtype == torch.float32
    fresh = TaperNorm(GemmaRMSNorm(D), module.probed, D)
    assert torch.equal(fresh.fixed_norm.weight, 1 + fresh.norm.weight)


def test_what_is_printed():
    assert "rms, path=mixed" in repr(taper_norm("rms", 0.5))
    assert "(16,), bias=True, centred=True" in repr(FixedScale(torch.ones(D), torch.ones(D), centred=True))
