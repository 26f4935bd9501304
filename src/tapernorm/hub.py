"""Load models and write them: hub ids, folders, GGUF and llama2.c files; stock, half-tapered and norm-free models.

A model folder of this library is one of

    stock          what transformers writes
    norm-free      after folding: model type `tapernorm_<base>`, the layout (`tapernorm.layout`) in config.json,
                   and copies of the files that build it (`_folder.CODE`), so that transformers alone loads it
    half-tapered   before folding: the same with `tapered`, the `TaperConfig`, in config.json, and the controller's
                   state in taper.json and taper.safetensors; only `from_pretrained` below loads it

Folders are written beside their place and renamed, so an interrupted save leaves no folder that is half written.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, save_torch_state_dict
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from tapernorm import _folder, card, gguf_file, llama2c, untrusted
from tapernorm import modeling_tapernorm as modeling
from tapernorm.convert import get_controller
from tapernorm.half_tapered import half_tapered, read_taper_state, read_weights, write_taper_state
from tapernorm.layout import changed_config, layout_of
from tapernorm.untrusted import explained

__all__ = [
    "from_pretrained", "push_to_hub", "read_taper_state", "read_weights", "save_pretrained", "skeleton",
    "write_taper_state",
]  # fmt: skip

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
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a stock, tapered or folded model, and its tokenizer, into a folder that loads as the same model.

    Args:
        model: a transformers model, or one that `taper_` or `fold_` changed. It is not changed here.
        folder: where to. It may be new, empty, or a folder that an earlier call wrote for a tapered or folded model.
        tokenizer: written beside the model when given.
        overwrite: replace the model in any other folder, too. Files that belong to no model stay in it.
        state_dict: whole tensors of a tapered model whose own are sharded over processes.
        max_shard_size: of a file of weights, as a number of bytes or as text ("5GB").

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
            _write_tapered(model, fields, controller, staging, state_dict, max_shard_size)
        elif any(fields.values()):
            _write_norm_free(model, fields, staging, max_shard_size)
            card.write_card(staging, name=_origin(model), place=target.name)
        else:
            model.save_pretrained(staging, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)


def push_to_hub(
    model: PreTrainedModel | str | os.PathLike[str],
    repository: str,
    tokenizer: Any = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Put a model, or a folder that `save_pretrained` wrote, on the hub, card included; returns its address there.

    A README.md that the repository has already, and that this library did not write, stays.

    Raises:
        ValueError: as `save_pretrained`; or the folder holds no config.json, or lacks a part of the model's code.
    """
    if isinstance(model, PreTrainedModel):
        with tempfile.TemporaryDirectory(prefix="tapernorm-") as place:
            folder = Path(place) / repository.rpartition("/")[2]
            save_pretrained(model, folder, tokenizer=tokenizer)
            return push_to_hub(folder, repository, private=private, token=token)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a model folder: there is no config.json in it")
    _folder.refuse_missing_code(folder)
    api = HfApi(token=token)
    name = api.create_repo(repository, private=private, exist_ok=True).repo_id
    there = api.file_exists(name, _folder.CARD)
    theirs = there and not _folder.is_own_card(Path(api.hf_hub_download(name, _folder.CARD)))
    skipped = [_folder.CARD] if theirs else []
    return str(
        api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=skipped, commit_message="Upload model")
    )


def _origin(model: PreTrainedModel) -> str:
    """Where the model was loaded from, for its card; nothing for one that was made here, or had lost norms there."""
    return "" if isinstance(model, modeling.ModelMixin) else str(getattr(model.config, "_name_or_path", "") or "")


def _write_norm_free(model: PreTrainedModel, fields: dict[str, Any], folder: Path, max_shard_size: int | str) -> None:
    config = changed_config(model, fields, tapered=None)
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        twin = modeling.get_class(config.architectures[0])(config)
    # Strict, and the tensors themselves: when the layout does not describe the model whole, nothing is written.
    twin.load_state_dict(model.state_dict(), assign=True, strict=True)
    twin.tie_weights()
    if model.can_generate():
        twin.generation_config = model.generation_config
    twin.save_pretrained(folder, max_shard_size=max_shard_size)
    _folder.copy_code(folder)


