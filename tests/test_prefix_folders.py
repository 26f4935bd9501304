"""Models with a constant prefix in folders, copies and pickles."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers

import tapernorm as tn
from folders import BLOCKED
from prefixed import IDS, PREFIX, P, constants, generated, held, trained
from tapernorm.prefix import prefix_of
from zoo import decibels, logits, relative


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folded models of two families in folders, one of them partly normed, with their logits."""
    root = tmp_path_factory.mktemp("prefix")
    wanted = {}
    for family, keep in (("llama", ("*layers.0*",)), ("gpt2", ())):
        model, _ = trained(family, dtype=torch.float32, keep=keep)
        tn.fold_(model)
        wanted[family] = logits(model, IDS), generated(model, IDS)[0]
        tn.save_pretrained(model, root / family)
    torch.save((IDS, wanted), root / "wanted.pt")
    return root, wanted


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saved_and_loaded(folders, family, tmp_path):
    root, wanted = folders
    model, _ = tn.from_pretrained(root / family)
    config = json.loads((root / family / "config.json").read_text())
    assert config["constant_prefix"] == list(PREFIX) == list(prefix_of(model))
    assert list(config["prefix_shapes"].values()) == [[1 if family == "llama" else 2, P, 8, 8]]
    assert sum(type(module).__name__ == "LlamaRMSNorm" for module in model.modules()) == 2 * (family == "llama")
    assert torch.equal(logits(model, IDS), wanted[family][0])
    assert torch.equal(generated(model, IDS)[0], wanted[family][1])
    eager = transformers.AutoModelForCausalLM.from_pretrained(root / family, attn_implementation="eager")
    assert relative(logits(eager, IDS), wanted[family][0]) < 1e-5
    half, _ = tn.from_pretrained(root / family, dtype="bfloat16")
    assert {v.dtype for v in constants(half).values()} == {torch.bfloat16}
    assert decibels(logits(half, IDS), wanted[family][0]) > 25
    tn.save_pretrained(model, tmp_path / "again")
    assert torch.equal(logits(tn.from_pretrained(tmp_path / "again")[0], IDS), wanted[family][0])


ALONE = (
    BLOCKED
    + """
import torch, pathlib, transformers as tf
torch.set_num_threads(1)
root, found = pathlib.Path(sys.argv[1]), {}
ids, wanted = torch.load(root / "wanted.pt")
for family, (logits, new) in wanted.items():
    model = tf.AutoModelForCausalLM.from_pretrained(root / family, trust_remote_code=True)
    with torch.no_grad():
        found[family] = bool(torch.equal(model(input_ids=ids, use_cache=False).logits, logits))
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    found[family] &= bool(torch.equal(out[:, ids.shape[1]:], new))
    model.save_pretrained(root / f"again-{family}")
    again = tf.AutoModelForCausalLM.from_pretrained(root / f"again-{family}", trust_remote_code=True)
    found[family] &= bool(torch.equal(again(input_ids=ids).logits, logits))
    for owner, name in ((model, "flex_attention"), (model.base_model, "flash_attention_2")):
        try:
            owner.set_attn_implementation(name)
            found[name] = False
        except ValueError as error:
            found[name] = "cannot hold a constant prefix" in str(error)
print(json.dumps(found))
"""
)


def test_a_fresh_process_without_tapernorm(folders):
    root = folders[0]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ALONE, str(root)]
    done = subprocess.run(command, env=environment, cwd=root, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(("llama", "gpt2", "flex_attention", "flash_attention_2"), True)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("steps", [0, 2])
def test_half_tapered_folder(family, steps, tmp_path):
    model, controller = trained(family, steps=steps)
    tn.save_pretrained(model, tmp_path / "model")
    loaded, _ = tn.from_pretrained(tmp_path / "model")
    again = tn.get_controller(loaded)
    assert again.config == controller.config and again.gate == controller.gate
    assert prefix_of(loaded) == PREFIX
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    assert all(torch.equal(v, constants(model)[k]) for k, v in constants(loaded).items())
    with pytest.raises(ValueError, match="cannot hold a constant prefix"):
        loaded.set_attn_implementation("flex_attention")
    tn.save_pretrained(loaded, tmp_path / "model")
    tn.restore_(loaded), tn.restore_(model)
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    if family == "llama":
        tn.save_pretrained(loaded, tmp_path / "stock")
        assert torch.equal(logits(tn.from_pretrained(tmp_path / "stock")[0], IDS), logits(model, IDS))


def test_copies_and_pickles_hold_it_too(tmp_path):
    _, model = held("llama")
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(logits(other, IDS), logits(model, IDS))
        other.set_attn_implementation("eager")
        assert other.config._attn_implementation == "prefix_eager"
        assert model.config._attn_implementation == "prefix_sdpa"
