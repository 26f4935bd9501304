"""What people do next with a norm-free model: generate, pipelines, adapters, trainers, compilers, other engines."""

import copy
import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, pipeline
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import tapernorm as tn
from folders import FAMILIES, IDS, byte_tokenizer, folded_by_hand, logits, names_of_norms
from tapernorm.logits import token_losses

FAMILY = pytest.mark.parametrize("family", FAMILIES)
TEXTS = ["a fox and a bear went out", "once there was", "the moon is up", "so they slept"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("next")
    for family in FAMILIES:
        tn.save_pretrained(folded_by_hand(family), root / family, tokenizer=byte_tokenizer())
    return root


@pytest.fixture
def load(made):
    return lambda family: tn.from_pretrained(made / family)


@FAMILY
@pytest.mark.parametrize(
    "how",
    [{"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True, "top_k": 20, "temperature": 20.0}],
    ids=["greedy", "beams", "sampling"],
)
def test_generate(family, how, load):
    """Every cache writes the same tokens, and padding on the left changes none."""
    model, _ = load(family)
    caches = [{"use_cache": False}, {}] + ([{"cache_implementation": "static"}] if how.get("num_beams", 1) == 1 else [])

    def write(ids, **more):
        torch.manual_seed(0)
        settings = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 2, **how, **more}
        return model.generate(ids, attention_mask=settings.pop("mask", torch.ones_like(ids)), **settings)

    written = [write(IDS, **cache) for cache in caches]
    assert written[0].shape == (2, IDS.shape[1] + 6)
    assert all(torch.equal(written[0], other) for other in written[1:])
    if how["do_sample"]:
        assert not torch.equal(written[0], model.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None))
        return
    short = IDS[1:, 4:]
    alone = write(short)[0, short.shape[1] :]
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[1, :4], mask[1, :4] = 2, 0
    ids[1, 4:] = short[0]
    for cache in caches:
        assert torch.equal(write(ids, mask=mask, **cache)[1, ids.shape[1] :], alone)


@FAMILY
def test_the_text_generation_pipeline(family, made, load):
    model, tokenizer = load(family)
    write = pipeline("text-generation", model=str(made / family))
    assert type(write.model) is type(model)
    found = write(TEXTS[:2], max_new_tokens=5, do_sample=False, batch_size=2, return_full_text=False)
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    alone = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=2)[0, ids.shape[1] :]
    assert found[0][0]["generated_text"] == tokenizer.decode(alone, skip_special_tokens=True)


@FAMILY
def test_lora_on_a_folded_model_and_merging(family, load, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra tapernorm[peft]")
    model, _ = load(family)
    base = logits(model)
    targets = ["q_proj", "up_proj"] if family == "llama" else ["c_attn", "c_fc"]
    config = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    trained = logits(adapted)
    assert (trained - base).abs().max() > 1e-3
    merged = adapted.merge_and_unload()
    assert (logits(merged) - trained).abs().max() < 1e-4 * trained.abs().max()
    tn.save_pretrained(merged, tmp_path / "merged")
    again, _ = tn.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again), logits(merged)) and names_of_norms(again) == []


@FAMILY
def test_an_adapter_is_saved_and_loaded_on_the_folder(family, made, load, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra tapernorm[peft]")
    targets = ["q_proj"] if family == "llama" else ["c_attn"]
    config = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=family == "gpt2", init_lora_weights=False)
    adapted = peft.get_peft_model(load(family)[0], config)
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(family)[0], tmp_path / "adapter")
    assert torch.equal(logits(again), logits(adapted))
    assert not torch.equal(logits(again), logits(load(family)[0]))


def test_sft_trainer(load, tmp_path):
    trl = pytest.importorskip("trl", reason="needs the extra tapernorm[trl]")
    from datasets import Dataset

    model, tokenizer = load("llama")
    before = copy.deepcopy(model.state_dict())
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, max_length=32, use_cpu=True, report_to=[],
        save_strategy="no", learning_rate=1e-2, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    trainer.save_model(str(tmp_path / "trained"))
    again, _ = tn.from_pretrained(tmp_path / "trained")
    assert type(again) is type(model) and names_of_norms(again) == []
    assert torch.equal(logits(again), logits(model))


