"""`tn.generate`: the tokens of transformers' generate, eager and compiled; streaming; the compiled step on disk."""

import copy
import functools
import importlib
import json
import subprocess
import sys
import time

import pytest
import torch
import transformers
from transformers import TextStreamer

import tapernorm as tn
from command import run_command
from folders import byte_tokenizer
from prefixed import build, held
from tapernorm import decode_step
from tapernorm.generate import decode
from tiny_models import ids as text_ids
from tiny_models import tiny
from zoo import ROWS, D, randomise, tapered

module = importlib.import_module("tapernorm.generate")  # the package's attribute is the function

IDS = torch.randint(D, (2, 9), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(IDS)
PADDED[1, :4] = 0
FAMILIES = ("gpt2", "mistral", "gemma3_text", "qwen2", "gpt_neox", "phi", "opt")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TAPERNORM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def few_places(monkeypatch):
    """A cache that grows twice within a short text."""
    monkeypatch.setattr(decode_step, "PLACES", 8)


def both(model, ids, mask=None, ours=True, compile=False, **options):
    """The tokens of transformers and ours, each from the same seed; ours: whether the loop here must have run."""
    options = {"attention_mask": torch.ones_like(ids) if mask is None else mask, "max_new_tokens": 20} | options
    torch.manual_seed(3)
    wanted = copy.deepcopy(model).eval().generate(ids, **options)
    torch.manual_seed(3)
    made = decode(model, ids, compile=compile, **options)
    assert torch.equal(made.sequences, wanted)
    ran = []
    seen = module._Stepper.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Stepper, "__call__", lambda *a: ran.append(1) or seen(*a))
        torch.manual_seed(3)
        assert torch.equal(tn.generate(model, ids, compile=compile, **options), wanted)
    assert bool(ran) == ours
    return made


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_stock_tapered_and_folded(row, few_places):
    for model in (randomise(row.build()), tapered(row, gate=0.4), tapered(row)):
        both(model.float(), IDS[:1], do_sample=False)
    model = tapered(row, dtype=torch.float32)
    tn.fold_(model)
    made = both(model, IDS[:1], do_sample=False)
    assert made.sequences.shape == (1, 29) and made.steps == 19 and not made.compiled


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_windows_prefixes_and_padding(family, few_places):
    """Sliding windows of 5 tokens; a constant prefix; rows padded on the left."""
    model = build(family).float()
    both(model, IDS[:1], do_sample=False)
    both(model, IDS, PADDED, do_sample=False)
    _, holding = held(family)
    both(holding.float(), IDS, PADDED, do_sample=False)


def test_a_model_in_training_mode_comes_back_in_it():
    model = tiny("gpt2")
    model.transformer.h[0].eval()
    flags = [m.training for m in model.modules()]
    both(model, text_ids(), do_sample=False, eos_token_id=None)
    assert [m.training for m in model.modules()] == flags


def test_end_tokens_and_what_pads_after_them():
    model = tiny("llama").eval()
    free = both(model, text_ids(), do_sample=False, eos_token_id=None).sequences[:, 8:]
    first, second = int(free[0, 5]), int(free[1, 0])
    never = next(t for t in range(3, 64) if t not in free)
    assert first not in free[0, :5] and first not in free[1]
    made = both(model, text_ids(), do_sample=False, eos_token_id=[never, first], pad_token_id=2).sequences[:, 8:]
    assert made.shape[1] == 20 and made[0, 6:].eq(2).all() and torch.equal(made[1], free[1])
    made = both(model, text_ids(), do_sample=False, eos_token_id=[second, first], pad_token_id=2).sequences
    assert made.shape[1] == 8 + 6  # both rows have ended
    alone = both(model, text_ids()[:1], do_sample=False, eos_token_id=[never, first])
    assert alone.sequences.shape[1] == 8 + 6 and int(alone.sequences[0, -1]) == first
    both(model, text_ids(), do_sample=False, eos_token_id=first, min_new_tokens=8)
    # one token: the prompt's forward is all that there is
    assert both(model, text_ids()[:1], ours=False, do_sample=False, max_new_tokens=1).tokens_per_second == 0


@pytest.mark.parametrize("rows", (1, 3))
def test_sampling_spends_the_same_random_numbers(rows):
    model = tiny("llama").eval()
    for options in ({}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5, "repetition_penalty": 1.3}):
        both(model, text_ids(rows), do_sample=True, **options)
    one = both(model, text_ids(1), do_sample=True, num_return_sequences=3, eos_token_id=None).sequences
    assert one.shape == (3, 28) and not torch.equal(one[0], one[1])
    both(model, text_ids(rows), do_sample=False, repetition_penalty=1.5, no_repeat_ngram_size=2)


