"""Training throughput of a tapered model against the stock norm, in each phase, all in one interleaved run.

    python benchmarks/training.py --family llama --width 64 128 256 512 1024 --csv benchmarks/results/training.csv
    python benchmarks/training.py --family llama --width 64 128 256 512 1024 --compile --csv ...

Four copies of one model take turns: stock, warm-up (gate 1, statistics gathered), taper (gate ½) and done (gate 0).
A step is forward, backward, AdamW, and `controller.step()`. The ratio is the median over rounds of
stock seconds / variant seconds within a round: above 1 is faster than stock. `--compile` compiles every decoder layer
of all four, outside of the timed part.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

import tapernorm as tn
from tapernorm.bench import append_csv
from tapernorm.material import random_llama

PHASES = ("stock", "warmup", "taper", "done")


def build(family: str, width: int, layers: int, vocabulary: int, length: int) -> Any:
    if family == "llama":
        return random_llama(width, layers, vocabulary, length)
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=max(4, width // 32),
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def prepare(phase: str, model: Any) -> Any:
    """A controller that stays in `phase` for longer than the benchmark runs; None for stock."""
    if phase == "stock":
        return None
    long = 10**6
    steps = {"warmup": (long, long), "taper": (1, 2), "done": (1, 1)}[phase]
    controller = tn.taper_(model, tn.TaperConfig(warmup_steps=steps[0], taper_steps=steps[1]))
    ids = torch.randint(model.config.vocab_size, (1, 16))
    for _ in range(0 if phase == "warmup" else 2):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        controller.step()
    return controller


def measure(options: argparse.Namespace, width: int) -> list[dict[str, Any]]:
    """One row a phase."""
    runs: dict[str, tuple[Any, Any, Any]] = {}
    for phase in PHASES:
        model = build(options.family, width, options.layers, options.vocabulary, options.length).train()
        controller = prepare(phase, model)
        if options.compile:
            for layer in model.model.layers if options.family == "llama" else model.transformer.h:
                layer.compile()
        runs[phase] = (model, controller, torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(options.vocabulary, (options.batch, options.length))
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    order = list(PHASES)
    for number in range(options.rounds + 2):
        for phase in order:
            model, controller, optimizer = runs[phase]
            start = time.perf_counter()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if phase == "warmup":  # the others would move on to the next phase
                controller.step()
            elapsed = time.perf_counter() - start
            if number >= 2:
                seconds[phase].append(elapsed)
        order = order[1:] + order[:1]

    rows = []
    for phase, times in seconds.items():
        ratios = sorted(a / b for a, b in zip(seconds["stock"], times, strict=True))
        rows.append(
            {
                "family": options.family,
                "width": width,
                "layers": options.layers,
                "tokens_a_step": ids.numel(),
                "phase": phase,
                "tokens_per_second": round(ids.numel() / statistics.median(times), 1),
                "ratio": round(statistics.median(ratios), 4),
                "ratio_p20": round(ratios[int(0.2 * (len(ratios) - 1))], 4),
                "ratio_p80": round(ratios[int(0.8 * (len(ratios) - 1))], 4),
                "rounds": options.rounds,
                "compiled": options.compile,
                "dtype": "float32",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "date": datetime.date.today().isoformat(),
            }
        )
        print(f"{options.family} {width:5d} {phase:7s} {rows[-1]['tokens_per_second']:10,.0f} tokens/s  "
              f"{rows[-1]['ratio']:.3f} [{rows[-1]['ratio_p20']:.3f}, {rows[-1]['ratio_p80']:.3f}]")  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--width", type=int, nargs="+", default=[96])
    parser.add_argument("--compile", action="store_true", help="torch.compile each decoder layer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()

    for width in options.width:
        rows = measure(options, width)
        if options.csv is not None:
            append_csv(options.csv, rows)


if __name__ == "__main__":
    main()
