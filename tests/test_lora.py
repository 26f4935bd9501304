"""LoRA: adapters and gains learn and nothing else; merged, then folded, it is the same function."""

from __future__ import annotations

import builtins
import json

import pytest
import torch

import tapernorm as tn
import tiny_models
from tapernorm import lora
from tapernorm.modules import taper_norms
from tapernorm.run_config import RunConfig
from test_cli import QUICK, Call, call, models, text  # noqa: F401  (fixtures)
from trainers import arguments, blocks

peft = pytest.importorskip("peft")

CONFIG = tn.TaperConfig(arm="all", warmup_steps=2, taper_steps=3, ema_decay=0.5)
STEPS = 8


def trained(folder, family: str, **settings):
    """(the PEFT model after a training, what its weights were before)."""
    model = tiny_models.tiny(family, dropout=False, **settings)
    tn.taper_(model, CONFIG)
    wrapped = lora.add_lora(model, rank=4, seed=1)
    before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    given = arguments(folder, max_steps=STEPS, learning_rate=3e-3)
    tn.TaperTrainer(model=wrapped, args=given, train_dataset=blocks()).train()
    return wrapped, before


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_learns_and_that_merged_and_folded_it_is_the_same(tmp_path, family, tied) -> None:
    wrapped, before = trained(tmp_path, family, tie_word_embeddings=tied)
    changed = {name for name, p in wrapped.named_parameters() if not torch.equal(p, before[name])}
    own = {name for name, p in wrapped.named_parameters() if p.ndim == 1}
    gains = {name for name in own if ".fixed_norm." in name or ".norm." in name}
    learnt = {name for name in changed if "lora_" in name}
    assert changed == gains | learnt and sum("fixed_norm.weight" in name for name in gains) == 5
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in learnt}
    maps = {"llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
            "gpt2": {"c_attn", "c_proj", "c_fc"}}  # fmt: skip
    assert adapted == maps[family]
    ids = tiny_models.ids(4, 8, seed=7)
    with torch.no_grad():
        wanted = wrapped.double().eval()(input_ids=ids).logits
        base = {name: p.clone() for name, p in wrapped.named_parameters() if "base_layer" in name}
        for name, p in base.items():
            assert torch.equal(p.float(), before[name]), name
        model = lora.merge_lora(wrapped)
        assert not [name for name, _ in model.named_parameters() if "lora" in name]
        assert all(p.requires_grad for p in model.parameters()) and not hasattr(model, "peft_config")
        torch.testing.assert_close(model(input_ids=ids).logits, wanted, rtol=1e-10, atol=1e-10)
        weights = [name for name in base if name.endswith("weight")]
        assert not any(torch.equal(model.get_parameter(_merged(name)), base[name]) for name in weights)
        embedding = model.get_input_embeddings().weight.clone()
        report = tn.fold_(model, example={"input_ids": ids})
        bound = 1e-10 if family == "gpt2" else 1e-6  # Llama's angles are float32
        assert float((model(input_ids=ids).logits - wanted).abs().max() / wanted.abs().max()) < bound
    assert len(report.folded) == 5 and bool(report.untied) == tied and not taper_norms(model)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    tn.save_pretrained(model, tmp_path / "out")
    again = tn.from_pretrained(tmp_path / "out")[0]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-12, atol=1e-12)


def _merged(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def test_at_first_it_is_the_same_function_and_of_a_stock_model_the_gains_learn() -> None:
    model = tiny_models.tiny().eval()
    ids = tiny_models.ids()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    names = [site.name for site in tn.find_sites(model)]
    gains = {name: model.get_submodule(name).weight.detach().clone() for name in names}
    wrapped = lora.add_lora(model, rank=2, gains=names)
    torch.testing.assert_close(wrapped(input_ids=ids).logits, wanted, rtol=1e-6, atol=1e-6)
    learns = [p for p in wrapped.parameters() if p.requires_grad and p.ndim == 1]
    assert len(learns) == len(names) == 5
    with torch.no_grad():
        for p in learns:
            p.mul_(2)
    merged = lora.merge_lora(wrapped)
    assert all(torch.equal(merged.get_submodule(name).weight, 2 * gains[name]) for name in names)
    assert type(merged.get_submodule(names[0])).__name__ == "LlamaRMSNorm"


@pytest.mark.parametrize("arm", ["internal", "all"])
def test_taper_with_lora(call: Call, models, text, tmp_path, arm) -> None:  # noqa: F811
    out = tmp_path / "run"
    given = ("--data", text, "--lora", 2, "--arm", arm, "--lr", 5e-3, *QUICK, "--json")
    code, said, err = call("taper", models / "llama", "--out", out, *given)
    assert code == 0, err
    result = json.loads(said)
    assert result["verify"]["passed"] and result["verify"]["greedy_match"] == 1
    assert "adapters of rank 2 trained, then merged" in err
    assert len(result["fold"]["folded"]) == (5 if arm == "all" else 4)
    assert result["loss_after"] < result["loss_before"] and result["loss_normed"] < result["loss_before"]
    original, last = (tn.from_pretrained(path)[0] for path in (models / "llama", out / arm / "final"))
    change = last.model.layers[0].mlp.up_proj.weight - original.model.layers[0].mlp.up_proj.weight
    assert int(torch.linalg.matrix_rank(change, atol=1e-5)) == 2
    assert torch.equal(last.model.embed_tokens.weight, original.model.embed_tokens.weight)
    rows = [json.loads(row) for row in (out / arm / "log.jsonl").open()]
    assert rows[-1]["gate"] == 0 and "scale" in rows[-1] and "eval_loss" in rows[-1]


def test_a_run_that_was_stopped_goes_on(call: Call, models, text, tmp_path, monkeypatch) -> None:  # noqa: F811
    """The same weights as without a stop."""
    arguments = ("taper", models / "llama", "--data", text, "--lora", 2, "--no-baseline", *QUICK)
    assert call(*arguments, "--out", tmp_path / "whole")[0] == 0
    step = tn.TaperController.step

    def stop(controller, *args, **kwargs):
        if controller.step_count == 7:
            raise KeyboardInterrupt
        return step(controller, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(tn.TaperController, "step", stop)
        assert call(*arguments, "--out", tmp_path / "run")[0] == 130
    code, _, err = call(*arguments, "--out", tmp_path / "run", "--resume")
    assert code == 0, err
    whole, again = (tn.from_pretrained(tmp_path / name / "internal" / "final")[0] for name in ("whole", "run"))
    for (name, one), other in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_missing_extra_and_values_that_are_none(call: Call, models, text, tmp_path, monkeypatch) -> None:  # noqa: F811
    whole = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "peft":
            raise ModuleNotFoundError("No module named 'peft'", name="peft")
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    code, _, err = call("taper", models / "llama", "--data", text, "--out", tmp_path / "run", "--lora", 2)
    assert code == 2 and err == "tapernorm: this needs peft: pip install 'tapernorm[peft]'\n"
    assert not (tmp_path / "run").exists()
    for value in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=r"lora=.* must be a whole number, at least 1"):
            RunConfig(kind="taper", model="m", data="a.txt", out="x", lora=value)
