"""Linear maps that read one tensor are one product: in folders, compiled, copied and from the command line."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import tapernorm as tn
from folders import BLOCKED, to_gate
from fusing import QKV, fused, parts_of
from tapernorm import commands, fuse
from tapernorm.sites import find_sites
from zoo import BY_NAME, IDS, D, logits, randomise, relative, tapered

torch.set_num_threads(1)


# Folders


BODY = """
import torch, pathlib, transformers as tf
torch.set_num_threads(1)
root = pathlib.Path(sys.argv[1])
wanted, ids = torch.load(root / "wanted.pt"), torch.load(root / "ids.pt")
model, info = tf.AutoModelForCausalLM.from_pretrained(
    root / "out", output_loading_info=True, trust_remote_code=True, dtype="auto")
assert not info["missing_keys"] and not info["unexpected_keys"], info
assert torch.equal(model(input_ids=ids).logits, wanted)
cached, plain = (model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=c) for c in (True, False))
assert torch.equal(cached, plain)
names = [n for n, _ in model.named_parameters()]
assert "model.layers.0.self_attn.qkv_proj.weight" in names and not [n for n in names if "q_proj" in n]
model.save_pretrained(root / "again")
copy = tf.AutoModelForCausalLM.from_pretrained(root / "again", trust_remote_code=True, dtype="auto")
assert torch.equal(copy(input_ids=ids).logits, wanted)
body = tf.AutoModel.from_pretrained(root / "out", trust_remote_code=True, dtype="auto")
assert "layers.0.mlp.gate_up_proj.weight" in dict(body.named_parameters())
head = tf.AutoModelForSequenceClassification.from_pretrained(root / "out", trust_remote_code=True, dtype="auto")
assert "model.layers.1.mlp.gate_up_proj.weight" in dict(head.named_parameters())
try:
    tf.LlamaForCausalLM.from_pretrained(root / "out")
except Exception as error:
    assert "norms were taken out" in str(error), error
else:
    raise AssertionError("loaded as a stock model")
