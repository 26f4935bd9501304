"""Load models and write them: hub ids, folders, GGUF and llama2.c files; stock, half-tapered and norm-free models.

A model folder of this library is one of

    stock          what transformers writes
    norm-free      after folding: model type `tapernorm_<base>`, the layout (`tapernorm.layout`) in config.json,
                   and a copy of `modeling_tapernorm.py`, so that transformers alone loads it
    half-tapered   before folding: the same with `tapered`, the `TaperConfig`, in config.json, and the controller's
                   state in taper.json and taper.safetensors; only `from_pretrained` below loads it

Folders are written beside their place and renamed, so an interrupted save leaves no folder that is half written.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from tapernorm import _folder, gguf_file, llama2c
from tapernorm import modeling_tapernorm as modeling
from tapernorm.config import TaperConfig
from tapernorm.convert import get_controller, taper_
from tapernorm.layout import changed_config, layout_of, stock_config

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "tekken.json",
)  # fmt: skip


# Writing


def save_pretrained(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    overwrite: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a stock, tapered or folded model, and its tokenizer, into a folder that loads as the same model.

    Args:
        model: a transformers model, or one that `taper_` or `fold_` changed. It is not changed here.
        folder: where to. It may be new, empty, or a folder that an earlier call wrote for a tapered or folded model.
        tokenizer: written beside the model when given.
        overwrite: replace the model in any other folder, too. Files that belong to no model stay in it.
        state_dict: whole tensors of a tapered model whose own are sharded over processes.

    Raises:
        ValueError: the folder holds something else and `overwrite` is false; the model is not a transformers model,
            or its class is not one that transformers itself has.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"a {type(model).__name__} cannot be saved: pass the transformers model inside it")
    target = Path(folder).expanduser().resolve()
    _folder.refuse_occupied(target, overwrite)
    controller = get_controller(model)
    fields = layout_of(model)
    with _folder.staged(target) as staging:
        if controller is not None:
            _write_tapered(model, fields, controller, staging, state_dict)
        elif any(fields.values()):
            _write_norm_free(model, fields, staging)
        else:
            model.save_pretrained(staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)


def _write_norm_free(model: PreTrainedModel, fields: dict[str, Any], folder: Path) -> None:
    config = changed_config(model, fields, tapered=None)
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        twin = modeling.get_class(config.architectures[0])(config)
    # Strict, and the tensors themselves: when the layout does not describe the model whole, nothing is written.
    twin.load_state_dict(model.state_dict(), assign=True, strict=True)
    twin.tie_weights()
    if model.can_generate():
        twin.generation_config = model.generation_config
    twin.save_pretrained(folder)
    shutil.copyfile(modeling.__file__, folder / Path(modeling.__file__).name)


def _write_tapered(
    model: PreTrainedModel,
    fields: dict[str, Any],
    controller: Any,
    folder: Path,
    state_dict: dict[str, torch.Tensor] | None,
) -> None:
    config = changed_config(model, fields, tapered=controller.config.to_dict())
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    # Of tensors that are one, one is written and the other named.
    save_torch_state_dict(state_dict or model.state_dict(), folder)
    shutil.copyfile(modeling.__file__, folder / Path(modeling.__file__).name)
    write_taper_state(controller, folder)


def write_taper_state(controller: Any, folder: Path) -> None:
    """The controller's state into taper.safetensors and taper.json; `read_taper_state` is the inverse."""
    state = controller.state_dict()
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    save_file(tensors, folder / "taper.safetensors")
    scalars = {k: v for k, v in state.items() if k not in tensors}
    (folder / "taper.json").write_text(json.dumps(scalars, indent=2) + "\n", encoding="utf-8")


# Reading


