"""What the tests of the Trainer share: a tiny model, its rows, and a trainer that is watched."""

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

import tiny_models
from tapernorm import TaperConfig, TaperTrainer, taper_

transformers.utils.logging.set_verbosity_error()

CONFIG = TaperConfig(arm="all", warmup_steps=3, taper_steps=4, ema_decay=0.8)
STEPS = 9


def tiny(family="llama", seed=0):
    """One block; GPT-2 keeps its dropout."""
    return tiny_models.tiny(family, seed, layers=1)


def blocks(count=64, length=8, seed=0):
    rows = tiny_models.ids(count, length, seed)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, **settings):
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "linear",
        "weight_decay": 0.1, "max_grad_norm": 1.0, "save_strategy": "no", "logging_strategy": "no",
    } | settings  # fmt: skip
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **settings
    )


class Watch(TrainerCallback):
    """What the controller showed after each optimizer step."""

    def __init__(self, controller):
        self.controller, self.rows = controller, []

    def on_step_end(self, args, state, control, **kwargs):
        c = self.controller
        self.rows.append((state.global_step, c.step_count, c.gate, c.phase, c.scale_target, c.scales))


def make(folder, family="llama", config=CONFIG, kind=TaperTrainer, seed=0, data=None, **settings):
    """(trainer, controller, watch) on a fresh model."""
    model = tiny(family, seed)
    controller = taper_(model, config)
    trainer = kind(
        model=model, args=arguments(folder, **settings), train_dataset=data or blocks(), eval_dataset=blocks(8, seed=5)
    )
    watch = Watch(controller)
    trainer.add_callback(watch)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer, controller, watch


def step_gradients(folder, config, data, batch, accumulate, steps=1, **overrides):
    """The gradient of each optimizer step, with weights that stay. overrides: attributes of the trainer."""
    found = []

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            found.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])

    trainer, *_ = make(
        folder, config=config, data=data, max_steps=steps, per_device_train_batch_size=batch, max_grad_norm=0.0,
        gradient_accumulation_steps=accumulate, learning_rate=0.0,
    )  # fmt: skip
    for name, value in overrides.items():
        setattr(trainer, name, value)
    trainer.add_callback(Catch())
    trainer.train()
    return found


def masked_blocks():
    """Eight rows of different lengths."""
    rows = blocks(8)
    for index, row in enumerate(rows):
        row["attention_mask"] = (torch.arange(8) < 8 - index // 2).long()
        row["labels"] = torch.where(row["attention_mask"] == 1, row["input_ids"], -100)
    return rows


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        equal = torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key]
        assert equal, key
