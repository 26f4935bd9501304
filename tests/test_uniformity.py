"""The uniformity loss: its value and its gradient are those of the formula, however the model is run."""

import copy
import math

import pytest
import torch

from tapernorm import TaperConfig, taper_
from tapernorm.modules import taper_norms
from zoo import BY_NAME, randomise

WEIGHT = 0.3
ROW = pytest.mark.parametrize("name", ("llama", "gpt2-untied"))


def ids(rows, length=8, seed=0):
    return torch.randint(16, (rows, length), generator=torch.Generator().manual_seed(seed))


def ready(name, steps=1, dtype=torch.float64, weight=WEIGHT, **config):
    """A model that has a c, after `steps` steps of a warm-up of 3."""
    settings = {"arm": "all", "anchor_weight": 0.0, "warmup_steps": 3, "taper_steps": 4, "allow_massive": True} | config
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name.startswith("gpt2") else {}
    model = randomise(BY_NAME[name].build(**off)).to(dtype).train()
    controller = taper_(model, TaperConfig(uniformity_weight=weight, **settings))
    for _ in range(steps):
        loss = model(input_ids=ids(4, seed=50)).logits.sum() * 0 + controller.auxiliary_loss()
        if loss.requires_grad:
            loss.backward()
        controller.step()
    model.zero_grad(set_to_none=True)
    return model, controller


def formula(model, above=None, **inputs):
    """The loss as a part of the graph, from the inputs of the sites. Σ over sites and tokens, and tokens."""
    seen, counted, mask = [], [], inputs.get("attention_mask")

    def hook(module, args):
        h = args[0]
        x = h - h.mean(-1, keepdim=True) if module.probed.kind == "layer" else h
        r = (x.pow(2).mean(-1) + module.probed.eps).sqrt()
        deviation = (r * module.fixed_norm.c.to(r.dtype)).log()
        if above is not None:
            deviation = torch.relu(deviation - math.log(above))
            counted.append((deviation > 0).double().mean())
        deviation = deviation.pow(2)
        seen.append((deviation if mask is None else deviation * mask).sum())

    handles = [m.register_forward_pre_hook(hook) for m in taper_norms(model).values()]
    logits = model(**inputs).logits
    for handle in handles:
        handle.remove()
    assert above is None or 0.05 < sum(counted) / len(counted) < 0.95  # some count, and some do not
    tokens = inputs["input_ids"].numel() if mask is None else float(mask.sum())
    return sum(seen), tokens, logits


def target(logits, rows):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def reference(name, batches, steps, scale=1.0, **config):
    """Gradients of cross-entropy and the loss, by autograd alone, on a model without the loss of the library."""
    model, _ = ready(name, steps, weight=0.0, **config)
    theirs, _ = ready(name, steps, **config)  # whose weights and c are the same: there was no optimizer
    for module, other in zip(taper_norms(model).values(), taper_norms(theirs).values(), strict=True):
        assert torch.equal(module.fixed_norm.c, other.fixed_norm.c) and module.path == other.path
    value = 0.0
    for inputs in batches:
        total, tokens, logits = formula(model, config.get("uniformity_above"), **inputs)
        loss = target(logits, inputs["input_ids"]) + WEIGHT * total / tokens
        value += float((WEIGHT * total / tokens).detach())
        (scale * loss / len(batches)).backward()
    return value, {n: p.grad for n, p in model.named_parameters()}


def close(model, wanted, bound=1e-10):
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    assert largest > 1e-3
    for name, parameter in model.named_parameters():
        want = wanted[name] if wanted[name] is not None else torch.zeros_like(parameter)
        torch.testing.assert_close(parameter.grad, want, rtol=0, atol=bound * largest, msg=name)


@ROW
@pytest.mark.parametrize("steps", (1, 2, 4, 5), ids="in step {}".format)
@pytest.mark.parametrize("scale", (1.0, 1024.0))
@pytest.mark.parametrize("above", (None, 1.02))
def test_value_and_gradient(name, steps, scale, above):
    """In warm-up and in the taper, under accumulation, scaled as by a GradScaler; of all tokens, of the large ones."""
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, 5:] = 0
    batches = [{"input_ids": ids(2, seed=1)}, {"input_ids": ids(3, seed=2), "attention_mask": mask}]
    wanted_value, wanted = reference(name, batches, steps, scale, uniformity_above=above)
    model, controller = ready(name, steps, uniformity_above=above)
    value = 0.0
    for inputs in batches:
        logits = model(**inputs).logits
        auxiliary = controller.auxiliary_loss()
        value += float(auxiliary.detach())
        (scale * (target(logits, inputs["input_ids"]) + auxiliary) / len(batches)).backward()
    assert value == pytest.approx(wanted_value, rel=1e-10) and value > 1e-3
    close(model, wanted)
    controller.step()


