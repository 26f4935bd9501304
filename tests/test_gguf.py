"""A GGUF file, written here with random weights, loads as the model it was made from, and can be saved again."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tapernorm as tn
from tapernorm import gguf_file
from tapernorm.inspection import inspect_source

gguf = pytest.importorskip("gguf", reason="reading GGUF files needs the gguf package")

TOKENS = ["<s>", "</s>", "<unk>", *map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "he", "th", "an"]
HEADS, KEYS = 4, 2
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(path of the file, the model in it)"""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KEYS, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h e", "t h", "a n"])
    for number, add in enumerate((writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id)):
        add(number)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in (0, 1) for ours, theirs in LAYER.items()}
    for ours, theirs in names.items():
        weight = model.get_submodule(ours).weight.detach().numpy()
        if theirs.endswith(("attn_q", "attn_k")):  # rotary pairs stand side by side there, and in halves here
            heads = HEADS if theirs.endswith("q") else KEYS
            rows = weight.reshape(heads, 2, -1, weight.shape[1])
            weight = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))
        writer.add_tensor(f"{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


IDS = torch.arange(12)[None] + 3


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_the_same_model(tiny):
    path, wanted = tiny
    model, tokenizer = tn.from_pretrained(path)
    assert torch.equal(logits(model), logits(wanted))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer("the hen")["input_ids"] == [TOKENS.index(t) for t in ("t", "he", "Ġ", "he", "n")]
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_it_can_be_saved(tiny, tmp_path):
    model, tokenizer = tn.from_pretrained(tiny[0])
    tn.save_pretrained(model, tmp_path / "out", tokenizer=tokenizer)
    again, _ = tn.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))


def test_it_can_lose_its_norms(tiny, tmp_path):
    model, _ = tn.from_pretrained(tiny[0], dtype="float64")
    ids = torch.randint(3, len(TOKENS), (12, 16), generator=torch.Generator().manual_seed(0))
    removal = tn.remove_(model, ids, budget=0.1, tail=1.0)
    assert removal.folded
    assert removal.fold is not None
    assert removal.fold.relative_error < 1e-6  # the family's own norms, of which one is kept, are float32
    tn.save_pretrained(model, tmp_path / "out")
    again, _ = tn.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))


def test_a_name_of_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(gguf_file._PACKAGED, "smollm2-135m", "no-such-distribution")
    assert gguf_file.packaged("smollm2-135m") is None


def test_a_model_that_a_package_brings_is_known_by_its_name_everywhere(tiny, monkeypatch):
    monkeypatch.setattr(gguf_file, "packaged", lambda name: tiny[0] if name == "smollm2-135m" else None)
    model, _ = tn.from_pretrained("smollm2-135m")
    assert torch.equal(logits(model), logits(tiny[1]))
    assert len(inspect_source("smollm2-135m")[1]) == 5
