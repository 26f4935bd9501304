"""The constant prefix: keys and values in every layer that do what the same tokens in front would do."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface

import tapernorm as tn
from prefixed import (
    ENDS,
    FRONT,
    IDS,
    LEARNED,
    LLAMA,
    MODELS,
    PREFIX,
    WINDOW,
    P,
    build,
    constants,
    generated,
    held,
    in_front,
    trained,
)
from tapernorm import prefix as prefixes
from tapernorm.modules import taper_norms
from tapernorm.prefix import attach_prefix, detach_prefix, prefix_of
from zoo import D, decibels, logits, randomise, relative


def additive(mask):
    """0 where a token is seen, and the least number where not."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


@torch.no_grad()
def with_tokens(stock, ids):
    """Logits with the prefix as tokens, at places before 0 where these are rotary; it is seen always."""
    family = stock.config.model_type
    places = torch.arange(P + ids.shape[1])
    causal = places[:, None] >= places
    near = causal & ((places[:, None] - places < WINDOW) | (places < P))
    masks = {"full_attention": additive(causal)[None, None], "sliding_attention": additive(near)[None, None]}
    mask = {"mistral": masks["sliding_attention"], "gemma3_text": masks, "gpt_oss": masks}.get(family)
    places = (places if family in LEARNED else places - P)[None]
    out = stock(input_ids=in_front(ids)[0], attention_mask=mask, position_ids=places, use_cache=False)
    return out.logits[:, P:]


# What it computes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MODELS)
def test_constants_do_what_the_tokens_do(family, attention):
    if family == "gpt_oss" and attention == "sdpa":
        pytest.skip("gpt_oss has no sdpa attention")
    stock, model = held(family, attention)
    wanted = with_tokens(stock, IDS)
    # Norms and rotary angles of these families are float32 in a float64 model; gpt2's and opt's are not, but for the
    # softmax of opt's eager attention.
    bound = 1e-12 if family in LEARNED else 1e-6
    if (family, attention) == ("opt", "eager"):
        bound = 2**-23
    assert relative(logits(model, IDS), wanted) < bound
    assert relative(logits(stock, IDS), wanted) > 1e-2  # the prefix matters
    assert relative(logits(model, IDS[:, :1]), wanted[:, :1]) < bound
    other = "eager" if attention == "sdpa" else "sdpa"
    if family != "gpt_oss":
        model.set_attn_implementation(other)
        assert relative(logits(model, IDS), wanted) < 1e-6
    detach_prefix(model)
    if family not in LEARNED:
        assert torch.equal(logits(model, IDS), logits(build(family, other if family != "gpt_oss" else None), IDS))


@pytest.mark.parametrize("family", LEARNED)
def test_a_learned_table_loses_the_rows_of_the_prefix(family):
    stock, model = held(family)
    tables = [
        next(m for m in x.modules() if isinstance(m, nn.Embedding) and m is not x.get_input_embeddings())
        for x in (stock, model)
    ]
    assert torch.equal(tables[1].weight, tables[0].weight[P:])
    assert tables[1].num_embeddings == tables[0].num_embeddings - P
    assert model.config.max_position_embeddings == 64 - P
    ids = torch.randint(D, (1, 64 - P))  # the whole context
    assert relative(logits(model, ids), logits(stock, in_front(ids)[0])[:, P:]) < 1e-12


def test_a_prompt_that_brings_its_own_bos():
    """It is a token like any other, after the prefix."""
    stock, model = held("llama")
    ids = torch.cat([FRONT[:, :1], IDS[:1]], dim=1)  # the first token of the prefix once more
    assert relative(logits(model, ids), with_tokens(stock, ids)) < 1e-6


def test_the_prefix_stays_visible_behind_a_sliding_window():
    for family in ("mistral", "gemma3_text"):
        stock, model = held(family)
        ids = torch.randint(D, (1, 30), generator=torch.Generator().manual_seed(2))
        assert relative(logits(model, ids), with_tokens(stock, ids)) < 1e-6
        slid = logits(stock, in_front(ids)[0])[:, P:]
        assert relative(logits(model, ids), slid) > 1e-3  # a stock window would lose sight of it


def test_a_classifier_is_checked_by_its_body():
    config = transformers.LlamaConfig(**(ENDS | LLAMA), num_labels=3)
    model = randomise(transformers.LlamaForSequenceClassification(config).double().eval())
    stock = copy.deepcopy(model)
    attach_prefix(model, PREFIX)
    assert relative(logits(model, IDS), logits(stock, in_front(IDS)[0])) < 1e-6


