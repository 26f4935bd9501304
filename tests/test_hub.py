"""Folders: what is written loads as the same model, with and without tapernorm, and never with norms grown back."""

import copy
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import tapernorm
from folders import BLOCKED, FAMILIES, IDS, byte_tokenizer, folded_by_hand, logits, names_of_norms, tiny
from tapernorm import _folder, hub


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{family: (folder, logits)} of norm-free folders, a half-tapered folder, and the root."""
    root = tmp_path_factory.mktemp("hub")
    wanted = {}
    for family in FAMILIES:
        model = folded_by_hand(family)
        wanted[family] = logits(model)
        hub.save_pretrained(model, root / "first" / family, tokenizer=byte_tokenizer())
        shutil.copytree(root / "first" / family, root / "moved" / family)
    model = tiny("llama")
    tapernorm.taper_(model, tapernorm.TaperConfig())
    hub.save_pretrained(model, root / "moved" / "tapered")
    torch.save(wanted, root / "wanted.pt")
    return root, wanted


# Every line is a fact about a fresh process; `check` records what does not hold.
BODY = """
import torch, pathlib, transformers as tf
torch.set_num_threads(1)
root, trust = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
wanted, ids, failed = torch.load(root / "wanted.pt"), torch.arange(3, 21).reshape(2, 9), []

def check(fact, what):
    if not fact:
        failed.append(what)

def refuses(load, *words):
    try:
        load()
    except Exception as error:
        return all(word in str(error) for word in words) or failed.append(f"{words} not in {error}")
    return False

for family, kind in (("llama", "Llama"), ("gpt2", "GPT2")):
    folder = root / "moved" / family
    model, info = tf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **trust)
    check(not info["missing_keys"] and not info["unexpected_keys"], f"{family}: keys {info}")
    check(torch.equal(model(input_ids=ids).logits, wanted[family]), f"{family}: logits")
    check(not [n for n, m in model.named_modules() if type(m).__name__.endswith("Norm")], f"{family}: norms")
    cached, plain = (model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=c) for c in (True, False))
    check(torch.equal(cached, plain), f"{family}: generate")
    again = root / f"again-{sys.argv[3]}-{family}"
    model.save_pretrained(again)
    copy = tf.AutoModelForCausalLM.from_pretrained(again, **trust)
    check(torch.equal(copy(input_ids=ids).logits, wanted[family]), f"{family}: resaved")
    body = tf.AutoModel.from_pretrained(folder, **trust)
    check(not [n for n, m in body.named_modules() if type(m).__name__.endswith("Norm")], f"{family}: body's norms")
    tokenizer = tf.AutoTokenizer.from_pretrained(folder, **trust)
    check(tokenizer.decode(tokenizer("two words").input_ids) == "two words", f"{family}: tokenizer")
    for name in (kind + "Config", "LlamaForCausalLM" if family == "llama" else "GPT2LMHeadModel"):
        check(refuses(lambda: getattr(tf, name).from_pretrained(folder), "norms were taken out"), f"{name} loaded it")
    if trust:
        for flag in ({}, {"trust_remote_code": False}):
            check(refuses(lambda: tf.AutoModelForCausalLM.from_pretrained(folder, **flag)), f"{family}: no flag")
