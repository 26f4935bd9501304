"""The specification: counts that can be checked by hand, depths, ranges."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn

from exported import folded, prefixed
from tapernorm.export import export
from tapernorm.export.count import Counter, Depth
from zoo import D


def spec_of(model, tmp_path, **options):
    export(model, tmp_path / "out", "spec", **options)
    return json.loads((tmp_path / "out" / "spec.json").read_text())


LAYERS, HEADS = 2, 2


def test_a_llamas_counts_by_hand(tmp_path):
    spec = spec_of(folded("llama"), tmp_path)
    after = {kind: pair["after"] for kind, pair in spec["operations"].items()}
    before = {kind: pair["before"] for kind, pair in spec["operations"].items()}
    reach = int(spec["per"].split("with ")[1].split()[0])
    assert after["multiply-adds with weights"] == LAYERS * 7 * D * D + D * D
    assert after["multiply-adds of activations"] == LAYERS * HEADS * 2 * reach * (D // HEADS)
    assert after["exponentials"] == after["divisions"] == LAYERS * HEADS * reach  # softmax
    assert after["square roots"] == 0 and after["reductions"] == LAYERS * HEADS * 2
    assert after["activation functions"] == LAYERS * D
    assert before["square roots"] == 5 and before["reductions"] - after["reductions"] == 5
    assert before["divisions"] - after["divisions"] == 5
    assert before["multiplications"] - after["multiplications"] == 5 * 3 * D  # square, h / r, gain
    assert set(spec["left_by_module"]) == {f"model.layers.{i}.self_attn" for i in range(LAYERS)}
    assert not spec["not_counted"]


def test_a_kept_norm_is_named(tmp_path):
    spec = spec_of(folded(arm="internal"), tmp_path)
    assert spec["left_by_module"]["model.norm"] == {"reductions": 1, "divisions": 1, "square roots": 1}


def test_depth_of_a_llama(tmp_path):
    spec = spec_of(folded("llama"), tmp_path)
    block = spec["depth"]["after"]["model.layers.1"]
    # q · k, softmax, p · v; silu's own and the gate's
    assert block["products"] == 5
    assert block["scalings"] == 6  # Wq, angles, 1/√d, Wo; gate, down
    assert block["functions"] == 3
    before = spec["depth"]["before"]["model.layers.1"]
    assert before["products"] - block["products"] == 4 and before["functions"] - block["functions"] == 2
    assert spec["depth"]["after"]["model"]["products"] == LAYERS * 5


@pytest.mark.parametrize("make", [lambda: folded("gpt2"), lambda: prefixed()], ids=["gpt2", "prefix"])
def test_others_are_counted_whole(make, tmp_path):
    spec = spec_of(make(), tmp_path)
    assert not spec["not_counted"] and spec["operations"]["square roots"]["after"] == 0
    assert spec["operations"]["square roots"]["before"] == 5
    assert all("attn" in name for name in spec["left_by_module"])


def test_ranges_are_those_of_the_inputs(tmp_path):
    model = folded()
    ids = torch.randint(D, (20, 30), generator=torch.Generator().manual_seed(0))
    seen = []
    handle = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    handle.remove()
    spec = spec_of(model, tmp_path, ids=ids)
    found = spec["ranges"]["model.layers.1.mlp.down_proj"]
    values = seen[0].flatten()
    assert found["min"] == pytest.approx(float(values.min()), rel=1e-5)
    assert found["max"] == pytest.approx(float(values.max()), rel=1e-5)
    assert found["p99.99"] == pytest.approx(float(values.abs().sort().values[int(0.9999 * len(values))]), rel=1e-5)
    assert found["int8_scale"] == pytest.approx(found["p99.99"] / 127)
    assert len(spec["ranges"]) == LAYERS * 7 + 1


def test_a_classifier(tmp_path):
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        num_labels=16,
    )  # fmt: skip
    model = folded(model=transformers.ViTForImageClassification(config).eval())
    spec = spec_of(model, tmp_path)
    assert spec["operations"]["square roots"] == {"before": 5 * 5, "after": 0}  # five tokens


def test_chains_are_followed_by_kind():
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    with torch.no_grad(), Counter(unknown=x) as counter:
        y = x @ w  # a scaling
        z = (y * y).exp() * 2.0  # a product, a function, a scaling
        known = w * w
        made = nn.functional.silu(z / z.sum(-1, keepdim=True))  # 1/x and a product; silu and a product
    assert counter.depth(y) == Depth(0, 1, 0)
    assert counter.depth(z) == Depth(1, 2, 1)
    assert counter.depth(known) == Depth()
    assert counter.depth(made) == Depth(3, 2, 3)
    total = counter.total()
    assert total["multiply-adds with weights"] == 3 * 4 * 4 and total["reductions"] == 3
