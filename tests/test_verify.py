"""Losses with their tail, and whether two models are the same function."""

import copy
import json
import math

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import tiny_models
from tapernorm.verify import evaluate, greedy_tokens, verify

torch.set_num_threads(1)


def tiny(family="llama", dtype=torch.float32, **settings):
    """One block, its keys not grouped; GPT-2 keeps its dropout."""
    heads = {"num_key_value_heads": 2} if family == "llama" else {}
    return tiny_models.tiny(family, dtype=dtype, layers=1, **heads, **settings).eval()


def ids(rows=6, length=20):
    return tiny_models.ids(rows, length)


class Table(nn.Module):
    """Logits looked up by the token alone, so that every loss is chosen by the test."""

    def __init__(self, logits):
        super().__init__()
        self.table = nn.Parameter(logits)
        self.config = transformers.PreTrainedConfig()

    def forward(self, input_ids, use_cache=None):
        return transformers.modeling_outputs.CausalLMOutput(logits=self.table[input_ids])


def chosen(losses):
    """(model, blocks) whose token losses are `losses`: block i asks for token 0 after token i + 1."""
    table = torch.zeros(len(losses) + 1, 2, dtype=torch.float64)
    # −log softmax of column 0 is L when the other logit is log(exp(L) − 1)
    other = [math.log(math.expm1(x)) if math.isfinite(x) else x for x in losses]
    table[1:, 1] = torch.tensor(other, dtype=torch.float64)
    return Table(table), torch.tensor([[i + 1, 0] for i in range(len(losses))])


# evaluate


@pytest.mark.parametrize("batch", (1, 4, 8))
def test_losses_against_a_direct_computation(batch):
    model, rows = tiny(), ids()
    with torch.no_grad():
        logits = model(input_ids=rows).logits
    losses = F.cross_entropy(logits[:, :-1].reshape(-1, 64), rows[:, 1:].reshape(-1), reduction="none").double()
    calls = []
    found = evaluate(model, rows, batch=batch, progress=lambda: calls.append(1))
    assert found.tokens == losses.numel() == 6 * 19
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(float(losses.mean())), rel=1e-6)
    assert (found.nonfinite, found.over_10) == (0, int((losses > 10).sum()))
    assert len(calls) == -(-6 // batch)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_quantiles_and_the_tail():
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    losses = torch.linspace(0.01, 4.0, 2000).double()
    losses[1999], losses[1998], losses[1997] = 50.0, 10.5, 9.5
    found = evaluate(*chosen(losses[order].tolist()), batch=64)
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-12)
    for name, q in (("median", 0.5), ("p99", 0.99), ("p999", 0.999)):
        value = getattr(found, name)
        assert int((losses < value - 1e-9).sum()) <= q * 2000 <= int((losses <= value + 1e-9).sum())
        assert float((losses - value).abs().min()) < 1e-9  # one of the losses
    assert found.median < found.p99 < found.p999 < 50
    assert found.over_10 == 2


@pytest.mark.parametrize("bad", (float("inf"), float("nan")))
def test_losses_that_are_not_finite_are_counted_and_left_out(bad):
    found = evaluate(*chosen([1.0, bad, 3.0, bad]))
    assert (found.tokens, found.nonfinite) == (4, 2)
    assert found.loss == pytest.approx(2.0)
    nothing = evaluate(*chosen([bad, bad]))
    assert (nothing.tokens, nothing.nonfinite, nothing.over_10) == (2, 2, 0)
    assert math.isnan(nothing.loss) and math.isnan(nothing.p999)


def test_evaluation_leaves_the_flags_alone():
    model = tiny("gpt2").train()  # with dropout
    model.transformer.h[0].eval()
    flags = [m.training for m in model.modules()]
    assert evaluate(model, ids()) == evaluate(model, ids())
    verify(model, model, ids(), new_tokens=2)
    assert flags == [m.training for m in model.modules()]


@pytest.mark.parametrize("shape", ((0, 4), (3, 1), (5,)))
def test_blocks_that_cannot_be_evaluated(shape):
    with pytest.raises(ValueError, match="at least two tokens"):
        evaluate(tiny(), torch.zeros(shape, dtype=torch.long))


# verify


