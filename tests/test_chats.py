"""Rows that are chats: which tokens are answers, how they lie in blocks, and that the loss counts those alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import stories
from tapernorm.chats import Rendered, messages_of, render
from tapernorm.data import load_text, pack
from tapernorm.packing import Blocks, disturbed, pack_labelled
from tapernorm.sources import mix
from tapernorm.verify import evaluate
from test_cli import Call, call  # noqa: F401  (a fixture)
from trainers import make

load = stories.load  # the fixture

WORDS = re.findall(
    r"\w+", "the cat sat on a mat and saw that it was good hi there hello you yes no be kind what is red blue"
)
SPECIAL = ["<unk>", "<user>", "<assistant>", "<system>", "<end>"]
HEAD = "{% for m in messages %}<{{ m['role'] }}> "
TAIL = "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
PLAIN = HEAD + "{{ m['content'] }} <end> " + TAIL
MARKED = (
    HEAD + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <end> {% endgeneration %}"
    "{% else %}{{ m['content'] }} <end> {% endif %}" + TAIL
)
# Reasoning is shown of the last answer alone.
FORGETFUL = HEAD + "{{ m['content'] if loop.last else m['content'].split('yes ')[-1] }} <end> " + TAIL


def tokenizer(template: str | None = PLAIN) -> Any:
    """A word a token."""
    known = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    backend: Any = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"unk_token": "<unk>", "eos_token": "<end>", "additional_special_tokens": SPECIAL[1:4]}
    made: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    made.chat_template = template
    return made


def turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    chat = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + chat


def shown(text: Rendered, made: Any) -> str:
    """Its words, those of answers in brackets."""
    words = made.convert_ids_to_tokens(text.ids)
    return " ".join(f"[{word}]" if answer else word for word, answer in zip(words, text.answers, strict=True))


def rows_in(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Which tokens are answers


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["compared", "marked"])
def test_answers_by_hand(template: str) -> None:
    made = tokenizer(template)
    text = render(made, turns("hi there", "hello you", "what is it", "a cat", system="be kind"))
    assert shown(text, made) == (
        "<system> be kind <end> <user> hi there <end> <assistant> [hello] [you] [<end>] "
        "<user> what is it <end> <assistant> [a] [cat] [<end>]"
    )
    assert text == made.apply_chat_template(turns("hi there", "hello you", "what is it", "a cat", system="be kind"),
                                            tokenize=False)  # fmt: skip
    text = render(made, turns("hi", "hello", "what is it"))  # ends with a question
    assert shown(text, made) == "<user> hi <end> <assistant> [hello] [<end>] <user> what is it <end>"


def test_an_earlier_answer_that_is_shown_otherwise_does_not_count() -> None:
    made = tokenizer(FORGETFUL)
    text = render(made, turns("hi", "yes hello", "what", "yes a cat"))
    assert (
        shown(text, made)
        == "<user> hi <end> <assistant> hello <end> <user> what <end> <assistant> [yes] [a] [cat] [<end>]"
    )
    text = render(made, turns("hi", "hello", "what", "a cat"))
    assert (
        shown(text, made)
        == "<user> hi <end> <assistant> [hello] [<end>] <user> what <end> <assistant> [a] [cat] [<end>]"
    )


def test_rows_of_prompt_and_completion_are_chats_of_two() -> None:
    wanted = turns("hi", "hello")
    assert messages_of({"prompt": "hi", "completion": "hello"}) == wanted
    assert messages_of({"prompt": wanted[:1], "completion": wanted[1:]}) == wanted
    assert messages_of({"messages": [{**m, "tool_calls": None} for m in wanted]}) == wanted
    assert messages_of({"messages": None}) == []


# Sources


def test_a_source_of_chats(tmp_path, load) -> None:
    made = tokenizer()
    chats = [turns("hi", "hello you", system="be kind" if n % 2 else "") for n in range(40)]
    rows: list[dict[str, Any]] = [{"messages": chat, "source": "x", "text": "hi"} for chat in chats]
    rows.insert(3, {"messages": [], "source": "x", "text": "hi"})
    found = load(rows_in(tmp_path / "a.jsonl", rows), tokenizer=made)
    texts = [*found.train, *found.validation]
    assert len(found.validation) == 2 and texts == [render(made, chat) for chat in chats]
    assert found.train[1].answers == render(made, chats[1]).answers and len(found.train[2:5]) == 3
    named = [{"talk": chat} for chat in chats]
    assert list(load(rows_in(tmp_path / "b.jsonl", named), text_column="talk", tokenizer=made).train) == texts[:38]
    pairs = [{"prompt": "hi", "completion": "hello you"} for _ in range(40)]
    assert load(rows_in(tmp_path / "c.jsonl", pairs), tokenizer=made).train[0] == texts[0]
    assert load(rows_in(tmp_path / "a.jsonl", rows), text_column="source", tokenizer=made).train[0] == "x"
    assert load(tmp_path / "a.jsonl").train[0] == "hi", "nobody can render chats, and there is text"


def test_what_is_refused(tmp_path, load) -> None:
    good, mute = {"messages": turns("hi", "hello")}, {"messages": turns("hi")}
    path = rows_in(tmp_path / "a.jsonl", [good] * 9)
    assert "the tokenizer has no chat template; put a chat_template.jinja beside it" in stories.refusal(
        load, path, tokenizer=tokenizer(None)
    )
    assert "are for a model with a tokenizer and a chat template" in stories.refusal(load, path)
    path = rows_in(tmp_path / "b.jsonl", [good, good, mute, good])
    assert "row 2: a chat without an answer of the assistant; leave such rows out" in stories.refusal(
        load, path, tokenizer=tokenizer()
    )
    path = rows_in(tmp_path / "c.jsonl", [good])
    assert "one chat is too little to hold some out" in stories.refusal(load, path, tokenizer=tokenizer())
    folder = tmp_path / "folder"
    folder.mkdir()
    rows_in(folder / "a.jsonl", [good] * 3), rows_in(folder / "b.jsonl", [{"text": "hi"}] * 3)
    assert "hold chats of several kinds, or text too" in stories.refusal(load, folder, tokenizer=tokenizer())
    strict = tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="a chat: the chat template refuses it: roles must alternate"):
        render(strict, turns("hi", "hello"))
    blind = tokenizer("{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}")
    with pytest.raises(ValueError, match="shows no answer"):
        render(blind, turns("hi", "hello"))


# Blocks


def words(blocks: Blocks, made: Any) -> list[str]:
    rows = []
    for at, ids in enumerate(blocks.ids):
        real = len(ids) if blocks.mask is None else int(blocks.mask[at].sum())
        labels = blocks.labels[at]
        assert bool((labels[real:] == -100).all()) and bool(((labels == -100) | (labels == ids)).all())
        pairs = zip(made.convert_ids_to_tokens(ids[:real].tolist()), labels[:real].tolist(), strict=True)
        rows.append(" ".join(word if label == -100 else f"[{word}]" for word, label in pairs))
    return rows


def test_chats_stay_whole_and_what_is_longer_is_cut() -> None:
    made = tokenizer()
    long, short = render(made, turns("what is it", "a cat sat on a mat")), render(made, turns("hi", "hello"))
    assert (len(long.ids), len(short.ids)) == (13, 6)
    head, answer = "<user> what is it <end> <assistant>", "[a] [cat] [sat] [on] [a] [mat] [<end>]"
    small = "<user> hi <end> <assistant> [hello] [<end>]"
    found = pack_labelled([long, short, short, long], made, 20)
    assert words(found, made) == [f"{head} {answer} {small}", f"{small} {head} {answer}"]
    assert found.mask is not None and found.mask.sum(1).tolist() == [19, 19] and found.tokens == 38
    assert found.counted == 18 and len(found[:1]) == 1 and found.shape == (2, 20)
    found = pack_labelled([long, short], made, 8)
    assert words(found, made) == [f"{head} [a] [cat]", "[sat] [on] [a] [mat] [<end>]", small]
    found = pack_labelled([long], made, 6)  # the first piece has no answer, the last one cannot be predicted
    assert words(found, made) == ["[a] [cat] [sat] [on] [a] [mat]"]
    assert words(pack_labelled([long, short], made, 19), made) == [f"{head} {answer} {small}"]
    assert pack_labelled([long, short], made, 19).mask is None
    assert len(pack_labelled([short] * 900, made, 6, limit=5)) == 5


def test_text_alone_is_packed_as_ever_and_both_may_be_mixed(tmp_path) -> None:
    made = tokenizer()
    plain = ["the cat sat on a mat", "it was good", "hi there"] * 9
    alone = pack_labelled(plain, made, 7)
    assert torch.equal(alone.ids, pack(plain, made, 7)) and alone.mask is None
    assert torch.equal(alone.labels, alone.ids) and set(alone.rows()[0]) == {"input_ids", "labels"}
    for limit in (1, 3):
        assert torch.equal(pack_labelled(plain, made, 7, limit=limit).ids, alone.ids[:limit])
    pairs = [{"prompt": "hi there", "completion": "hello you"} for _ in range(30)]
    texts = [
        load_text(rows_in(tmp_path / f"{at}.jsonl", rows), tokenizer=made, cache_dir=tmp_path / "cache")
        for at, rows in enumerate((pairs, [{"text": text} for text in plain]))
    ]
    both = pack_labelled(mix(texts).train, made, 9)
    rows = words(both, made)
    chat = "<user> hi there <end> <assistant> [hello] [you] [<end>]"
    assert rows.count(chat) == len(texts[0].train)
    others = [row for row in rows if row != chat]
    assert len(others) > 5 and all("<user>" not in row and row.count("[") == 9 for row in others)
    assert set(both.rows()[0]) == {"input_ids", "labels", "attention_mask"}
    ids = pack([render(made, turns("hi", "hello")), "hi"], made, 8)
    assert " ".join(made.convert_ids_to_tokens(ids[0].tolist())) == "<user> hi <end> <assistant> hello <end> hi <end>"


# The loss


def model_of(made: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(made), **shape, **heads))


def test_the_loss_is_that_of_the_answers(tmp_path) -> None:
    made = tokenizer()
    chats = [turns("hi " * n, "hello you " * (n % 3 + 1)) for n in range(1, 7)]
    blocks = pack_labelled([render(made, chat) for chat in chats], made, 16)
    assert blocks.mask is not None and int(blocks.mask.min()) == 0
    model = model_of(made).eval()
    total, count = 0.0, 0
    for row, labels, mask in zip(blocks.ids, blocks.labels, blocks.mask, strict=True):
        real = int(mask.sum())
        with torch.no_grad():
            logits = model(input_ids=row[None, :real]).logits[0]
        for at in range(1, real):
            if int(labels[at]) != -100:
                total += float(cross_entropy(logits[at - 1], row[at]))
                count += 1
    found = evaluate(model, blocks.ids, labels=blocks.labels)
    assert found.tokens == count == blocks.counted and found.loss == pytest.approx(total / count, rel=1e-5)
    assert abs(found.loss - evaluate(model, blocks.ids).loss) > 1e-3
    rows = [{**row, "input_ids": row["input_ids"] % 64} for row in blocks.rows()]
    trainer, _, _ = make(tmp_path, data=rows, max_steps=1, per_device_train_batch_size=1, logging_strategy="steps",
                         logging_steps=1, gradient_accumulation_steps=len(rows), learning_rate=0.0)  # fmt: skip
    by_hand = evaluate(trainer.model, blocks.ids, labels=blocks.labels).loss
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(by_hand, rel=1e-3)


# The commands


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a template (llama) and without (mute); chats.jsonl and text.jsonl."""
    root = tmp_path_factory.mktemp("chats")
    for name, template in (("llama", PLAIN), ("mute", None)):
        model_of(tokenizer(template)).save_pretrained(root / name)
        tokenizer(template).save_pretrained(root / name)
    generator = torch.Generator().manual_seed(0)

    def said(length: int) -> str:
        return " ".join(WORDS[at] for at in torch.randint(len(WORDS), (length,), generator=generator).tolist())

    rows_in(root / "chats.jsonl", [{"messages": turns(said(5), said(9), said(3), said(4))} for _ in range(400)])
    rows_in(root / "text.jsonl", [{"text": said(30)} for _ in range(200)])
    return root