print("done")
"""


def test_a_folder_loads_without_tapernorm(tmp_path):
    _, model, _ = fused("llama-tied", dtype=torch.float32)
    wanted = logits(model)
    tn.save_pretrained(model, tmp_path / "out")
    torch.save(wanted, tmp_path / "wanted.pt")
    torch.save(IDS, tmp_path / "ids.pt")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["fused_linears"] == {
        "model.layers.*.mlp": {"gate_up_proj": ["gate_proj", "up_proj"]},
        "model.layers.*.self_attn": {"qkv_proj": list(QKV)},
    }
    loaded, _ = tn.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), wanted)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BLOCKED + BODY, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-2000:]


def test_some_layers_fused_are_named_without_a_star(tmp_path):
    model = tapered(BY_NAME["llama"], dtype=torch.float32)
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    report = tn.fold_(model, fuse=True)
    assert "it has hooks" in report.unfused["model.layers.1.mlp.up_proj"] and len(report.fused) == 3
    tn.save_pretrained(model, tmp_path / "out")
    loaded, _ = tn.from_pretrained(tmp_path / "out")
    assert set(loaded.config.fused_linears) == {"model.layers.*.self_attn", "model.layers.0.mlp"}
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    "wrong", [{"lm_head": {"both": ["a", "b"]}}, {"model.layers.*": {"both": ["mlp", "self_attn"]}}]
)
def test_a_config_that_asks_for_nonsense_is_refused(wrong, tmp_path):
    _, model, _ = fused("llama", dtype=torch.float32)
    tn.save_pretrained(model, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fused_linears": wrong}))
    with pytest.raises(ValueError, match="no linear maps to be fused"):
        tn.from_pretrained(tmp_path / "out")


def test_a_fused_model_can_lose_more_norms(tmp_path):
    """The norms that stay have the fused map as their reader."""
    model = tapered(BY_NAME["llama"], "internal")
    tn.fold_(model, fuse=True)
    tn.save_pretrained(model, tmp_path / "out")
    model, _ = tn.from_pretrained(tmp_path / "out")
    tn.taper_(model, tn.TaperConfig(arm="all"))
    to_gate(model)
    wanted = logits(model)
    tn.fold_(model)
    assert relative(logits(model), wanted) < 1e-10
    stock = randomise(BY_NAME["llama"].build().double())
    fuse.fuse_(stock)
    assert {"model.layers.0.self_attn.qkv_proj.weight"} == set(find_sites(stock)[0].consumers)
    tn.taper_(stock, tn.TaperConfig(arm="all"))
    to_gate(stock)
    wanted = logits(stock)
    tn.fold_(stock)
    assert relative(logits(stock), wanted) < 1e-10


# How it runs


def test_generation_with_a_cache():
    folded, model, _ = fused("llama", dtype=torch.float32)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = folded.generate(IDS, **options)
    for cache in (True, False):
        assert torch.equal(model.generate(IDS, use_cache=cache, **options), wanted)


def test_gradients_with_and_without_checkpointing():
    folded, model, _ = fused("llama-bias")
    wanted = None
    for setting in (None, True, False):
        model.zero_grad()
        model.train()
        if setting is not None:
            model.gradient_checkpointing_enable({"use_reentrant": setting})
        model(input_ids=IDS, labels=IDS).loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        wanted = wanted or found
        assert all(relative(found[k], wanted[k]) < 1e-12 for k in wanted)
    folded.train()
    folded(input_ids=IDS, labels=IDS).loss.backward()
    q, k, v = (folded.get_parameter(f"model.layers.0.self_attn.{part}.weight").grad for part in QKV)
    assert relative(wanted["model.layers.0.self_attn.qkv_proj.weight"], torch.cat([q, k, v])) < 1e-12


def test_a_copy_is_a_model_of_its_own():
    _, model, _ = fused("llama")
    wanted = logits(model)
    part = model.model.layers[0].self_attn.q_proj
    part(torch.ones(1, D, dtype=torch.float64, requires_grad=True))  # a forward that was broken off
    assert part.left.held is not None
    twin = copy.deepcopy(model)
    assert all(m.left.held is None for m in parts_of(twin))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(twin), wanted)
    attention = twin.model.layers[0].self_attn
    assert attention.q_proj.owner is attention and attention.q_proj.left is attention.v_proj.left


def test_a_wrapped_map_is_the_one_that_runs():
    """As an adapter or a quantizer does after fusing."""
    _, model, _ = fused("llama")
    attention = model.model.layers[0].self_attn
    wanted = logits(model)
    attention.qkv_proj = nn.Sequential(attention.qkv_proj, nn.Dropout(0.0))
    assert torch.equal(logits(model), wanted)
    attention.qkv_proj = nn.Linear(D, 3 * D).double()
    assert relative(logits(model), wanted) > 1e-3


def test_compiled_without_a_graph_break():
    torch._dynamo.reset()
    _, model, _ = fused("llama", dtype=torch.float32)
    wanted = logits(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(input_ids=IDS, use_cache=False).logits
        assert torch.equal(found, wanted)
        assert torch.equal(compiled(input_ids=IDS, use_cache=False).logits, wanted)
    assert all(part.left.held is None for part in parts_of(model))
    torch._dynamo.reset()


def test_exported():
    _, model, _ = fused("llama", dtype=torch.float32)
    attention, x = model.model.layers[0].mlp, torch.randn(1, 3, D)
    program = torch.export.export(attention, (x,))
    assert torch.equal(program.module()(x), attention(x))
    products = [n for n in program.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert len(products) == 2


# The command line


def test_the_command(tmp_path, capsys):
    tn.save_pretrained(tapered(BY_NAME["llama"], dtype=torch.float32), tmp_path / "half")
    source, out = str(tmp_path / "half"), str(tmp_path / "out")
    with pytest.raises(ValueError, match="--fuse is for a fold in memory"):
        commands.fold_model(source, out, True, False, False, True, fuse=True)
    commands.fold_model(source, out, None, False, False, True, fuse=True)
    assert len(json.loads(capsys.readouterr().out)["fold"]["fused"]) == 4
    assert len(parts_of(tn.from_pretrained(out)[0])) == 10


def test_taken_apart_for_a_stock_checkpoint(tmp_path):
    _, model, _ = fused("llama", dtype=torch.float32)
    tn.export(model, tmp_path / "out", format="as-normed")
    assert len(parts_of(model)) == 10
