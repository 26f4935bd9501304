"""Generation with a constant prefix: caches, padding, batches, a conversation, the pipeline."""

import pytest
import torch
import transformers

from folders import byte_tokenizer
from prefixed import IDS, PREFIX, WAYS, build, generated, held, in_front
from tapernorm.prefix import attach_prefix
from zoo import D, relative


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
    model = build("llama", vocab_size=300)
    attach_prefix(model, PREFIX)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=byte_tokenizer())
    text = pipe("two words", max_new_tokens=3, do_sample=False, return_full_text=False)[0]["generated_text"]
    ids = byte_tokenizer()("two words", return_tensors="pt").input_ids
    assert text == byte_tokenizer().decode(generated(model, ids, max_new_tokens=3)[0][0], skip_special_tokens=True)
