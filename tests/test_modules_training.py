"""TaperNorm in training: which parameters have a gradient, what is frozen or decayed, and what its observer sees."""

import pytest
import torch

import tapernorm as tn
from norms import NORM, NORMS, PATHS, ROW, residual, taper_norm
from tapernorm.modules import TaperNorm, in_backward, taper_norms
from tapernorm.probe import probe
from zoo import IDS, D, tapered

# Parameters stay in the graph


@ROW
@pytest.mark.parametrize("path", PATHS)
def test_every_parameter_has_a_gradient_on_every_path(row, path):
    model = tapered(row, gate=PATHS[path], dtype=torch.float32).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    unused = {"exact": ".fixed_norm.", "fixed": ".norm.weight"}.get(path)
    site = next(iter(row.sites))
    for name, parameter in model.get_submodule(site).named_parameters(prefix=site):
        is_unused = unused is not None and unused in name
        if name.endswith("weight"):
            assert bool(parameter.grad.any()) != is_unused, name


@pytest.mark.parametrize("path", ["exact", "fixed"])
def test_nothing_is_held_in_evaluation(path):
    module, h = taper_norm("layer", PATHS[path]).train(), residual(2, 5)
    assert "Hold" in type(module(h.requires_grad_()).grad_fn).__name__
    with torch.no_grad():
        assert module(h).grad_fn is None
    assert "Hold" not in type(module.eval()(h).grad_fn).__name__


def test_frozen_parameters_are_not_held():
    module, h = taper_norm("layer").train(), residual(2, 5)
    module.fixed_norm.requires_grad_(False)
    module(h.requires_grad_()).sum().backward()
    assert module.fixed_norm.weight.grad is None
    assert module.norm.weight.grad is not None


@NORM
def test_a_frozen_norm_gives_a_frozen_fixed_branch(name):
    norm = NORMS[name]()
    norm.requires_grad_(False)
    module = TaperNorm(norm, probe(norm, D), D)
    wanted = not list(norm.parameters())  # nothing was frozen where there is nothing
    assert {p.requires_grad for p in module.fixed_norm.parameters()} == {wanted}


@pytest.mark.parametrize("path", PATHS)
def test_the_input_may_be_given_by_name(path):
    module, h = taper_norm("rms", PATHS[path]), residual(2, 5)
    assert torch.equal(module(hidden_states=h), module(h))


@ROW
def test_stock_trainers_do_not_decay_what_was_added(row):
    from transformers import Trainer

    model = row.build()
    tn.taper_(model, tn.TaperConfig(arm="all"))
    decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    assert any("proj" in name or "c_fc" in name for name in decayed)
    for site in taper_norms(model):
        assert not [name for name in decayed if name.startswith(f"{site}.")]


# Observation


def test_the_observer_sees_training_forwards_only():
    module, h, seen = taper_norm("rms").train(), residual(2, 5), []
    module.observer = seen.append
    module(h)
    assert seen == [h]
    module.eval()(h)
    assert len(seen) == 1


def test_the_observer_sees_a_checkpointed_forward_once():
    module, seen = taper_norm("rms").train(), []
    module.observer = seen.append
    for reentrant in (False, True):
        h = residual(2, 5).requires_grad_()
        torch.utils.checkpoint.checkpoint(module, h, use_reentrant=reentrant).sum().backward()
        assert h.grad is not None
    assert len(seen) == 2
    assert not in_backward()