@ROW
def test_the_loss_is_not_nothing(name):
    """Without it the gradient is another one: the tests above can fail."""
    batches = [{"input_ids": ids(2, seed=1)}]
    _, wanted = reference(name, batches, 1)
    model, _ = ready(name, 1, weight=0.0)
    target(model(**batches[0]).logits, ids(2, seed=1)).backward()
    with pytest.raises(AssertionError):
        close(model, wanted, 1e-3)


@ROW
@pytest.mark.parametrize("reentrant", (True, False))
@pytest.mark.parametrize("steps", (1, 4))
def test_gradient_checkpointing(name, reentrant, steps):
    gradients, values = [], []
    for checkpointing in (False, True):
        model, controller = ready(name, steps)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        for seed in (1, 2):
            rows = ids(2, seed=seed)
            loss = target(model(input_ids=rows, use_cache=False).logits, rows)
            auxiliary = controller.auxiliary_loss()
            values.append(float(auxiliary.detach()))
            (loss + auxiliary).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
        controller.step()
    assert values[:2] == values[2:]
    for key, value in gradients[0].items():
        assert torch.equal(value, gradients[1][key]), key


def test_two_forwards_of_one_call():
    batches = [{"input_ids": ids(2, seed=1)}, {"input_ids": ids(2, seed=2)}]
    _, wanted = reference("llama", batches, 4)
    model, controller = ready("llama", 4)
    loss = sum(target(model(**inputs).logits, inputs["input_ids"]) for inputs in batches) / 2
    (loss + controller.auxiliary_loss()).backward()
    close(model, wanted)


@ROW
def test_it_goes_on_until_the_fold(name):
    """At gate 0 too tokens are drawn to one scale, with the gradient that autograd gives."""
    rows = ids(4)
    _, wanted = reference(name, [{"input_ids": rows}], 7)
    model, controller = ready(name, 7)
    assert controller.phase == "done"
    loss = target(model(input_ids=rows).logits, rows)
    found = controller.auxiliary_loss()
    assert float(found) > 0
    (loss + found).backward()
    close(model, wanted)
    controller.step()


def test_evaluation_has_no_part_in_it():
    model, controller = ready("llama", 2)
    model.eval()
    model(input_ids=ids(2))
    model.train()
    with torch.no_grad():
        model(input_ids=ids(2))
    assert float(controller.auxiliary_loss()) == 0.0
    controller.step()


@pytest.mark.parametrize("forgotten", ("call", "backward"))
def test_it_is_not_dropped_in_silence(forgotten):
    model, controller = ready("llama", 2)
    rows = ids(2)
    loss = target(model(input_ids=rows).logits, rows)
    if forgotten == "backward":
        loss.backward()
        controller.auxiliary_loss().backward()
    with pytest.raises(RuntimeError, match=r"uniformity_weight=0\.3, but auxiliary_loss"):
        controller.step()
    controller.step(skipped=True)  # forgets it


def test_no_graph_is_held_after_a_step():
    import gc

    model, controller = ready("llama", 2)
    rows = ids(2)
    (target(model(input_ids=rows).logits, rows) + controller.auxiliary_loss()).backward()
    controller.step()
    gc.collect()
    held = [t for t in vars(controller.uniformity).values() if isinstance(t, torch.Tensor)]
    assert not held and controller.uniformity._closed.value is None and controller.uniformity._open.value is None


def test_training_with_it_makes_tokens_alike():
    """What it is for: the spread of log r over tokens falls, and more than without it."""
    spreads = []
    for weight in (0.0, 1.0):
        model, controller = ready("llama", 0, torch.float32, weight=weight, warmup_steps=60, ema_decay=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(40):
            rows = ids(8, seed=step)
            (target(model(input_ids=rows).logits, rows) + controller.auxiliary_loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step()
        spreads.append(sum(controller.spreads.values()))
    assert spreads[1] < 0.5 * spreads[0]


def test_a_copy_pulls_for_itself():
    model, controller = ready("llama", 2)
    twin = copy.deepcopy(model)
    twin(input_ids=ids(2))
    assert float(controller.auxiliary_loss()) == 0.0


@ROW
def test_sites_that_are_done_before_others(name):
    """Staggered by depth, the first site is at gate 0 long before the last; the mean is over the same tokens."""
    model, controller = ready(name, 3, stagger=0.5, order="depth", taper_steps=8)
    first = next(iter(taper_norms(model).values()))
    alone = 0
    for step in range(8):
        rows = ids(4, seed=step)
        with torch.no_grad():
            total, tokens, _ = formula(model, input_ids=rows)
        loss = model(input_ids=rows).logits.sum() * 0
        found = controller.auxiliary_loss()
        assert float(found) == pytest.approx(float(WEIGHT * total / tokens), rel=1e-10)
        (loss + found).backward()
        alone += first.path == "fixed"
        controller.step()
    assert alone > 2 and controller.phase == "done"
