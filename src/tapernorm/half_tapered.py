"""Half-tapered folders: a model whose norms are TaperNorms, and the state of its controller.

config.json           as of a norm-free folder, with `tapered`, the `TaperConfig`
model*.safetensors    the weights of the tapered model: each norm's own, its fixed branch and its gate
taper.safetensors     the tensors of the controller's state, and
taper.json            its numbers
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from tapernorm import modeling_tapernorm as modeling
from tapernorm import untrusted
from tapernorm.config import TaperConfig
from tapernorm.convert import taper_
from tapernorm.layout import stock_config
from tapernorm.modules import taper_norms


def write_taper_state(controller: Any, folder: Path) -> None:
    """The controller's state into taper.safetensors and taper.json; `read_taper_state` is the inverse."""
    state = controller.state_dict()
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    save_file(tensors, folder / "taper.safetensors")
    scalars = {k: v for k, v in state.items() if k not in tensors}
    (folder / "taper.json").write_text(json.dumps(scalars, indent=2) + "\n", encoding="utf-8")


def read_taper_state(folder: Path) -> dict[str, Any]:
    """The controller's state in a half-tapered folder: tensors from taper.safetensors, numbers from taper.json."""
    return load_file(folder / "taper.safetensors") | json.loads((folder / "taper.json").read_text(encoding="utf-8"))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The state dict of a folder, with the names of tensors that were one with another's.

    Raises:
        ValueError: as `untrusted.weight_files`.
    """
    state: dict[str, torch.Tensor] = {}
    same: dict[str, str] = {}
    files, index = untrusted.indexed_files(folder)
    for path in files:
        with safe_open(path, framework="pt") as file:
            state |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            same |= file.metadata() or {}
    said = index.get("metadata") or {}  # which holds the names where there are several files
    same |= {name: kept for name, kept in said.items() if isinstance(kept, str)}
    return state | {name: state[kept] for name, kept in same.items() if kept in state and name not in state}


def half_tapered(config: Any, place: str, dtype: torch.dtype | None) -> Any:
    """The tapered model of a folder or hub id, with its controller.

    Raises:
        ValueError: gates or scales that are none, or that are others in the weights than in the controller's state.
        Exception: whatever torch and transformers raise of a folder that is not sound; `untrusted.explained` makes
            one sentence of it.
    """
    config = copy.deepcopy(config)
    taper_config, config.tapered = TaperConfig.from_dict(config.tapered), None
    model_class = modeling.get_class(config.architectures[0])
    if not any(getattr(config, field) for field in modeling.FIELDS if field != "tapered"):
        model_class, config = model_class.stock_class, stock_config(config)
    model = model_class._from_config(config, dtype=dtype or config.dtype)
    controller = taper_(model, taper_config)
    folder = Path(place)
    if not folder.is_dir():
        folder = Path(snapshot_download(place, allow_patterns=["*.json", "*.safetensors"]))
    model.load_state_dict(read_weights(folder), strict=True)
    in_weights = _gates(model, folder)
    controller.load_state_dict(read_taper_state(folder))
    if _gates(model, folder) != in_weights:
        raise ValueError(f"{folder}: the gates in taper.safetensors are not those in its weights; save the model again")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _gates(model: Any, folder: Path) -> dict[str, tuple[float, float]]:
    """Gate and c of every site. Raises ValueError for a gate outside [0, 1] and for a scale that is not finite."""
    found = {}
    for name, module in taper_norms(model).items():
        gate, c = float(module.gate), float(module.fixed_norm.c)
        if not 0 <= gate <= 1 or not math.isfinite(c):
            raise ValueError(f"{folder}: {name} has gate {gate:g} and c = {c:g}, which no taper makes")
        found[name] = gate, c
    return found