def test_stopping_criteria_of_the_caller():
    def after(ids, scores, **_):
        return torch.full((len(ids),), ids.shape[1] >= 14)

    criteria = transformers.StoppingCriteriaList([after])
    made = both(tiny("llama"), text_ids(1), do_sample=False, stopping_criteria=criteria, eos_token_id=None)
    assert made.sequences.shape[1] == 14


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_transformers_own_loop_for_everything_else(options):
    both(tiny("llama").eval(), text_ids(1), ours=False, **({"do_sample": False} | options))


def test_padding_of_another_form_is_transformers_own():
    holes = torch.ones_like(IDS)
    holes[0, 3] = 0
    both(build("llama").float(), IDS, holes, ours=False, do_sample=False)


def test_outputs_beyond_tokens():
    out = tn.generate(tiny("llama"), text_ids(1), max_new_tokens=3, return_dict_in_generate=True, output_scores=True)
    assert len(out.scores) == 3


def test_refusals():
    model = tiny("llama")
    with pytest.raises(ValueError, match="compile='yes' must be"):
        tn.generate(model, text_ids(1), compile="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one token"):
        tn.generate(model, torch.empty(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="pass the model's tokenizer"):
        tn.generate(model, "a text")


# Texts and streams


@pytest.fixture(scope="module")
def spoken():
    """A model that repeats one sentence for ever, and its byte tokenizer: (model, tokenizer, sentence)."""
    tokenizer = byte_tokenizer()
    sentence = "né 你好 🙂, so "
    tokens = tokenizer(sentence, add_special_tokens=False)["input_ids"]
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256).eval()
    forward = type(model).forward

    def say(self, input_ids=None, position_ids=None, **kwargs):
        out = forward(self, input_ids=input_ids, position_ids=position_ids, **kwargs)
        out.logits = torch.zeros_like(out.logits)
        at = (position_ids[0, -1] + 1) % len(tokens)
        out.logits[:, -1, torch.tensor(tokens)[at]] = 1.0
        return out

    model.forward = say.__get__(model)
    return model, tokenizer, sentence, len(tokens)


def test_text_in_text_out(spoken):
    model, tokenizer, sentence, count = spoken
    assert tn.generate(model, sentence, tokenizer, max_new_tokens=count, do_sample=False, compile=False) == sentence
    twice = tn.generate(model, [sentence, sentence * 2], tokenizer, max_new_tokens=count, do_sample=False)
    assert twice == [sentence, sentence]


def test_a_stream_never_shows_half_a_letter(spoken, monkeypatch):
    """Several tokens make one letter here. What is printed is the text, in whole letters."""
    model, tokenizer, sentence, count = spoken
    pieces = []
    monkeypatch.setattr(TextStreamer, "on_finalized_text", lambda self, text, stream_end=False: pieces.append(text))
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    tn.generate(model, sentence, tokenizer, streamer=streamer, max_new_tokens=2 * count, do_sample=False)
    assert "".join(pieces) == 2 * sentence and len([p for p in pieces if p]) > 4
    assert not any("�" in piece for piece in pieces)


def test_a_callback_gets_each_token_and_no_prompt():
    seen = []
    made = tn.generate(tiny("llama"), text_ids(2), callback=seen.append, max_new_tokens=4, do_sample=False)
    assert torch.equal(torch.stack(seen, dim=1), made[:, 8:])


@pytest.fixture
def folder(tmp_path):
    tn.save_pretrained(tiny("llama", vocab_size=259).eval(), tmp_path / "model", tokenizer=byte_tokenizer())
    return str(tmp_path / "model")


def test_the_command(folder, monkeypatch, capsys):
    run = functools.partial(run_command, monkeypatch, capsys, "generate", folder, "--prompt", "ab")
    code, out, _ = run("--max-new-tokens", "6", "--json", "--no-compile")
    told = json.loads(out)
    model, tokenizer = tn.from_pretrained(folder)
    wanted = model.generate(torch.tensor([tokenizer("ab")["input_ids"]]), max_new_tokens=6, do_sample=False)
    assert code == 0 and told["tokens"] == wanted[0, 2:].tolist() and told["prompt"] == "ab"
    assert told["new_tokens"] == len(told["tokens"]) and not told["compiled"] and told["tokens_per_second"] > 0
    assert told["text"] == tokenizer.decode(told["tokens"], skip_special_tokens=True)
    code, out, _ = run("--max-new-tokens", "6")
    assert code == 0 and out.startswith("ab") and out.endswith("\n")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Stepper, "__call__", interrupt)
    code, out, err = run("--max-new-tokens", "6")
    assert code == 130 and out.startswith("ab") and out.endswith("\n") and "tapernorm:" not in err


# The compiled step


