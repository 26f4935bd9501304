"""torch.export: programs that need neither this library nor transformers, with a cache of one size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers

import tapernorm as tn
from exported import GRAPH, folded
from folders import BLOCKED
from tapernorm.export import export

PLACES = 16
FRESH = (
    BLOCKED.replace('== "tapernorm"', 'in ("tapernorm", "transformers")')
    + """
import torch
folder, suffix = sys.argv[1:]
told = json.load(open(f"{folder}/export.json"))["details"]
def load(name):
    if suffix == ".aoti.pt2":
        return torch._inductor.aoti_load_package(f"{folder}/{name}{suffix}")
    return torch.export.load(f"{folder}/{name}{suffix}").module()
keys, values = ([torch.zeros(layer[kind]) for layer in told["cache"]] for kind in ("key", "value"))
prefill, decode = load("prefill"), load("decode")
ids = torch.load(f"{folder}/ids.bin")
with torch.no_grad():
    out = [prefill(ids[:, :4].contiguous(), torch.tensor([0]), keys, values)]
    for place in range(4, ids.shape[1]):
        out.append(decode(ids[:, place:place + 1].contiguous(), torch.tensor([place]), keys, values))
torch.save(torch.cat(out, dim=1), f"{folder}/logits.bin")
assert "transformers" not in sys.modules and "tapernorm" not in sys.modules
"""
)


def fresh(folder, ids, suffix=".pt2"):
    """The logits of a process that can import neither library."""
    torch.save(ids, folder / "ids.bin")
    done = subprocess.run([sys.executable, "-c", FRESH, str(folder), suffix], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(folder / "logits.bin")


def check(model, folder, suffix=".pt2"):
    ids = torch.randint(model.config.vocab_size, (1, PLACES), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    made = fresh(folder, ids, suffix)  # to the last place of the cache
    assert float((made - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize("name", GRAPH)
def test_is_the_model_in_a_process_without_its_class(name, tmp_path):
    model = GRAPH[name]()
    record = export(model, tmp_path / "out", "pt2", context=PLACES)
    check(model, tmp_path / "out")
    assert not set(record.details["norm_operations"]) & set(record.removed)
    if not record.kept:
        assert not record.details["norm_operations"]
    if record.kept == ("model.norm",):
        assert record.details["norm_operations"] == {"model.norm": {"mean": 1, "rsqrt": 1}}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tapernorm"]["constant_prefix"] == list(record.prefix)


@pytest.mark.slow  # a C++ compiler's minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiled(tmp_path):
    model = GRAPH["prefix"]()
    export(model, tmp_path / "out", "pt2", context=PLACES, compile=True)
    check(model, tmp_path / "out", ".aoti.pt2")


def test_a_classifier(tmp_path):
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        num_labels=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = folded(model=transformers.ViTForImageClassification(config).eval())
    export(model, tmp_path / "out", "pt2")
    images = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        wanted = model(pixel_values=images).logits
        made = torch.export.load(tmp_path / "out" / "model.pt2").module()(images)
    assert float((made - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_more_places_than_the_model_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match="context=65: this model takes 4 to 64 tokens"):
        export(folded(), tmp_path / "out", "pt2", context=65)


def test_a_wrong_program_is_not_handed_over(tmp_path, monkeypatch):
    from tapernorm.export import pt2

    monkeypatch.setattr(pt2.StaticDecoder, "forward", _without_mask)
    with pytest.raises(tn.ExportError, match="differs from the model"):
        export(folded(), tmp_path / "out", "pt2", context=PLACES)
    assert not (tmp_path / "out").exists()


def _without_mask(self, input_ids, start, keys, values):
    """Sees no token before its call."""
    return self.model(input_ids=input_ids, use_cache=False).logits + 0 * (keys[0].sum() + start)
