"""One arm of a run: the Trainer that trains it, the same for every arm but for the taper."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from tapernorm.controller import TaperController
from tapernorm.distill import Teacher
from tapernorm.material import device
from tapernorm.rates import lower_rates
from tapernorm.run_config import RunConfig
from tapernorm.train import TaperTrainer


def log_every(config: RunConfig) -> int:
    """Steps between two rows of an arm's log."""
    return max(1, config.steps // 100)


def arm_trainer(
    config: RunConfig,
    model: Any,
    controller: TaperController | None,
    rows: list[dict[str, Tensor]],
    folder: Path,
    tokenizer: Any = None,
    checkpoints: bool = True,
    teacher: Teacher | None = None,
    rates: dict[str, float] | None = None,
) -> Trainer:
    """The Trainer of an arm.

    Args:
        config: of the run. Arms of one seed see the same batches.
        model: the arm's model; controller: of its taper, None for one that keeps its norms.
        rows: what to train on, `tapernorm.packing.Blocks.rows`.
        folder: for checkpoints; checkpoints: whether there are any.
        teacher: of a tapered model.
        rates: weights that learn more slowly, by name, and the share of the rate (`tapernorm.rates`).
    """
    width = model.config.hidden_size
    rate = config.learning_rate or (min(5e-4, 0.06 / width) if config.kind == "taper" else 3e-3 * (64 / width) ** 0.5)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.02},
        warmup_steps=max(1, config.steps // 20),
        # A norm makes the scale of what it feeds free, so decay costs nothing; without norms it pulls the function
        # itself down, which a short fine-tuning cannot make up for.
        weight_decay=0.1 if config.kind == "pretrain" else 0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=log_every(config),
        logging_nan_inf_filter=False,  # a NaN is to be seen
        save_strategy="steps" if checkpoints else "no",
        save_steps=max(1, config.steps // 10),
        save_total_limit=2,
        seed=config.seed,
        bf16=config.bf16,
        use_cpu=device().type == "cpu",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
    )
    dataset: Any = rows
    kind: Any = Trainer if controller is None else functools.partial(TaperTrainer, teacher=teacher)
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=default_data_collator,  # blocks are full: nothing to pad, and a tokenizer may have no pad token
        processing_class=tokenizer,
    )
    if rates:
        lower_rates(trainer.create_optimizer(), model, rates)
    for unwanted in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(unwanted)
    return trainer
