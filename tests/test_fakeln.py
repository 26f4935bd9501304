"""FakeLN: bit-equal before a switch, affine after it, q and k apart from v, and nothing left at the end."""

import copy

import pytest
import torch

import tapernorm as tn
import tiny_models
from tapernorm.baselines.fakeln import Apart, FakeLNConfig, FakeNorm, attach, plan
from tapernorm.sites import find_sites

LAYERS, EOT = 2, 7
IDS = torch.randint(8, 64, (3, 9), generator=torch.Generator().manual_seed(1))
IDS[:, 4] = EOT
AT_ONCE = {"start": 1, "mlp": 0, "qk": 0, "v": 0, "final": 0, "eot": 0, "bos": 0}


def gpt2():
    return tiny_models.tiny("gpt2", dtype=torch.float64, layers=LAYERS, dropout=False)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


def forward(model, ids=IDS):
    return model.train()(input_ids=ids, labels=ids, use_cache=False).loss


def switched(until, **gaps):
    """A model on which one step was taken, and the switches before the one of kind `until` with it."""
    model = gpt2()
    kinds = ("mlp", "qk", "v", "final", "eot", "bos")
    later = dict.fromkeys(kinds[kinds.index(until) :], 5.0) if until else {}
    later |= {"start": 5} if until == "mlp" else {}  # nothing comes before it
    controller = attach(model, FakeLNConfig(**AT_ONCE | {"decay": 0.0} | later | gaps), eot=EOT)
    forward(model)
    controller.step()
    return model, controller


def seen(model, name):
    """(input, output) of a module on IDS."""
    found = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, args, out: found.append((args[0], out)))
    logits(model)
    handle.remove()
    return found[0]


def test_before_any_switch_the_model_is_the_same_to_the_bit():
    plain, model = gpt2(), gpt2()
    controller = attach(model, eot=EOT)
    assert torch.equal(logits(plain), logits(model))
    for each in (plain, model):
        forward(each).backward()
    grads = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        name = name.replace(".norm.", ".").replace(".conv.", ".")
        assert torch.equal(parameter.grad, grads[name].grad), name
    controller.step()
    assert not controller.switched and torch.equal(logits(plain), logits(model))


def test_the_plan_is_in_the_order_of_the_paper():
    made = plan(FakeLNConfig(start=4, mlp=2, qk=1.5, v=3, final=1, eot=0, bos=10), 2)
    assert [(s.kind, s.block) for s in made] == [
        ("mlp", 0), ("mlp", 1), ("qk", 0), ("qk", 1), ("v", 0), ("v", 1), ("final", -1), ("eot", -1), ("bos", -1),
    ]  # fmt: skip
    assert [s.step for s in made] == [4, 6, 8, 9, 12, 15, 16, 16, 26]


@pytest.mark.parametrize(("steps", "layers"), [(300, 12), (60, 2), (800, 48)])
def test_a_plan_within_a_budget_ends_at_its_share(steps, layers):
    made = plan(FakeLNConfig.within(steps, layers, share=0.4), layers)
    assert made[-1].step == round(0.4 * steps) and made[0].step == round(steps / 15)
    assert len(made) == 3 * layers + 3


def test_averages_are_of_ordinary_and_of_special_tokens():
    _, controller = switched("")
    plain = gpt2()
    h, _ = seen(plain, "transformer.h.0.ln_2")
    sigma = torch.sqrt(h.var(-1, unbiased=False) + plain.config.layer_norm_epsilon)
    special = torch.zeros_like(sigma, dtype=torch.bool)
    special[:, 0] = special[:, 4] = True
    c = controller.norms["transformer.h.0.ln_2"].c[0]
    assert c.double() == pytest.approx([1 / float(sigma[~special].mean()), 1 / float(sigma[special].mean())], rel=1e-6)


def test_special_tokens_have_their_own_scale_until_their_switch():
    name = "transformer.h.0.ln_2"
    for until, own in (("eot", {0, 4}), ("bos", {0}), ("", set())):
        model, controller = switched(until)
        norm = controller.norms[name]
        h, out = seen(model, name)
        for place in range(IDS.shape[1]):
            c = norm.c[0, int(place in own)].double()
            centred = h[:, place] - h[:, place].mean(-1, keepdim=True)
            wanted = centred * c * norm.norm.weight + norm.norm.bias
            assert torch.allclose(out[:, place], wanted, rtol=1e-12, atol=1e-12), (until, place)


