"""Massive tokens in warm-up: named, refused on every rank, and allowed where that is asked for."""

import dataclasses

import pytest
import torch

from tapernorm import MassiveTokenError, TaperConfig, taper_
from tapernorm.statistics import pending
from tiny_models import ids
from warmup import scales, tapered, tiny, warm


def with_massive_token(config, family, factor=3e3, position=3):
    model, controller = tapered(config, family)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[17] *= factor
    rows = torch.where(ids(4, 16) == 17, 18, ids(4, 16))
    rows[2, position] = 17
    return model, controller, rows


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_a_massive_token_is_named(family):
    model, controller, rows = with_massive_token(TaperConfig(warmup_steps=3), family)
    model(input_ids=rows)
    controller.step()
    clean = torch.where(rows == 17, 18, rows)
    model(input_ids=clean)  # seen once is enough, and remembered
    controller.step()
    model(input_ids=clean)
    with pytest.raises(MassiveTokenError) as error:
        controller.step()
    message, sites = str(error.value), list(controller.sites)
    assert any(message.startswith(f"{name}: ") for name in sites)
    assert "token id 17 at position 3 had" in message
    assert "keep=" in message and "allow_massive=True" in message and "massive_ratio=20" in message
    assert (controller.step_count, controller.phase, controller.gate) == (2, "warmup", 1.0)


def test_a_massive_token_of_a_step_that_did_not_happen_is_forgotten():
    model, controller, rows = with_massive_token(TaperConfig(warmup_steps=2), "llama")
    model(input_ids=rows)
    controller.step(skipped=True)
    warm(model, controller, [torch.where(rows == 17, 18, rows)], steps=2)
    assert controller.phase == "taper"


def test_after_a_massive_token_the_step_can_be_tried_again():
    model, controller, rows = with_massive_token(TaperConfig(warmup_steps=1), "llama")
    model(input_ids=rows)
    before = controller.state_dict()
    for _ in range(2):  # nothing of it was counted, nothing forgotten
        with pytest.raises(MassiveTokenError):
            controller.step()
        after = controller.state_dict()
        assert all(torch.equal(v, after[k]) for k, v in before.items() if isinstance(v, torch.Tensor))
    controller.config = dataclasses.replace(controller.config, allow_massive=True)
    controller.step()
    assert controller.phase == "taper"


def test_a_massive_token_on_another_rank_stops_all(monkeypatch):
    """Every rank comes to the same verdict: what is judged is gathered first."""
    model, controller, rows = with_massive_token(TaperConfig(warmup_steps=1), "llama")
    model(input_ids=rows)
    theirs = pending(list(controller._statistics.values()))
    other = tiny()
    mine = taper_(other, TaperConfig(warmup_steps=1))
    other(input_ids=torch.where(rows == 17, 18, rows))
    monkeypatch.setattr("tapernorm.controller.gather", lambda own: torch.stack([own, theirs]))
    with pytest.raises(MassiveTokenError, match="token id 17 at position 3"):
        mine.step()


def test_allow_massive_goes_on():
    model, controller, rows = with_massive_token(TaperConfig(warmup_steps=2, allow_massive=True), "llama")
    warm(model, controller, [rows], steps=2)
    assert controller.phase == "taper"
    assert torch.isfinite(scales(controller)).all()


def test_a_massive_token_in_the_padding_does_not_count():
    model, controller, rows = with_massive_token(TaperConfig(warmup_steps=1), "llama")
    mask = (rows != 17).long()
    warm(model, controller, [rows], steps=1, attention_mask=mask)
    assert controller.phase == "taper"


def test_massive_ratio_is_the_threshold():
    model, controller, rows = with_massive_token(TaperConfig(warmup_steps=1, massive_ratio=1e6), "llama")
    warm(model, controller, [rows], steps=1)
    assert controller.phase == "taper"
    model, controller = tapered(TaperConfig(warmup_steps=1, massive_ratio=1.01))
    model(input_ids=ids(2))
    with pytest.raises(MassiveTokenError):
        controller.step()