def from_pretrained(
    source: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load `(model, tokenizer)`; the model in eval mode, the tokenizer None where there is none.

    Args:
        source: a hub id, a folder (stock, norm-free or half-tapered), a `*.gguf` file (dequantized; needs the gguf
            package), `smollm2-135m` or `gemma3-270m` where the package that brings that file is installed, or a
            llama2.c `*.bin` file. A half-tapered model comes back tapered, with its controller
            (`get_controller(model)`) in the state that it was saved in.
        dtype: of the weights, such as `"float32"`. None or `"auto"`: as they are stored (float32 for GGUF and llama2.c
            files).
        device: where the model goes; None: the CPU.
        trust_remote_code: run code that comes with the checkpoint. Never needed for this library's own folders.

    Raises:
        ValueError: there is no such file, folder or hub repository, or it cannot be reached; it holds no model that
            can be read; weights are missing from it; `dtype` is not a dtype.
    """
    wanted = _dtype(dtype)
    path = _file(source)
    if path is not None:
        model, tokenizer = _from_llama2c(path, wanted) if path.suffix == ".bin" else _from_gguf(path, wanted)
    else:
        place = _place(source)
        with _explained(place):
            config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        if getattr(config, "tapered", None) is not None:
            model = _half_tapered(config, place, wanted)
        else:
            model = _whole(config, place, wanted, trust_remote_code)
        tokenizer = _tokenizer(place, trust_remote_code)
    if device is not None:
        model = model.to(device)
    return model.eval(), tokenizer


def skeleton(source: str | os.PathLike[str]) -> Any:
    """The model of a folder or hub id on the meta device: its config is read, no weights. None for a file.

    Raises:
        ValueError: as `from_pretrained`.
    """
    if _file(source) is not None:
        return None
    place = _place(source)
    with _explained(place):
        config = copy.deepcopy(AutoConfig.from_pretrained(place))
        if getattr(config, "tapered", None) is not None:  # its norms are still there
            config.tapered = None
        model_class = _model_class(config)
        build = model_class._from_config if hasattr(model_class, "_from_config") else model_class.from_config
        with torch.device("meta"):
            return build(config, dtype=torch.bfloat16).eval()


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return None if dtype == "auto" else dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating-point dtype, such as 'float32' or 'bfloat16'")
    return found


def _file(source: str | os.PathLike[str]) -> Path | None:
    """The GGUF or llama2.c file that is meant, by its path or by the name of a model that a package brings."""
    text = os.fspath(source)
    path = gguf_file.packaged(text) or Path(text).expanduser()
    return path if path.suffix in (".bin", ".gguf") and path.is_file() else None


def _place(source: str | os.PathLike[str]) -> str:
    """The folder, or the hub id, as transformers takes it."""
    text = os.fspath(source)
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path)
        hint = "; it holds a PEFT adapter: merge it into its model first" * (path / "adapter_config.json").is_file()
        raise ValueError(f"{path} is not a model folder: there is no config.json in it{hint}")
    if path.is_file():
        raise ValueError(f"{path}: cannot read a {path.suffix or 'nameless'} file; pass a folder, *.gguf or *.bin")
    if text.endswith((".bin", ".gguf")) or not _HUB_ID.fullmatch(text):
        raise ValueError(f"{text}: no such file or folder, and not the form of a hub id (owner/name)")
    return text


@contextlib.contextmanager
def _explained(place: str) -> Iterator[None]:
    """Whatever transformers and the hub raise about a checkpoint becomes one ValueError."""
    try:
        yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise  # not about the checkpoint, and clear enough
    except Exception as error:
        raise ValueError(f"{place}: {_reason(place, error)}") from error


def _reason(place: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if Path(place).is_dir():
        if "does not recognize this architecture" in lines[0]:
            return f"unknown model type {_folder.model_type(Path(place))!r}; a newer transformers may know it"
        if "trust_remote_code" in str(error):
            return "the model needs code from its own folder; read it, then pass trust_remote_code=True"
        return f"not a model that can be loaded: {lines[0]}"
    if "trust_remote_code" in str(error):
        return "the model needs code from its own repository; read it, then pass trust_remote_code=True"
    if isinstance(error, OSError):
        return (
            "neither a folder here nor loadable from the hub (no such repository, a private one, or no connection); "
            f"check the name, or download the model and pass its local folder [{lines[0]}]"
        )
    return f"not a model that can be loaded: {lines[0]}"


def _model_class(config: Any) -> Any:
    """The class that the checkpoint names; the causal language model when it names none, or a stock body without
    head (as many a hub repository of whole models does)."""
    base_type = config.model_type.removeprefix(modeling.TYPE_PREFIX)
    body = modeling.heads(base_type).get("AutoModel") if type(config) in AutoModelForCausalLM._model_mapping else None
    for name in config.architectures or ():
        ours = name.startswith(modeling.PREFIX)
        known = getattr(modeling if ours else transformers, name, None)
        if isinstance(known, type) and getattr(known, "config_class", None) is type(config):
            return AutoModelForCausalLM if name == body else known
    if type(config) in AutoModel._model_mapping and type(config) not in AutoModelForCausalLM._model_mapping:
        return AutoModel
    return AutoModelForCausalLM


def _whole(config: Any, place: str, dtype: torch.dtype | None, trust_remote_code: bool) -> Any:
    model_class = _model_class(config)
    autos = (AutoModel, AutoModelForCausalLM)
    trusted = {"trust_remote_code": trust_remote_code} if model_class in autos else {}
    with _explained(place):
        # The class reads config.json again: the config above bears traces of the Auto class.
        loaded: Any = model_class.from_pretrained(place, dtype=dtype or "auto", output_loading_info=True, **trusted)
    model, info = loaded
    _refuse_missing(place, model, info)
    return model


def _refuse_missing(place: str, model: Any, info: dict[str, Any]) -> None:
    """transformers fills what is missing with random numbers, and only warns."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"{place}: {len(missing)} weights of {type(model).__name__} are missing from it, such as {missing[0]}; "
            "the download may be incomplete, or the model was saved from another class"
        )


