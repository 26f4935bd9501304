"""Train a small GPT-2 (layer norms, biases, learned positions, tied head) on a text, to take its norms out of it.

python studies/training-free/layernorm.py --data stories.parquet --out runs/gpt2-small
tapernorm remove runs/gpt2-small --data stories.parquet --budget 1% --out runs/free
"""

import argparse

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from tapernorm import save_pretrained
from tapernorm.data import load_text, pack, train_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    text = load_text(options.data)
    tokenizer = train_tokenizer(text.train, 2048)
    torch.manual_seed(0)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_embd=options.width, n_layer=options.layers, n_head=4, n_positions=512, **ends
        )
    )
    blocks = pack(text.train, tokenizer, 128)
    arguments = TrainingArguments(
        output_dir=options.out + "-checkpoints", max_steps=options.steps, per_device_train_batch_size=16,
        learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=100, weight_decay=0.1, adam_beta2=0.95,
        logging_steps=100, save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )  # fmt: skip
    dataset = [{"input_ids": row, "labels": row} for row in blocks]
    Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=default_data_collator).train()  # type: ignore[arg-type]
    save_pretrained(model.eval(), options.out, tokenizer=tokenizer)


if __name__ == "__main__":
    main()
