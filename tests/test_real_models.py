"""Small models that somebody else trained: real gains and biases, real text, a task with a right answer."""

from __future__ import annotations

import base64
import copy
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tapernorm as tn
from tapernorm.verify import greedy_tokens

DATA = Path(os.environ.get("TAPERNORM_DATA", Path(__file__).parents[1] / "../shared/data"))
LETTERS = 6


def needs(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there; TAPERNORM_DATA names the folder with real models")
    return path


def sorter() -> GPT2LMHeadModel:
    """gpt-nano, which sorts six letters: given them, it writes them in order. Its file holds linears as (out, in)."""
    raw = json.loads(needs("gpt-nano-sort/gpt-nano-sort-model.json").read_text())
    config = raw["config"]
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config["vocab_size"],
            n_positions=config["block_size"],
            n_embd=config["n_embd"],
            n_layer=config["n_layer"],
            n_head=config["n_head"],
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    state = {}
    for name, value in raw.items():
        if isinstance(value, dict) and "data" in value and not name.endswith(".attn.bias"):
            tensor = torch.frombuffer(bytearray(base64.b64decode(value["data"])), dtype=torch.float32)
            tensor = tensor.reshape(value["shape"])
            is_linear = name.endswith("weight") and tensor.dim() == 2 and ".h." in name
            state[name] = tensor.T.contiguous() if is_linear else tensor.clone()
    model.load_state_dict(state, strict=True)
    return model


def letters(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, (count, LETTERS), generator=torch.Generator().manual_seed(seed))


def sorted_right(model: torch.nn.Module, count: int = 300) -> int:
    start = letters(count, seed=1)
    return int((greedy_tokens(model, start, LETTERS) == start.sort(1).values).all(1).sum())


@pytest.mark.parametrize("arm", ["internal", "all"])
def test_a_real_layer_norm_model_still_sorts_without_its_norms(arm: str) -> None:
    model = sorter()
    assert sorted_right(model) == 300
    controller = tn.taper_(model, tn.TaperConfig(arm=arm, warmup_steps=50, taper_steps=250, anchor="relative"))
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    controller.attach_optimizer(optimizer)
    model.train()
    for step in range(400):
        start = letters(64, seed=1000 + step)
        ids = torch.cat([start, start.sort(1).values], dim=1)
        logits = model(input_ids=ids[:, :-1]).logits[:, LETTERS - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, LETTERS:].flatten())
        (loss + controller.auxiliary_loss()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    assert controller.gate == 0
    report = tn.fold_(model)
    assert len(report.folded) == (7 if arm == "all" else 6)
    assert report.relative_error < 1e-5
    assert not any(isinstance(m, tn.TaperNorm) for m in model.modules())
    assert sorted_right(model) >= 299


@torch.no_grad()
def test_stories260k_tells_the_same_story_at_gate_1_to_the_bit() -> None:
    model, tokenizer = tn.from_pretrained(needs("stories260K/stories260K.bin"))
    start = torch.tensor([tokenizer("Once upon a time")["input_ids"]])
    before, logits = greedy_tokens(model, start, 200), model(input_ids=start).logits
    tapered = copy.deepcopy(model)
    tn.taper_(tapered, tn.TaperConfig(arm="all"))
    assert torch.equal(tapered(input_ids=start).logits, logits)
    assert torch.equal(greedy_tokens(tapered, start, 200), before)
    assert tokenizer.decode(before[0]).strip().startswith(",")  # "Once upon a time, ..."
