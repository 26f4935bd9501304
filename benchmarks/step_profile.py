"""Where the time of one decoded token goes, in eager transformers: the parts of a step, taken out one after another.

python benchmarks/step_profile.py --csv benchmarks/results/step_profile.csv

A step of a small model waits for Python and for operations to be started. So the parts are found by leaving them out:

    whole       the step as it is
    no MLP      every MLP hands its input on
    no blocks   the attention does, too: what is left of a block are its norms, two sums and the calls around them
    no layers   embedding, masks, rotary tables, the last norm, the head

Time is that of the processor on one thread (`time.process_time`), the median of rounds in which all take turns: what
else runs on the machine is hardly in it. mlp, attention, calls and rest are the differences.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from speed import SIZES, build
from torch import nn
from transformers import DynamicCache

from tapernorm.bench import append_csv, device_name
from tapernorm.variants import variants

PARTS = ("whole", "no MLP", "no blocks", "no layers")


class _Nothing(nn.Module):
    """In place of an MLP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _NoAttention(nn.Module):
    """In place of an attention module of transformers."""

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def parts(model: Any) -> dict[str, Any]:
    """The model and what is left of it."""
    made = {"whole": model}
    for name in PARTS[1:]:
        left = made[name] = copy.deepcopy(model)
        for layer in left.model.layers:
            layer.mlp = _Nothing()
            if name == "no blocks":
                layer.self_attn = _NoAttention()
        if name == "no layers":
            left.model.layers = nn.ModuleList()
    return made


@torch.inference_mode()
def seconds(model: Any, prompt: torch.Tensor, tokens: int) -> float:
    """Processor time of one decoded token."""
    cache = DynamicCache(config=model.config)
    model(prompt, past_key_values=cache, use_cache=True)
    token = prompt[:, :1]
    begin = time.process_time()
    for _ in range(tokens):
        model(token, past_key_values=cache, use_cache=True)
    return (time.process_time() - begin) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.size:
        models = variants(build(size))
        steps = {(name, part): left for name, model in models.items() for part, left in parts(model).items()}
        prompt = torch.randint(1, SIZES[size][2], (1, 16), generator=torch.Generator().manual_seed(0))
        times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
        for number in range(options.rounds + 1):
            for key, model in steps.items():
                spent = seconds(model, prompt, options.new_tokens)
                if number:
                    times[key].append(spent)
        stock = times["stock", "whole"]
        rows = []
        for name in models:
            whole, no_mlp, no_blocks, no_layers = (1e3 * statistics.median(times[name, part]) for part in PARTS)
            ratio = statistics.median(a / b for a, b in zip(stock, times[name, "whole"], strict=True))
            values = {"mlp": whole - no_mlp, "attention": no_mlp - no_blocks, "calls": no_blocks - no_layers}
            row: dict[str, Any] = {"size": size, "variant": name, "ratio": round(ratio, 3), "step_ms": round(whole, 3)}
            row |= {f"{key}_ms": round(value, 3) for key, value in {**values, "rest": no_layers}.items()}
            row |= {"rounds": options.rounds, "device": device_name(torch.device("cpu")), "torch": torch.__version__}
            rows.append(row | {"transformers": transformers.__version__, "date": datetime.date.today().isoformat()})
            print({k: row[k] for k in list(row)[:8]}, flush=True)
        if options.csv is not None:
            append_csv(options.csv, rows)


if __name__ == "__main__":
    main()
