"""TransformerLens: the same logits without normalization, and attribution that adds up."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from exported import folded, prefixed
from tapernorm.export import export
from tapernorm.export.lens import load_transformer_lens, to_transformer_lens
from zoo import D

pytest.importorskip("transformer_lens", minversion=None, reason="needs tapernorm[lens]")
if not importlib.metadata.version("transformer-lens").startswith("3."):
    pytest.skip("needs transformer-lens 3 (tapernorm[lens])", allow_module_level=True)

MODELS = {
    "all": lambda: folded("llama-tied"),
    "grouped": lambda: prefixed(),
    "gpt2": lambda: folded("gpt2"),
    "internal": lambda: folded("llama", arm="internal"),
    "gpt2-internal": lambda: folded("gpt2-untied", arm="internal"),
    "gpt2-prefix": lambda: prefixed("gpt2"),
}
IDS = torch.randint(D, (3, 11), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits(name, tmp_path):
    model = MODELS[name]()
    wanted = logits(model)
    with torch.no_grad():
        made = to_transformer_lens(model)(IDS)
    assert float((made - wanted).abs().max() / wanted.abs().max()) < 1e-5
    record = export(model, tmp_path / "out", "transformer-lens")
    again = load_transformer_lens(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(IDS), made)
    kind = {"internal": "RMS", "gpt2-internal": "LN"}.get(name)
    assert again.cfg.normalization_type == record.details["normalization_type"] == kind
    assert bool(record.kept) == bool(kind)
