"""What a folder from elsewhere says is checked before anything in it is used.

Names, paths, sizes and values in a downloaded folder are somebody else's. transformers and safetensors refuse much,
each with an exception of its own; the checks here come first and look for what neither does:

    files     every file that could be read lies in the folder and is a plain file: no link out of it, no pipe
    json      an object, of sane size, without numbers that are none; nothing in it names code or a file elsewhere
    index     the shards that it names are those that are there, and each holds the tensors that it says
    headers   whole safetensors files; floating-point weights unless the checkpoint is quantized
    sizes     the model that config.json describes is no larger than the weights beside it

Values of weights are not checked: a file in which a bit of a number was turned is a file of another model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from tapernorm._folder import model_type

INDEX = "model.safetensors.index.json"
_READ = {".json", ".safetensors", ".model", ".txt", ".jinja", ".bin", ".pt", ".py", ".tiktoken"}
_JSON_LIMIT = 64 << 20  # bytes; the index of the largest checkpoints is a tenth of that
# Sizes that a config is looped over, before there is a tensor that could be compared with it.
_LAYERS = re.compile(r"(num_hidden_|num_|n_|(num_)?(en|de)coder_|num_(en|de)coder_)?(layers?|blocks)\Z|depth\Z")
_COUNTS = re.compile(r"(num_labels|.*experts)\Z")
_COUNT_LIMIT, _NUMBER_LIMIT = 1_000_000, 1 << 40
_CODE = re.compile(r"_?(attn|experts)_implementation(_internal)?\Z")  # may name a kernel on the hub: code
_SMALL = 1 << 20
_BUFFER_LIMIT = 4 << 30  # bytes of tables that are computed and not stored
_WHOLE = {"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"}
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file: its file, its dtype as safetensors names it, and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def check_folder(folder: Path) -> dict[str, Any]:
    """Look at every file of a model folder that could be read, and return what config.json holds.

    Raises:
        ValueError: a file that is not a plain file in the folder; JSON that is broken or asks for what a folder must
            not ask for. The message names the file and says what is wrong with it.
    """
    for path in _files(folder):
        _refuse_elsewhere(folder, path)
    values = {path.name: read_json(path) for path in sorted(folder.glob("*.json")) if _OBJECTS.fullmatch(path.name)}
    config = values.get("config.json")
    if config is None:
        raise ValueError(f"{folder} is not a model folder: there is no config.json in it")
    check_config(folder / "config.json", config)
    for name, value in values.items():
        _refuse_paths(folder / name, value)
    return config


# What transformers and peft read as an object. tokenizer.json, vocab.json and taper.json are data of a kind of their
# own, which their readers judge; what else lies in a folder (modules.json, trainer_state.json) is none of a load's.
_OBJECTS = re.compile(
    r"(config|generation_config|adapter_config|tokenizer_config|special_tokens_map|added_tokens|chat_template)\.json"
    r"|.*\.index\.json"
)


def _files(folder: Path) -> Iterator[Path]:
    for place in (folder, folder / "additional_chat_templates"):
        if place.is_dir():
            yield from (path for path in sorted(place.iterdir()) if path.suffix in _READ)


def _refuse_elsewhere(folder: Path, path: Path) -> None:
    """A link may lead to another file of the folder, and from a snapshot in the hub's cache to the cache's blobs."""
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # a link to nothing, or in a circle
        raise ValueError(f"{path} cannot be read: {_first_line(error)}") from error
    if not any(real.is_relative_to(place) for place in allowed):
        raise ValueError(f"{path} leads out of its folder, to {real}; put the file itself there if it is yours")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a file that can be read")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError: too large, not JSON, too deep, or no object."""
    size = path.stat().st_size
    if size > _JSON_LIMIT:
        raise ValueError(f"{path} has {size:,} bytes, far more than such a file ever has")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not sound JSON: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} and not an object")
    return value