def _write_tapered(
    model: PreTrainedModel,
    fields: dict[str, Any],
    controller: Any,
    folder: Path,
    state_dict: dict[str, torch.Tensor] | None,
    max_shard_size: int | str,
) -> None:
    config = changed_config(model, fields, tapered=controller.config.to_dict())
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    # Of tensors that are one, one is written and the other named.
    save_torch_state_dict(state_dict or model.state_dict(), folder, max_shard_size=max_shard_size)
    _folder.copy_code(folder)
    write_taper_state(controller, folder)


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
            package), `smollm2-135m` where the package that brings that file is installed, or a
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
        with explained(place):
            config = _checked_config(place, trust_remote_code)
            if getattr(config, "tapered", None) is not None:
                model = half_tapered(config, place, wanted)
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
    with explained(place):
        if Path(place).is_dir():
            untrusted.check_folder(Path(place))
        return skeleton_of(AutoConfig.from_pretrained(place, trust_remote_code=False))


def skeleton_of(config: Any) -> Any:
    """The model that a config describes, on the meta device; a half-tapered one with its norms."""
    config = copy.deepcopy(config)
    if getattr(config, "tapered", None) is not None:  # its norms are still there
        config.tapered = None
    model_class = _model_class(config)
    build = model_class._from_config if hasattr(model_class, "_from_config") else model_class.from_config
    with torch.device("meta"):
        return build(config, dtype=torch.bfloat16).eval()


def _checked_config(place: str, trust_remote_code: bool) -> Any:
    """The config of a folder or hub id. What a folder says of itself is checked, before memory is given to it."""
    folder = Path(place)
    if not folder.is_dir():
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        untrusted.check_config(Path(place) / "config.json", config.to_dict())
        return config
    values = untrusted.check_folder(folder)
    quantized = values.get("quantization_config") is not None
    found = untrusted.headers(folder, quantized)
    if found:
        untrusted.check_layers(folder / "config.json", values, len(found))
    config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    known = type(config).__module__.partition(".")[0] in ("transformers", "tapernorm")  # not code from the folder
    if found and known and not quantized:
        untrusted.check_size(folder, skeleton_of(config), found)
    return config


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
    # The class reads config.json again: the config above bears traces of the Auto class.
    loaded: Any = model_class.from_pretrained(place, dtype=dtype or "auto", output_loading_info=True, **trusted)
    model, info = loaded
    _refuse_missing(place, model, info)
    _refuse_unexpected(place, model, info)
    return model


def _refuse_missing(place: str, model: Any, info: dict[str, Any]) -> None:
    """transformers fills what is missing with random numbers, and only warns."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"{place}: {len(missing)} weights of {type(model).__name__} are missing from it, such as {missing[0]}; "
            "the download may be incomplete, or the model was saved from another class"
        )


def _refuse_unexpected(place: str, model: Any, info: dict[str, Any]) -> None:
    """transformers leaves out weights that the config knows no place for, and only warns. In a folder of this
    library every weight has its place; in others there may be more, but no bias for a layer that has none."""
    odd = sorted(info["unexpected_keys"])
    if not isinstance(model, modeling.ModelMixin):
        modules = dict(model.named_modules())
        places = {name: name.rpartition(".") for name in odd}
        odd = [n for n, (owner, _, leaf) in places.items() if getattr(modules.get(owner), leaf, 0) is None]
    if odd:
        raise ValueError(
            f"{place}: config.json knows no place for {len(odd)} of the weights beside it, such as {odd[0]}: the two "
            "are not of one model"
        )


def _tokenizer(place: str, trust_remote_code: bool) -> Any:
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if all(cached_file(place, name, **quiet) is None for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)


def _from_llama2c(path: Path, dtype: torch.dtype | None) -> tuple[Any, Any]:
    model: Any = llama2c.load_model(path)
    tokenizer = llama2c.load_tokenizer(path, model.config.vocab_size)
    return (model if dtype is None else model.to(dtype)), tokenizer


def _from_gguf(path: Path, dtype: torch.dtype | None) -> tuple[Any, Any]:
    gguf_file.require_package(path)
    with explained(str(path)):
        model, tokenizer, info = gguf_file.load(path, dtype)
    _refuse_missing(str(path), model, info)
    return model, tokenizer
