"""PEFT, TRL and Lightning, each where it is installed."""

import importlib.util
import json

import pytest
import torch
import transformers

import tapernorm as tn
from llama import tiny
from tapernorm.modules import taper_norms
from tapernorm.train import TaperTrainer, controller_of

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()

CONFIG = tn.TaperConfig(arm="all", warmup_steps=3, taper_steps=4, ema_decay=0.8)
STEPS = 9


def needs(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def blocks(count=64, length=8):
    rows = torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def settings(folder, **more):
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False,
        "save_strategy": "no", "logging_strategy": "no",
    } | more  # fmt: skip


# PEFT


def adapted(seed=0):
    """LoRA on the linear maps of a tapered model, and its gains trainable."""
    import peft

    model = tiny(seed)
    tn.taper_(model, CONFIG)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, lora)
    for module in taper_norms(wrapped).values():
        module.requires_grad_(True)
    return wrapped


@needs("peft")
def test_lora_with_trainable_gains(tmp_path):
    """Trained, merged, folded: the same function; the base weights were never touched."""
    wrapped = adapted()
    controller = controller_of(wrapped)
    before = {n: p.detach().clone() for n, p in wrapped.named_parameters()}
    trainer = TaperTrainer(
        model=wrapped, args=transformers.TrainingArguments(**settings(tmp_path)), train_dataset=blocks()
    )
    trainer.train()
    assert controller.phase == "done" and controller.gate == 0.0
    assert len(set(controller.scales.values())) == 5 and all(c > 0 for c in controller.scales.values())
    trained = {n for n, p in wrapped.named_parameters() if not torch.equal(p, before[n])}
    assert all("lora_" in n or "norm" in n for n in trained)
    assert sum(n.endswith("fixed_norm.weight") for n in trained) == 5 and any("lora_A" in n for n in trained)
    rows = torch.stack([row["input_ids"] for row in blocks(4)])
    wrapped.eval()
    with torch.no_grad():
        wanted = wrapped(input_ids=rows).logits
        merged = wrapped.merge_and_unload()
        report = tn.fold_(merged, example={"input_ids": rows})
        torch.testing.assert_close(merged(input_ids=rows).logits, wanted, rtol=1e-4, atol=1e-4)
    assert len(report.folded) == 5


@needs("peft")
def test_lora_resumes(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 5}
    arguments = transformers.TrainingArguments(**settings(tmp_path, **saves))
    whole = TaperTrainer(model=adapted(), args=arguments, train_dataset=blocks())
    whole.train()
    checkpoint = tmp_path / "checkpoint-5"
    assert not list(checkpoint.glob("*.bin"))
    assert json.loads((checkpoint / "taper.json").read_text())["step_count"] == 5
    fresh = adapted()
    with torch.no_grad():  # what is trained comes from the checkpoint, the rest from the base model
        for name, parameter in fresh.named_parameters():
            if parameter.requires_grad:
                parameter.add_(1.0) if "lora" in name else parameter.mul_(2.0)
    again = TaperTrainer(model=fresh, args=arguments, train_dataset=blocks())
    again.train(resume_from_checkpoint=str(checkpoint))
    for (name, ours), theirs in zip(fresh.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for key, value in whole.controller.state_dict().items():
        found = again.controller.state_dict()[key]
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, key


@needs("peft")
def test_frozen_gains_stay_frozen():
    import peft

    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules=["o_proj", "down_proj"]))
    tn.taper_(model, CONFIG)
    for module in taper_norms(model).values():
        assert not any(p.requires_grad for p in module.parameters())


# TRL


@needs("trl")
def test_sft_trainer_of_trl(tmp_path):
    """The same gates and scales as with TaperTrainer, the scale loss on, and rows of different lengths."""
    import datasets
    import trl

    from tapernorm.data import train_tokenizer

    class Mine(tn.TaperMixin, trl.SFTTrainer):
        pass

    tokenizer = train_tokenizer(["a b c d e f g h"] * 20, 300)
    rows = [{"input_ids": row["input_ids"].tolist()[: 4 + number % 5]} for number, row in enumerate(blocks(64))]
    model = tiny()
    controller = tn.taper_(model, CONFIG)
    arguments = trl.SFTConfig(**settings(tmp_path, gradient_accumulation_steps=2, max_length=16, packing=False))
    trainer = Mine(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    assert controller.phase == "done" and controller.step_count == STEPS
    assert controller.scale_target is not None and controller.scale_target > 0
    # TRL trains in bfloat16 by default, and leaves that in the model's forward
    unwrapped = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    assert tn.fold_(unwrapped).folded


# Lightning


class Loader:
    """Batches of four, from where it was."""

    def __init__(self, rows):
        self.batches, self.done = rows.split(4), 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.done < len(self.batches):
            self.done += 1
            yield self.batches[self.done - 1]

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def lightning_run(folder, model, config=CONFIG, steps=STEPS, accumulate=1, checkpoint=None, **more):
    import lightning

    from tapernorm.integrations.lightning import TaperCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, number):
            loss = self.model(input_ids=batch, labels=batch).loss
            return loss + tn.get_controller(self.model).auxiliary_loss()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)

    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", callbacks=[TaperCallback(tn.get_controller(model))], logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, enable_checkpointing=False,
        accumulate_grad_batches=accumulate, **more,
    )  # fmt: skip
    rows = torch.stack([row["input_ids"] for row in blocks(STEPS * 4 * accumulate)])
    loader = Loader(rows)
    trainer.fit(Module(), loader, ckpt_path=checkpoint, **({"weights_only": True} if checkpoint else {}))
    return trainer, rows


@needs("lightning")
@pytest.mark.parametrize("accumulate", (1, 2))
def test_lightning_is_the_plain_loop(tmp_path, accumulate):
    model = tiny()
    controller = tn.taper_(model, CONFIG)
    _, rows = lightning_run(tmp_path, model, accumulate=accumulate)
    plain = tiny().train()
    mine = tn.taper_(plain, CONFIG)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    mine.attach_optimizer(optimizer)
    for step in range(STEPS):
        for part in range(accumulate):
            number = step * accumulate + part
            batch = rows[4 * number : 4 * number + 4]
            loss = plain(input_ids=batch, labels=batch).loss + mine.auxiliary_loss()
            (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        mine.step()
    assert (controller.step_count, controller.gate, controller.phase) == (STEPS, 0.0, "done")
    assert controller.scales == mine.scales and controller.scale_target == mine.scale_target
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@needs("lightning")
def test_lightning_resumes(tmp_path):
    model = tiny()
    controller = tn.taper_(model, CONFIG)
    trainer, _ = lightning_run(tmp_path, model, steps=5)
    trainer.save_checkpoint(tmp_path / "five.ckpt")
    whole = tiny()
    reference = tn.taper_(whole, CONFIG)
    lightning_run(tmp_path, whole)
    fresh = tiny(seed=9)
    controller = tn.taper_(fresh, CONFIG)
    lightning_run(tmp_path, fresh, checkpoint=str(tmp_path / "five.ckpt"))
    assert controller.step_count == STEPS and controller.scales == reference.scales
    for ours, theirs in zip(fresh.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@needs("lightning")
def test_lightning_with_a_guard(tmp_path):
    model = tiny()
    controller = tn.taper_(model, tn.TaperConfig(warmup_steps=3, taper_steps=4, guard_margin=0.5))
    judged = []
    judge = controller.guard.judge
    controller.guard.judge = lambda loss, *rest: (judged.append(loss), judge(loss, *rest))[1]
    lightning_run(tmp_path, model, accumulate=2)
    assert len(judged) == STEPS and all(3 < loss < 6 for loss in judged)
