"""OpenVINO and ExecuTorch, where they are installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exported import GRAPH, folded, run_steps
from tapernorm.export import export
from tapernorm.verify import greedy_tokens


@pytest.mark.parametrize("name", ["all", "prefix", "internal"])
def test_openvino_is_the_model(name, tmp_path):
    pytest.importorskip("openvino", reason="needs tapernorm[openvino]")
    pytest.importorskip("onnxruntime", reason="needs tapernorm[onnx]")
    from tapernorm.export.openvino import _Session

    model = GRAPH[name]()
    record = export(model, tmp_path / "out", "openvino")
    session = _Session(tmp_path / "out" / "openvino_model.xml")
    session.get_outputs = lambda: [_Named(n) for n in record.details["outputs"]]
    ids = torch.randint(model.config.vocab_size, (3, 7), generator=torch.Generator().manual_seed(0))
    logits, tokens = run_steps(session, ids, 10)
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits.numpy()
    assert np.abs(logits - wanted).max() / np.abs(wanted).max() < 1e-5
    assert torch.equal(torch.tensor(tokens), greedy_tokens(model, ids, 10))
    assert bool(record.details["norm_operations"]) == bool(record.kept)


class _Named:
    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize("name", ["all", "prefix"])
def test_executorch_is_the_model(name, tmp_path):
    runtime = pytest.importorskip("executorch.runtime", reason="needs tapernorm[executorch]")
    model = GRAPH[name]()
    export(model, tmp_path / "out", "executorch", context=16)
    method = runtime.Runtime.get().load_program(tmp_path / "out" / "model.pte").load_method("forward")
    for seed in (0, 1):  # the second text begins again at place 0, over the first one's cache
        ids = torch.randint(model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(seed))
        made = [method.execute([ids[:, i : i + 1].contiguous(), torch.tensor([i])])[0].clone() for i in range(12)]
        with torch.no_grad():
            wanted = model(input_ids=ids, use_cache=False).logits
        assert float((torch.cat(made, dim=1) - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    missing = ("openvino", "executorch", "onnxscript")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in missing else found(name, *a))
    for format, extra in (("openvino", "openvino"), ("executorch", "executorch"), ("onnx", "onnx")):
        with pytest.raises(ValueError, match=rf"pip install 'tapernorm\[{extra}\]'"):
            export(folded(), tmp_path / "out", format)