@FAMILY
def test_torch_compile(family, load):
    model, _ = load(family)
    wanted = logits(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert (logits(compiled) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_int8_weights_by_torchao(load):
    """The quantized model is the model with its weights rounded to 127 steps a row, and no other."""
    torchao = pytest.importorskip("torchao", reason="torchao is not installed")
    model, _ = load("llama")
    rounded = copy.deepcopy(model)
    torchao.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
    changed = 0
    for name, linear in rounded.named_modules():
        if isinstance(linear, torch.nn.Linear):
            made = model.get_submodule(name).weight.dequantize()
            step = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            assert ((made - linear.weight.detach()).abs() <= 0.51 * step).all(), name
            linear.weight = torch.nn.Parameter(made)
            changed += 1
    assert changed == 15
    wanted = logits(rounded)
    assert (logits(model) - wanted).abs().max() < 1e-4 * wanted.abs().max()


# What engines that run any transformers model (vLLM, SGLang, TGI) ask of one


@FAMILY
def test_attention_goes_through_the_interface(family, made):
    """A function that an engine registers is called once a layer, and what the engine passes reaches it."""
    seen = []

    def attention(module, query, key, value, attention_mask, **kwargs):
        seen.append((module.layer_idx, kwargs.get("attention_instances")))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("engine", attention)
    AttentionMaskInterface.register("engine", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(made / family, attn_implementation="engine")
    assert type(model)._supports_attention_backend
    wanted = logits(tn.from_pretrained(made / family)[0])
    with torch.no_grad():
        found = model.eval()(input_ids=IDS, attention_instances={"it": "arrives"}).logits
    assert torch.equal(found, wanted)
    assert seen == [(layer, {"it": "arrives"}) for layer in range(2)]


@FAMILY
def test_what_an_engine_reads_in_the_folder(family, made):
    """The body by the Auto class, from config.json; parallel plans only for modules that are there; no tied head."""
    values = json.loads((made / family / "config.json").read_text())
    assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} <= values["auto_map"].keys()
    model = AutoModelForCausalLM.from_pretrained(made / family)
    body = transformers.AutoModel.from_pretrained(made / family)
    assert type(body).__name__ == "TaperNorm" + type(model.base_model).__name__
    names = {name for name, _ in model.named_modules()}
    from tapernorm.modeling_tapernorm import name_pattern

    for rule in model._tp_plan or {}:
        assert any(name_pattern(rule).match(name) for name in names), rule
    assert body.get_input_embeddings() is not None and model.get_output_embeddings() is not None
    assert model.config.vocab_size == 300 and model.config.get_text_config().num_attention_heads == 4


@FAMILY
def test_the_evaluation_harness(family, made, load, tmp_path):
    """`lm_eval --model hf --model_args pretrained=DIR` on a task of two documents gives the losses that we measure."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed")
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2]), encoding="utf-8")
    task = {
        "task": "two_documents", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }  # fmt: skip
    (tmp_path / "two_documents.yaml").write_text(json.dumps(task), encoding="utf-8")
    arguments = f"pretrained={made / family},trust_remote_code=True,dtype=float32,max_length=64"
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, "--tasks", "two_documents",
        "--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "1", "--output_path", str(tmp_path / "out"),
        "--trust_remote_code",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(results.read_text(encoding="utf-8"))["results"]["two_documents"]["bits_per_byte,none"]
    model, tokenizer = load(family)
    total = 0.0
    for text in TEXTS[:2]:
        # The harness begins each document with the tokenizer's token for that.
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        ids = torch.tensor([[first, *tokenizer(text, add_special_tokens=False).input_ids]])
        with torch.no_grad():
            total += float(token_losses(model.float()(input_ids=ids).logits, ids).sum())
    assert found == pytest.approx(total / math.log(2) / sum(len(text.encode()) for text in TEXTS[:2]), rel=1e-4)
