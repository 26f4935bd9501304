"""A fold is refused where the mean of the loss would hide tokens that are lost."""

import copy
import math

import pytest
import torch

import tapernorm as tn
from tapernorm.modules import taper_norms
from tapernorm.soundness import refuse_lost
from zoo import BY_NAME, IDS, D, assert_same, logits, snapshot, tapered

LLAMA = BY_NAME["llama"]
LABELLED = {"input_ids": IDS, "labels": IDS}


def blown():
    """A model whose logits are far too sure: every scale is thirty times too large."""
    model = tapered(LLAMA, "all")
    for module in taper_norms(model).values():
        module.fixed_norm.c.mul_(30)
    return model


def test_a_blown_tail_is_refused_and_the_model_left_as_it_was():
    model = blown()
    before = snapshot(model)
    with pytest.raises(tn.FoldError, match=r"tokens of the example have a loss above .* allow_tail=True"):
        tn.fold_(model, example=LABELLED)
    assert_same(before, snapshot(model))


def test_unless_told_otherwise():
    model = blown()
    wanted = logits(model)
    report = tn.fold_(model, example=LABELLED, allow_tail=True)
    assert report.folded
    assert (logits(model) - wanted).abs().max() < 1e-9 * wanted.abs().max()


def test_without_labels_nothing_is_known():
    assert tn.fold_(blown(), example={"input_ids": IDS}).folded


def test_a_sound_model_folds():
    model = tapered(LLAMA, "internal")
    twin = copy.deepcopy(model)
    assert tn.fold_(model, example=LABELLED).folded == tn.fold_(twin).folded


def test_one_token_in_a_thousand_may_be_lost():
    vocabulary, length = 8, 1002
    labels = torch.zeros(1, length, dtype=torch.long)
    sound = torch.zeros(1, length, vocabulary)
    refuse_lost(sound, {"labels": labels})
    lost = sound.clone()
    lost[0, 5, 0] = -3.0 * math.log(vocabulary)  # and the softmax of the rest on top of it
    refuse_lost(lost, {"labels": labels})
    lost[0, 6, 0] = -3.0 * math.log(vocabulary)
    with pytest.raises(tn.FoldError, match="2 of 1001 tokens"):
        refuse_lost(lost, {"labels": labels})
    labels[0, 7] = -100  # the label of position 6: not asked for, so not lost
    refuse_lost(lost, {"labels": labels})


def test_a_loss_that_is_not_finite_is_lost():
    logits_ = torch.zeros(1, 11, D)
    logits_[0, 3, 2] = torch.nan
    with pytest.raises(tn.FoldError, match="1 of 10 tokens"):
        refuse_lost(logits_, {"labels": torch.zeros(1, 11, dtype=torch.long)})
