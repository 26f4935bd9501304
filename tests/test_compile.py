"""torch.compile: at most three compilations a run, none for a gate that moves, and the same numbers as eager."""

import copy
import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tapernorm import TaperConfig, get_controller, taper_
from tapernorm.modules import taper_norms
from zoo import BY_NAME, D, randomise, tapered

torch.set_num_threads(1)

# a layer at a time: the regional compilation that transformers itself does
LAYERS = {"llama": "model.layers", "gpt2-untied": "transformer.h"}
OFF = {"gpt2-untied": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, name, counter):
    for layer in model.get_submodule(LAYERS[name]):
        layer.compile(backend=counter)
    return model


def run(model, steps, log):
    controller = get_controller(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randint(D, (2, 8), generator=torch.Generator().manual_seed(controller.step_count))
        # without a cache, whose own state would be compiled in: it doubles what stock layers compile, too
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss + controller.auxiliary_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        log.append((loss.item(), *controller.scales.values()))


@pytest.mark.parametrize("name", LAYERS)
def test_three_compilations_over_a_whole_run(name):
    """50 gate values, two layers, statistics and scale loss on."""
    config = TaperConfig(arm="all", warmup_steps=4, taper_steps=51, ema_decay=0.5, anchor_weight=0.01)
    model = randomise(BY_NAME[name].build(**OFF.get(name, {}))).float().train()
    taper_(model, config)
    eager, found, wanted = copy.deepcopy(model), [], []
    counter = CompileCounterWithBackend("aot_eager")
    compiled(model, name, counter)
    after = []
    for steps in (3, 2, 50, 5):  # warm-up; over its end, after which nothing is observed; 50 gates; done
        run(model, steps, found)
        after.append(counter.frame_count)
    assert after == [1, 1, 2, 3]
    run(eager, 60, wanted)
    assert get_controller(model).phase == "done"
    for ours, reference in zip(found, wanted, strict=True):
        assert ours == pytest.approx(reference, rel=2e-5)


@pytest.mark.parametrize("gate", (1.0, 0.4, 0.0))
@pytest.mark.parametrize("name", ("rms", "layer"))
def test_no_graph_break_in_a_norm(name, gate):
    """In training and evaluation; forward and gradients as in eager."""
    row = "llama" if name == "rms" else "gpt2-untied"
    model = tapered(BY_NAME[row], gate=gate)
    module = next(iter(taper_norms(model).values())).train()
    twin = copy.deepcopy(module)
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    h = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    again = h.detach().clone().requires_grad_()
    for training in (True, False):
        module.train(training), twin.train(training)
        y, z = whole(h), twin(again)
        torch.testing.assert_close(y, z, rtol=1e-14, atol=1e-14)
        y.square().sum().backward()
        z.square().sum().backward()
    torch.testing.assert_close(h.grad, again.grad, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_statistics_of_compiled_layers():
    """The observer is called through an operator; also under gradient checkpointing, once a forward."""
    config = TaperConfig(warmup_steps=9, ema_decay=0.5)
    found = []
    for how in ("eager", "compiled", "checkpointed"):
        model = randomise(BY_NAME["llama"].build()).float().train()
        controller = taper_(model, config)
        if how == "checkpointed":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if how != "eager":
            compiled(model, "llama", "aot_eager")
        for step in range(3):
            rows = torch.randint(D, (2, 8), generator=torch.Generator().manual_seed(step))
            model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
            model(input_ids=rows[:1], labels=rows[:1], use_cache=False).loss.backward()
            controller.step()
        found.append(controller.state_dict()["average.total"])
        torch._dynamo.reset()
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[2], found[0], rtol=1e-6, atol=1e-6)


def test_a_copy_of_a_compiled_model_is_observed_for_itself():
    model = randomise(BY_NAME["llama"].build()).float().train()
    controller = taper_(model, TaperConfig(warmup_steps=9))
    twin = copy.deepcopy(model)
    compiled(twin, "llama", "aot_eager")
    rows = torch.randint(D, (2, 8))
    twin(input_ids=rows)
    get_controller(twin).step()
    controller.step()
    assert get_controller(twin)._average.weight.all() and not controller._average.weight.any()


def test_losses_of_the_controller_with_a_compiled_model():
    """The uniformity loss and the seat belt break the graph at a norm, and give the same numbers."""
    config = TaperConfig(
        arm="all", warmup_steps=2, taper_steps=3, ema_decay=0.5, uniformity_weight=0.1, cap=2.0, allow_massive=True
    )
    model = randomise(BY_NAME["llama"].build()).float().train()
    taper_(model, config)
    eager, found, wanted = copy.deepcopy(model), [], []
    model.compile(backend="aot_eager")
    run(model, 7, found)
    run(eager, 7, wanted)
    for ours, reference in zip(found, wanted, strict=True):
        assert ours == pytest.approx(reference, rel=2e-5)


@pytest.mark.parametrize("gate", (1.0, 0.4, 0.0))
def test_ahead_of_time_export_in_evaluation(gate):
    model = tapered(BY_NAME["llama"], gate=gate, dtype=torch.float32).eval()
    rows = torch.randint(D, (2, 8))
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": rows, "use_cache": False}, strict=False)
        found = program.module()(input_ids=rows, use_cache=False).logits
        torch.testing.assert_close(found, model(input_ids=rows, use_cache=False).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_the_real_compiler(name):
    config = TaperConfig(arm="all", warmup_steps=2, taper_steps=3, ema_decay=0.5)
    model = randomise(BY_NAME[name].build(**OFF.get(name, {}))).float().train()
    taper_(model, dataclasses.replace(config, anchor_weight=0.01))
    eager, found, wanted = copy.deepcopy(model), [], []
    for layer in model.get_submodule(LAYERS[name]):
        layer.compile()
    run(model, 8, found)
    run(eager, 8, wanted)
    for ours, reference in zip(found, wanted, strict=True):
        assert ours == pytest.approx(reference, rel=1e-4)