QUICK = ("--steps", 8, "--batch", 2, "--block", 32, "--warmup-steps", 2, "--taper-steps", 3, "--eval-tokens", 256)


def test_taper_trains_on_answers(call: Call, place: Path, tmp_path: Path) -> None:  # noqa: F811
    given = ("--data", place / "chats.jsonl", "--data", place / "text.jsonl", "--distill", 1)
    code, said, err = call("taper", place / "llama", *given, "--out", tmp_path / "run", *QUICK, "--json")
    assert code == 0, err
    result = json.loads(said)
    assert result["verify"]["passed"] and "the loss counts the answers of chats" in err
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert facts["sources"] == ["chats.jsonl", "text.jsonl"]
    assert 0.5 < facts["answer_tokens"] / facts["train_tokens"] < 0.9
    code, said, err = call(
        "taper", place / "llama", "--data", place / "chats.jsonl", "--out", tmp_path / "one", "--no-baseline", *QUICK,
        "--json",
    )  # fmt: skip
    assert code == 0, err
    given = ("--data", place / "chats.jsonl", "--block", 32, "--eval-tokens", 256, "--json")
    code, measured, _ = call("eval", tmp_path / "one" / "model", *given)
    assert code == 0 and json.loads(measured)["loss"] == pytest.approx(json.loads(said)["loss_after"], rel=1e-4)
    assert json.loads(measured)["tokens"] < 250, "answers"


