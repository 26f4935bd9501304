"""Decoding speed: transformers' `generate` on a stock Llama against `tapernorm.generate` on the same one folded.

    python benchmarks/generate.py --csv benchmarks/results/generate.csv
    python benchmarks/generate.py --size 1m --no-compile

Greedy, batch 1, random weights (speed does not depend on them). stock: transformers' default, eager on a cache that
grows. folded: the compiled step, made before anything is timed and kept on disk. Both take turns in
every round, and each is timed as a user meets it, from the prompt to the last token; the ratio is the median over
rounds of the ratio within a round. same_tokens: whether both ways write the same tokens, both on the folded model.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from speed import SIZES, build
from torch import Tensor

from tapernorm.bench import append_csv, device_name, variants
from tapernorm.generate import decode


def measure(options: argparse.Namespace, size: str) -> dict[str, Any]:
    """One row about both."""
    models = variants(build(size, eos_token_id=None, pad_token_id=0))  # a text of random weights would end anywhere
    ids = torch.randint(1, SIZES[size][2], (1, options.prompt), generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": options.new_tokens, "do_sample": False}
    compiled = False

    def theirs(model: Any) -> Tensor:
        return model.generate(ids, **settings)

    def ours(model: Any) -> Tensor:
        nonlocal compiled
        made = decode(model, ids, compile=options.compile, **settings)
        compiled = made.compiled
        return made.sequences

    ways: dict[str, Callable[[], Tensor]] = {
        "stock": lambda: theirs(models["stock"]),
        "folded": lambda: ours(models["folded"]),
    }
    begin = time.perf_counter()
    first = ours(models["folded"])
    ready = time.perf_counter() - begin
    same = torch.equal(first, theirs(models["folded"]))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(options.rounds + 1):
        for name in order:
            begin = time.perf_counter()
            ways[name]()
            if number:
                seconds[name].append(time.perf_counter() - begin)
        order.reverse()
    row: dict[str, Any] = {"size": size, "parameters": sum(p.numel() for p in models["stock"].parameters())}
    row |= {"batch": 1, "prompt": options.prompt, "new_tokens": options.new_tokens, "rounds": options.rounds}
    row |= {"compiled": compiled, "same_tokens": same, "first_seconds": round(ready, 1)}
    for name, times in seconds.items():
        speeds = sorted(options.new_tokens / t for t in times)
        row |= {f"{name}_tokens_per_second": statistics.median(speeds)}
        row |= {f"{name}_p{q}": speeds[int(q / 100 * (len(speeds) - 1))] for q in (20, 80)}
    ratios = sorted(a / b for a, b in zip(seconds["stock"], seconds["folded"], strict=True))
    row |= {"ratio": statistics.median(ratios)}
    row |= {f"ratio_p{q}": ratios[int(q / 100 * (len(ratios) - 1))] for q in (20, 80)}
    row |= {"dtype": "float32", "device": device_name(torch.device("cpu")), "threads": torch.get_num_threads()}
    row |= {"torch": torch.__version__, "transformers": transformers.__version__}
    return row | {"date": datetime.date.today().isoformat()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), nargs="+", default=list(SIZES))
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    for size in options.size:
        row = measure(options, size)
        print(
            f"{size:>5s} stock {row['stock_tokens_per_second']:8,.0f}  folded {row['folded_tokens_per_second']:8,.0f} "
            f"tokens/s  ratio {row['ratio']:.2f} [{row['ratio_p20']:.2f}, {row['ratio_p80']:.2f}]  "
            f"compiled {row['compiled']}, same tokens {row['same_tokens']}, first {row['first_seconds']} s",
            flush=True,
        )
        if options.csv is not None:
            append_csv(options.csv, [row])


if __name__ == "__main__":
    main()
