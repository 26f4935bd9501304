"""A stock checkpoint whose norms do nothing: in stock classes, bit for bit where it can be."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import tapernorm as tn
from exported import folded, prefixed
from prefixed import build
from tapernorm.export import export
from tapernorm.modules import taper_norms
from zoo import D, randomise

IDS = torch.randint(D, (3, 11), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def stock(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model).__module__.startswith("transformers.models.")
    return model


@pytest.mark.parametrize("row", ["llama-tied", "llama-bias"])
def test_rms_norms_do_nothing_to_the_bit(row, tmp_path):
    model = folded(row)
    record = export(model, tmp_path / "out", "as-normed")
    made = stock(tmp_path / "out")
    assert sum(type(m).__name__ == "LlamaRMSNorm" for m in made.modules()) == 5
    assert torch.equal(logits(made), logits(model))
    h = torch.randn(7, D) * record.details["largest_mean_square"] ** 0.5 * 30  # larger than any that was seen
    assert torch.equal(made.model.norm(h), h)
    assert any("no faster" in note and "float16" in note for note in record.notes)


@pytest.mark.parametrize("row", ["gpt2", "gpt2-untied"])
def test_layer_norms_and_the_bias_of_a_head_that_has_none(row, tmp_path):
    model = folded(row)
    assert model.lm_head.bias is not None and model.lm_head.bias.abs().max() > 0.1
    export(model, tmp_path / "out", "as-normed")
    made = stock(tmp_path / "out")
    assert made.lm_head.bias is None
    wanted = logits(model)
    assert float((logits(made) - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_norms_of_queries_and_keys_are_kept_exactly(tmp_path):
    model = build("qwen3")
    tn.taper_(model, tn.TaperConfig(arm="all"))
    randomise(model, seed=1)
    for module in taper_norms(model).values():
        module.set_gate(0.0)
    tn.fold_(model)
    model = model.float().eval()
    record = export(model, tmp_path / "out", "as-normed")
    assert len(record.details["rescaled"]) == 4 and record.details["rescaled"][0].endswith("q_norm")
    wanted = logits(model)
    assert float((logits(stock(tmp_path / "out")) - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_a_kept_norm_on_the_residual_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.norm is kept, and a stock config has one epsilon"):
        export(folded(arm="internal"), tmp_path / "out", "as-normed")


def test_a_prefix_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no place for its keys and values"):
        export(prefixed(), tmp_path / "out", "as-normed")


def test_a_stock_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a stock model already"):
        export(folded(fold=False), tmp_path / "out", "as-normed")


def test_half_precision(tmp_path):
    tn.save_pretrained(folded(), tmp_path / "free")
    model, _ = tn.from_pretrained(tmp_path / "free", dtype="bfloat16")
    export(model, tmp_path / "bf16", "as-normed")
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto").eval()
    assert made.dtype == torch.bfloat16 and torch.equal(logits(made), logits(model))
    record = export(folded().half(), tmp_path / "fp16", "as-normed")
    assert json.loads((tmp_path / "fp16" / "config.json").read_text())["dtype"] == "float32"
    assert any("are float32 in the file" in note for note in record.notes)


def test_a_wrong_checkpoint_is_not_handed_over(tmp_path, monkeypatch):
    from tapernorm.export import normed

    monkeypatch.setattr(normed, "_EXACT", 2.0**-14)  # an eps that the residual can be seen beside
    with pytest.raises(tn.ExportError, match="the stock model differs"):
        export(folded(), tmp_path / "out", "as-normed")
    assert not (tmp_path / "out").exists()
