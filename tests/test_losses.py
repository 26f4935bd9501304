"""The scale loss against its formula, its gradient under accumulation, and the mathematics that it answers."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tapernorm import TaperConfig, taper_
from tapernorm.losses import diagnose
from tapernorm.sites import find_sites

torch.set_num_threads(1)

FAMILIES = {"llama": ("rms", "model.norm"), "gpt2": ("layer", "transformer.ln_f")}
LAMBDA = 0.7


def tiny(family="llama", dtype=torch.float32, eps=1e-6):
    """A model with two blocks whose every parameter is random."""
    ends = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if family == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": eps}
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **off, **ends)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=64, rms_norm_eps=eps, **ends
        )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter += 1
    return model.to(dtype).train()


def ids(rows, length=8, seed=0):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def anchored(family="llama", dtype=torch.float32, **settings):
    settings = {"arm": "all", "warmup_steps": 1, "taper_steps": 4, "anchor_weight": LAMBDA} | settings
    model = tiny(family, dtype)
    return model, taper_(model, TaperConfig(**settings))


def past_warm_up(*args, **settings):
    """A model whose target was frozen on `ids(4, seed=50)`."""
    model, controller = anchored(*args, **settings)
    model(input_ids=ids(4, seed=50))
    assert float(controller.auxiliary_loss()) == 0.0
    controller.step()
    return model, controller


def residual(model, family, **inputs):
    """The final norm's input, with its graph, by a hook of the test's own and without the anchor's."""
    kept = []
    handle = model.get_submodule(FAMILIES[family][1]).register_forward_pre_hook(lambda m, a: kept.append(a[0]))
    training = model.training
    model.eval()
    model(**inputs)
    model.train(training)
    handle.remove()
    return kept[0]


def s_of(h, family, eps=1e-6):
    if FAMILIES[family][0] == "layer":
        return (h.var(-1, unbiased=False) + eps).sqrt()
    return (h.pow(2).mean(-1) + eps).sqrt()


# The anchor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arm", ("all", "internal"))
@pytest.mark.parametrize("anchor", ("absolute", "relative"))
def test_value_and_gradient(family, arm, anchor):
    model, controller = past_warm_up(family, torch.float64, arm=arm, anchor=anchor)
    target = controller.scale_target
    first = s_of(residual(model, family, input_ids=ids(4, seed=50)), family).detach()
    assert target == pytest.approx(float(first.mean()))
    controller.step()
    assert 0 < controller.gate < 1
    rows = ids(3, seed=1)
    s = s_of(residual(model, family, input_ids=rows), family)
    deviation = s - target if anchor == "absolute" else s / target - 1
    wanted = LAMBDA * deviation.pow(2).mean()
    assert float(wanted.detach()) > 1e-4
    gradients = torch.autograd.grad(wanted, list(model.parameters()), allow_unused=True, materialize_grads=True)
    assert sum(float(g.abs().sum()) for g in gradients) > 0
    model(input_ids=rows)
    loss = controller.auxiliary_loss()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    for ours, reference in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-12)


def test_the_final_norm_of_the_internal_arm_is_the_stock_one():
    model, controller = past_warm_up(arm="internal")
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"
    model(input_ids=ids(2))
    assert float(controller.auxiliary_loss()) > 0


@pytest.mark.parametrize(("arm", "weight", "wanted"), (("all", None, 0.1), ("internal", None, 0.0), ("all", 0.0, 0.0)))
def test_default_weight(arm, weight, wanted):
    model, controller = past_warm_up(arm=arm, anchor_weight=weight)
    model(input_ids=ids(2))
    loss = controller.auxiliary_loss()
    assert (float(loss) > 0) == (wanted > 0)
    assert (controller.scale_target is None) == (wanted == 0)
    if wanted:
        s = s_of(residual(model, "llama", input_ids=ids(2)), "llama")
        assert float(loss) == pytest.approx(wanted * float((s - controller.scale_target).pow(2).mean()), rel=1e-5)


def test_a_second_call_gives_nothing_and_the_first_all_forwards():
    model, controller = past_warm_up()
    parts = []
    for seed in (1, 2):
        model(input_ids=ids(2, seed=seed))
        parts.append(float(controller.auxiliary_loss()))
        assert float(controller.auxiliary_loss()) == 0.0
    for seed in (1, 2):
        model(input_ids=ids(2, seed=seed))
    assert float(controller.auxiliary_loss()) == pytest.approx(sum(parts) / 2, rel=1e-6)


