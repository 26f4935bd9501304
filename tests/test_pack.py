"""What becomes of documents as tokens: the tokenizer, and blocks of a fixed length."""

from __future__ import annotations

import datasets
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import stories
from stories import STORIES, real, write
from tapernorm.data import pack, train_tokenizer

load = stories.load  # the fixture
UNICODE = [
    "  leading and trailing \n\n",
    "a\tb\r\nc\x00d\x7f",
    "é e\u0301 ﬁ \u200b\u202e\ufeff",
    "𝔘𝔫𝔦 👩‍👩‍👧 日本語 \U0010ffff",
    "don 't , you . n't",
    "<|bos|> spelt out <|eos|><|pad|>",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(STORIES, 350)


# The tokenizer


def test_special_tokens_and_size(tokenizer):
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert len(tokenizer) == tokenizer.vocab_size == 350
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|bos|>", "<|eos|>", "<|pad|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


def test_bos_is_added_and_eos_is_not(tokenizer):
    encoded = tokenizer(["Once upon", "a time, number 3"], padding=True)
    assert set(encoded) == {"input_ids", "attention_mask"}
    ids = tokenizer("Once upon")["input_ids"]
    assert ids[0] == 0
    assert not {0, 1, 2} & set(ids[1:])
    assert encoded["input_ids"][0][: len(ids)] == ids
    assert tokenizer("Once upon", add_special_tokens=False)["input_ids"] == ids[1:]
    assert tokenizer("Once", " upon")["input_ids"].count(0) == 1


@pytest.mark.parametrize("text", [*UNICODE, *STORIES[:2], "".join(UNICODE)])
def test_any_text_survives(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert not {0, 1, 2} & set(ids[1:])  # spelt-out special tokens are text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_saved_and_loaded_gives_the_same_ids(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(UNICODE + STORIES)["input_ids"] == tokenizer(UNICODE + STORIES)["input_ids"]
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (0, 1, 2)
    for text in UNICODE:
        assert again.decode(again(text)["input_ids"], skip_special_tokens=True) == text
    assert torch.equal(pack(STORIES, again, 32), pack(STORIES, tokenizer, 32))


def test_training_twice_gives_the_same_tokenizer(tokenizer):
    again = train_tokenizer(iter(STORIES), 350)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    other = train_tokenizer(STORIES[::-1] + ["zzzz zzzz zzzz"] * 99, 350)
    assert other.get_vocab() != tokenizer.get_vocab()


def test_merges_are_learnt(tokenizer):
    text = STORIES[7]
    assert len(tokenizer(text)["input_ids"]) < len(text) / 2


def test_smallest_vocabulary_is_bytes():
    tokenizer = train_tokenizer(["aa bb"], 259)
    assert len(tokenizer) == 259
    assert len(tokenizer("aé")["input_ids"]) == 1 + 3


def test_little_text_gives_a_smaller_vocabulary():
    assert 259 < len(train_tokenizer(["ab ab"], 5000)) < 270


@pytest.mark.parametrize("size", [258, 0, -1, 300.0, True, "300"])
def test_vocabulary_too_small(size):
    with pytest.raises(ValueError, match=r"vocab_size=.* must be a whole number, at least 259"):
        train_tokenizer(STORIES, size)


@pytest.mark.parametrize("use", [lambda texts, tok: train_tokenizer(texts), lambda texts, tok: pack(texts, tok, 4)])
def test_texts_must_be_strings(tokenizer, use):
    with pytest.raises(ValueError, match=r"pass \[text\]"):
        use("one string", tokenizer)
    with pytest.raises(ValueError, match="item 1 is NoneType, not a string"):
        use(["a", None], tokenizer)
    with pytest.raises(ValueError, match="item 0 is dict, not a string"):
        use(datasets.Dataset.from_dict({"text": STORIES}), tokenizer)


@pytest.mark.parametrize("texts", [[], [""]])
def test_nothing_to_learn_from(texts):
    with pytest.raises(ValueError, match="nothing in them to merge"):
        train_tokenizer(texts)


# Packing


def documents(tokenizer, texts) -> list[int]:
    """What `pack` must lay end to end, the slow way."""
    stream = []
    for text in texts:
        stream += [0, *tokenizer(text, add_special_tokens=False)["input_ids"], 1]
    return stream


@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_are_the_documents_end_to_end(tokenizer, block):
    texts = STORIES + UNICODE
    blocks = pack(texts, tokenizer, block)
    stream = documents(tokenizer, texts)
    assert blocks.dtype == torch.int64
    assert blocks.shape == (len(stream) // block, block)
    assert blocks.is_contiguous()
    assert blocks.flatten().tolist() == stream[: blocks.numel()]


def test_more_documents_than_a_batch_and_a_generator(tokenizer):
    texts = [f"number {i}" for i in range(700)]
    blocks = pack((text for text in texts), tokenizer, 5)
    assert blocks.flatten().tolist() == documents(tokenizer, texts)[: blocks.numel()]
    assert torch.equal(blocks, pack(texts, tokenizer, 5))


@pytest.mark.parametrize("limit", [1, 3, 10**9])
def test_limit_is_the_first_blocks(tokenizer, limit):
    every = pack(STORIES, tokenizer, 16)
    assert torch.equal(pack(STORIES, tokenizer, 16, limit=limit), every[:limit])


def test_limit_stops_reading(tokenizer):
    def endless():
        while True:
            yield STORIES[0]

    assert pack(endless(), tokenizer, 16, limit=4).shape == (4, 16)


def test_loaded_text_is_packed_as_it_is(tmp_path, load, tokenizer):
    found = load(write(tmp_path / "a.jsonl", STORIES))
    assert torch.equal(pack(found.train, tokenizer, 8), pack(STORIES[:38], tokenizer, 8))


def variant(tokenizer, template: str | None, **special) -> PreTrainedTokenizerFast:
    """The same vocabulary with other special tokens, as other families have them."""
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    ids = [("<|bos|>", 0), ("<|eos|>", 1)]
    backend.post_processor = processors.TemplateProcessing(single=template or "$A", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.mark.parametrize(
    ("template", "special", "before", "after"),
    [
        (None, {"bos_token": "<|eos|>", "eos_token": "<|eos|>"}, [], [1]),  # GPT-2
        ("<|bos|> $A", {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, [0], [1]),  # Llama
        ("$A <|eos|>", {"eos_token": "<|eos|>"}, [], [1]),  # T5
        ("<|bos|> $A <|eos|>", {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, [0], [1]),
        (None, {"bos_token": "<|bos|>"}, [0], []),
        ("<|bos|> $A", {"bos_token": "<|bos|>"}, [0], []),
        (None, {}, [], []),
    ],
)
def test_ends_of_documents_by_family(tokenizer, template, special, before, after):
    expected = []
    for text in STORIES:
        expected += [*before, *tokenizer(text, add_special_tokens=False)["input_ids"], *after]
    blocks = pack(STORIES, variant(tokenizer, template, **special), 16)
    assert blocks.flatten().tolist() == expected[: blocks.numel()]
    assert len(expected) - blocks.numel() < 16


def test_document_longer_than_the_model_is_not_truncated(tokenizer):
    short = variant(tokenizer, None, eos_token="<|eos|>", model_max_length=8)
    short.backend_tokenizer.enable_truncation(8)
    short.backend_tokenizer.enable_padding(length=500)
    text = " ".join(STORIES)
    assert pack([text], short, 1).numel() == len(tokenizer(text)["input_ids"])
    assert not short.deprecation_warnings  # of indexing errors to come


def test_no_block(tokenizer):
    with pytest.raises(ValueError, match="texts: 4 tokens are not one block of 100; pass more text or a smaller block"):
        pack(["ab"], tokenizer, 100)
    with pytest.raises(ValueError, match="texts: 0 tokens are not one block of 100"):
        pack([], tokenizer, 100)


@pytest.mark.parametrize(
    "options", [{"block": 0}, {"block": 2.0}, {"block": 4, "limit": 0}, {"block": 4, "limit": True}]
)
def test_block_and_limit_are_whole(tokenizer, options):
    with pytest.raises(ValueError, match="must be a whole number, at least 1"):
        pack(STORIES, tokenizer, **options)


def test_real_stories_are_packed_the_same_twice(load):
    found = load(real("tinystories"))
    texts = found.validation[:200]
    tokenizer = train_tokenizer(texts, 1000)
    blocks = pack(texts, tokenizer, 128)
    assert torch.equal(blocks, pack(texts, train_tokenizer(texts, 1000), 128))
    assert tokenizer.decode(blocks.flatten(), skip_special_tokens=True).startswith("".join(texts)[:10_000])
    assert 3 < len("".join(texts)) / blocks.numel() < 4.5
