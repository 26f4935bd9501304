"""A loop of your own: taper the norms of a Llama away while it trains, fold, save.

python examples/plain_loop.py [OUT]
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tapernorm as tn


def main(out=None):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )
    )  # fmt: skip
    controller = tn.taper_(model, tn.TaperConfig(arm="internal", warmup_steps=10, taper_steps=20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    controller.attach_optimizer(optimizer)

    first = None
    for step in range(40):
        ids = (torch.randint(64, (8, 1)) + 3 * torch.arange(24)) % 64  # a text that can be learnt: every third letter
        loss = model(input_ids=ids, labels=ids).loss
        (loss + controller.auxiliary_loss()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        controller.step()  # once per optimizer step
        first = first or loss.item()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}, gate {controller.gate:.2f}, {controller.phase}")

    report = tn.fold_(model, example={"input_ids": ids})
    print(
        f"{len(report.folded)} norms folded, {len(report.kept)} kept; logits moved by {report.max_abs_logit_error:.1e}"
    )
    folder = out or tempfile.mkdtemp()
    tn.save_pretrained(model, folder)
    again, _ = tn.from_pretrained(folder)

    assert loss.item() < first  # it learnt, and kept on without norms
    assert len(report.folded) == 4 and report.kept == ("model.norm",)
    assert report.relative_error < report.bound
    assert torch.equal(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