def test_queries_and_keys_are_switched_apart_from_values():
    model, controller = switched("v")
    norm, apart = controller.norms["transformer.h.1.ln_1"], model.transformer.h[1].attn.c_attn
    assert isinstance(apart, Apart) and norm.off == {"qk"}
    h, _ = seen(model, "transformer.h.1.ln_1")
    _, out = seen(model, "transformer.h.1.attn.c_attn")
    width, conv = h.shape[-1], apart.conv
    real = torch.nn.functional.layer_norm(h, (width,), norm.norm.weight, norm.norm.bias, norm.norm.eps)
    c = norm.c[0, 0].double().expand(IDS.shape).clone()
    c[:, 0] = c[:, 4] = norm.c[0, 1].double()
    fake = (h - h.mean(-1, keepdim=True)) * c[..., None] * norm.norm.weight + norm.norm.bias
    wanted = [real @ conv.weight + conv.bias, fake @ conv.weight + conv.bias]
    assert torch.allclose(out[..., : 2 * width], wanted[1][..., : 2 * width], rtol=1e-12, atol=1e-12)
    assert torch.allclose(out[..., 2 * width :], wanted[0][..., 2 * width :], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(wanted[0], wanted[1], rtol=1e-2)


def is_affine(norm, h):
    """Whether f(t a + (1 − t) b) = t f(a) + (1 − t) f(b) for tokens that are nothing like each other."""
    a, b = h[:, 1:4], 5 * h[:, 5:8].flip(0)
    with torch.no_grad():
        mixed, parts = norm(0.3 * a + 0.7 * b), 0.3 * norm(a) + 0.7 * norm(b)
    return bool(torch.allclose(mixed, parts, rtol=1e-11, atol=1e-11))


def test_after_all_switches_no_token_has_a_statistic():
    model, controller = switched("")
    assert controller.done
    for name, norm in controller.norms.items():
        h, _ = seen(model, name)
        assert is_affine(norm, h), name
    before, early = switched("mlp")
    h, _ = seen(before, "transformer.h.0.ln_2")
    assert not any(is_affine(norm, h) for norm in early.norms.values())


def test_finish_leaves_a_plain_gpt2_without_norms():
    model = gpt2()
    controller = attach(model, FakeLNConfig(start=2, mlp=1, qk=1, v=1, final=1, eot=1, bos=1), eot=EOT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    while not controller.done:
        (forward(model) + controller.auxiliary_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    ones = controller.norms["transformer.h.0.ln_1"]
    assert ones.c[0, 0] != ones.c[1, 0]  # switched at different times: values have a scale of their own
    before = logits(model)
    report = controller.finish({"input_ids": IDS, "labels": IDS})
    assert torch.allclose(logits(model), before, rtol=1e-8, atol=1e-8)
    assert len(report.folded) == 2 * LAYERS + 1 and not report.kept and not find_sites(model)
    assert not any(isinstance(module, FakeNorm | Apart) for module in model.modules())
    hooks = [m._forward_pre_hooks for m in (model, model.transformer.ln_f)]
    assert not any(hooks)


def test_the_norm_free_model_is_saved_and_loads(tmp_path):
    model, controller = switched("")
    controller.finish({"input_ids": IDS, "labels": IDS})
    tn.save_pretrained(model, tmp_path / "free")
    loaded, _ = tn.from_pretrained(tmp_path / "free")
    assert torch.allclose(logits(loaded), logits(model), rtol=1e-12, atol=1e-12)


def test_the_auxiliary_loss_pulls_deviations_together():
    model = gpt2()
    controller = attach(model, FakeLNConfig(weight=0.5), eot=EOT)
    forward(model)
    loss = controller.auxiliary_loss()
    h, _ = seen(gpt2(), "transformer.ln_f")
    sigma = torch.sqrt(h.var(-1, unbiased=False) + model.config.layer_norm_epsilon)
    ordinary = torch.ones(IDS.shape[1], dtype=torch.bool)
    ordinary[0] = ordinary[4] = False
    assert float(loss) == pytest.approx(float(0.5 * (sigma - sigma[:, ordinary].mean()).pow(2).mean()), rel=1e-12)
    assert float(controller.auxiliary_loss()) == 0
    forward(model)
    first = controller.auxiliary_loss()
    gradients = torch.autograd.grad(first, [p for n, p in model.named_parameters() if "mlp.c_proj.weight" in n])
    with torch.no_grad():
        for parameter, gradient in zip(
            [p for n, p in model.named_parameters() if "mlp.c_proj.weight" in n], gradients, strict=True
        ):
            parameter -= 1e-3 * gradient
    forward(model)
    assert float(controller.auxiliary_loss()) < float(first)
    model.eval()
    logits(model)
    assert float(controller.auxiliary_loss()) == 0  # evaluation is no training


def test_evaluation_and_skipped_steps_do_not_count():
    model = gpt2()
    controller = attach(model, FakeLNConfig(**AT_ONCE), eot=EOT)
    logits(model)
    forward(model)
    controller.step(skipped=True)
    assert controller.step_count == controller.switched == 0
    with pytest.raises(RuntimeError, match=r"transformer\.h\.0\.ln_2: no finite statistics"):
        controller.step()  # what was gathered went with the skipped step


def test_refusals_leave_the_model_alone():
    llama = tiny_models.tiny("llama")
    tapered = gpt2()
    tn.taper_(tapered)
    done = gpt2()
    attach(done)
    for model, said in ((llama, "this is llama"), (tapered, "tapered"), (done, "no layer norm any more")):
        before = copy.deepcopy([type(module) for module in model.modules()])
        with pytest.raises(ValueError, match=said):
            attach(model)
        assert [type(module) for module in model.modules()] == before
    with pytest.raises(ValueError, match="9 switches are still to come"):
        attach(gpt2()).finish()
    for wrong, said in (({"start": 0}, "start=0"), ({"v": -1}, "v=-1"), ({"decay": 1.0}, "decay=1.0")):
        with pytest.raises(ValueError, match=said):
            FakeLNConfig(**wrong)
    with pytest.raises(ValueError, match="leave no room"):
        FakeLNConfig.within(2, 2)
