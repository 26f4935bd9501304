"""Folding from disk to disk: the same bits as in memory for every family, nothing half-written, and it goes on."""

import json

import pytest
import torch
from safetensors.torch import load_file

import tapernorm as tn
from families import FAMILIES
from folders import byte_tokenizer
from tapernorm import shard_plan, shards, untrusted
from tapernorm.modules import taper_norms
from tapernorm.sites import find_sites

ROWS = {row.name: row for row in FAMILIES if row.goes and row.model_type != "timm"}


@torch.no_grad()
def half_tapered(row, folder, dtype, shard="6KB", gate=0.0, prefix=(), **changes):
    """A folder of a model of that family with gates at 0 and gains, biases and c of their own; and the model."""
    if row.is_moe:
        changes.setdefault("experts_implementation", "eager")
    model, example = row.build(**changes).to(dtype), row.example
    example = {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()}
    sites = find_sites(model, example)
    keep = tuple(site.name for site in sites if site.role == "final" and not site.removable)
    config = tn.TaperConfig(arm="all", keep=keep, post=row.post, anchor_weight=0, prefix=prefix)
    tn.taper_(model, config, example=example)
    generator = torch.Generator().manual_seed(7)
    for module in taper_norms(model).values():
        fixed = module.fixed_norm
        fixed.c.copy_(0.5 * torch.rand(1, generator=generator) + 0.3)
        fixed.weight.copy_(torch.rand(fixed.weight.shape, generator=generator) + 0.5)
        if fixed.bias is not None:
            fixed.bias.copy_(0.3 * torch.randn(fixed.bias.shape, generator=generator))
        module.set_gate(gate)
    tn.save_pretrained(model, folder, tokenizer=byte_tokenizer(), max_shard_size=shard)
    return model, example


def contents(folder):
    """Every tensor in a folder's files, and its config."""
    tensors = {}
    for path in untrusted.weight_files(folder):
        tensors |= load_file(path)
    return tensors, json.loads((folder / "config.json").read_text())


def same_bits(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), (name, float((tensor.double() - two[name].double()).abs().max()))


@pytest.fixture
def few_numbers(monkeypatch):
    """Weights of the tiny models are cut into many parts, too."""
    monkeypatch.setattr(shard_plan, "NUMBERS", 40)


@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_as_in_memory(name, tmp_path, few_numbers):
    row = ROWS[name]
    dtype = torch.bfloat16 if len(name) % 2 else torch.float32
    model, example = half_tapered(row, tmp_path / "half", dtype)
    wanted = tn.fold_(model, example=example, allow_tail=True)
    tn.save_pretrained(model, tmp_path / "memory", max_shard_size="6KB")
    report = shards.fold_folder(tmp_path / "half", tmp_path / "disk")
    assert report.folded == wanted.folded and report.kept == wanted.kept and report.untied == wanted.untied
    assert sorted(report.new_biases) == sorted(wanted.new_biases) and report.prefix == wanted.prefix
    assert report.c == wanted.c and report.kinds == wanted.kinds and report.roles == wanted.roles
    assert report.rows_checked > 0 and report.shards > 1
    first, second = (tn.from_pretrained(tmp_path / place)[0] for place in ("memory", "disk"))
    same_bits(first.state_dict(), second.state_dict())
    assert contents(tmp_path / "memory")[1] == contents(tmp_path / "disk")[1]
    written = {path.name for path in (tmp_path / "disk").iterdir()} - {"fold.json"}
    assert {"README.md", "modeling_tapernorm.py", "tokenizer.json", untrusted.INDEX} <= written
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-post", "mixtral", "phi", "bloom", "t5", "glm4-post"])
def test_other_dtypes(name, dtype, tmp_path, few_numbers):
    row = ROWS[name]
    model, example = half_tapered(row, tmp_path / "half", dtype)
    tn.fold_(model, example=example, allow_tail=True)
    tn.save_pretrained(model, tmp_path / "memory")
    shards.fold_folder(tmp_path / "half", tmp_path / "disk")
    first, second = (tn.from_pretrained(tmp_path / place)[0] for place in ("memory", "disk"))
    same_bits(first.state_dict(), second.state_dict())