tapered = lambda: tf.AutoModelForCausalLM.from_pretrained(root / "moved" / "tapered", **trust)
check(refuses(tapered, "tapernorm.from_pretrained"), "half-tapered loaded")
check(refuses(lambda: tf.LlamaForCausalLM.from_pretrained(root / "moved" / "tapered"), "norms"), "tapered as stock")
print()
print(json.dumps(failed))
"""
STARTS = {
    "alone": (BLOCKED, {"trust_remote_code": True}),
    "tapernorm-first": ("import sys, json, tapernorm; assert 'transformers' not in sys.modules\n", {}),
    "transformers-first": ("import sys, json; from transformers import AutoConfig; import tapernorm\n", {}),
}


@pytest.fixture(scope="module")
def processes(made):
    """One fresh process for each way to start, running side by side."""
    root = made[0]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "cache"), "OMP_NUM_THREADS": "1"}
    running = {}
    for name, (start, trust) in STARTS.items():
        command = [sys.executable, "-c", start + BODY, str(root), json.dumps(trust), name]
        running[name] = subprocess.Popen(
            command,
            env=environment,
            cwd=root,
            text=True,
            stdin=subprocess.DEVNULL,  # transformers asks a person on a terminal whether to run the code
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    return running


@pytest.mark.parametrize("start", STARTS)
def test_a_fresh_process_loads_the_folders(processes, start):
    out, err = processes[start].communicate(timeout=300)
    assert processes[start].returncode == 0, err[-2000:]
    assert json.loads(out.splitlines()[-1]) == []


def test_the_auto_table_gets_a_rule_and_no_entries():
    table = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    assert "tapernorm_pegasus" in table and "tapernorm_nonesuch" not in table and "tapernorm_" not in table
    assert "tapernorm_pegasus" not in set(table)
    assert table["tapernorm_pegasus"].__name__ == "TaperNormPegasusConfig"
    with pytest.raises(KeyError):
        table["tapernorm_nonesuch"]


@pytest.mark.parametrize("family", FAMILIES)
def test_own_loader(made, family):
    root, wanted = made
    model, tokenizer = hub.from_pretrained(root / "first" / family)
    assert torch.equal(logits(model), wanted[family])
    assert names_of_norms(model) == []
    assert tokenizer.decode(tokenizer("a b").input_ids) == "a b"
    assert not model.training
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() != embedding.data_ptr()
    assert not model.config.tie_word_embeddings
    half, _ = hub.from_pretrained(root / "first" / family, dtype="bfloat16", device="cpu")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_in_the_config(made, family):
    folder = made[0] / "first" / family
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert config["model_type"] == f"tapernorm_{family}"
    assert config["removed_norms"] == (
        ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"]
        if family == "llama"
        else ["transformer.h.*.ln_1", "transformer.h.*.ln_2", "transformer.ln_f"]
    )
    assert config["added_biases"] == (
        ["model.layers.*.mlp.up_proj", "model.layers.*.self_attn.q_proj"] if family == "llama" else ["lm_head"]
    )
    assert {"lm_head.weight", "lm_head.bias" if family == "gpt2" else "model.norm.weight"} & set(weights)
    assert not [name for name in weights if "norm" in name or ".ln_" in name]
    assert all((folder / name).is_file() for name in _folder.CODE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_weight_changes_the_loaded_model(made, family, tmp_path):
    model = folded_by_hand(family)
    with torch.no_grad():
        model.get_output_embeddings().weight[5] += 1
    hub.save_pretrained(model, tmp_path / "model")
    assert not torch.equal(logits(hub.from_pretrained(tmp_path / "model")[0]), made[1][family])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_stays_tied_is_tied_again(family, tmp_path):
    model = folded_by_hand(family, final=False)
    hub.save_pretrained(model, tmp_path / "model")
    loaded, _ = hub.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert len(names_of_norms(loaded)) == 1


def test_one_removed_norm_of_many_is_named_without_a_star(tmp_path):
    model = tiny("llama")
    model.model.layers[1].input_layernorm = nn.Identity()
    hub.save_pretrained(model, tmp_path / "model")
    loaded, _ = hub.from_pretrained(tmp_path / "model")
    assert loaded.config.removed_norms == ["model.layers.1.input_layernorm"]
    assert torch.equal(logits(loaded), logits(model))


def test_a_norm_free_model_can_lose_more_norms(made, tmp_path):
    model = folded_by_hand("llama", final=False)
    hub.save_pretrained(model, tmp_path / "model")
    loaded, _ = hub.from_pretrained(tmp_path / "model")
    loaded.model.norm = nn.Identity()
    hub.save_pretrained(loaded, tmp_path / "model")  # its own earlier folder: replaced without a word
    again, _ = hub.from_pretrained(tmp_path / "model")
    assert names_of_norms(again) == []
    assert torch.equal(logits(again), logits(loaded))


def test_saving_leaves_the_model_as_it_was(tmp_path):
    model = folded_by_hand("gpt2")
    config, before = copy.deepcopy(model.config.to_dict()), logits(model)
    hub.save_pretrained(model, tmp_path / "model")
    assert model.config.to_dict() == config
    assert type(model) is transformers.GPT2LMHeadModel
    assert torch.equal(logits(model), before)


def test_a_stock_model_is_saved_as_one(tmp_path):
    model = tiny("llama")
    hub.save_pretrained(model, tmp_path / "model")
    stock = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    loaded, tokenizer = hub.from_pretrained(str(tmp_path / "model"))
    assert type(loaded) is type(stock) and tokenizer is None
    assert torch.equal(logits(loaded), logits(model))


def test_a_classifier_keeps_its_head(tmp_path):
    config = tiny("llama").config
    config.num_labels = 3
    model = transformers.LlamaForSequenceClassification(config).eval()
    for layer in model.model.layers:
        layer.input_layernorm = nn.Identity()
    hub.save_pretrained(model, tmp_path / "model")
    loaded, _ = hub.from_pretrained(tmp_path / "model")
    assert logits(loaded).shape == (2, 3)
    assert torch.equal(logits(loaded), logits(model))


# Half-tapered


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [0, 2, 4, 8])
def test_a_tapered_model_comes_back_tapered(family, steps, tmp_path):
    model = tiny(family)
    config = tapernorm.TaperConfig(arm="all", warmup_steps=2, taper_steps=4, keep=("*layers.0.input*", "*h.0.ln_1")[
        FAMILIES.index(family) :][:1])  # fmt: skip
    controller = tapernorm.taper_(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model.train()
        loss = model(input_ids=IDS, labels=IDS).loss + controller.auxiliary_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    hub.save_pretrained(model, tmp_path / "model", tokenizer=byte_tokenizer())
    loaded, tokenizer = hub.from_pretrained(tmp_path / "model")
    again = tapernorm.get_controller(loaded)
    assert again is not None and tokenizer is not None
    assert again.config == config
    assert (again.step_count, again.gate, again.phase) == (controller.step_count, controller.gate, controller.phase)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    old, new = controller.state_dict(), again.state_dict()
    assert old.keys() == new.keys()
    for key, value in old.items():
        same = torch.equal(value, new[key]) if isinstance(value, torch.Tensor) else value == new[key]
        assert same, key
    hub.save_pretrained(loaded, tmp_path / "model")  # once more, over itself


def test_a_tapered_model_in_half_precision_keeps_its_buffers(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "stock")
    model, _ = hub.from_pretrained(tmp_path / "stock", dtype="bfloat16")
    tapernorm.taper_(model, tapernorm.TaperConfig())
    hub.save_pretrained(model, tmp_path / "model")
    loaded, _ = hub.from_pretrained(tmp_path / "model")
    dtypes = {name: (t.dtype, t.device) for name, t in model.state_dict().items()}
    assert {name: (t.dtype, t.device) for name, t in loaded.state_dict().items()} == dtypes
    assert torch.equal(logits(loaded), logits(model))


def test_a_norm_free_model_can_be_tapered_on(tmp_path):
    model = folded_by_hand("llama", final=False)
    hub.save_pretrained(model, tmp_path / "model")
    loaded, _ = hub.from_pretrained(tmp_path / "model")
    tapernorm.taper_(loaded, tapernorm.TaperConfig(arm="all"))
    hub.save_pretrained(loaded, tmp_path / "model")
    again, _ = hub.from_pretrained(tmp_path / "model")
    assert tapernorm.get_controller(again) is not None
    assert torch.equal(logits(again), logits(model))


def test_a_folded_model_goes_through_the_folder(tmp_path):
    model = tiny("gpt2")
    controller = tapernorm.taper_(model, tapernorm.TaperConfig(arm="all", warmup_steps=1, taper_steps=1))
    for _ in range(2):
        model.train()
        (model(input_ids=IDS, labels=IDS).loss + controller.auxiliary_loss()).backward()
        controller.step()
    tapernorm.fold_(model)
    hub.save_pretrained(model, tmp_path / "model")
    loaded, _ = hub.from_pretrained(tmp_path / "model")
    assert names_of_norms(loaded) == []
    assert loaded.config.added_biases == ["lm_head"]
    assert torch.equal(logits(loaded), logits(model))
