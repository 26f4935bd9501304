"""ExecuTorch: one step of decoding as model.pte, for phones and microcontrollers.

    forward(input_ids [1, 1], start [1]) → logits [1, 1, V]

The cache is inside the program and is filled in place; start is the token's place, 0 for the first, and a prompt is fed
token by token. A program that begins again at 0 sees nothing of what was there. Lowered to XNNPACK where that can take
an operation, else ExecuTorch's own kernels.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.export.decoder import StaticDecoder, cache_shapes, is_decoder, prepared, sample_ids
from tapernorm.export.folder import Made, write_companions
from tapernorm.export.norms import ExportError, Norms
from tapernorm.export.quiet import quiet, require
from tapernorm.inputs import context_length

BOUND = 1e-4
PLACES = 512


class _Step(nn.Module):
    """A decoder whose cache is its own buffers."""

    def __init__(self, model: Any, places: int) -> None:
        super().__init__()
        self.decoder, self.layers = StaticDecoder(model), 0
        for number, ((heads, width), (others, value_width)) in enumerate(cache_shapes(model)):
            self.register_buffer(f"key_{number}", torch.zeros(1, heads, places, width))
            self.register_buffer(f"value_{number}", torch.zeros(1, others, places, value_width))
            self.layers = number + 1

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        """input_ids: [1, 1]; start: [1]. Returns [1, 1, V]."""
        keys = [getattr(self, f"key_{i}") for i in range(self.layers)]
        return self.decoder(input_ids, start, keys, [getattr(self, f"value_{i}") for i in range(self.layers)])


def write(
    model: Any, tokenizer: Any, norms: Norms, folder: Path, ids: Tensor | None = None, context: int | None = None
) -> Made:
    """model.pte and the companions.

    Args:
        model: a causal language model; it is not changed, and written as float32.
        ids: [N, T] tokens to check on; None: random ones.
        context: places in the cache; None: 512, or the model's context where that is less.

    Raises:
        ValueError: the executorch package is missing; the model is no decoder, or cannot be lowered.
        ExportError: the program is not the same function.
    """
    require("executorch", extra="executorch")
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # type: ignore[import-not-found]
    from executorch.exir import to_edge_transform_and_lower  # type: ignore[import-not-found]

    if not is_decoder(model):
        raise ValueError(f"{type(model).__name__} is no causal language model; --format pt2 takes it")
    limit = context_length(model)
    places = min(PLACES, limit) if context is None else context
    if not 4 <= places <= limit:
        raise ValueError(f"context={places}: this model takes 4 to {limit} tokens")
    model = prepared(copy.deepcopy(model).float())
    try:
        with quiet(), torch.no_grad():
            args = (sample_ids(model, 1, 1), torch.tensor([1]))
            program = torch.export.export(_Step(model, places).eval(), args, strict=False)
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(
            f"ExecuTorch cannot lower {type(model).__name__}: {lines[0] if lines else type(error).__name__}"
        ) from error
    path = folder / "model.pte"
    path.write_bytes(lowered.buffer)
    write_companions(model, tokenizer, norms, folder)
    ids = (sample_ids(model, 1, 8) if ids is None else ids)[:1, : min(16, places)]
    error = _difference(model, path, ids)
    if not error <= BOUND:
        raise ExportError(f"ExecuTorch differs from the model by {error:.1e} of the largest logit")
    return Made({"bound": BOUND, "executorch": {"relative_error": error}}, details={"places": places})


def _difference(model: Any, path: Path, ids: Tensor) -> float:
    from executorch.runtime import Runtime  # type: ignore[import-not-found]

    method: Any = Runtime.get().load_program(path).load_method("forward")
    made = [method.execute([ids[:, i : i + 1].contiguous(), torch.tensor([i])])[0].clone() for i in range(ids.shape[1])]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    return float((torch.cat(made, dim=1) - wanted).abs().max() / wanted.abs().max())
