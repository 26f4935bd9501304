"""The training loop of studies: every arm sees the same, parts of a step add up, and what diverges is said."""

import copy

import pytest
import torch

import tapernorm as tn
import tiny_models
from tapernorm.studies.loop import Recipe, order, train

IDS = tiny_models.ids(rows=24, length=8)
TAPER = tn.TaperConfig(arm="all", warmup_steps=2, taper_steps=3, allow_massive=True)


def tiny():
    return tiny_models.tiny(layers=1)


def inputs(rows):
    return {"input_ids": IDS[rows], "labels": IDS[rows]}


def fit(model, recipe, driver=None, seed=0):
    return train(model, order(len(IDS), recipe, seed), inputs, recipe, driver)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_all_rows_come_once_before_one_comes_again():
    rows = order(24, Recipe(7, 8, 1e-3), seed=0)
    assert rows.shape == (7, 8)
    for epoch in rows.flatten()[:48].view(2, 24):
        assert sorted(epoch.tolist()) == list(range(24))
    assert not torch.equal(rows[:3], rows[3:6])
    assert torch.equal(rows, order(24, Recipe(7, 8, 1e-3), seed=0))
    assert not torch.equal(rows, order(24, Recipe(7, 8, 1e-3), seed=1))


def test_parts_of_a_step_are_the_step():
    """The anchor and the cross-entropy both: a step in four forwards moves the weights as one in a single forward."""
    moved = []
    for parts in (1, 4):
        model = tiny().double()  # Adam makes whole steps of what rounding leaves of a gradient that is 0
        controller = tn.taper_(model, TAPER)
        assert fit(model, Recipe(7, 8, 1e-3, parts=parts), controller) == ""
        moved.append(weights(model))
        assert controller.gate == 0 and not model.training
    assert torch.allclose(moved[0], moved[1], rtol=1e-4, atol=1e-5)


def test_until_the_gate_falls_an_arm_is_the_training_with_norms():
    plain, model = tiny(), tiny()
    controller = tn.taper_(model, TAPER)
    short = Recipe(2, 8, 1e-3)
    train(plain, order(len(IDS), short, 0), inputs, short)
    train(model, order(len(IDS), short, 0), inputs, short, controller)
    ours = {n.replace(".norm.weight", ".weight"): p for n, p in model.named_parameters() if "fixed_norm" not in n}
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, ours.get(name, ours.get(f"{name.removesuffix('.weight')}.norm.weight"))), name


def test_gains_and_biases_do_not_decay():
    model = tiny()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    still = copy.deepcopy(model)
    assert fit(model, Recipe(3, 8, 1e-9, decay=1e6)) == ""
    assert torch.allclose(weights(model), weights(still), rtol=1e-5)


@pytest.mark.parametrize("at", [0, 2])
def test_a_loss_that_is_not_finite_ends_it_with_its_reason(at):
    model, calls = tiny(), []

    def spoiled(rows):
        calls.append(rows)
        if len(calls) == at + 1:
            with torch.no_grad():
                model.lm_head.weight.fill_(torch.inf)
        return inputs(rows)

    recipe = Recipe(5, 8, 1e-3)
    why = train(model, order(len(IDS), recipe, 0), spoiled, recipe)
    assert why.startswith("loss nan") and why.endswith(f"at step {at + 1}") and len(calls) == at + 1


def test_a_massive_token_and_a_taper_that_does_not_end_are_reasons_too():
    model = tiny()
    controller = tn.taper_(model, tn.TaperConfig(warmup_steps=2, taper_steps=3, massive_ratio=1.0001))
    assert fit(model, Recipe(7, 8, 1e-3), controller).startswith("MassiveTokenError: model.")
    model = tiny()
    controller = tn.taper_(model, TAPER)
    assert fit(model, Recipe(3, 8, 1e-3), controller).startswith("the taper did not come to its end: the gate is 0.")
