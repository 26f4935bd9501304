"""A norm and a model that no library knows: they are traced and measured, not looked up by name.

python examples/custom_model.py
"""

import torch
from torch import nn

import tapernorm as tn


class MyNorm(nn.Module):  # an RMS norm whose gain is stored as a difference from 1, with an epsilon of its own
    def __init__(self, width):
        super().__init__()
        self.delta = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, h):
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-4) * (1 + self.delta)


class Mixer(nn.Module):  # blocks h + f(norm(h)), each norm with two readers; then a norm and a head
    def __init__(self, width=24, vocabulary=40, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(MyNorm(width) for _ in range(layers))
        linear = [nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(3)]
        self.gates, self.values, self.outs = linear
        self.final, self.head = MyNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        h = self.embedding(ids)
        for norm, gate, value, out in zip(self.norms, self.gates, self.values, self.outs, strict=True):
            x = norm(h)
            h = h + out(torch.tanh(gate(x)) * value(x).cumsum(1) / 10)
        return self.head(self.final(h))


def main():
    torch.manual_seed(0)
    model, ids = Mixer().double(), torch.randint(40, (2, 8))
    for site in tn.find_sites(model, example=(ids,)):  # example: the inputs of one forward
        print(f"{site.name}: {site.kind}, 1 + w: {site.zero_centered}, eps {site.eps:.0e}, read by {site.consumers}")
    before = model.eval()(ids)
    controller = tn.taper_(model, tn.TaperConfig(arm="all", warmup_steps=1, taper_steps=2), example=(ids,))
    assert torch.equal(model(ids), before)  # gate 1: the same bits

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(4):
        loss = nn.functional.cross_entropy(model.train()(ids).flatten(0, 1), ids.flatten())
        (loss + controller.auxiliary_loss()).backward()
        optimizer.step()
        controller.step()
    report = tn.fold_(model, example=(ids,))
    print(f"{len(report.folded)} norms folded; the output moved by {report.max_abs_logit_error:.1e}")
    assert len(report.folded) == 4 and report.max_abs_logit_error < 1e-10


if __name__ == "__main__":
    main()
