"""The blocks of a model in a row: a forward that begins at one and ends at another."""

import pytest
import torch

import tapernorm as tn
from removing import IDS, model_of
from tapernorm.chain import Chain
from zoo import BY_NAME, D, logits

ROWS = [pytest.param(BY_NAME[name], id=name) for name in ("llama", "llama-tied", "gpt2", "gpt2-untied")]


@pytest.mark.parametrize("row", ROWS)
def test_a_forward_can_begin_and_end_at_any_block(row):
    model = model_of(row)
    chain = Chain(model, tn.find_sites(model), IDS, batch=5)
    wanted, hidden = logits(model, IDS), chain.start(IDS)
    for index in range(len(chain.blocks)):
        assert torch.equal(chain.rest(index, IDS, hidden, lambda out, ids: out), wanted)
        hidden = chain.through(index, IDS, hidden)
    assert torch.equal(chain.head(IDS, hidden, lambda out, ids: out), wanted)
    assert torch.equal(logits(model, IDS), wanted)  # nothing is left behind
    assert not any("forward" in vars(block) or block._forward_pre_hooks for block in chain.blocks)


def test_what_is_handed_over_is_what_runs():
    model = model_of(BY_NAME["llama"])
    chain = Chain(model, tn.find_sites(model), IDS)
    hidden = chain.start(IDS)
    changed = chain.rest(1, IDS, chain.through(0, IDS, 2 * hidden), lambda out, ids: out)
    handle = model.model.embed_tokens.register_forward_hook(lambda m, args, out: 2 * out)
    wanted = logits(model, IDS)
    handle.remove()
    assert torch.equal(changed, wanted)
    inside = chain.inside(1, IDS, hidden, {"model.layers.1.mlp.down_proj": "input"})
    assert inside["model.layers.1.mlp.down_proj"].shape == (*IDS.shape, D)


def test_norms_outside_a_list_of_blocks_are_refused():
    model = model_of(BY_NAME["llama"])
    sites = [site for site in tn.find_sites(model) if site.role == "final"]
    with pytest.raises(ValueError, match="do not sit in a list of blocks"):
        Chain(model, sites, IDS)
