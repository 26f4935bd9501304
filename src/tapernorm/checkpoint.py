"""Checkpoints of a training loop of one's own: everything that the next step depends on, and nothing pickled.

FOLDER/checkpoint-<step>/model.safetensors    weights, gate and c
                         state.safetensors    tensors of the controller, the optimizer and the generators
                         state.json           everything else, and where the tensors belong

A checkpoint is written beside its place and renamed: one that a kill cut short is never found by `load_checkpoint`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tapernorm import _folder
from tapernorm.convert import get_controller
from tapernorm.hub import read_weights

_NAME = re.compile(r"checkpoint-(\d+)")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` found. step: as it was given to `save_checkpoint`. extra: likewise."""

    step: int
    extra: dict[str, Any]


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: Any,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    extra: dict[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write `folder/checkpoint-<step>`: model, controller, optimizer, and the state of every random generator.

    Call it between steps, on every rank; the first one writes.

    Args:
        folder: of the run.
        step: how many steps are done.
        model: tapered or not, on one device or with a whole copy on every rank.
        optimizer: anything with a `state_dict()` of tensors, numbers and names.
        scheduler: of the learning rate; scaler: a GradScaler.
        extra: what else the loop needs, such as the position in the data; JSON values.
        keep: how many checkpoints to keep, this one with them.

    Raises:
        ValueError: a parameter is sharded (see torch.distributed.checkpoint), a value is neither a tensor nor JSON, or
            `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least the checkpoint that is written must stay")
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if sharded:
        raise ValueError(
            f"{sharded[0]} is sharded over processes: save it with torch.distributed.checkpoint, and the controller's "
            "state_dict() beside it (examples/multi_node.md)"
        )
    controller = get_controller(model)
    parts = {
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "controller": controller.state_dict() if controller is not None else None,
    }
    generators = _of_every_rank(_generators())
    root = Path(folder).expanduser().resolve()
    target = root / f"checkpoint-{step}"
    if _rank() == 0:
        tensors: dict[str, Tensor] = {}
        packed = {key: _pack(value, key, tensors) for key, value in (parts | {"generators": generators}).items()}
        packed |= {"step": step, "extra": extra or {}}
        text = json.dumps(packed)
        root.mkdir(parents=True, exist_ok=True)
        for leftover in (*root.glob(".checkpoint-*.partial"), *root.glob(".checkpoint-*.old")):
            shutil.rmtree(leftover, ignore_errors=True)  # of a save that was killed
        with _folder.staged(target) as staging:
            save_torch_state_dict(model.state_dict(), staging)
            save_file(tensors, staging / "state.safetensors")
            (staging / "state.json").write_text(text, encoding="utf-8")
        for _, old in _whole(root)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    if _is_distributed():
        dist.barrier()  # nobody goes on, or dies, while the first one writes
    return target


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Any, *, scheduler: Any = None, scaler: Any = None
) -> Checkpoint | None:
    """Put the newest whole checkpoint of a run into model, controller, optimizer and generators. In place.

    Build everything as for a fresh run first (taper the model, make the optimizer, attach it), then call this; the
    steps that follow have the same bits as if the run had never stopped.

    Returns:
        The step and the extra values, or None where there is no checkpoint.

    Raises:
        ValueError: the checkpoint was written without a scheduler, scaler or taper that is there now, or with one
            that is not; or it is of another model.
    """
    found = _whole(Path(folder).expanduser().resolve())
    if not found:
        return None
    step, path = found[-1]
    tensors = load_file(path / "state.safetensors")
    packed = json.loads((path / "state.json").read_text(encoding="utf-8"))
    controller = get_controller(model)
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "controller": controller}
    state = {key: _unpack(packed[key], tensors) for key in parts}
    for key, part in parts.items():
        if (part is None) != (state[key] is None):
            raise ValueError(f"{path} was written {'without' if state[key] is None else 'with'} a {key}")
    try:
        model.load_state_dict(read_weights(path), strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path} is of another model: {str(error).splitlines()[-1].strip()}") from error
    for key, part in parts.items():
        if part is not None:
            part.load_state_dict(state[key])
    generators = _unpack(packed["generators"], tensors)
    if len(generators) == _world():  # with another number of ranks there is no same order of anything
        _set_generators(generators[_rank()])
    return Checkpoint(step, packed["extra"])


def _whole(root: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, oldest first. A name without a dot is only given to whole ones."""
    named = [(_NAME.fullmatch(path.name), path) for path in root.glob("checkpoint-*") if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in named if match and (path / "state.json").is_file())


# Random generators


def _generators() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": (version, words, gauss),
        "numpy": (str(kind), torch.tensor(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
    }


def _set_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    with contextlib.suppress(RuntimeError):  # fewer devices than there were
        torch.cuda.set_rng_state_all(state["cuda"]) if torch.cuda.is_available() else None
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


def _world() -> int:
    return dist.get_world_size() if _is_distributed() else 1


def _of_every_rank(value: Any) -> list[Any]:
    if not _is_distributed():
        return [value]
    found: list[Any] = [None] * _world()
    dist.all_gather_object(found, value)
    return found


# Nested values as JSON, with their tensors apart


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for `value`; its tensors go into `tensors` under names made of `name`."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, dict):  # as pairs: JSON has no numbers for keys
        return {"dict": [[key, _pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
            return {"tuple": list(value)}
        items = [_pack(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name} is a {type(value).__name__}, which is neither a tensor nor a JSON value")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
