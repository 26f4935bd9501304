"""A fold is refused where the mean of the loss would hide tokens that are lost."""

import copy
import math

import pytest
import torch
import transformers

import tapernorm as tn
from tapernorm.modules import taper_norms
from tapernorm.soundness import refuse_lost
from zoo import BY_NAME, IDS, D, assert_same, logits, snapshot, tapered

LLAMA = BY_NAME["llama"]
MODEL = torch.nn.Module()
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
    example = {"input_ids": labels.clone(), "labels": labels}
    refuse_lost(MODEL, sound, example)
    lost = sound.clone()
    lost[0, 5, 0] = -3.0 * math.log(vocabulary)  # and the softmax of the rest on top of it
    refuse_lost(MODEL, lost, example)
    lost[0, 6, 0] = -3.0 * math.log(vocabulary)
    with pytest.raises(tn.FoldError, match="2 of 1001 tokens"):
        refuse_lost(MODEL, lost, example)
    labels[0, 7] = -100  # the label of position 6: not asked for, so not lost
    refuse_lost(MODEL, lost, example)


def test_a_loss_that_is_not_finite_is_lost():
    logits_ = torch.zeros(1, 11, D)
    logits_[0, 3, 2] = torch.nan
    zeros = torch.zeros(1, 11, dtype=torch.long)
    with pytest.raises(tn.FoldError, match="1 of 10 tokens"):
        refuse_lost(MODEL, logits_, {"input_ids": zeros, "labels": zeros})


def of_tokens():
    """A classifier of tokens: its logits are of four classes, and its labels no ids."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_labels=4
    )
    return transformers.LlamaForTokenClassification(config), {"input_ids": IDS, "labels": IDS % 4}


def of_pairs():
    """An encoder-decoder: its labels are its decoder's, and not shifted."""
    config = transformers.T5Config(
        vocab_size=97, d_model=24, d_ff=40, d_kv=12, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize("make", [of_tokens, of_pairs])
def test_labels_that_are_no_next_tokens_are_not_judged(make):
    torch.manual_seed(0)
    model, example = make()
    model = model.double()
    tn.taper_(model, tn.TaperConfig(), example=example)
    for module in taper_norms(model).values():
        module.set_gate(0.0)
        module.fixed_norm.weight.data.mul_(30)
    assert tn.fold_(model, example=example).folded
