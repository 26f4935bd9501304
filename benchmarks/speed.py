"""Tokens a second with norms and without: the project's table, on Llamas with random weights.

python benchmarks/speed.py --csv benchmarks/results/speed.csv
python docs/speed.py        # the page of it

Sizes 1m, 5.5m and 30m count all parameters, embeddings included. For each: decoding, batch 1 and 4, eager and compiled,
and for the largest one forward over 128 tokens with the last logits alone. A second stock model runs along: how far its
ratio is from 1.00 is the noise of the machine at that hour.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

from tapernorm.bench import EAGER, Setting, append_csv, compile_modes
from tapernorm.bench_command import DTYPES, measure, read_device
from tapernorm.material import random_llama
from tapernorm.run_config import SIZES as PROJECT
from tapernorm.variants import variants

# width, layers, vocabulary, context
SIZES = {"1m": PROJECT["1m"], "5.5m": (192, 8, 10_000, 512), "30m": PROJECT["30m"]}
LARGEST = "30m"


def build(size: str, **more: Any) -> transformers.LlamaForCausalLM:
    """A Llama of the shape that `tapernorm pretrain` would train, with random weights."""
    return random_llama(*SIZES[size], **more).eval()


def settings(
    size: str, device: torch.device, compile: bool, whole: bool, rounds: int, batches: list[int]
) -> list[Setting]:
    """What is measured of one size. whole: the table of all modes, caches and lengths."""

    def make(mode: str, batch: int, cache: str, prompt: int) -> Setting:
        how = compile_modes(device, cache) if compile else (EAGER,)
        return Setting(mode, batch, cache, prompt, compile=how, rounds=rounds)

    caches = ("dynamic", "static") if whole or compile else ("dynamic",)
    made = [make("decode", batch, cache, 16) for cache in caches for batch in batches]
    if whole:
        made += [make("last-token", batch, "none", length) for batch in (1, 4) for length in (128, 256, 512)]
        made += [make("prefill", batch, "dynamic", length) for batch in (1, 4) for length in (128, 512)]
    elif size == LARGEST:
        made += [make("last-token", 1, "none", 128)]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--arm", choices=("internal", "all"), default="internal")
    parser.add_argument("--eager", action="store_true", help="nothing compiled, which is most of the time it takes")
    parser.add_argument("--whole", action="store_true", help="all modes, caches and lengths")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="sequences together, when decoding")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", help="cpu or cuda; default: a GPU where there is one")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)

    device = read_device(options.device)
    for size in options.size:
        model = build(size).to(device, DTYPES[options.dtype])
        models = variants(model, arm=options.arm, again=True)
        for setting in settings(size, device, not options.eager, options.whole, options.rounds, options.batch):
            rows = [{**row, "arm": options.arm} for row in measure(models, [setting], size)]
            if options.csv is not None:
                append_csv(options.csv, rows)  # at once: what was measured is not lost
            for row in rows:
                what = f"{size:5s} {row['mode']:10s} batch {row['batch']} T {row['prompt']:<3d} {row['cache']:8s}"
                ratio = f"{row['ratio']:.3f} [{row['ratio_p20']:.3f}, {row['ratio_p80']:.3f}]"
                speed = f"{row['tokens_per_second']:12,.0f} tokens/s {row['bandwidth_share']:6.1%}"
                print(f"{what} {row['compile_mode'] or 'eager':16s} {row['variant']:13s} {ratio} {speed}", flush=True)


if __name__ == "__main__":
    main()