def _constant(text: str) -> float:
    if text == "NaN":
        raise ValueError("it holds NaN, which is no value of anything")
    return float(text)


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Raises ValueError for a config.json that names code outside of it, or sizes that no model has."""
    for key, value in _nested(config):
        if _CODE.search(key) and isinstance(value, str) and not value.isidentifier():
            raise ValueError(
                f"{path}: {key} names code from elsewhere ({value!r}); choose the implementation yourself, where the "
                "model is loaded"
            )
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        limit = _COUNT_LIMIT if _COUNTS.match(key) or _LAYERS.match(key) else _NUMBER_LIMIT
        if abs(value) > limit:
            raise ValueError(f"{path}: {key} is {value}, which no model has")
    kinds = {"model_type": str, "architectures": list, "tapered": dict, "auto_map": dict, "quantization_config": dict}
    kinds |= {"fused_linears": dict, "short_forwards": dict}
    for key, kind in kinds.items():
        if config.get(key) is not None and not isinstance(config[key], kind):
            raise ValueError(f"{path}: {key} is a {type(config[key]).__name__} and must be a {kind.__name__}")
    if not all(isinstance(name, str) for name in config.get("architectures") or ()):
        raise ValueError(f"{path}: architectures must hold names")
    method = (config.get("quantization_config") or {}).get("quant_method", "bitsandbytes")
    if not any(known.startswith(str(method)) for known in AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise ValueError(f"{path}: it is quantized by {method!r}, which transformers does not know")


def _nested(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every (key, value) of a nest; the members of a list have the list's key."""
    if isinstance(value, dict):
        for name, member in value.items():
            yield from _nested(member, str(name))
    elif isinstance(value, list):
        for member in value:
            yield from _nested(member, key)
    else:
        yield key, value


def _refuse_paths(path: Path, value: dict[str, Any]) -> None:
    """No shard of an index, and no `vocab_file` and the like, may be anything but a name of a file in the folder.

    Tokenizers saved long ago name files by the paths of the machine that saved them: what is not there is not read.
    """
    shards = value.get("weight_map", {})
    if not isinstance(shards, dict):
        raise ValueError(f"{path}: weight_map is a {type(shards).__name__} and must be an object")
    odd = [(key, member) for key, member in shards.items() if not is_plain(member)]
    for key, member in _nested(value):
        named = re.search(r"_files?\Z", key) and key != "special_tokens_map_file" and isinstance(member, str)
        if named and not is_plain(member) and ("\0" in member or (path.parent / member).exists()):
            odd.append((key, member))
    for key, member in odd:
        raise ValueError(f"{path}: {key} names {member!r}, which is not a file of this folder")


def is_plain(name: Any) -> bool:
    """Whether a name stays in the folder that it is looked for in."""
    if not isinstance(name, str) or not name or any(char in name for char in "\\\0:"):
        return False
    return len(PurePosixPath(name).parts) == 1 and name not in (".", "..") and not name.startswith(("/", "~"))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the shards of its index, or else model.safetensors; [] without either.

    Raises:
        ValueError: the index is broken, names files that are not there, or there are shards that it does not name.
    """
    return indexed_files(folder)[0]


def indexed_files(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """As `weight_files`, and what the index holds: {} where there is none."""
    index = folder / INDEX
    if not index.is_file():
        strays = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
        if strays and not (folder / "model.safetensors").is_file():
            raise ValueError(f"{folder} holds {strays[0]}, and no {INDEX} that says what is in it")
        return [path for path in [folder / "model.safetensors"] if path.is_file()], {}
    values = read_json(index)
    _refuse_paths(index, values)
    names = sorted(set(values.get("weight_map", {}).values()))
    if not names:
        raise ValueError(f"{index} names no weights")
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing, though {INDEX} names it; the download may be incomplete")
    return [folder / name for name in names], values


def headers(folder: Path, quantized: bool = False) -> dict[str, Entry]:
    """Name, file, dtype and shape of every tensor in the folder's safetensors files.

    Raises:
        ValueError: a file that is cut short, has bytes too many or a broken header; a tensor twice, or elsewhere than
            the index says; a weight that is not floating-point, unless the checkpoint is quantized.
    """
    found: dict[str, Entry] = {}
    files, index = indexed_files(folder)
    for path in files:
        for name, entry in header(path).items():
            if name in found:
                raise ValueError(f"{path}: {name} is in {found[name].file.name} too")
            if not quantized and entry.dtype not in _FLOATS and (entry.dtype not in _WHOLE or name.endswith("weight")):
                raise ValueError(f"{path}: {name} is {entry.dtype}, which is not a dtype of weights")
            found[name] = entry
    if index:
        _compare_index(folder / INDEX, index["weight_map"], found)
    return found


def header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Raises ValueError where it is not a whole and sound one."""
    found = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = Entry(path, str(part.get_dtype()), tuple(part.get_shape()))
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {_first_line(error)}") from error
    return found


