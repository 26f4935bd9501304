"""The study `transfer` on images made here, so that it needs no scikit-learn."""

import sys

import pytest
import torch

from studying import study
from tapernorm.studies import transfer


@pytest.fixture
def easy(monkeypatch):
    """600 images whose brightness is their class, and a small transformer."""
    numbers = torch.arange(600) % 10
    noise = torch.randn(600, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images = (numbers / 4.5 - 1)[:, None, None, None] + 0.05 * noise
    monkeypatch.setattr(transfer, "digits", lambda: (images, numbers))
    monkeypatch.setattr(transfer, "SHAPES", {"small": (16, 2, 2, 60), "paper": (16, 2, 2, 60)})
    monkeypatch.setattr(transfer, "RATE", 1e-2)


def test_every_arm_of_both_tasks_has_a_row(easy, tmp_path):
    said, rows = study("transfer", tmp_path, only=["seed=0"])
    assert [(row["task"], row["arm"]) for row in rows] == [(t, a) for t in transfer.TASKS for a in transfer.ARMS]
    assert said["left"] == 0 and [row["norms"] for row in rows if not row["diverged"]][:3] == [5, 1, 0]
    for row in rows:
        assert row["diverged"] == 0, row["why"]
        assert row["fold_error"] is None if row["arm"] == "norm" else row["fold_error"] < 1e-4
        if row["task"] == "classes":
            assert 0.2 < row["accuracy"] <= 1 and row["mse"] is None
        else:
            assert row["mse"] < 1 and row["accuracy"] is None
    page = (tmp_path / "transfer" / "page.md").read_text(encoding="utf-8")
    assert page.count("| `internal` | 1 | 1 |") == 2 and "None." in page
    assert {path.name for path in (tmp_path / "transfer").glob("*.svg")} == {"classes.svg", "value.svg"}


def test_arms_of_a_seed_start_from_the_same_weights_and_images(easy, tmp_path, monkeypatch):
    seen = []

    def watched(model, batches, inputs, recipe, driver):
        names = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
        seen.append((torch.cat([p.detach().flatten() for _, p in names]), batches, inputs(batches[0])["pixel_values"]))
        return "not trained"

    monkeypatch.setattr("tapernorm.studies.loop.train", watched)
    _, rows = study("transfer", tmp_path, only=["task=value", "seed=1,2"])
    assert all(row["diverged"] == 1 and row["why"] == "not trained" and row["mse"] is None for row in rows)
    for of_seed in (seen[:3], seen[3:]):
        for ours in of_seed[1:]:
            assert all(torch.equal(a, b) for a, b in zip(ours, of_seed[0], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(seen[0], seen[3], strict=True))


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    transfer.digits.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'tapernorm\[digits\]'"):
        transfer.digits()


def test_the_digits():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, which is not installed")
    transfer.digits.cache_clear()
    images, numbers = transfer.digits()
    assert images.shape == (1797, 1, 8, 8) and float(images.min()) == -1 and float(images.max()) == 1
    assert sorted(numbers.unique().tolist()) == list(range(10))
