"""Text that a model writes itself: what it is sampled from, how much, and what a run makes of it."""

from __future__ import annotations

import json
import re

import pytest
import torch

import tapernorm as tn
from tapernorm import removal, self_text
from tapernorm.data import load_text
from tapernorm.self_text import NAME, save_text, write_text
from test_cli import QUICK, Call, call, models, text  # noqa: F401  (fixtures)


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "_ROUNDS", 1)


@pytest.fixture(params=["llama", "gpt2"])
def pair(request, models):  # noqa: F811
    return tn.from_pretrained(models / request.param)


def only(model, token: int) -> None:
    """Make the model write one token and nothing else."""
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    torch.nn.init.zeros_(model.lm_head.weight)
    torch.nn.init.zeros_(model.lm_head.bias)
    model.lm_head.bias.data[token] = 50.0


def tokens_of(tokenizer, documents) -> int:
    return sum(len(tokenizer(document, add_special_tokens=False)["input_ids"]) for document in documents)


def test_enough_tokens_and_a_quarter_of_them_for_validation(pair) -> None:
    model, tokenizer = pair
    only(model, tokenizer("a", add_special_tokens=False)["input_ids"][0])  # decoded and encoded again, the same tokens
    found = write_text(model, tokenizer, 4096)
    assert found.name == NAME and all(document.strip() for document in [*found.train, *found.validation])
    train, held = (tokens_of(tokenizer, part) for part in (found.train, found.validation))
    assert 3072 <= train < 3072 + 63 and 1024 - 63 < held < 1024 + 32 * 63


def test_the_seed_makes_the_text_and_nothing_around_it_changes(pair) -> None:
    model, tokenizer = pair
    config, state = model.generation_config, torch.get_rng_state()
    one, again = write_text(model, tokenizer, 4096, seed=3), write_text(model, tokenizer, 4096, seed=3)
    assert one == again and one != write_text(model, tokenizer, 4096, seed=4)
    assert model.generation_config is config and torch.equal(torch.get_rng_state(), state)


def test_it_is_sampled_at_temperature_one_whatever_the_model_is_set_to(pair) -> None:
    """The tokens of a model whose logits do not depend on the text are drawn from their softmax."""
    model, _ = pair
    only(model, 50)
    model.lm_head.bias.data.zero_()
    model.lm_head.bias.data[50:54] = torch.log(torch.tensor([8.0, 4.0, 2.0, 1.0])) + 30
    model.generation_config.update(top_k=1, temperature=0.1, repetition_penalty=3.0, min_new_tokens=2)
    made = self_text._sample(model, torch.zeros(64, 1, dtype=torch.long), 60, 1, lambda count: None)[:, 1:]
    shares = torch.bincount(made.flatten(), minlength=54)[50:54] / made.numel()
    assert made.shape == (64, 60) and torch.allclose(shares, torch.tensor([8, 4, 2, 1]) / 15, atol=0.03)


def test_a_text_ends_at_its_end_token(pair) -> None:
    model, tokenizer = pair
    only(model, tokenizer("a", add_special_tokens=False)["input_ids"][0])
    model.lm_head.bias.data[tokenizer.eos_token_id] = 50.0 - 2.0
    found = write_text(model, tokenizer, 4096, rows=256)
    lengths = {len(document) for document in found.train}
    assert len(lengths) > 5 and max(lengths) <= 63 and set("".join(found.train)) == {"a"}


def test_without_bos_and_eos_a_text_begins_with_a_common_word(pair) -> None:
    model, tokenizer = pair
    assert self_text._starts(model, tokenizer, 3, torch.Generator()).tolist() == [[0]] * 3
    tokenizer.bos_token = None
    assert self_text._starts(model, tokenizer, 3, torch.Generator()).tolist() == [[1]] * 3
    tokenizer.eos_token = None
    starts = self_text._starts(model, tokenizer, 30, torch.Generator().manual_seed(0))
    words = {tokenizer.decode(row) for row in starts}
    assert words <= set(self_text._OPENINGS) and len(words) > 1
    assert len(write_text(model, tokenizer, 4096).train) >= 48  # each as long as the context


def test_what_it_refuses(pair) -> None:
    model, tokenizer = pair
    with pytest.raises(ValueError, match=r"--self-generate 100: at least 4,096"):
        write_text(model, tokenizer, 100)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        write_text(model, tokenizer, 4096)


def test_a_model_that_ends_at_once_is_told_to_need_text(pair) -> None:
    model, tokenizer = pair
    only(model, tokenizer.eos_token_id)
    with pytest.raises(ValueError, match=r"wrote 0 tokens in .* ends them too soon; pass --data"):
        write_text(model, tokenizer, 4096)


def test_what_was_kept_is_read_as_it_was(tmp_path) -> None:
    kept = self_text.TextData(["one\nline\u2028", "é two"], ["three"], NAME)
    save_text(kept, tmp_path / "text")
    found = load_text(tmp_path / "text", cache_dir=tmp_path / "cache")
    assert list(found.train) == kept.train and list(found.validation) == kept.validation


def test_remove_needs_nothing_but_the_model(call: Call, models, tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tapernorm.removal.SELF_TOKENS", 6144)
    code, said, err = call("remove", models / "llama", "--budget", "20%")
    assert code == 0, err
    assert "tapernorm: the model writes 6,144 tokens of text itself, for want of --data" in err
    run = tmp_path / "runs" / "llama-removed"
    record = json.loads((run / "run.json").read_text())
    assert record["data"]["name"] == NAME and record["data"]["self_generated"] is True
    assert record["settings"]["data"] is None and record["settings"]["self_generate"] == 6144
    assert record["settings"]["fit_tokens"] == 3072 and record["data"]["validation_tokens"] >= 1024
    assert load_text(run / "text", cache_dir=tmp_path / "cache").train
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "written by the model itself" in page and NAME in page
    verdict = " ".join(said.split())
    assert re.search(r"\d of 4 norms of llama were taken out without training, under a loss budget of 20 %", verdict)
    assert re.search(r"It writes [\d.,]+ tokens a second, and the original [\d.,]+", verdict)
    # again: another folder; with --overwrite the first one; both texts where both are asked for
    code, _, _ = call("remove", models / "llama", "--budget", "20%", "--json")
    assert code == 0 and (tmp_path / "runs" / "llama-removed-2" / "report.html").is_file()
    assert removal.default_out("hub/llama.gguf", overwrite=True) == "runs/llama-removed"
    assert removal.default_out(str(models / "llama")) == "runs/llama-removed-3"


def test_taper_takes_it_beside_a_text_and_takes_the_same_when_resumed(call: Call, models, text, tmp_path, monkeypatch):  # noqa: F811
    out = tmp_path / "run"
    given = ("taper", models / "llama", "--self-generate", 4096, "--data", text, "--out", out, *QUICK, "--no-baseline")
    with monkeypatch.context() as broken:
        broken.setattr("tapernorm.runs._finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        code, _, err = call(*given)
    assert code == 130 and "writes 4,096 tokens of text itself, beside --data" in err
    record = json.loads((out / "run.json").read_text())
    assert record["data"]["sources"] == ["stories.jsonl", NAME] and record["data"]["self_generated"] is True
    monkeypatch.setattr(self_text, "write_text", lambda *_, **__: pytest.fail("written again"))
    code, _, err = call(*given, "--resume")
    assert code == 0, err
    assert json.loads((out / "run.json").read_text())["status"] == "done"