def _compare_index(index: Path, said: dict[str, str], found: dict[str, Entry]) -> None:
    for name in sorted(said.keys() | found.keys()):
        if name not in found:
            raise ValueError(f"{index} places {name} in {said[name]}, which does not hold it")
        if said.get(name) != found[name].file.name:
            raise ValueError(f"{found[name].file} holds {name}, which {INDEX} does not say")


def check_layers(path: Path, config: dict[str, Any], tensors: int) -> None:
    """Raises ValueError where config.json counts more layers than there are tensors in the files."""
    for key, value in _nested(config):
        if _LAYERS.match(key) and isinstance(value, int) and value > max(tensors, 1):
            raise ValueError(f"{path}: {key} is {value}, and the weights beside it are {tensors} tensors")


def check_size(folder: Path, model: Any, found: dict[str, Entry]) -> None:
    """Compare a model on the meta device with the headers, before it is given memory: what is missing from the files
    is named after loading, but the most of it must be in them.

    Raises:
        ValueError: it has over twice the weights that the files hold, or would compute tables of more than 4 GiB.
    """
    stored = set(model.state_dict(keep_vars=True))
    own = {id(p): p.numel() for p in model.parameters()}
    held = sum(math.prod(entry.shape) for entry in found.values())
    if sum(own.values()) > 2 * held + _SMALL:
        raise ValueError(
            f"{folder}: config.json describes a model of {sum(own.values()):,} weights, and the files beside it hold "
            f"{held:,}; the download may be incomplete, or config.json is that of another model"
        )
    tables = sum(b.nbytes for name, b in model.named_buffers() if name not in stored)
    if tables > _BUFFER_LIMIT:
        raise ValueError(f"{folder}: the model of config.json would compute tables of {tables:,} bytes")


@contextlib.contextmanager
def explained(place: str) -> Iterator[None]:
    """Whatever transformers, tokenizers and the hub raise about a checkpoint becomes one ValueError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise  # not about the checkpoint, and clear enough
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(place):
            raise  # it says where already
        raise ValueError(f"{place}: {_reason(place, error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the tokenizers library, and no Exception
            raise
        raise ValueError(f"{place}: its tokenizer cannot be read: {_first_line(error)}") from error


def _reason(place: str, error: Exception) -> str:
    first = _first_line(error)
    local = Path(place).is_dir()
    if isinstance(error, ImportError):
        return f"it needs a package that is not here: {first}"
    if local and "does not recognize this architecture" in first:
        return f"unknown model type {model_type(Path(place))!r}; a newer transformers may know it"
    if "trust_remote_code" in str(error):
        whose = "folder" if local else "repository"
        return f"the model needs code from its own {whose}; read it, then pass trust_remote_code=True"
    if isinstance(error, OSError) and not local:
        return (
            "neither a folder here nor loadable from the hub (no such repository, a private one, or no connection); "
            f"check the name, or download the model and pass its local folder [{first}]"
        )
    return f"not a model that can be loaded: {first}"


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, and the second where the first announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
