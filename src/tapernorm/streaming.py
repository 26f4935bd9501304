"""safetensors files read and written tensor by tensor, some rows at a time, so that no tensor need fit into memory.

A file is 8 bytes with the header's length, the header (JSON: dtype, shape and place of each tensor), and the numbers.
It is written under another name, flushed to the disk and renamed: under its own name there is only ever a whole one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tapernorm import untrusted

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_CHUNK = 8 << 20  # bytes of a plain copy at a time
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file: where its numbers begin, in bytes, and what they are."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]

    def read(self, index: Index) -> Tensor:
        """The part of the tensor that `index` names, whole slices in every dimension but the first ones."""
        kind = DTYPES[self.dtype]
        shape = [len(range(*part.indices(size))) for part, size in zip(index, self.shape, strict=True)]
        if not math.prod(shape):
            return torch.empty(shape, dtype=kind)
        run = _run_of(index, self.shape)
        if run is None:
            whole = np.memmap(self.file, _bits(self.dtype), "r", self.start, self.shape)
            return torch.from_numpy(np.array(whole[index])).view(kind)
        data = bytearray(math.prod(shape) * _SIZES[self.dtype])
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start + run * _SIZES[self.dtype])
            view = memoryview(data)
            while view:
                count = file.readinto(view)
                if not count:
                    raise ValueError(f"{self.file} ended while it was read; it was changed meanwhile")
                view = view[count:]
        return torch.frombuffer(data, dtype=kind).view(shape)

    def write(self, index: Index, value: Tensor, file: BinaryIO) -> None:
        """Put a part of the tensor into its place. `file` is the one that is being written, not yet renamed."""
        if not value.numel():
            return
        run = _run_of(index, self.shape)
        if run is None:
            whole = np.memmap(file, _bits(self.dtype), "r+", self.start, self.shape)
            whole[index] = value.contiguous().view(_integer(self.dtype)).numpy()
            whole.flush()
            return
        file.seek(self.start + run * _SIZES[self.dtype])
        file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _bits(dtype: str) -> str:
    """numpy has no bfloat16: numbers are moved as integers of their size."""
    return f"<i{_SIZES[dtype]}"


def _integer(dtype: str) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[_SIZES[dtype]]


def _run_of(index: Index, shape: tuple[int, ...]) -> int | None:
    """The first number of a part that lies in one run, None where it does not."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    cut = [dim for dim, (a, b) in enumerate(ranges) if (a, b) != (0, shape[dim])]
    last = cut[-1] if cut else 0
    if any(b - a != 1 for a, b in ranges[:last]):
        return None
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return sum(a * stride for (a, _), stride in zip(ranges, strides, strict=True))


def stored(path: Path) -> dict[str, Stored]:
    """Every tensor of a file. Raises ValueError where it is not a whole safetensors file."""
    untrusted.header(path)  # refuses what is not sound
    with path.open("rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        values = json.loads(file.read(size))
    values.pop("__metadata__", None)
    begin = 8 + size
    return {k: Stored(path, begin + v["data_offsets"][0], v["dtype"], tuple(v["shape"])) for k, v in values.items()}


def parts(shape: tuple[int, ...], whole: set[int], numbers: int) -> Iterator[Index]:
    """A tensor cut into parts of about `numbers` numbers, never along the dimensions in `whole`.

    One run in memory where that can be had: the leading dimensions are cut first.
    """
    steps = list(shape)
    for dim in range(len(shape)):
        if math.prod(steps) <= numbers:
            break
        if dim not in whole:
            steps[dim] = max(1, numbers // max(1, math.prod(steps[:dim] + steps[dim + 1 :])))
    cuts = [range(0, size, max(step, 1)) for size, step in zip(shape, steps, strict=True)]
    for corner in itertools.product(*cuts):
        yield tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, steps, shape, strict=True))


Fill = Callable[[Stored, BinaryIO], None]  # writes one tensor into its place


def write_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], Fill]], last: set[str]) -> None:
    """A safetensors file, all of it or none. tensors: name -> (dtype, shape, what writes it); `last` are written last.

    Raises:
        OSError: the disk is full, or the folder cannot be written; nothing is left behind then.
    """
    order = sorted(tensors, key=lambda name: (-_SIZES[tensors[name][0]], name))  # which keeps every tensor aligned
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        size = math.prod(shape) * _SIZES[dtype]
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w+b") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(begin + end)
            for name in sorted(order, key=lambda name: name in last):
                dtype, shape, fill = tensors[name]
                start = begin + head[name]["data_offsets"][0]
                fill(Stored(temporary, start, dtype, shape), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def copier(source: Stored) -> Fill:
    """What writes a tensor as it is."""

    def fill(target: Stored, file: BinaryIO) -> None:
        left = source.nbytes
        file.seek(target.start)
        with source.file.open("rb", buffering=0) as old:
            old.seek(source.start)
            while left:
                data = old.read(min(left, _CHUNK))
                if not data:
                    raise ValueError(f"{source.file} ended while it was read; it was changed meanwhile")
                file.write(data)
                left -= len(data)

    return fill


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the system can."""
    with contextlib.suppress(OSError):  # not every file system, and not every system, lets a folder be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
