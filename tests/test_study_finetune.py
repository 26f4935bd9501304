"""The study `finetune` with a GPT-2 and texts that fit in a test."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tapernorm as tn
from studying import study, text_file
from tapernorm.data import load_text, train_tokenizer
from tapernorm.studies import finetune

TINY = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(finetune, "SHAPE", TINY)
    monkeypatch.setattr(finetune, "VOCABULARY", 300)
    monkeypatch.setattr(finetune, "PRETRAINING", {"steps": 4, "rate": 1e-3})
    monkeypatch.setattr(finetune, "BATCH", {"small": (2, 16), "paper": (2, 16)})
    monkeypatch.setattr(finetune, "STEPS", dict.fromkeys(finetune.STEPS, 30))
    monkeypatch.setattr(finetune, "EVAL_TOKENS", {"small": 256, "paper": 256})


@pytest.fixture
def texts(tmp_path):
    """(what is tuned on, another text)"""
    return text_file(tmp_path), text_file(tmp_path, "other.jsonl", "or perhaps")


def test_every_method_is_measured_on_both_texts(tmp_path, texts):
    tuned, other = texts
    said, rows = study("finetune", tmp_path, data=tuned, only=["seed=0"], extra=[f"other={other}"])
    assert said["runs"] == len(rows) == 8 and said["diverged"] == 0
    found = {(row["method"], row["corpus"]): row for row in rows}
    assert list(found) == [(method, corpus) for method in finetune.METHODS for corpus in finetune.CORPORA]
    left = {method: found[method, "tuned"]["norms"] for method in finetune.METHODS}
    assert left == {"vanilla": 5, "fakeln": 0, "internal": 1, "all": 0}
    assert len({row["val_loss"] for row in rows}) == 8
    for (_, corpus), row in found.items():
        assert row["text"] == {"tuned": "stories.jsonl", "other": "other.jsonl"}[corpus]
        assert (row["steps"], row["tokens"]) == (30, 30 * 2 * 16) and 0 < row["val_loss"] < 10
    page = (tmp_path / "finetune" / "page.md").read_text(encoding="utf-8")
    assert "| other.jsonl | `fakeln` | 0 | 1 |" in page and "`all` below `fakeln` in every cell: in" in page
    assert (tmp_path / "finetune" / "gap.svg").is_file()


def test_both_texts_are_one_training(tmp_path, texts, monkeypatch):
    tuned, other = texts
    made, trained = [], finetune._tuned
    monkeypatch.setattr(finetune, "_tuned", lambda *args: made.append(args[0]["method"]) or trained(*args))
    only = ["method=vanilla,all", "seed=0"]
    study("finetune", tmp_path, data=tuned, only=only, extra=[f"other={other}"])
    assert made == ["vanilla", "all"]


def test_all_methods_see_the_same_batches_of_unseen_text(tmp_path, texts):
    tuned, other = texts
    context = finetune_context(tmp_path, tuned, {"other": other})
    material = finetune._material(finetune.SMALL, context)
    seen = finetune._half()
    assert seen == 4 and len(material.train) > 2
    again = finetune._material(finetune.SMALL, context)
    assert torch.equal(material.train, again.train)
    ours, theirs = (m.model.state_dict() for m in (material, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(module.p for module in material.model.modules() if isinstance(module, torch.nn.Dropout))


def finetune_context(folder, data, extra, scale="small"):
    from tapernorm.studies.base import Context

    return Context(scale, data, folder / "finetune", extra)


def test_real_weights_come_from_a_folder(tmp_path, texts):
    tuned, other = texts
    tokenizer = train_tokenizer(load_text(tuned).train, 300)
    torch.manual_seed(0)
    tn.save_pretrained(
        GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **TINY)), tmp_path / "gpt2", tokenizer=tokenizer
    )
    options = {"scale": "paper", "data": tuned, "only": ["model=gpt2", "method=vanilla"]}
    with pytest.raises(ValueError, match="gpt2 needs real weights: --set gpt2_path=FOLDER"):
        study("finetune", tmp_path, extra=[f"other={other}"], **options)
    with pytest.raises(ValueError, match=r"holds neither config\.json nor a folder gpt2 with one"):
        study("finetune", tmp_path, extra=[f"other={other}", f"gpt2_path={tmp_path / 'nothing'}"], **options)
    _, rows = study("finetune", tmp_path, extra=[f"other={other}", f"gpt2_path={tmp_path}"], **options)
    assert [row["corpus"] for row in rows] == ["tuned", "other"] and rows[0]["pretrained"] == "OpenAI's weights"
    page = (tmp_path / "finetune" / "page.md").read_text(encoding="utf-8")
    assert f"| gpt2 | 3.0126 | 3.0797 | +2.23 % | {rows[0]['val_loss']:.4f} |" in page


def test_the_other_text_is_another(tmp_path, texts):
    with pytest.raises(ValueError, match="name another text: --set other=FILE"):
        study("finetune", tmp_path, data=texts[0], only=["seed=0"], extra=[f"other={texts[0]}"])