def test_remove_fits_on_the_whole_text_of_chats(call: Call, place: Path, tmp_path: Path) -> None:  # noqa: F811
    quick = ("--fit-tokens", 1024, "--eval-tokens", 1024, "--budget", "50%", "--json")
    code, said, err = call("remove", place / "llama", "--data", place / "chats.jsonl", "--out", tmp_path, *quick)
    assert code == 0, err
    assert json.loads(said)["verify"]["passed"]


def test_commands_without_a_template_refuse_chats(call: Call, place: Path, tmp_path: Path) -> None:  # noqa: F811
    data = ("--data", place / "chats.jsonl", "--out", tmp_path / "run")
    for command in (("taper", place / "mute"), ("remove", place / "mute")):
        code, _, err = call(*command, *data)
        assert code == 2 and "the tokenizer has no chat template" in err and err.count("\n") == 1
    code, _, err = call("pretrain", *data)
    assert code == 2 and "name a column of text (--text-column)" in err
    assert not (tmp_path / "run").exists()


def test_disturbed_blocks():
    """A share of the blocks, with a tenth of their tokens from elsewhere in the text, and nothing to predict."""
    ids = torch.arange(200 * 50).view(200, 50) % 977
    blocks = Blocks(ids, ids)
    found = disturbed(blocks, 0.25, seed=3)
    changed = found.ids != ids
    hit = (found.labels[:, 8:] == -100).all(-1)
    assert torch.equal(found.labels[:, :8], ids[:, :8]) and not changed[:, :8].any()  # no batch has nothing to predict
    assert 0.15 < float(hit.float().mean()) < 0.35 and torch.equal(found.labels[~hit], ids[~hit])
    assert 0.07 < float(changed[hit, 8:].float().mean()) < 0.13 and not changed[~hit].any()
    assert bool(torch.isin(found.ids, ids).all())
    again = disturbed(blocks, 0.25, seed=3)
    assert torch.equal(found.ids, again.ids) and torch.equal(found.labels, again.labels)
    assert not torch.equal(found.ids, disturbed(blocks, 0.25, seed=4).ids)
