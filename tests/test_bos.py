"""A tokenizer that begins every text with a token of its own, and a prefix that takes its place."""

import copy

import pytest
import torch

import tapernorm as tn
from prefixed import build
from tapernorm import data, material
from tapernorm.bos import take_over, without_bos
from tapernorm.prefix import attach_prefix, own_bos, prefix_of, sample, search_prefix
from tapernorm.removal import RemovalConfig, _Work
from tapernorm.run_config import RunConfig
from tapernorm.verify import evaluate
from zoo import assert_same, relative, snapshot

TEXTS = [f"so {word} went on and on for many a day and night; and nobody knew {word}." for word in "abcdefghij"] * 12
TEMPLATE = "{{- bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ bos_token + m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def trained():
    return data.train_tokenizer(TEXTS, 270)


@pytest.fixture
def tokenizer(trained):
    return copy.deepcopy(trained)


def massive(tokenizer):
    """A model for which the token is massive wherever it stands, and nothing else is."""
    model = build("llama", vocab_size=len(tokenizer), max_position_embeddings=128)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.bos_token_id] *= 1000
    return model


def test_the_token_is_the_prefix(tokenizer):
    model = massive(tokenizer)
    bos = tokenizer.bos_token_id
    assert own_bos(tokenizer) == bos == tokenizer("a")["input_ids"][0]
    ids = data.pack(TEXTS, tokenizer, 32)
    assert (ids == bos).any()
    for texts in (TEXTS, ids):
        assert tn.find_prefix(model, tokenizer, texts) == (bos,)
    trials = search_prefix(model, tokenizer, sample(tokenizer, ids, model))
    assert trials[0].prefix == () and trials[0].token == bos and trials[0].ratio > 20
    assert tn.find_prefix(build("llama", vocab_size=len(tokenizer)), tokenizer, TEXTS) == ()


def test_taken_over_and_put_back(tokenizer, tmp_path):
    model = massive(tokenizer)
    tokenizer.chat_template = TEMPLATE
    bos, before = tokenizer.bos_token_id, snapshot(model)
    ids = tokenizer("nobody knew", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    undo = take_over(model, tokenizer, (bos,))
    assert prefix_of(model) == (bos,) and own_bos(tokenizer) is None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again("nobody knew")["input_ids"] == ids[0, 1:].tolist()
    with torch.no_grad():  # the text behind the token, and behind the prefix: the same
        assert relative(model(input_ids=ids[:, 1:]).logits, wanted[:, 1:]) < 1e-6
    undo()
    assert tokenizer("nobody knew")["input_ids"] == ids[0].tolist() and tokenizer.chat_template == TEMPLATE
    assert_same(before, snapshot(model))
    assert take_over(model, tokenizer, ()) is None and own_bos(tokenizer) == bos


def test_a_tokenizer_that_cannot_leave_it_out(tokenizer):
    class Stubborn:
        bos_token_id, bos_token = tokenizer.bos_token_id, tokenizer.bos_token

        def __call__(self, text, **kwargs):
            return tokenizer(text, **kwargs)

    model = massive(tokenizer)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"Stubborn goes on writing .*--prefix none"):
        take_over(model, Stubborn(), (tokenizer.bos_token_id,))
    assert_same(before, snapshot(model))


def test_blocks_without_it():
    ids = torch.tensor([[1, 5, 6, 7], [8, 1, 9, 2], [1, 3, 4, 5]])
    assert without_bos(ids, 1).tolist() == [[5, 6, 7, 8], [9, 2, 3, 4]]
    assert without_bos(ids, None) is ids


def test_removal_is_measured_beside_the_model_with_it(tokenizer):
    model = massive(tokenizer)
    bos, original = tokenizer.bos_token_id, copy.deepcopy(model)
    ids = data.pack(TEXTS, tokenizer, 32)
    found = tn.remove_(model, TEXTS, tokenizer, budget=0.5, fit_tokens=1536, check_tokens=512, block=32, tail=1.0)
    assert found.folded and found.prefix == (bos,) and own_bos(tokenizer) is None
    attach_prefix(original, (bos,))
    text = without_bos(ids[: 2048 // 32 + 1], bos)
    share = text[: -min(1536 // 32, int(0.75 * len(text)))]
    assert found.loss_before == pytest.approx(evaluate(original, share).loss, rel=1e-5)


def test_where_nothing_goes_the_tokenizer_is_as_it_came(tokenizer):
    model = massive(tokenizer)
    before = snapshot(model)
    found = tn.remove_(model, TEXTS, tokenizer, budget=1e-9, fit_tokens=1536, check_tokens=512, block=32)
    assert not found.folded and own_bos(tokenizer) == tokenizer.bos_token_id
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("command", ["taper", "remove"])
def test_runs_of_either_kind_begin_behind_the_prefix(tokenizer, tmp_path, command):
    model, text = massive(tokenizer).float(), tmp_path / "text.txt"
    tn.save_pretrained(model, tmp_path / "model", tokenizer=tokenizer)
    text.write_text("\n\n".join(TEXTS), encoding="utf-8")
    asked = {"model": str(tmp_path / "model"), "data": str(text), "out": str(tmp_path / "run"), "eval_tokens": 1024}
    if command == "taper":
        made = material.prepare(RunConfig(kind="taper", block=32, steps=8, **asked))
        start, ids = made.build(), made.train.ids
        assert prefix_of(start) == ()  # taper_ puts it into the arm that loses its norms
        attach_prefix(start, made.prefix)
        begun = made.stock(made.train)  # the other arm is what people have without this library
        assert (begun.ids[:, 0] == own_bos(made.stock_tokenizer)).all() and torch.equal(begun.ids[:, 1:], ids)
        assert torch.equal(begun.labels[:, 2:], made.train.labels[:, 1:]) and (begun.labels[:, :2] == -100).all()
    else:
        made = _Work.prepare(RemovalConfig(**asked))
        start, ids = made.model, made.texts["validation"]
    assert made.prefix == prefix_of(start) == (tokenizer.bos_token_id,)
    assert not (ids == tokenizer.bos_token_id).any() and own_bos(made.tokenizer) is None
