"""TRL's SFTTrainer with LoRA (pip install 'tapernorm[trl,peft]'): TaperMixin goes in front of the trainer's class.

python examples/trl_lora.py [OUT]
"""

import sys
import tempfile

import datasets
import peft
import torch
import trl
from transformers import LlamaConfig, LlamaForCausalLM

import tapernorm as tn
from tapernorm.data import train_tokenizer


class TaperSFT(tn.TaperMixin, trl.SFTTrainer):
    """SFTTrainer for a tapered model."""


def main(out=None):
    torch.manual_seed(0)
    texts = [f"the {animal} sat on the {thing}" for animal in ("cat", "dog", "hen") for thing in ("mat", "sun", "box")]
    tokenizer = train_tokenizer(texts, 280)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, pad_token_id=2,
            num_attention_heads=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    controller = tn.taper_(model, tn.TaperConfig(warmup_steps=5, taper_steps=10))  # before PEFT wraps the model
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    for module in controller.sites.values():
        module.requires_grad_(True)  # PEFT froze the gains; γ̃ has to learn

    trainer = TaperSFT(
        model=adapted,
        args=trl.SFTConfig(
            output_dir=out or tempfile.mkdtemp(), max_steps=20, per_device_train_batch_size=3, learning_rate=1e-2,
            max_length=32, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    merged = trainer.model.merge_and_unload()  # LoRA into the weights, then the scales
    report = tn.fold_(merged)
    print(
        f"gate {controller.gate}, {len(report.folded)} norms folded, logits moved by {report.max_abs_logit_error:.1e}"
    )
    assert controller.phase == "done" and len(report.folded) == 4
    assert report.relative_error < report.bound


if __name__ == "__main__":
    main(*sys.argv[1:])
