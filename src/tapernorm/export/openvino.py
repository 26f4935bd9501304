"""OpenVINO: the ONNX graph as an intermediate representation, with the same inputs and outputs, checked on the CPU."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.export import onnx
from tapernorm.export.decoder import Plain, is_decoder, prepared, sample_ids
from tapernorm.export.folder import Made, write_companions
from tapernorm.export.inputs import named_inputs
from tapernorm.export.norms import ExportError, Norms
from tapernorm.export.quiet import require

# What norms are made of there; a kept one may be fused into one operation.
_NORM_OPERATIONS = frozenset({"ReduceMean", "Power", "Sqrt", "MVN", "RMS", "NormalizeL2"})


def write(
    model: nn.Module,
    tokenizer: Any,
    norms: Norms,
    folder: Path,
    ids: Tensor | None = None,
    example: Any = None,
    opset: int | None = None,
) -> Made:
    """openvino_model.xml and .bin, by the names that optimum-intel looks for, and the companions.

    Args:
        model, tokenizer, norms, ids, example, opset: as for `tapernorm.export.onnx.write`.

    Raises:
        ValueError, ExportError: as there.
    """
    require("openvino", extra="openvino")
    import openvino

    with tempfile.TemporaryDirectory(prefix="tapernorm-") as place:
        graph = onnx.write(model, None, norms, Path(place), ids=ids, example=example, opset=opset)
        converted = openvino.convert_model(str(Path(place) / "model.onnx"))
        openvino.save_model(converted, str(folder / "openvino_model.xml"), compress_to_fp16=False)
    session = _Session(folder / "openvino_model.xml")
    reference = prepared(_float(model))
    checks: dict[str, Any] = {"bound": onnx.BOUND}
    if is_decoder(model):
        tokens = (sample_ids(model, 2, 8) if ids is None else ids)[:2, :32]
        checks["openvino"] = onnx.compare_decoder(reference, session, tokens, "OpenVINO")
    else:
        inputs = named_inputs(reference, example)
        with torch.no_grad():
            wanted = Plain(reference, tuple(inputs))(*inputs.values()).numpy()
        made = session.run(None, {name: value.numpy() for name, value in inputs.items()})[0]
        error = onnx.relative(made, wanted)
        if not error <= onnx.BOUND:
            raise ExportError(f"OpenVINO differs from the model by {error:.1e} of the largest output")
        checks["openvino"] = {"relative_error": error}
    write_companions(model, tokenizer, norms, folder)
    left = {kind: count for kind, count in session.operations.items() if kind in _NORM_OPERATIONS}
    kept = {"norm_operations": left, "in_onnx": graph.details["norm_operations"]}
    return Made(checks, graph.notes, {k: graph.details[k] for k in ("inputs", "outputs")} | kept)


def _float(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).float().eval()


@dataclasses.dataclass
class _Input:
    name: str
    shape: list[Any]


class _Session:
    """As much of an onnxruntime session as `run_greedy` needs, over OpenVINO, in full precision."""

    def __init__(self, path: Path) -> None:
        import openvino

        core = openvino.Core()
        model = core.read_model(str(path))
        self.operations: dict[str, int] = {}
        for operation in model.get_ops():
            kind = operation.get_type_name()
            self.operations[kind] = self.operations.get(kind, 0) + 1
        self.compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        self.inputs = [_Input(port.get_any_name(), _shape(port.get_partial_shape())) for port in model.inputs]

    def get_inputs(self) -> list[_Input]:
        return self.inputs

    def run(self, _: None, feed: dict[str, Any]) -> list[Any]:
        made = self.compiled(feed)
        return [made[port] for port in self.compiled.outputs]


def _shape(shape: Iterable[Any]) -> list[Any]:
    return [None if size.is_dynamic else size.get_length() for size in shape]
