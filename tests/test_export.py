"""What is refused before anything is written, and the command line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers

import tapernorm as tn
from command import run_command
from exported import folded
from tapernorm import cli
from tapernorm.export import FORMATS, export
from zoo import BY_NAME, tapered

ROOT = Path(__file__).resolve().parent.parent
EASY = "spec"  # the format that needs nothing


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A norm-free folder and the original beside it."""
    root = tmp_path_factory.mktemp("saved")
    tn.save_pretrained(folded("llama"), root / "free")
    folded("llama", fold=False).save_pretrained(root / "stock")
    return root


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("gate", "says"),
    [(0.5, "train on until the gate is 0, then fold"), (0.0, "fold it first"), (1.0, "put its norms back")],
)
def test_a_tapered_model_is_refused(format, gate, says, tmp_path):
    with pytest.raises(ValueError, match=says) as caught:
        export(tapered(BY_NAME["llama"], gate=gate, dtype=torch.float32), tmp_path / "out", format)
    assert "model.layers.0.input_layernorm" in str(caught.value) and f"gate is {gate:.4g}" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_gguf_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match=r"llama\.cpp, which normalises in every architecture.*as-normed"):
        export(folded(), tmp_path / "out", "gguf")


def test_the_help_names_every_format():
    assert tuple(FORMATS) == cli.EXPORTS


def test_an_unknown_format_has_a_neighbour(tmp_path):
    with pytest.raises(ValueError, match=r"no format 'onx' \(did you mean 'onnx'\?\)"):
        export(folded(), tmp_path / "out", "onx")


def test_what_is_in_the_folder_stays(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        export(folded(), tmp_path, EASY)
    with pytest.raises(ValueError, match="is a file"):
        export(folded(), tmp_path / "mine.txt", EASY)
    export(folded(), tmp_path, EASY, overwrite=True)
    assert (tmp_path / "mine.txt").read_text() == "mine" and (tmp_path / "spec.json").exists()


def test_a_models_own_weights_are_never_replaced(saved):
    with pytest.raises(ValueError, match="holds a model's weights"):
        export(folded(), saved / "free", EASY, overwrite=True)
    assert (saved / "free" / "model.safetensors").exists()


def test_the_function_and_the_package_are_both_callable(tmp_path):
    assert callable(tn.export)
    record = tn.export(folded(), tmp_path / "out", EASY)
    assert record.format == EASY and (tmp_path / "out" / "export.json").exists()


def test_the_command(saved, tmp_path, monkeypatch, capsys):
    code, out, err = run_command(
        monkeypatch, capsys, "export", saved / "free", "--format", EASY, "--out", tmp_path / "out"
    )
    assert code == 0, err
    assert "5 norms gone, 0 kept" in out and "square roots" in out and "random tokens" in out
    code, out, _ = run_command(
        monkeypatch, capsys, "export", saved / "stock", "--format", EASY, "--out", tmp_path / "stock", "--json"
    )
    record = json.loads(out)
    assert code == 0 and record["removed"] == [] and len(record["kept"]) == 5
    assert any("no norm was removed" in note for note in record["notes"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--format", "gguf"], "as-normed"),
        (["--format", "pt3"], "did you mean 'pt2'"),
        (["--format", "spec", "--opset", "18"], "--opset is for --format onnx"),
        (["--format", "onnx", "--compile"], "--compile is for --format pt2"),
    ],
)
def test_the_command_refuses(args, says, saved, tmp_path, monkeypatch, capsys):
    code, _, err = run_command(monkeypatch, capsys, "export", saved / "free", "--out", tmp_path / "out", *args)
    assert code == 2 and says in err and err.startswith("tapernorm: ") and not (tmp_path / "out").exists()


def test_attribution_adds_up_without_norms_only(saved, capsys):
    spec = importlib.util.spec_from_file_location("logit_attribution", ROOT / "examples" / "logit_attribution.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    off = {}
    for name in ("stock", "free"):
        model, _ = tn.from_pretrained(saved / name, dtype="float64")
        found, logit, _ = example.shares(model, torch.arange(1, 9)[None])
        assert len(found) == 5
        off[name] = abs(sum(found.values()) - logit) / abs(logit)
    assert off["free"] < 1e-12 < 0.05 < off["stock"]
    example.main(str(saved / "stock"), str(saved / "free"))
    assert "sum of 5 shares" in capsys.readouterr().out


def test_gpt2_adds_up_with_its_biases():
    spec = importlib.util.spec_from_file_location("logit_attribution", ROOT / "examples" / "logit_attribution.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = folded("gpt2", dtype=torch.float64)
    assert isinstance(model, transformers.GPT2LMHeadModel)
    found, logit, _ = example.shares(model, torch.arange(1, 9)[None])
    assert "head's bias" in found and abs(sum(found.values()) - logit) < 1e-12 * abs(logit)
