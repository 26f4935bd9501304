"""PEFT: a norm folds under an adapter, which may still be switched off or merged; what cannot be is refused by name."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import tapernorm as tn
from families import FAMILIES
from tapernorm.modules import taper_norms
from zoo import randomise

peft = pytest.importorskip("peft")

BY_NAME = {row.name: row for row in FAMILIES}
TARGETS = {
    "llama": {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]},
    "gpt2": {"target_modules": ["c_attn", "c_fc", "mlp.c_proj"], "fan_in_fan_out": True},
    "vit": {"target_modules": ["q_proj", "fc1"]},
    "phi": {"target_modules": ["q_proj", "fc1"]},
}
ALL = tn.TaperConfig(arm="all", anchor_weight=0)


def wrapped(family, **options):
    """A model with a random adapter, float64."""
    config = peft.LoraConfig(r=4, lora_alpha=8, **(TARGETS[family] | options))
    return randomise(peft.get_peft_model(BY_NAME[family].build(), config)).double().eval()


def tapered(model, family):
    with torch.no_grad():
        tn.taper_(model, ALL, example=example(family))
        randomise(model)
        for module in taper_norms(model).values():
            module.set_gate(0.0)
    return model


def example(family):
    return {k: v.double() if v.is_floating_point() else v for k, v in BY_NAME[family].example.items()}


@torch.no_grad()
def logits(model, family, adapter=True):
    with contextlib.nullcontext() if adapter else model.disable_adapter():
        return model(**example(family)).logits


def error(new, old):
    return float((new - old).abs().max() / old.abs().max())


@pytest.mark.parametrize("family", TARGETS)
def test_folding_under_an_adapter(family):
    model = tapered(wrapped(family), family)
    on, off = logits(model, family), logits(model, family, adapter=False)
    assert error(on, off) > 1e-3
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    report = tn.fold_(model, example=example(family))
    assert len(report.folded) == len(
        BY_NAME[family].expected([n.removeprefix("base_model.model.") for n in report.roles])
    )
    assert error(logits(model, family), on) < 1e-12
    assert error(logits(model, family, adapter=False), off) < 1e-12
    for key, parameter in model.named_parameters():
        if "lora_B" in key and key in before:
            assert torch.equal(parameter, before[key]), key
        if "lora_A" in key:
            assert key.endswith(".weight")  # a bias of A would be lost when the adapter is merged
    assert [key for key in before if "lora_A" in key and not torch.equal(before[key], model.get_parameter(key))]
    merged = copy.deepcopy(model).merge_and_unload()
    assert error(logits(merged, family), on) < 1e-12


def test_a_bias_made_under_an_adapter(tmp_path):
    """The part of the adapter is its own: it goes when the adapter is switched off, merges and is saved with it."""
    family = "phi"
    model = wrapped(family)
    for module in model.modules():
        if isinstance(module, nn.Linear) and getattr(module, "bias", None) is not None:
            module.register_parameter("bias", None)
    tapered(model, family)
    on, off = logits(model, family), logits(model, family, adapter=False)
    report = tn.fold_(model, example=example(family))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert {f"{layer}.base_layer.bias", f"{layer}.lora_B.default.bias"} <= set(report.new_biases)
    assert len(set(report.new_biases)) == len(report.new_biases)
    assert error(logits(model, family), on) < 1e-12
    assert error(logits(model, family, adapter=False), off) < 1e-12
    assert error(logits(copy.deepcopy(model).merge_and_unload(), family), on) < 1e-12
    assert model.peft_config["default"].lora_bias
    assert not any(name.endswith("lora_A.default.bias") for name, _ in model.named_parameters())


def test_a_failed_fold_under_an_adapter_is_undone(monkeypatch):
    from tapernorm import fold

    family = "gpt2"
    model = tapered(wrapped(family), family)
    wanted = logits(model, family)
    names = [name for name, _ in model.named_parameters()]

    def fail(*_):
        assert model.peft_config["default"].lora_bias
        raise fold.FoldError("no")

    monkeypatch.setattr(fold, "compare_outputs", fail)
    with pytest.raises(fold.FoldError, match=r"^no$"):
        tn.fold_(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(logits(model, family), wanted)
    assert not any(any(m.lora_bias.values()) for m in model.modules() if hasattr(m, "lora_bias"))
    assert not model.peft_config["default"].lora_bias


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_modules_to_save(tied):
    """Its copy and the module that it stands in for are both folded."""
    row = BY_NAME["llama"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    base = row.build()
    if tied:
        base.lm_head.weight = base.model.embed_tokens.weight
        base.config.tie_word_embeddings = True
    model = tapered(randomise(peft.get_peft_model(base, config)).double().eval(), "llama")
    on, off = logits(model, "llama"), logits(model, "llama", adapter=False)
    embedding = base.model.embed_tokens.weight.detach().clone()
    tn.fold_(model)
    assert error(logits(model, "llama"), on) < 1e-12
    assert error(logits(model, "llama", adapter=False), off) < 1e-12
    assert torch.equal(base.model.embed_tokens.weight, embedding)


def test_a_merged_model_is_saved_without_its_norms(tmp_path):
    model = tapered(wrapped("llama"), "llama")
    wanted = logits(model, "llama")
    tn.fold_(model)
    model.merge_and_unload().save_pretrained(tmp_path / "out")
    loaded, _ = tn.from_pretrained(tmp_path / "out")
    assert error(logits(loaded, "llama"), wanted) < 1e-12
    assert not [name for name, module in loaded.named_modules() if type(module).__name__.endswith("RMSNorm")]


def refused(model, match):
    reasons = {site.name: site.reason for site in tn.find_sites(model) if site.reason}
    assert any(match in reason for reason in reasons.values()), reasons
    return reasons


def test_what_is_refused_by_name():
    found = refused(wrapped("llama", use_dora=True), "q_proj is a DoRA layer, whose magnitudes follow its weight")
    assert len(found) == 4  # each norm of a block has such a reader; the last norm has none
    model = wrapped("llama")
    model.merge_adapter()
    refused(model, "q_proj has its adapter merged in place")
    model.unmerge_adapter()
    assert not [site for site in tn.find_sites(model) if site.reason]
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    refused(model, "q_proj has an adapter that is not active (second)")
    with model.disable_adapter():
        refused(model, "q_proj has an adapter that is not active")
    norms = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["input_layernorm"])
    refused(peft.get_peft_model(BY_NAME["llama"].build(), norms), "a copy made by modules_to_save")


@pytest.mark.parametrize("kind", ["LoHaConfig", "IA3Config", "VeraConfig", "OFTConfig"])
def test_other_adapters_are_refused_where_they_read_a_norm(kind):
    options = {"target_modules": ["q_proj"]}
    options |= {"feedforward_modules": []} if kind == "IA3Config" else {}
    options |= {"oft_block_size": 4} if kind == "OFTConfig" else {}
    model = peft.get_peft_model(BY_NAME["llama"].build(), getattr(peft, kind)(**options)).eval()
    randomise(model)
    sites = {site.name.removeprefix("base_model.model."): site for site in tn.find_sites(model)}
    assert sites["model.layers.0.post_attention_layernorm"].removable
    site = sites["model.layers.0.input_layernorm"]
    if kind == "IA3Config":  # it scales what the linear map made
        assert site.removable
    else:
        assert "q_proj" in site.reason