# Masks of the caller


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows(attention):
    """Each text of a row sees the prefix, and no other text."""
    _, model = held("llama", attention)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    with torch.no_grad():
        packed = model(input_ids=IDS, position_ids=places, use_cache=False).logits
    assert relative(packed[:, :5], logits(model, IDS[:, :5])) < 1e-6
    assert relative(packed[:, 5:], logits(model, IDS[:, 5:])) < 1e-6


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_four_dimensional_mask(attention, kind):
    if (attention, kind) == ("eager", "bool"):
        pytest.skip("transformers' eager attention adds its mask")
    _, model = held("llama", attention)
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    seen[:, 3] = False  # nobody looks at one token
    mask = seen if kind == "bool" else additive(seen)
    two = torch.ones_like(IDS)
    two[:, 3] = 0
    places = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(input_ids=IDS, attention_mask=two, position_ids=places, use_cache=False).logits
        made = model(input_ids=IDS, attention_mask=mask.expand(2, 1, -1, -1), use_cache=False).logits
    assert relative(made, wanted) < 1e-12


# Training


def gradients(model):
    model.train()
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients(family):
    """Those of the text; the tokens in front get none."""
    _, model = held(family)
    mine = gradients(model)
    assert mine.keys() == {name for name, _ in model.named_parameters()}
    assert all(grad.abs().max() > 0 for grad in mine.values())
    embedding = model.get_input_embeddings().weight
    ids = IDS[:1, :1]
    embedding.grad = None
    model(input_ids=ids, labels=ids, use_cache=False).logits[..., 0].sum().backward()
    if not model.config.tie_word_embeddings:
        assert set(embedding.grad.abs().sum(1).nonzero().flatten().tolist()) == {int(ids)}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing(family, reentrant):
    _, model = held(family)
    plain, before = gradients(model), constants(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = gradients(model)
    assert plain.keys() == again.keys()
    assert all(relative(again[name], grad) < 1e-10 for name, grad in plain.items())
    assert all(torch.equal(v, before[k]) for k, v in constants(model).items())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_tapered_trained_folded(family):
    _, begun = held(family)
    model, controller = trained(family)
    assert controller.config.prefix == prefix_of(model) == PREFIX
    before = constants(model)
    assert len(before) == 4
    for name, value in constants(begun).items():  # those of the original weights, and no others
        assert torch.equal(before[name], value), name
    assert relative(logits(model, IDS), logits(begun, IDS)) > 1e-3
    wanted, generation = logits(model, IDS), generated(model, IDS)
    report = tn.fold_(model)
    assert report.prefix == PREFIX
    assert not taper_norms(model)
    assert relative(logits(model, IDS), wanted) < 1e-10
    assert torch.equal(generated(model, IDS)[0], generation[0])
    assert all(torch.equal(v, before[k]) for k, v in constants(model).items())
    mine = gradients(model)  # and it can be trained on
    assert all(grad.abs().max() > 0 for grad in mine.values())


def test_folded_in_single_precision():
    model, _ = trained(dtype=torch.float32)
    wanted = logits(model, IDS)
    tn.fold_(model)
    assert relative(logits(model, IDS), wanted) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tapered_at_gate_one_is_the_model_with_the_prefix(family):
    _, wanted = held(family)
    model, _ = trained(family, steps=0)
    assert torch.equal(logits(model, IDS), logits(wanted, IDS))
    tn.restore_(model)
    assert prefix_of(model) == () and constants(model) == {}
    if family == "llama":
        assert torch.equal(logits(model, IDS), logits(build(family), IDS))


def test_half_precision():
    model, _ = trained()
    tn.fold_(model)
    wanted = logits(model, IDS)
    model.to(torch.bfloat16)
    assert {v.dtype for v in constants(model).values()} == {torch.bfloat16}
    assert decibels(logits(model, IDS), wanted) > 25
    for dtype in (torch.bfloat16, torch.float16):
        attach_prefix(build("llama").to(dtype), PREFIX)


def test_no_model_is_kept_alive():
    held("llama")
    registered = AttentionInterface._global_mapping[prefixes._RECORD]
    assert registered.__closure__ is None


# Export


def folded(family, dtype=torch.float32):
    model, _ = trained(family, dtype=dtype)
    tn.fold_(model)
    return model


class Forward(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_export(family):
    model = folded(family)
    dynamic = {"ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(Forward(model), (IDS,), dynamic_shapes=dynamic, strict=False)
    assert sum("prefix_" in name for name in program.state_dict) == 4
    for ids in (IDS, IDS[:1].repeat(3, 2)):
        assert relative(program.module()(ids), logits(model, ids)) < 1e-5


def test_compile():
    model = folded("llama")
    wanted = logits(model, IDS)
    torch._dynamo.reset()
    compiled = torch.compile(Forward(model), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert relative(compiled(IDS), wanted) < 1e-5
    torch._dynamo.reset()
