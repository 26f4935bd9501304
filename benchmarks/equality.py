"""How exactly a tapered training is what it should be: differences that ought to be nothing, measured.

    python benchmarks/equality.py --csv benchmarks/results/equality.csv

A Llama of two blocks and width 64 with random gains, in float32 on the CPU. `c` is the fixed scale of a norm at the end
of warm-up, its difference relative; losses are those of nine steps through warm-up, taper and gate 0, in nats. `stock`
is the difference of the losses when the same model is trained with its own norms: AdamW divides small gradients by
their own size, and makes much of the last bit of a sum whichever way it was added up.
"""

from __future__ import annotations

import argparse
import copy
import csv
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import tapernorm as tn

STEPS, BATCH, LENGTH, VOCABULARY = 9, 8, 32, 128
CONFIG = tn.TaperConfig(
    warmup_steps=3, taper_steps=4, ema_decay=0.8, anchor_weight=0.1, uniformity_weight=0.01, allow_massive=True
)


def build() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def rows(step: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def run(
    taper: bool = True,
    parts: int = 1,
    pad: int = 0,
    prepare: Callable[[Any], Any] = lambda m: m,
    between: Callable[[Any], Any] = id,
) -> tuple[list[float], Tensor]:
    """(losses of the steps, c of every norm). parts: micro-batches of a step. pad: columns of padding."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    made = build()
    controller = tn.taper_(made, CONFIG) if taper else None
    model = prepare(made)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, weight_decay=0.0)
    if controller is not None:
        controller.attach_optimizer(optimizer)
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for ids in rows(step).chunk(world)[rank].chunk(parts):
            mask = torch.ones_like(ids)
            labels = ids
            if pad:
                ids, mask = (torch.nn.functional.pad(x, (0, pad)) for x in (ids, mask))
                labels = torch.where(mask.bool(), ids, -100)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss / parts
            added = 0.0 if controller is None else controller.auxiliary_loss() / parts
            (loss + added).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if controller is not None:
            controller.step()
        between(made)
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / world)
    return losses, torch.tensor(list(controller.scales.values()) if controller else [], dtype=torch.float64)


def shard(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def checkpointing(reentrant: bool) -> Callable[[Any], Any]:
    def prepare(model: Any) -> Any:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model

    return prepare


def compiled(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile()
    return model


def evaluate(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=rows(99))
        model.generate(input_ids=rows(98)[:, :4], max_new_tokens=4, do_sample=False)
    model.train()


def processes(kind: str, taper: bool) -> tuple[list[float], Tensor]:
    """The same on two processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.pt"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        subprocess.run(
            [*launcher, __file__, "--kind", kind, "--out", str(out), *(["--stock"] if not taper else [])],
            check=True,
            capture_output=True,
        )
        return tuple(torch.load(out))  # type: ignore[return-value]


def gate_one(dtype: torch.dtype) -> float:
    """The largest difference of logits between a stock model and its tapered copy at gate 1."""
    model = build().to(dtype).eval()
    copied = copy.deepcopy(model)
    tn.taper_(copied, CONFIG)
    with torch.no_grad():
        return float((model(input_ids=rows(0)).logits - copied(input_ids=rows(0)).logits).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--kind", choices=("ddp", "static", "fsdp"), help=argparse.SUPPRESS)
    parser.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.kind:  # a process of two
        dist.init_process_group("gloo")
        wrap = torch.nn.parallel.DistributedDataParallel
        ways = {"ddp": wrap, "static": lambda m: wrap(m, static_graph=True), "fsdp": shard}
        found = run(not asked.stock, prepare=ways[asked.kind])
        if dist.get_rank() == 0:
            torch.save(found, asked.out)
        dist.destroy_process_group()
        return
    ways: dict[str, Callable[[bool], tuple[list[float], Tensor]]] = {
        "4 micro-batches of 2": lambda taper: run(taper, parts=4),
        "8 micro-batches of 1": lambda taper: run(taper, parts=8),
        "8 columns of padding": lambda taper: run(taper, pad=8),
        "32 columns of padding": lambda taper: run(taper, pad=32),
        "gradient checkpointing": lambda taper: run(taper, prepare=checkpointing(False)),
        "gradient checkpointing, reentrant": lambda taper: run(taper, prepare=checkpointing(True)),
        "evaluation and generation between steps": lambda taper: run(taper, between=evaluate),
        "compiled decoder layers": lambda taper: run(taper, prepare=compiled),
        "DDP, 2 processes": lambda taper: processes("ddp", taper),
        "DDP with a static graph, 2 processes": lambda taper: processes("static", taper),
        "FSDP2, 2 processes": lambda taper: processes("fsdp", taper),
    }
    plain, stock = run(), run(False)
    found = []
    for name, way in ways.items():
        (losses, c), (others, _) = way(True), way(False)
        row = {"what": name, "c": f"{float((c / plain[1] - 1).abs().max()):.1e}"}
        for key, a, b in (("loss", losses, plain[0]), ("stock", others, stock[0])):
            row[key] = f"{max(abs(x - y) for x, y in zip(a, b, strict=True)):.1e}"
        found.append(row)
    found += [
        {
            "what": f"gate 1 against the stock norms, logits, {str(dtype)[6:]}",
            "c": "",
            "loss": f"{gate_one(dtype):.1e}",
            "stock": "",
        }
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    for row in found:
        print(f"{row['what']:45s} c {row['c'] or '–':8s} loss {row['loss']}   stock {row['stock'] or '–'}")
    if asked.csv:
        with asked.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["what", "c", "loss", "stock"])
            writer.writeheader()
            writer.writerows(found)


if __name__ == "__main__":
    main()