def test_never_in_evaluation():
    model, controller = past_warm_up()
    model.eval()
    model(input_ids=ids(2))
    model.generate(ids(1), max_new_tokens=3, do_sample=False)
    assert float(controller.auxiliary_loss()) == 0.0
    controller.step()  # nothing is pending
    model.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_tokens_weigh_nothing(family):
    texts = [ids(1, length, seed=length)[0] for length in (3, 9, 12)]
    padded, mask = torch.full((3, 16), 2), torch.zeros(3, 16, dtype=torch.long)
    for row, text in enumerate(texts):
        padded[row, : len(text)], mask[row, : len(text)] = text, 1
    model, controller = anchored(family, torch.float64)
    model(input_ids=padded, attention_mask=mask)
    controller.auxiliary_loss()
    controller.step()
    singly = torch.cat([s_of(residual(model, family, input_ids=t[None]), family)[0] for t in texts])
    target = controller.scale_target
    assert target == pytest.approx(float(singly.mean()), rel=1e-6)
    model(input_ids=padded, attention_mask=mask)
    wanted = LAMBDA * float((singly - target).pow(2).mean())
    assert float(controller.auxiliary_loss()) == pytest.approx(wanted, rel=1e-9)


def test_a_micro_batch_of_padding_alone_is_nothing():
    model, controller = past_warm_up()
    model(input_ids=ids(2), attention_mask=torch.zeros(2, 8))
    assert float(controller.auxiliary_loss()) == 0.0


def test_the_target_is_the_average_of_the_mean_scale():
    model, controller = anchored(warmup_steps=4, ema_decay=0.7)
    total = weight = 0.0
    for step in range(4):
        rows = [ids(2, seed=10 * step + part) for part in range(2)]
        s = torch.cat([s_of(residual(model, "llama", input_ids=r), "llama") for r in rows])
        total, weight = 0.7 * total + 0.3 * float(s.mean()), 0.7 * weight + 0.3
        for part in rows:
            model(input_ids=part)
            assert float(controller.auxiliary_loss()) == 0.0  # before the end of warm-up
        assert controller.scale_target is None
        controller.step()
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.3)
    assert controller.scale_target == pytest.approx(total / weight, rel=1e-6)
    frozen = controller.scale_target
    model(input_ids=ids(2))
    controller.auxiliary_loss()
    controller.step()
    assert controller.scale_target == frozen


def test_a_batch_that_is_not_finite_leaves_the_target_alone():
    targets = []
    for spoiled in (False, True):
        model, controller = anchored(warmup_steps=2)
        for seed in (1, 2):
            model(input_ids=ids(2, seed=seed))
            if spoiled:
                model(inputs_embeds=torch.full((1, 4, 16), float("inf")))
            controller.auxiliary_loss()
            controller.step()
        targets.append(controller.scale_target)
    assert targets[0] == targets[1]


@pytest.mark.parametrize("anchor", ("absolute", "relative"))
def test_accumulation_gives_the_same_gradient(anchor):
    rows, found = ids(8, seed=3), []
    for parts in (1, 2, 8):
        model, controller = past_warm_up(anchor=anchor)
        for part in rows.chunk(parts):
            model(input_ids=part)
            (controller.auxiliary_loss() / parts).backward()
        found.append((controller.scales, [p.grad for p in model.parameters()]))
    largest = max(float(g.abs().max()) for g in found[0][1] if g is not None)
    assert largest > 1e-3
    for scales, gradients in found[1:]:
        assert scales == found[0][0]
        for ours, reference in zip(gradients, found[0][1], strict=True):
            assert (ours is None) == (reference is None)
            if ours is not None:
                torch.testing.assert_close(ours, reference, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("reentrant", (True, False))
def test_gradient_checkpointing_gives_the_same_gradient(reentrant):
    found = []
    for checkpointing in (False, True):
        model, controller = past_warm_up()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        for seed in range(2):
            rows = ids(2, seed=seed)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss + controller.auxiliary_loss()
            loss.backward()
            controller.step()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None)


def test_the_loss_is_float32_in_a_bfloat16_model():
    model, controller = past_warm_up(dtype=torch.bfloat16)
    model(input_ids=ids(2))
    loss = controller.auxiliary_loss()
    assert loss.dtype == torch.float32
    loss.backward()
    assert torch.isfinite(model.model.embed_tokens.weight.grad).all()


# The mathematics: the pull of the loss along the residual


def radial(loss, h):
    """⟨∇_h ℓ, h⟩ of every token. [N]"""
    (gradient,) = torch.autograd.grad(loss.sum(), h)
    return (gradient * h.detach()).sum(-1)