def _half_tapered(config: Any, place: str, dtype: torch.dtype | None) -> Any:
    config = copy.deepcopy(config)
    taper_config, config.tapered = TaperConfig.from_dict(config.tapered), None
    model_class = modeling.get_class(config.architectures[0])
    if not any(getattr(config, field) for field in modeling.FIELDS if field != "tapered"):
        model_class, config = model_class.stock_class, stock_config(config)
    model = model_class._from_config(config, dtype=dtype or config.dtype)
    controller = taper_(model, taper_config)
    folder = Path(place) if Path(place).is_dir() else _download(place)
    with _explained(place):
        model.load_state_dict(read_weights(folder), strict=True)
        controller.load_state_dict(read_taper_state(folder))
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def read_taper_state(folder: Path) -> dict[str, Any]:
    """The controller's state in a half-tapered folder: tensors from taper.safetensors, numbers from taper.json."""
    return load_file(folder / "taper.safetensors") | json.loads((folder / "taper.json").read_text(encoding="utf-8"))


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    with _explained(repository):
        return Path(snapshot_download(repository, allow_patterns=["*.json", "*.safetensors"]))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The state dict in model*.safetensors, with the names of tensors that were one with another's."""
    state: dict[str, torch.Tensor] = {}
    same: dict[str, str] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            state |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            same |= file.metadata() or {}
    return state | {name: state[kept] for name, kept in same.items() if kept in state and name not in state}


def _tokenizer(place: str, trust_remote_code: bool) -> Any:
    found = False
    for name in _TOKENIZER_FILES:
        with _explained(place):
            quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
            found = found or cached_file(place, name, **quiet) is not None
    if not found:
        return None
    with _explained(place):
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)


def _from_llama2c(path: Path, dtype: torch.dtype | None) -> tuple[Any, Any]:
    model: Any = llama2c.load_model(path)
    tokenizer = llama2c.load_tokenizer(path, model.config.vocab_size)
    return (model if dtype is None else model.to(dtype)), tokenizer


def _from_gguf(path: Path, dtype: torch.dtype | None) -> tuple[Any, Any]:
    gguf_file.require_package(path)
    with _explained(str(path)):
        model, tokenizer, info = gguf_file.load(path, dtype)
    _refuse_missing(str(path), model, info)
    return model, tokenizer
