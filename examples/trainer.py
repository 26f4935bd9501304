"""transformers' Trainer: TaperTrainer in its place, and nothing else changes.

python examples/trainer.py [OUT]
"""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import tapernorm as tn


def main(out=None):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    )
    rows = [(start + 3 * torch.arange(16)) % 64 for start in range(64)]
    dataset = [{"input_ids": row, "labels": row} for row in rows]

    # arm="all": the final norm goes as well, and the scale loss holds the residual in its place
    controller = tn.taper_(model, tn.TaperConfig(arm="all", warmup_steps=10, taper_steps=15))
    trainer = tn.TaperTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=out or tempfile.mkdtemp(), max_steps=30, per_device_train_batch_size=8, learning_rate=1e-3,
            gradient_accumulation_steps=2, logging_steps=10, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False,
        ),
        train_dataset=dataset,
    )  # fmt: skip
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, {controller.step_count} steps, gate {controller.gate}")

    report = tn.fold_(model)
    print(f"{len(report.folded)} norms folded, none kept; biases made for: {', '.join(report.new_biases) or 'nothing'}")
    print(f"heads cut loose from the embedding: {', '.join(report.untied) or 'none'}")

    assert controller.phase == "done" and controller.step_count == 30  # optimizer steps, not micro-batches
    assert losses[-1] < losses[0]
    assert len(report.folded) == 5 and not report.kept
    assert not any("LayerNorm" in type(module).__name__ for module in model.modules())


if __name__ == "__main__":
    main(*sys.argv[1:])