def head_and_tokens():
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    h = torch.randn(200, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    gamma, beta = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    return head, h, 1 + 0.3 * gamma, beta


@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_a_norm_hides_the_scale_from_the_loss(kind):
    head, h, gamma, beta = head_and_tokens()
    labels = torch.arange(200) % 40
    if kind == "rms":
        y = F.rms_norm(h, (16,), gamma, eps=0.0)
    else:
        y = F.layer_norm(h, (16,), gamma, beta, eps=0.0)
    pull = radial(F.cross_entropy(y @ head.T, labels, reduction="none"), h)
    assert float(pull.abs().max()) < 1e-12
    bare = radial(F.cross_entropy((h * gamma) @ head.T, labels, reduction="none"), h)
    assert float(bare.abs().max()) > 1


def test_without_a_norm_a_right_token_asks_for_more():
    """⟨∇_h ℓ, h⟩ ≤ −(1 − p_y) m for a token whose label leads by the margin m."""
    head, h, _, _ = head_and_tokens()
    logits = h @ head.T
    labels = logits.argmax(-1)
    top = logits.detach().topk(2, dim=-1).values
    margin = top[:, 0] - top[:, 1]
    p = logits.detach().softmax(-1).gather(1, labels[:, None])[:, 0]
    pull = radial(F.cross_entropy(logits, labels, reduction="none"), h)
    assert (margin > 0).all()
    assert (pull <= -(1 - p) * margin + 1e-12).all()
    assert (pull < 0).all()


# The diagnostics


def watched(model):
    sites = [site for site in find_sites(model) if site.role in ("internal", "final")]
    final = next(site.name for site in sites if site.role == "final")
    return {site.name: (site.kind, site.eps) for site in sites}, final


@pytest.mark.parametrize("family", FAMILIES)
def test_diagnose_against_a_direct_computation(family):
    model = tiny(family, torch.float64).eval()
    sites, final = watched(model)
    seen = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda m, a, name=name: seen.update({name: a[0].detach()}))
        for name in sites
    ]
    rows = ids(3)
    logits = model(input_ids=rows).logits.detach()
    for handle in handles:
        handle.remove()
    found = diagnose(model, rows, sites, final)
    for name, h in seen.items():
        assert found.scale[name] == pytest.approx(float(s_of(h, family).mean()), rel=1e-12)
    assert found.prelogit_scale == found.scale[final]
    assert found.logit_max == pytest.approx(float(logits.abs().max()), rel=1e-12)
    assert found.logit_std == pytest.approx(float(logits.std()), rel=1e-12)
    h = seen[final].clone().requires_grad_()
    head = model.get_output_embeddings()
    mine = head(model.get_submodule(final)(h))
    loss = F.cross_entropy(mine[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    wanted = float(radial(loss, h).sum() / loss.numel())
    assert found.radial_gradient == pytest.approx(wanted, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("family", FAMILIES)
def test_diagnose_sees_logit_chasing_without_the_final_norm_alone(family):
    model = tiny(family, torch.float64, eps=1e-30).eval()
    sites, final = watched(model)
    if family == "llama":  # transformers' own computes in float32 whatever it is given
        gain = model.model.norm.weight
        model.model.norm = nn.RMSNorm(16, eps=0.0, dtype=torch.float64)
        model.model.norm.weight = gain
    rows = ids(1, 2)
    with torch.no_grad():
        rows[0, 1] = int(model(input_ids=rows).logits[0, 0].argmax())
    assert abs(diagnose(model, rows, sites, final).radial_gradient) < 1e-10
    model.set_submodule(final, nn.Identity())
    with torch.no_grad():
        logits = model(input_ids=rows).logits[0, 0]
    label = int(logits.argmax())
    rows[0, 1] = label
    top = logits.topk(2).values
    bound = -(1 - float(logits.softmax(-1)[label])) * float(top[0] - top[1])
    assert bound < -1e-4
    assert diagnose(model, rows, sites, final).radial_gradient <= bound


def test_diagnose_without_a_final_norm():
    model = tiny().eval()
    sites, _ = watched(model)
    found = diagnose(model, ids(2), sites, None)
    assert found.radial_gradient != found.radial_gradient
    assert found.prelogit_scale != found.prelogit_scale
    assert len(found.scale) == 5


def test_diagnose_changes_nothing():
    model, controller = past_warm_up()
    sites, final = watched(model)
    rows = ids(2)
    (model(input_ids=rows, labels=rows).loss + controller.auxiliary_loss()).backward()
    model.model.layers[0].eval()  # a part that its owner froze
    before = {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "gradients": [p.grad.clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "flags": [m.training for m in model.modules()],
        "hooks": [len(m._forward_pre_hooks) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "controller": copy.deepcopy(controller.state_dict()),
    }
    diagnose(model, rows, sites, final)
    after = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "buffers": list(model.buffers()),
        "flags": [m.training for m in model.modules()],
        "hooks": [len(m._forward_pre_hooks) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "controller": controller.state_dict(),
    }
    for what in ("parameters", "gradients", "buffers"):
        assert all(torch.equal(a, b) for a, b in zip(before[what], after[what], strict=True)), what
    assert torch.equal(before["rng"], after["rng"])
    assert before["flags"] == after["flags"] and before["hooks"] == after["hooks"]
    for key, value in before["controller"].items():
        now = after["controller"][key]
        assert torch.equal(value, now) if isinstance(value, torch.Tensor) else value == now, key
    controller.step()  # nothing is pending of what diagnose ran


def test_diagnose_restores_the_flags_when_the_model_fails():
    model = tiny()
    sites, final = watched(model)
    with pytest.raises(IndexError):
        diagnose(model, torch.full((1, 4), 999), sites, final)
    assert all(m.training for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())