def fake(monkeypatch, wrong=0.0):
    """Compiling replaced by the step itself; returns the folders that were asked for, one for each compilation."""
    made = []

    class Fake:
        def __init__(self, step, folder):
            self.step = step

        def lend(self, step):
            self.step = step

        def __call__(self, *args):
            logits, token = self.step(*args)
            return [logits + wrong * logits.abs().max(), token]

    def compile_step(step, token, places, folder):
        made.append(folder)
        folder.mkdir(parents=True)
        (folder / "step.pt2").touch()

    monkeypatch.setattr(module, "Compiled", Fake)
    monkeypatch.setattr(module, "compile_step", compile_step)
    monkeypatch.setattr(module, "refuse_compiling", lambda: None)
    return made


def test_when_a_step_is_compiled(monkeypatch):
    """Not for a short text; for a long one; when asked; not again when it is on disk."""
    made = fake(monkeypatch)
    model = tiny("llama").eval()
    settings = {"do_sample": False, "eos_token_id": None}
    assert not both(model, text_ids(1), **settings, compile="auto").compiled and not made
    assert not both(model, text_ids(1), **settings, compile=False).compiled and not made
    monkeypatch.setattr(module, "_SECONDS", 0.0)
    assert both(model, text_ids(1), **settings, compile="auto").compiled and len(made) == 1
    monkeypatch.setattr(module, "_SECONDS", 60.0)
    again = tiny("llama", seed=1).eval()  # other weights, the same structure
    assert both(again, text_ids(1), **settings, compile="auto").compiled and len(made) == 1
    assert both(model, text_ids(2), **settings, compile=True).compiled and len(made) == 2
    assert both(tiny("gpt2").eval(), text_ids(1), **settings, compile=True).compiled and len(made) == 3
    assert not both(model, text_ids(1), **settings, compile=False).compiled
    monkeypatch.setenv("TAPERNORM_CACHE", "off")
    assert not both(tiny("gemma").eval(), text_ids(1), **settings, compile="auto").compiled


def test_a_wrong_library_is_not_used(monkeypatch, capsys):
    fake(monkeypatch, wrong=0.1)
    assert not both(tiny("llama"), text_ids(1), do_sample=False, compile=True).compiled
    assert "does not make the logits of the model" in capsys.readouterr().err


def test_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: 1 / 0)
    assert not both(tiny("llama"), text_ids(1), do_sample=False, compile=True).compiled
    said = capsys.readouterr().err.strip().splitlines()
    assert said == ["tapernorm: decoding without a compiled step: no C++ compiler (g++) is on the path"]


def test_the_key_follows_all_that_the_library_depends_on():
    def key(model, batch=1, padded=False):
        return decode_step.step_key(decode_step.Step(model, padded), batch)

    model = tiny("llama")
    assert key(model) == key(tiny("llama", seed=5))
    others = [
        tiny("llama", layers=1),
        tiny("gpt2"),
        tiny("llama", dtype=torch.bfloat16),
        tiny("llama", rms_norm_eps=1.0),
    ]
    keys = [key(model), key(model, batch=2), key(model, padded=True), *map(key, others)]
    assert len(set(keys)) == len(keys)


def test_where_libraries_lie(monkeypatch, tmp_path):
    assert decode_step.cache_root() == tmp_path / "cache"
    monkeypatch.setenv("TAPERNORM_CACHE", "off")
    assert decode_step.cache_root() is None
    monkeypatch.delenv("TAPERNORM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert decode_step.cache_root() == tmp_path / "tapernorm"


@pytest.mark.slow
@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_compiled(family, few_places):
    """A cache that grows, other weights in the same library, replaced weights, padded rows."""
    model = tiny(family, layers=1).eval()
    settings = {"do_sample": False, "eos_token_id": None, "compile": True}
    assert both(model, text_ids(1), **settings).compiled
    assert both(tiny(family, layers=1, seed=1).eval(), text_ids(1), **settings).compiled
    model.load_state_dict(tiny(family, layers=1, seed=2).state_dict(), assign=True)
    assert both(model, text_ids(1), **settings).compiled
    assert both(model, text_ids(1), **(settings | {"do_sample": True, "top_p": 0.9})).compiled
    assert len(list(decode_step.cache_root().iterdir())) == 1  # type: ignore[union-attr]


@pytest.mark.slow
def test_compiled_padded_with_a_prefix_and_a_window(few_places):
    _, model = held("gemma3_text")
    made = both(model.float(), IDS, PADDED, do_sample=False, compile=True)
    assert made.compiled


@pytest.mark.slow
def test_another_process_finds_the_library(folder, tmp_path):
    def run(*options):
        begin = time.perf_counter()
        start = [sys.executable, "-c", "from tapernorm.cli import main; main()"]
        command = [*start, "generate", folder, "--prompt", "ab", "--json", *options]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(made.stdout), time.perf_counter() - begin

    first, slow = run("--compile")
    second, quick = run()
    assert first["compiled"] and second["compiled"] and first["tokens"] == second["tokens"]
    assert quick < slow
