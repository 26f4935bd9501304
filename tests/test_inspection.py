"""`tapernorm inspect`: the norms of a model that is known by its config alone."""

import json
import resource
import subprocess
import sys

import pytest
import transformers

from families import FAMILIES
from tapernorm import hub, inspection
from tapernorm.sites import find_sites

LARGE = {
    "llama-70b": transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, architectures=["LlamaForCausalLM"],
    ),
    "deepseek-671b": transformers.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]),
}  # fmt: skip
BY_NAME = {row.name: row for row in FAMILIES}


def folder_of(config, path):
    config.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", LARGE)
def test_a_model_that_fits_no_memory(name, tmp_path):
    command = [sys.executable, "-c", "from tapernorm.cli import main; main()", "inspect"]
    run = subprocess.run([*command, folder_of(LARGE[name], tmp_path)], capture_output=True, text=True, check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 3e6  # kB
    wanted = {"llama-70b": "161 of 161", "deepseek-671b": "245 of 245"}[name]
    assert f"{wanted} norms can go, 1 of them final" in run.stdout
    assert len(run.stdout.splitlines()) < 20


def test_layers_that_differ_are_told_apart(tmp_path):
    model_type, sites = inspection.inspect_source(folder_of(LARGE["deepseek-671b"], tmp_path))
    assert model_type == "deepseek_v3"
    sizes = {pattern: len(group) for pattern, group in inspection.grouped(sites)}
    assert sizes == {
        "model.layers.*.input_layernorm": 61,
        "model.layers.*.self_attn.q_a_layernorm": 61,
        "model.layers.*.self_attn.kv_a_layernorm": 61,
        "model.layers.{0-2}.post_attention_layernorm": 3,
        "model.layers.{3-60}.post_attention_layernorm": 58,
        "model.norm": 1,
    }
    assert len(json.loads(json.dumps(inspection.as_rows(sites)))) == 245


def test_ranges():
    names = [f"a.{i}.b" for i in (0, 1, 2, 5, 7, 8)]
    assert inspection._ranges(names) == "a.{0-2,5,7-8}.b"


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "t5", "whisper", "vit", "clip", "llama-body", "bert"])
def test_a_config_tells_as_much_as_weights(name, tmp_path):
    row = BY_NAME[name]
    model = row.build()
    model.config.architectures = [type(model).__name__]
    _, sites = inspection.inspect_source(folder_of(model.config, tmp_path))
    wanted = find_sites(model, row.example)
    told = [(site.name, site.kind, site.role, site.removable, site.consumers, site.eps) for site in sites]
    if name == "llama-body":  # a stock body is read as a causal model, with a head
        told = told[:-1]
        wanted = wanted[:-1]
        told = [(name.removeprefix("model."), *rest) for name, *rest in told]
        told = [(*rest[:4], tuple(c.removeprefix("model.") for c in rest[4]), rest[5]) for rest in told]
    assert told == [(s.name, s.kind, s.role, s.removable, s.consumers, s.eps) for s in wanted]


def test_every_norm_is_in_a_row_of_the_table(tmp_path):
    for row in FAMILIES:
        sites = find_sites(row.build(), row.example)
        groups = inspection.grouped(sites)
        assert sum(len(group) for _, group in groups) == len(sites)
        assert len({pattern for pattern, _ in groups}) == len(groups), row.name
        inspection.table(row.name, sites)


def test_weights_are_read_where_the_config_is_not_enough(tmp_path, monkeypatch):
    model = BY_NAME["llama"].build()
    model.save_pretrained(tmp_path)
    asked = []
    original = hub.from_pretrained
    monkeypatch.setattr(hub, "from_pretrained", lambda source: asked.append(source) or original(source))
    inspection.inspect_source(str(tmp_path))
    assert asked == []
    monkeypatch.setattr(hub, "skeleton", lambda source: None)
    inspection.inspect_source(str(tmp_path))
    assert asked == [str(tmp_path)]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="no such file or folder"):
        inspection.inspect_source(str(tmp_path / "nowhere" / "at-all"))
