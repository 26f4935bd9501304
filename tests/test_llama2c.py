"""llama2.c files: written here in both layouts, and a real one; its tokenizer against llama2.c's own rule."""

import os
import struct
from pathlib import Path

import pytest
import torch
import transformers
from datasets import load_dataset

from tapernorm import hub, llama2c

DATA = Path(os.environ.get("TAPERNORM_DATA", Path(__file__).parents[1] / "../shared/data")).resolve()
STORIES = DATA / "stories260K" / "stories260K.bin"
needs_data = pytest.mark.skipif(not STORIES.is_file(), reason=f"{STORIES} is absent; TAPERNORM_DATA names its folder")
IDS = torch.arange(3, 21).reshape(2, 9)
LAYER = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LAYER += ["post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"]


def tiny(tied):
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=tied, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model


def interleaved(weight, size=8):
    """Rows from pairs (i, i + size / 2) to pairs (2i, 2i + 1), one by one."""
    rows = []
    for head in range(len(weight) // size):
        for i in range(size // 2):
            rows += [head * size + i, head * size + i + size // 2]
    return weight[rows]


def write(path, model, version, tied, base=10000.0):
    """A llama2.c file of a Llama model."""
    state = model.state_dict()
    stacks = []
    for part in LAYER:
        stack = [state[f"model.layers.{layer}.{part}.weight"] for layer in range(2)]
        stacks.append([interleaved(w) for w in stack] if part.endswith(("q_proj", "k_proj")) else stack)
    embedding, final, head = (state[f"{n}.weight"] for n in ("model.embed_tokens", "model.norm", "lm_head"))
    tensors = [embedding, *(w for stack in stacks for w in stack), final]
    angles = torch.arange(16.0)[:, None] * base ** (-torch.arange(4.0) / 4)
    sizes = [32, 32, 2, 4, 2, 300, 16]
    if version == 0:
        sizes[5] *= 1 if tied else -1
        header, tensors = struct.pack("<7i", *sizes), [*tensors, angles.cos(), angles.sin()]
    else:
        header = struct.pack("<Ii7iB", 0x616B3432, version, *sizes, tied).ljust(256, b"\0")
        norms = [*stacks[0], *stacks[5], final, embedding]
        tensors = [*norms, *(w for i, stack in enumerate(stacks) if i not in (0, 5) for w in stack)]
    tensors += [] if tied else [head]
    path.write_bytes(header + b"".join(t.float().contiguous().numpy().tobytes() for t in tensors))
    return path


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_both_layouts(tmp_path, version, tied):
    model = tiny(tied)
    loaded, tokenizer = hub.from_pretrained(write(tmp_path / "model.bin", model, version, tied))
    assert tokenizer is None
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded.config.max_position_embeddings == 16


def test_other_files_are_refused(tmp_path):
    whole = write(tmp_path / "model.bin", tiny(True), 0, True).read_bytes()
    tables = write(tmp_path / "tables.bin", tiny(True), 0, True, base=500000.0).read_bytes()
    cases = {
        "not a llama2.c checkpoint, or cut short": whole[:-4],
        r"version 2 \(an int8-quantized file\) is not supported": struct.pack("<Ii", 0x616B3432, 2).ljust(256, b"\0"),
        r"version 7 \(an unknown layout\)": struct.pack("<Ii", 0x616B3432, 7).ljust(256, b"\0"),
        "its header reads": b"PK\x03\x04" * 100,
        "less than its header": b"short",
        "not those of base 10000": tables,
    }
    for words, content in cases.items():
        path = tmp_path / "other.bin"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words) as caught:
            hub.from_pretrained(path)
        assert str(path) in str(caught.value)


@pytest.fixture(scope="module")
def stories():
    data = load_dataset("parquet", data_files=str(DATA / "tinystories" / "validation.parquet"), split="train")
    return data["text"][:300]


@pytest.fixture(scope="module")
def real():
    model, tokenizer = hub.from_pretrained(STORIES)
    return model, tokenizer


class Reference:
    """llama2.c's `encode`, in Python: https://github.com/karpathy/llama2.c, run.c."""

    def __init__(self, path, vocab_size):
        data, offset, self.vocab, self.scores = path.read_bytes(), 4, [], []
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", data, offset)
            self.vocab.append(data[offset + 8 : offset + 8 + length])
            self.scores.append(score)
            offset += 8 + length
        self.ids = {piece: i for i, piece in reversed(list(enumerate(self.vocab)))}

    def encode(self, text):
        tokens = [1]
        if text:
            tokens.append(self.ids[b" "])
        for character in text:
            piece = character.encode()
            tokens += [self.ids[piece]] if piece in self.ids else [byte + 3 for byte in piece]
        while True:
            best, where, merged = -1e10, -1, -1
            for i in range(len(tokens) - 1):
                found = self.ids.get(self.vocab[tokens[i]] + self.vocab[tokens[i + 1]], -1)
                if found != -1 and self.scores[found] > best:
                    best, where, merged = self.scores[found], i, found
            if where == -1:
                return tokens
            tokens[where : where + 2] = [merged]


@needs_data
def test_the_tokenizer_is_llama2c_s(real, stories):
    tokenizer = real[1]
    reference = Reference(STORIES.with_name("tok512.bin"), 512)
    odd = ["", " ", "  two  spaces", "tab\tand\nnewline", "naïve café 🙂 日本", "Once", "</ s>", "a" * 50]
    for text in odd + [story[:400] for story in stories]:
        ids = tokenizer(text).input_ids
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@needs_data
def test_the_real_model_tells_stories(real, stories):
    model, tokenizer = real
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
    told = tokenizer.decode(model.generate(prompt, max_new_tokens=60, do_sample=False)[0], skip_special_tokens=True)
    assert told.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside")
    total, count = 0.0, 0
    with torch.no_grad():
        for story in stories[:20]:
            ids = tokenizer(story, return_tensors="pt").input_ids[:, :512]
            total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    assert 1.0 < total / count < 1.5


@needs_data
def test_the_real_model_survives_a_folder(real, stories, tmp_path):
    model, tokenizer = real
    hub.save_pretrained(model, tmp_path / "model", tokenizer=tokenizer)
    again, same = hub.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(again), logits(model))
    for text in ["", *stories[:50]]:
        assert same(text).input_ids == tokenizer(text).input_ids
        assert same.decode(same(text).input_ids, skip_special_tokens=True) == text
    assert again.generation_config.eos_token_id == [1, 2]


@needs_data
def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="may belong to another model"):
        llama2c.read_tokenizer(STORIES.with_name("tok512.bin"), 500)
    with pytest.raises(ValueError, match=r"not a llama2\.c tokenizer of 512 tokens"):
        llama2c.read_tokenizer(STORIES, 512)
