"""Read llama2.c checkpoints: a `*.bin` file of float32 weights and the tokenizer file beside it.

Layouts (github.com/karpathy/llama2.c, export.py). L layers, D width, F hidden width of the MLP, V vocabulary,
C context, H heads and K key/value heads of size D / H; every tensor is float32, row-major, (out, in).

    version 0   7 int32 (D, F, L, H, K, ±V, C), then: embedding [V, D]; for each of the following, all layers
                together: attention norm [D], wq, wk, wv, wo, MLP norm [D], w1 [F, D], w2 [D, F], w3 [F, D]; final
                norm [D]; two rotary tables [C, D / H / 2]; and, when the vocabulary is written as −V, the head [V, D]
    version 1   "ak42", the version, the 7 int32, a byte that is 1 for a tied head, zeros up to byte 256, then:
                attention norms, MLP norms, final norm, embedding, wq, wk, wv, wo, w1, w2, w3, the head unless tied

    tokenizer   int32 longest token, then for each token: float32 score, int32 length, the bytes (UTF-8). Ids 0, 1,
                2 are unknown, begin and end; 3 to 258 are the bytes "<0x00>" to "<0xFF>"

llama2.c turns neighbouring pairs (2i, 2i + 1) of a query or key by the rotary angle, transformers turns (i, i + size
/ 2): the rows of wq and wk are permuted, which leaves every product q·k as it was.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_MAGIC = 0x616B3432  # "ak42"
_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
_SPECIAL = ("<unk>", "<s>", "</s>")
_FIRST_PIECE = 259  # after the special tokens and the 256 bytes
_NAMES = {
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def load_model(path: str | Path) -> LlamaForCausalLM:
    """The model of a llama2.c file, in float32 on the CPU, in eval mode.

    Raises:
        ValueError: the file is not a llama2.c checkpoint of version 0 or 1 (quantized files, version 2, are not
            read), its size does not fit its header, or its rotary tables are not those of base 10000.
    """
    path = Path(path)
    version, header, tied, start = _read_header(path)
    layout = _layout(version, header, tied)
    count = sum(math.prod(shape) for _, shape in layout)
    size = path.stat().st_size
    if size != start + 4 * count:
        shown = ", ".join(f"{k} {v}" for k, v in header.items())
        raise ValueError(
            f"{path}: not a llama2.c checkpoint, or cut short: a version {version} file of {shown} has "
            f"{start + 4 * count:,} bytes, this one {size:,}"
        )
    values, tensors, offset = np.memmap(path, dtype="<f4", mode="r", offset=start), {}, 0
    for name, shape in layout:
        length = math.prod(shape)
        tensors[name] = torch.from_numpy(np.array(values[offset : offset + length]).reshape(shape))
        offset += length
    if version == 0:
        _check_rotary(path, tensors.pop("freq_cos"), tensors.pop("freq_sin"))
    return _to_llama(header, tied, tensors)


def load_tokenizer(path: str | Path, vocab_size: int) -> PreTrainedTokenizerFast | None:
    """The tokenizer beside the checkpoint `path`: `tok<vocab>.bin`, or else `tokenizer.bin`; None without either.

    Encoding is llama2.c's: begin token, a space before a text that is not empty, characters or else UTF-8 bytes,
    then the best-scored pair is merged until none is left. Spaces are written `▁`, as SentencePiece does.

    Raises:
        ValueError: the file does not hold exactly `vocab_size` tokens in llama2.c's layout.
    """
    folder = Path(path).parent
    for name in (f"tok{vocab_size}.bin", "tokenizer.bin"):
        if (folder / name).is_file():
            return read_tokenizer(folder / name, vocab_size)
    return None


def _read_header(path: Path) -> tuple[int, dict[str, int], bool, int]:
    """(version, sizes, whether the head is tied, offset of the first weight)."""
    with path.open("rb") as file:
        head = file.read(256)
    if len(head) < 28:
        raise ValueError(f"{path}: not a llama2.c checkpoint: {len(head)} bytes are less than its header")
    header: dict[str, int]
    magic, version = struct.unpack_from("<Ii", head)
    if magic == _MAGIC:
        if version != 1:
            what = "an int8-quantized file" if version == 2 else "an unknown layout"
            raise ValueError(
                f"{path}: llama2.c version {version} ({what}) is not supported; export the model again with "
                "`python export.py model.bin --version 1`"
            )
        header = dict(zip(_FIELDS, struct.unpack_from("<7i", head, 8), strict=True))
        tied, start = head[36:37] == b"\x01", 256
    else:
        version = 0
        header = dict(zip(_FIELDS, struct.unpack_from("<7i", head), strict=True))
        tied, start = header["vocab_size"] > 0, 28
        header["vocab_size"] = abs(header["vocab_size"])
    sound = all(0 < value < 2**31 for value in header.values())
    if not sound or header["dim"] % (2 * header["n_heads"]) or header["n_heads"] % header["n_kv_heads"]:
        raise ValueError(f"{path}: not a llama2.c checkpoint: its header reads {header}")
    return version, header, tied, start


def _layout(version: int, header: dict[str, int], tied: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the order of the file; tensors of all layers together have the layer as first axis."""
    dim, hidden, layers, heads, kv_heads, vocab, context = header.values()
    kv_dim = dim // heads * kv_heads
    head = [] if tied else [("output", (vocab, dim))]
    embedding, final = ("tok_embeddings", (vocab, dim)), ("norm", (dim,))
    attention_norm, ffn_norm = ("attention_norm", (layers, dim)), ("ffn_norm", (layers, dim))
    attention = [("wq", (layers, dim, dim)), ("wk", (layers, kv_dim, dim)), ("wv", (layers, kv_dim, dim))]
    attention += [("wo", (layers, dim, dim))]
    mlp = [("w1", (layers, hidden, dim)), ("w2", (layers, dim, hidden)), ("w3", (layers, hidden, dim))]
    if version == 1:
        return [attention_norm, ffn_norm, final, embedding, *attention, *mlp, *head]
    rotary = [(name, (context, dim // heads // 2)) for name in ("freq_cos", "freq_sin")]
    return [embedding, attention_norm, *attention, ffn_norm, *mlp, final, *rotary, *head]


def _check_rotary(path: Path, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Tables that are left as zeros are fine, the newer llama2.c skips them; those of another base are not."""
    size = cos.shape[1]
    angles = 10000.0 ** (-torch.arange(size, dtype=torch.float64) / size)  # at position 1
    written = len(cos) > 1 and bool(cos.any())
    if written and not torch.allclose(torch.atan2(sin[1], cos[1]).double(), angles, atol=1e-3):
        raise ValueError(f"{path}: its rotary tables are not those of base 10000, the only one llama2.c files have")


def _half_split(weight: torch.Tensor, head_size: int) -> torch.Tensor:
    """Rows of [out, in] from rotary pairs (2i, 2i + 1) to pairs (i, i + size / 2), head by head."""
    out, width = weight.shape
    return weight.view(out // head_size, head_size // 2, 2, width).transpose(1, 2).reshape(out, width)


def _to_llama(header: dict[str, int], tied: bool, tensors: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=header["vocab_size"],
        hidden_size=header["dim"],
        intermediate_size=header["hidden_dim"],
        num_hidden_layers=header["n_layers"],
        num_attention_heads=header["n_heads"],
        num_key_value_heads=header["n_kv_heads"],
        max_position_embeddings=header["seq_len"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    state = {"model.embed_tokens.weight": tensors["tok_embeddings"], "model.norm.weight": tensors["norm"]}
    state["lm_head.weight"] = tensors["tok_embeddings" if tied else "output"]
    for source, target in _NAMES.items():
        for layer, weight in enumerate(tensors[source]):
            if source in ("wq", "wk"):
                weight = _half_split(weight, header["dim"] // header["n_heads"])
            state[f"model.layers.{layer}.{target}.weight"] = weight
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    model.load_state_dict(state, strict=True)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = [1, 2]  # texts were joined by the begin token: it ends one, too
    return model.eval()


def read_tokenizer(path: str | Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """A llama2.c tokenizer file as a transformers tokenizer. Raises ValueError as `load_tokenizer` says."""
    path = Path(path)
    pieces, scores = _read_pieces(path, vocab_size)
    ids = {piece: i for i, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        twice = sorted({piece for piece in pieces if pieces.count(piece) > 1})
        raise ValueError(f"{path}: tokens occur twice, such as {twice[0]!r}")
    model = BPE(vocab=ids, merges=_merges(pieces, scores), unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    begin: Any = [("<s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=begin
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def _read_pieces(path: Path, vocab_size: int) -> tuple[list[str], list[float]]:
    data, offset, raw, scores = path.read_bytes(), 4, [], []
    while offset + 8 <= len(data) and len(raw) < vocab_size:
        score, length = struct.unpack_from("<fi", data, offset)
        if length < 0 or offset + 8 + length > len(data):
            break
        raw.append(data[offset + 8 : offset + 8 + length])
        scores.append(score)
        offset += 8 + length
    if len(raw) != vocab_size or offset != len(data):
        raise ValueError(
            f"{path}: not a llama2.c tokenizer of {vocab_size} tokens: {len(raw)} could be read and "
            f"{len(data) - offset} bytes were left; it may belong to another model"
        )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    if [piece.decode("utf-8", "replace") for piece in raw[3:_FIRST_PIECE]] != bytes_:
        raise ValueError(f"{path}: not a llama2.c tokenizer: tokens 3 to 258 are not the bytes <0x00> to <0xFF>")
    try:
        words = [piece.decode("utf-8").replace(" ", "▁") for piece in raw[_FIRST_PIECE:]]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a llama2.c tokenizer: {error.object!r} is not UTF-8") from error
    return [*_SPECIAL, *bytes_, *words], scores


def _merges(pieces: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third, the best-scored third first."""
    words = set(pieces[_FIRST_PIECE:])
    order = sorted(range(_FIRST_PIECE, len(pieces)), key=lambda i: -scores[i])
    splits = ((pieces[i][:cut], pieces[i][cut:]) for i in order for cut in range(1, len(pieces[i])))
    return [(left, right) for left, right in splits if left in words and right in words]
