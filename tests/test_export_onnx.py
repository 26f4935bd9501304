"""ONNX: the graph in onnxruntime is the model, with its cache, and holds no norm that was removed."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import transformers

import tapernorm as tn
from exported import GRAPH, folded, padded_feed, prefixed, run_steps
from tapernorm.export import export
from tapernorm.verify import greedy_tokens

pytest.importorskip("onnxscript", reason="needs tapernorm[onnx]")
onnx = pytest.importorskip("onnx", reason="needs tapernorm[onnx]")
ort = pytest.importorskip("onnxruntime", reason="needs tapernorm[onnx]")


@pytest.fixture(scope="module", params=["all", "internal", "gpt2", "prefix", "sliding"])
def graph(request, tmp_path_factory):
    """(model, its folder, what export said)"""
    model = GRAPH[request.param]()
    folder = tmp_path_factory.mktemp("onnx") / request.param
    return model, folder, export(model, folder, "onnx")


def session(folder, optimised):
    levels = ort.GraphOptimizationLevel
    options = ort.SessionOptions()
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    return ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("optimised", [False, True])
def test_is_the_model(graph, optimised):
    model, folder, _ = graph
    made = session(folder, optimised)
    for batch, length in ((1, 1), (3, 7)):  # shapes other than those it was traced with, and a single token
        ids = torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(batch))
        with torch.no_grad():
            wanted = model(input_ids=ids, use_cache=False).logits
        logits, tokens = run_steps(made, ids, 10)
        assert float((torch.tensor(logits) - wanted).abs().max() / wanted.abs().max()) < 1e-5
        assert torch.equal(torch.tensor(tokens), greedy_tokens(model, ids, 10))


@pytest.mark.parametrize("optimised", [False, True])
def test_padding_on_the_left_changes_nothing(graph, optimised):
    model, folder, _ = graph
    made = session(folder, optimised)
    ids = torch.randint(model.config.vocab_size, (1, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits[0].numpy()
    logits = made.run(["logits"], padded_feed(made, ids, pads=3))[0][0, 3:]
    assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 1e-5


def test_names_and_axes(graph):
    _, folder, record = graph
    model = onnx.load(str(folder / "model.onnx"))
    onnx.checker.check_model(model)
    inputs = {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    assert inputs["input_ids"] == ["batch_size", "sequence_length"]
    assert inputs["attention_mask"][1] == "past_sequence_length + sequence_length"
    assert inputs["past_key_values.1.value"][::2] == ["batch_size", "past_sequence_length"]
    outputs = [o.name for o in model.graph.output]
    assert outputs == ["logits", *(f"present.{i}.{kind}" for i in range(2) for kind in ("key", "value"))]
    assert record.details["inputs"] == list(inputs) and record.details["outputs"] == outputs
    assert record.details["opset"] >= 18


def test_no_operation_of_a_removed_norm(graph):
    _, folder, record = graph
    found = record.details["norm_operations"]
    assert set(found) <= {*record.kept, "transformer.h.0.mlp.act", "transformer.h.1.mlp.act"}, found
    assert not set(found) & set(record.removed)
    if not record.kept and "gpt2" not in str(folder):  # GPT-2's activation has a cube
        assert not found and not record.details["optimised"]
    if record.kept == ("model.norm",):
        assert found == {"model.norm": {"Pow": 1, "ReduceMean": 1, "Sqrt": 1, "Reciprocal": 1}}


def test_the_folder_says_what_it_is(graph):
    _, folder, record = graph
    config = transformers.AutoConfig.from_pretrained(folder)
    assert not config.model_type.startswith("tapernorm") and config.hidden_size == 16
    assert config.tapernorm["removed_norms"] == list(record.removed)
    with pytest.raises(OSError, match=r"model\.safetensors"):  # a stock class finds nothing to grow norms on
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    written = json.loads((folder / "export.json").read_text())
    assert written["removed"] == list(record.removed) and written["prefix"] == list(record.prefix)
    assert sorted(p.name for p in folder.iterdir()) == sorted(record.files)


def test_a_wrong_graph_is_not_handed_over(tmp_path, monkeypatch):
    from tapernorm.export import onnx as ours

    write = ours._export_decoder

    def off_by_a_little(model, *args):
        other = copy.deepcopy(model)
        other.model.layers[1].mlp.down_proj.weight.data *= 1.1
        return write(other, *args)

    monkeypatch.setattr(ours, "_export_decoder", off_by_a_little)
    with pytest.raises(tn.ExportError, match="differs from the model"):
        export(folded(), tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


def test_a_stock_model_is_said_to_have_its_norms(tmp_path):
    model = folded(fold=False)
    record = export(model, tmp_path / "out", "onnx")
    assert not record.removed and len(record.kept) == 5
    assert set(record.details["norm_operations"]) == set(record.kept)
    assert any("no norm was removed" in note for note in record.notes)


def test_bfloat16_is_written_as_float32(tmp_path):
    model = folded().bfloat16()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    record = export(model, tmp_path / "out", "onnx")
    assert any("bfloat16" in note for note in record.notes)
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in model.state_dict().items())


def test_a_classifier(tmp_path):
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        num_labels=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = folded(model=transformers.ViTForImageClassification(config).eval())
    record = export(model, tmp_path / "out", "onnx")
    assert len(record.removed) == 5 and not record.kept
    assert not record.details["norm_operations"]
    images = torch.randn(3, 3, 8, 8)
    made = session(tmp_path / "out", True).run(["logits"], {"pixel_values": images.numpy()})[0]
    with torch.no_grad():
        wanted = model(pixel_values=images).logits
    assert float((torch.tensor(made) - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_a_module_of_ones_own(tmp_path):
    from vit import TimmViT

    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    model = folded(model=TimmViT("avg").eval(), example=images)
    record = export(model, tmp_path / "out", "onnx", example=images)
    assert len(record.removed) == 5
    assert set(record.details["norm_operations"]) <= {""}  # the mean over tokens is the model's own
    made = session(tmp_path / "out", True).run(["logits"], {"input": images.numpy()})[0]
    with torch.no_grad():
        wanted = model(images)
    assert float((torch.tensor(made) - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_the_prefix_travels(tmp_path):
    """Without its constants the graph would be another function."""
    model = prefixed()
    export(model, tmp_path / "with", "onnx")
    ids = torch.randint(16, (1, 5), generator=torch.Generator().manual_seed(0))
    logits, _ = run_steps(session(tmp_path / "with", True), ids, 1)
    for module in model.modules():
        if hasattr(module, "prefix_key"):
            module.prefix_key.zero_()
    with torch.no_grad():
        without = model(input_ids=ids, use_cache=False).logits.numpy()
    assert np.abs(logits - without).max() > 1e-3
