"""The study `alternatives` on a text that fits in a test."""

import functools

import pytest
import torch

import tapernorm.bench
from studying import study, text_file
from tapernorm.material import random_llama
from tapernorm.studies import alternatives
from tapernorm.studies.loop import Recipe

SHORT = ("steps=40", "batch=2", "block=16")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """(folder, what the runner said, rows) of all methods of one seed."""
    folder = tmp_path_factory.mktemp("alternatives")
    quick = functools.partial(tapernorm.bench.bench, rounds=1, new_tokens=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tapernorm.bench.bench", quick)
        patch.setattr(alternatives, "EVAL_TOKENS", 512)
        patch.setattr(alternatives, "RATE", 3e-4)  # steps of 32 tokens are no place for a large one
        said, found = study("alternatives", folder, data=text_file(folder), only=["seed=0"], extra=SHORT)
    return folder, said, found


def test_every_method_has_a_row(rows):
    folder, said, found = rows
    assert [row["method"] for row in found] == list(alternatives.METHODS) and said["left"] == 0
    for row in found:
        assert (row["model"], row["steps"], row["tokens"]) == ("llama-1m", 40, 40 * 2 * 16)
        if row["method"] == "all+aux" and row["diverged"]:  # on steps of 32 tokens it may be lost; then it says why
            assert row["why"] and row["decode_ratio"] is None
            continue
        assert row["diverged"] == 0 and row["why"] is None, row
        assert 0 < row["val_loss"] < 10 and row["decode_ratio"] > 0
        assert row["gap_percent"] == pytest.approx(100 * (row["val_loss"] / found[0]["val_loss"] - 1), abs=1e-9)
    assert len({row["val_loss"] for row in found}) == len(found)
    page = (folder / "alternatives" / "page.md").read_text(encoding="utf-8")
    assert all(f"| `{method}` | 1 |" in page for method in alternatives.METHODS)
    assert {path.name for path in (folder / "alternatives").glob("*.svg")} == {"gap.svg", "decoding.svg"}


def test_all_methods_start_from_the_same_weights():
    models = {}
    for method in ("rms", "internal", "all+aux", "dyt", "derf", "none", "dyt 2"):
        models[method] = random_llama(16, 2, 64, 32, seed=5)
        alternatives.prepare(method, models[method], Recipe(40, 2, 1e-3), seed=5)
    plain = dict(models["rms"].named_parameters())
    for method, model in models.items():
        ours = {name.replace(".linear.", "."): p for name, p in model.named_parameters()}
        matrices = [name for name, p in plain.items() if p.dim() == 2]
        assert len(matrices) == 15 and all(torch.equal(ours[name], plain[name]) for name in matrices), method
    begins = {method: models[method].model.norm.alpha.item() for method in ("dyt", "dyt 2", "derf")}
    assert begins == {"dyt": 1, "dyt 2": 2, "derf": 0.5}


def test_a_run_that_is_lost_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(alternatives, "EVAL_TOKENS", 512)
    monkeypatch.setattr("tapernorm.studies.loop.train", lambda *_: "loss nan, gradient nan at step 3")
    said, found = study("alternatives", tmp_path, data=text_file(tmp_path), only=["seed=1", "method=dyt"], extra=SHORT)
    assert said["diverged"] == 1 and found[0]["val_loss"] is None and found[0]["gap_percent"] is None
    page = (tmp_path / "alternatives" / "page.md").read_text(encoding="utf-8")
    assert "- llama-1m, dyt, 1: loss nan, gradient nan at step 3" in page and "1 of 1 |" in page
