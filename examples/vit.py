"""A vision transformer: images in, classes out; the class token's norm feeds the head.

python examples/vit.py [OUT]
"""

import sys
import tempfile

import torch
from transformers import ViTConfig, ViTForImageClassification

import tapernorm as tn


def main(out=None):
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=16, patch_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_labels=4,
            num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    controller = tn.taper_(model, tn.TaperConfig(arm="all", warmup_steps=15, taper_steps=20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    controller.attach_optimizer(optimizer)

    colours = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])

    def batch(size=16):
        """Noise in one of four colours; the class says which."""
        labels = torch.randint(4, (size,))
        images = colours[labels][:, :, None, None] + 0.5 * torch.randn(size, 3, 16, 16)
        return {"pixel_values": images, "labels": labels}

    for _ in range(50):
        (model(**batch()).loss + controller.auxiliary_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()

    test = batch(64)
    report = tn.fold_(model.eval(), example=test)
    with torch.no_grad():
        right = (model(**test).logits.argmax(-1) == test["labels"]).float().mean().item()
    print(f"{len(report.folded)} norms folded, {right:.0%} of images right without any norm")
    tn.save_pretrained(model, folder := out or tempfile.mkdtemp())
    again, _ = tn.from_pretrained(folder)
    assert type(again).__name__ == "TaperNormViTForImageClassification"
    assert not report.kept and right > 0.5  # a guess is right in one of four
    assert torch.equal(again(**test).logits, model(**test).logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
