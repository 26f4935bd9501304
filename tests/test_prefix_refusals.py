"""Models and prefixes that do not go together are refused, and stay as they were."""

import pytest
import torch
import transformers

import tapernorm as tn
from prefixed import ENDS, GPT2, IDS, LLAMA, MHA, PREFIX, build, held
from tapernorm import prefix as prefixes
from tapernorm.prefix import attach_prefix, prefix_of
from zoo import D, assert_same, logits, randomise, snapshot

REFUSED = {
    "bloom": ("attention interface", {"n_layer": 2, "n_head": 2, "hidden_size": D}),
    "mpt": ("attention interface", {"n_layers": 2, "n_heads": 2, "d_model": D}),
    "t5": ("more than one causal", {"d_model": D, "d_kv": 8, "d_ff": D, "num_layers": 2, "num_heads": 2}),
    "bert": (r"attention\.self is not causal", MHA),
    "mamba": ("2 layers, and 0 of them attend", {"hidden_size": D, "num_hidden_layers": 2}),
    "lfm2": ("2 layers, and 1 of them attend", LLAMA | {"layer_types": ["conv", "full_attention"]}),
    "gptj": ("a table of angles", GPT2 | {"rotary_dim": 4}),
}


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_hold_one(family):
    words, changes = REFUSED[family]
    config = transformers.AutoConfig.for_model(family, **ENDS, **({"vocab_size": D} | changes))
    auto = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM}
    torch.manual_seed(0)
    model = randomise(auto.get(family, transformers.AutoModelForCausalLM).from_config(config).eval())
    before = snapshot(model)
    with pytest.raises(ValueError, match=words) as caught:
        attach_prefix(model, PREFIX)
    assert type(model).__name__ in str(caught.value) or "bert" in str(caught.value)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize(
    ("prefix", "words"),
    [((), "1 to 4"), ((1, 2, 3, 4, 5), "1 to 4"), ((1, D), "outside the model's vocabulary of 16"), ((-1,), "outside")],
)
def test_prefixes_that_are_none(prefix, words):
    model = build("llama")
    before = snapshot(model)
    with pytest.raises(ValueError, match=words):
        attach_prefix(model, prefix)
    assert_same(before, snapshot(model))


def test_twice_is_once_too_often():
    _, model = held("llama")
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"has a constant prefix already, \[5, 9, 3\]"):
        attach_prefix(model, (1,))
    with pytest.raises(ValueError, match=r"has a constant prefix already, \[5, 9, 3\]"):
        tn.taper_(model, tn.TaperConfig(prefix=(1,)))
    assert_same(before, snapshot(model))
    tn.taper_(model, tn.TaperConfig(prefix=PREFIX))  # the one that it has
    assert prefix_of(model) == PREFIX


def test_another_attention_is_refused():
    _, model = held("llama")
    wanted = logits(model, IDS)
    for owner in (model, model.base_model):
        for name in ("flash_attention_2", "flex_attention", "paged|sdpa"):
            with pytest.raises(ValueError, match=rf"{name.replace('|', '.')} attention cannot hold a constant prefix"):
                owner.set_attn_implementation(name)
        owner.set_attn_implementation("sdpa")
        assert torch.equal(logits(model, IDS), wanted)
    flex = build("llama", "flex_attention")
    with pytest.raises(ValueError, match=r'flex_attention attention cannot .*attn_implementation="sdpa"'):
        attach_prefix(flex, PREFIX)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["attach", "taper"])
def test_a_failing_check_leaves_the_model_as_it_was(family, how, monkeypatch):
    model = build(family)
    before, wanted = snapshot(model), logits(model, IDS)
    monkeypatch.setattr(prefixes, "_AGREE", {torch.float64: -1.0})
    with pytest.raises(ValueError, match="leave the prefix out"):
        if how == "attach":
            attach_prefix(model, PREFIX)
        else:
            tn.taper_(model, tn.TaperConfig(prefix=PREFIX))
    assert_same(before, snapshot(model))
    assert torch.equal(logits(model, IDS), wanted)
