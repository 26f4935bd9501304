"""How much memory a step must read, and how fast this machine can.

Decoding a token reads every weight once. Where that is what takes the time, no norm can be felt, and

    share = tokens a second × bytes per token / copy bandwidth

is near 1. Far below 1, a step is bound by something else, such as the number of operations that are launched. A model
that fits in the processor's cache can exceed 1.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

_BYTES = {"cpu": 2**28, "cuda": 2**30}  # beyond any cache
_TIMES = 9


def synchronize(device: torch.device) -> None:
    """Wait for what was launched on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@functools.cache
def copy_bandwidth(device: torch.device, threads: int) -> float:
    """Bytes a second, those read plus those written, of one large tensor copied into another; the median of nine.

    threads: how many torch has, on which the bandwidth of a processor depends; the caller's `torch.get_num_threads()`.
    """
    source = torch.ones(_BYTES.get(device.type, 2**28), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(_TIMES + 1):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds[1:])


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that one forward reads. Of a table of embeddings that is a few rows, unless it is tied to
    the head. Of experts all are counted, which a sparse model need not read."""
    embedding: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    table = getattr(embedding, "weight", None)
    looked_up = table is not None and getattr(head, "weight", None) is not table
    return sum(p.nbytes for p in model.parameters() if not (looked_up and p is table))


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a cache holds: all places of a static one, which attention reads in full."""
    layers = getattr(cache, "layers", None) or ()
    held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))