@pytest.mark.parametrize("family", ("llama", "gpt2"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_a_model_is_itself(family, dtype):
    model = tiny(family, dtype)
    found = verify(model, copy.deepcopy(model), ids(), new_tokens=6)
    assert (found.max_abs_logit_error, found.relative_error, found.greedy_match) == (0.0, 0.0, 1.0)
    assert found.loss_a == found.loss_b == pytest.approx(evaluate(model, ids()).loss, rel=1e-6)
    assert found.passed is True and found.cached_match is True
    assert found.tokens == 120
    assert found.bound == {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, pytest.approx(10**-1.5))
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_perturbed_model_is_not(dtype):
    a = tiny(dtype=dtype)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.model.layers[0].mlp.down_proj.weight[:, 3] *= 2
    rows = ids()
    found = verify(a, b, rows, batch=4, new_tokens=4)
    with torch.no_grad():
        first, second = a(input_ids=rows).logits.double(), b(input_ids=rows).logits.double()
    error = float((second - first).abs().max())
    assert found.max_abs_logit_error == pytest.approx(error, rel=1e-5)
    if dtype == torch.float32:
        assert found.relative_error == pytest.approx(error / float(first.abs().max()), rel=1e-5)
    else:
        assert found.relative_error == pytest.approx(float((second - first).norm() / first.norm()), rel=1e-5)
    assert found.passed is False
    assert found.loss_a != found.loss_b


def test_the_bound_lies_between():
    """A float32 model may differ by a hundred-thousandth of its logits, and not by a thousandth."""
    a = tiny()
    for change, passes in ((1e-5, True), (1e-3, False)):
        b = copy.deepcopy(a)
        with torch.no_grad():
            b.lm_head.weight *= 1 + change
        found = verify(a, b, ids(), new_tokens=2)
        assert found.relative_error == pytest.approx(change, rel=0.1)
        assert found.passed is passes


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_logits_that_are_not_finite_never_pass(dtype, bad):
    a = tiny(dtype=dtype)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.lm_head.weight[5, 3] = bad
    assert verify(a, b, ids(), new_tokens=2).passed is False
    assert verify(b, a, ids(), new_tokens=2).passed is False


def test_greedy_match_is_the_share_that_agrees():
    a = tiny()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.lm_head.weight.copy_(a.lm_head.weight.roll(1, dims=0))
    rows, start = ids(), ids()[:3, :5]
    found = verify(a, b, rows, prompts=3, new_tokens=8)
    agree = greedy_tokens(a, start, 8) == greedy_tokens(b, start, 8)
    assert found.greedy_match == pytest.approx(float(agree.double().mean()))
    assert found.greedy_match < 1


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_greedy_tokens_are_those_of_generate(family):
    model, start = tiny(family), ids(3, 5)
    wanted = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=8, do_sample=False)
    stop = (wanted[:, 5:] == 1).int().cumsum(1) > 0  # generate pads from the end token on
    for cached in (True, False):
        found = greedy_tokens(model, start, 8, use_cache=cached)
        assert torch.equal(found[~stop], wanted[:, 5:][~stop])
    assert (~stop).sum() > 8


def test_a_broken_cache_shows():
    good = tiny()
    broken = copy.deepcopy(good)
    attention = broken.model.layers[0].self_attn
    inner = attention.forward

    def forgetful(hidden_states, *args, **kwargs):
        """Keys and values of the prompt are spoiled, where a cache keeps them for later steps."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        output = inner(hidden_states, *args, **kwargs)
        if cache is not None and hidden_states.shape[1] > 1:
            cache.layers[0].keys.mul_(-3)
            cache.layers[0].values.mul_(-3)
        return output

    attention.forward = forgetful
    found = verify(good, broken, ids(), new_tokens=12)
    assert found.passed is True  # without a cache it is the same function
    assert found.cached_match is False
    assert found.greedy_match < 1
    assert verify(broken, good, ids(), new_tokens=12).cached_match is True  # the second model is the one judged


def test_other_vocabularies_are_refused():
    with pytest.raises(ValueError, match=r"\(6, 20, 64\) and \(6, 20, 80\)"):
        verify(tiny(), tiny(vocab_size=80), ids())
    with pytest.raises(ValueError, match="at least one block"):
        verify(tiny(), tiny(), ids()[:0])


def test_decoding_stays_within_the_context():
    model = tiny("gpt2", max_position_embeddings=20)
    found = verify(model, model, ids(), new_tokens=500)
    assert found.passed and found.cached_match
