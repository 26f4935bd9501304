"""Folders that are somebody's stay as they are, and sources that are no model are refused."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from folders import byte_tokenizer, folded_by_hand, logits, tiny
from tapernorm import hub

# Folders that are somebody's


def test_an_occupied_folder_is_refused_and_stays(tmp_path):
    model = folded_by_hand("llama")
    hub.save_pretrained(model, tmp_path / "model")
    notes = tmp_path / "model" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt.*overwrite=True"):
        hub.save_pretrained(model, tmp_path / "model")
    hub.save_pretrained(folded_by_hand("llama", seed=1), tmp_path / "model", overwrite=True)
    assert notes.read_text() == "mine"
    loaded, _ = hub.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(folded_by_hand("llama", seed=1)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_stock_folder_is_not_replaced_silently(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "original")
    with pytest.raises(ValueError, match="was not written by an earlier save"):
        hub.save_pretrained(folded_by_hand("llama"), tmp_path / "original")
    with pytest.raises(ValueError, match="is a file"):
        hub.save_pretrained(folded_by_hand("llama"), tmp_path / "original" / "config.json")


def test_a_save_that_fails_leaves_the_old_folder(tmp_path, monkeypatch):
    hub.save_pretrained(folded_by_hand("llama"), tmp_path / "model")
    before = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda folder: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        hub.save_pretrained(folded_by_hand("llama", seed=1), tmp_path / "model", tokenizer=tokenizer)
    assert {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_what_cannot_be_saved(tmp_path):
    class Own(transformers.LlamaForCausalLM):
        pass

    model = Own(tiny("llama").config)
    model.model.norm = nn.Identity()
    with pytest.raises(ValueError, match="Own is not a class that transformers exports"):
        hub.save_pretrained(model, tmp_path / "model")
    with pytest.raises(ValueError, match="a Linear cannot be saved"):
        hub.save_pretrained(nn.Linear(2, 2), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# Sources that are none


def write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def test_sources_that_are_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cases = {
        tmp_path / "nowhere": "no such file or folder",
        write(tmp_path / "empty"): "not a model folder: there is no config.json",
        write(tmp_path / "adapter", adapter_config="{}"): "merge it into its model first",
        write(tmp_path / "typeless", config="{}"): "not a model that can be loaded",
        write(tmp_path / "unknown", config='{"model_type": "nonesuch"}'): "unknown model type 'nonesuch'",
        write(tmp_path / "ours", config='{"model_type": "tapernorm_nonesuch"}'): "unknown model type 'tapernorm_non",
        write(tmp_path / "broken", config="{"): "is not sound JSON",
        write(tmp_path / "bare", config=tiny("llama").config.to_json_string()): "not a model that can be loaded",
        tmp_path / "broken" / "config.json": r"cannot read a \.json file",
        tmp_path / "model.gguf": "no such file or folder",
        "models/nowhere.bin": "no such file or folder",
        "nobody-at-all/nothing-of-the-kind": "neither a folder here nor loadable from the hub.*local folder",
    }
    for source, words in cases.items():
        with pytest.raises(ValueError, match=words) as caught:
            hub.from_pretrained(source)
        assert str(source) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="not a floating-point dtype"):
        hub.from_pretrained(tmp_path, dtype="int8")


def test_missing_weights_are_not_made_up(tmp_path):
    model = tiny("llama")
    state = {name: t for name, t in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path / "model", state_dict=state)
    with pytest.raises(ValueError, match=r"1 weights of .* missing from it, such as model\.layers\.1\.mlp\.up_proj"):
        hub.from_pretrained(tmp_path / "model")


def test_gguf_without_its_package(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf"):
        hub.from_pretrained(path)
