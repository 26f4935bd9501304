"""Time and memory of find_sites, taper_, fold_ and saving against the size of a model: bfloat16 Llamas, random weights.

python benchmarks/scale.py --csv benchmarks/results/scale.csv --plot docs/scale.svg
python benchmarks/scale.py --plot docs/scale.svg --csv benchmarks/results/scale.csv --size     # the plot alone

Every measurement is a process of its own, because the high-water mark of a process never falls. In each, in order:

    imported    tapernorm and its parts are loaded, and the whole life of a tiny model is run once: whatever is loaded
                late is loaded. The resident size now is the base, which is taken off everything below
    built       the model is made, and brought to where the operation starts (to gate 0, for fold_)
    done        the operation ran; seconds are its own. The largest resident size (getrusage) less the base is the peak

peak_ratio is that peak over the bytes of the model's weights. 1 is the model alone. before_ratio is the same just
before the operation: where the two are equal, it is the making of the model that set the mark and not the operation.
Of a model of a few megabytes the ratio says nothing: the heap itself is that large. Expected from 100 M parameters on:
time and memory grow linearly, and no peak is above 1.5 times the weights.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OPERATIONS = ("build", "find_sites", "taper", "fold", "save")
# name -> (width, width of the MLP, layers, heads, vocabulary)
SIZES = {
    "1m": (64, 160, 8, 4, 10_000),
    "5.5m": (192, 512, 8, 6, 10_000),
    "30m": (512, 1360, 8, 16, 10_000),
    "100m": (768, 2048, 12, 12, 32_000),
    "300m": (1024, 2752, 22, 16, 32_000),
    "1b": (2048, 5632, 20, 32, 32_000),
    "3b": (3072, 8192, 26, 24, 32_000),
}


@dataclasses.dataclass
class Marks:
    """Bytes: resident after the imports; the high-water marks before and after the operation."""

    base: int = 0
    before: int = 0
    after: int = 0


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def high_water() -> int:
    """The most bytes of this process that were ever in memory. (Linux gives kilobytes.)"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one(size: str, operation: str) -> dict[str, Any]:
    """One measurement, in this process."""
    import torch

    tiny, marks = (32, 48, 2, 4, 64), Marks()
    for step in OPERATIONS:
        prepare(tiny, step)()
    marks.base = resident()
    start = time.perf_counter()
    work = prepare(SIZES[size], operation)
    built = time.perf_counter() - start
    marks.before = high_water()
    start = time.perf_counter()
    model = work()
    seconds = built if operation == "build" else time.perf_counter() - start
    marks.after = high_water()
    weights = sum(p.nbytes for p in model.parameters())
    return {
        "size": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "operation": operation,
        "seconds": round(seconds, 4),
        "model_mb": round(weights / 1e6, 2),
        "base_mb": round(marks.base / 1e6, 2),
        "before_mb": round((marks.before - marks.base) / 1e6, 2),
        "peak_mb": round((marks.after - marks.base) / 1e6, 2),
        "before_ratio": round((marks.before - marks.base) / weights, 3),
        "peak_ratio": round((marks.after - marks.base) / weights, 3),
        "dtype": "bfloat16",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def prepare(shape: tuple[int, ...], operation: str) -> Any:
    """A function that runs the operation on a model that is ready for it, and returns the model."""
    import tapernorm as tn
    from tapernorm.convert import taper_

    model = build(shape)
    if operation == "build":
        return lambda: model
    if operation == "find_sites":
        return lambda: (tn.find_sites(model), model)[1]
    config = tn.TaperConfig(warmup_steps=1, taper_steps=1, allow_massive=True)
    if operation == "taper":
        return lambda: (taper_(model, config), model)[1]
    if operation == "fold":
        to_gate_0(model, config)
        return lambda: (tn.fold_(model), model)[1]

    def save() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            tn.save_pretrained(model, Path(folder) / "model")
        return model

    return save


def build(shape: tuple[int, ...]) -> Any:
    """A bfloat16 Llama with random weights, made in bfloat16 from the start."""
    import torch
    import transformers

    width, inner, layers, heads, vocabulary = shape
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def to_gate_0(model: Any, config: Any) -> None:
    """Two steps of a controller, without a backward: its activations would be the largest thing of all."""
    import torch

    from tapernorm.convert import taper_
    from tapernorm.modules import taper_norms

    controller = taper_(model, config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.train()
    with torch.enable_grad():  # a forward under no_grad is none of training, and gives no statistics
        model(input_ids=torch.randint(1, model.config.vocab_size, (2, 16)))
    model.eval()
    controller.step()
    controller.step()
    with torch.no_grad():
        for module in taper_norms(model).values():
            module.fixed_norm.c.mul_(0.1)  # untrained, at the full scale twenty layers overflow


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds and peak memory over parameters, an SVG with the project's figures' style."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from tapernorm import canvas

    latest = {(row["size"], row["operation"]): row for row in rows}
    five = (canvas.GREY, canvas.THIRD, canvas.FOURTH, canvas.ACCENT, canvas.INK)
    measured = {operation for _, operation in latest}
    colours = {name: colour for name, colour in zip(OPERATIONS, five, strict=True) if name in measured}

    def draw(width: int) -> Any:
        fig, axes = canvas.place_grid(width, 2, 200, 64 if width == canvas.WIDE else 84)
        for ax, field, title in zip(axes, ("seconds", "peak_mb"), ("seconds", "peak memory, MB"), strict=True):
            for name, colour in colours.items():
                points = sorted(
                    (float(row["parameters"]), max(float(row[field]), 1e-4))
                    for (_, operation), row in latest.items()
                    if operation == name
                )
                ax.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=colour, label=name)
            sizes = sorted({(float(row["parameters"]), float(row["model_mb"])) for row in latest.values()})
            if field == "peak_mb":
                ax.plot(*zip(*((n, 1.5 * mb) for n, mb in sizes), strict=True), ":", color=canvas.MUTED,
                        label="1.5 × the weights")  # fmt: skip
            ax.set(xscale="log", yscale="log", title=title, xlabel="parameters")
            ax.xaxis.set_major_formatter(FuncFormatter(count_text))
            ax.yaxis.set_major_formatter(FuncFormatter(canvas.tick_text))
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(LogLocator(10, numticks=9))
                axis.set_minor_formatter(NullFormatter())
        canvas.legend_above(fig, axes[1], width)
        return fig

    label = "Seconds and peak memory of each operation over the number of parameters, both axes logarithmic."
    path.write_text(standalone(canvas.inline(draw, "scale", label)), encoding="utf-8")


def count_text(value: float, _: int) -> str:
    """3000000 -> 3 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def standalone(figure: str) -> str:
    """The wide figure as a file of its own: with the namespace and the colours that a page would give it."""
    wide = figure[: figure.index("</svg>") + len("</svg>")]
    colours = (
        "svg{background:#fff;--sans:system-ui,sans-serif;--ink:#1c1c1c;--muted:#666;--rule:#ddd;--accent:#c2410c;"
        "--grey:#8a8a8a;--third:#2563eb;--fourth:#15803d;--bar:#bbb;--page:#fff}"
    )
    head = wide.index(">") + 1
    return wide[:head].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + (
        f"<style>{colours}</style>{wide[head:]}\n"
    )


def measure(size: str, operation: str) -> dict[str, Any]:
    """One measurement, in a fresh process."""
    command = [sys.executable, __file__, "--one", size, operation]
    # One arena: otherwise every thread of the allocator keeps what it freed, which is nobody's use of memory.
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment = {**os.environ, **quiet, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="*", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--operation", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the rows of --csv into this SVG file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one)))
        return
    from tapernorm.bench import append_csv

    for size in options.size:
        for operation in options.operation:
            row = measure(size, operation)
            if options.csv is not None:
                append_csv(options.csv, [row])
            print(f"{size:5s} {operation:10s} {row['seconds']:8.2f} s   peak {row['peak_mb']:9.1f} MB = "
                  f"{row['peak_ratio']:.2f} × the weights ({row['before_ratio']:.2f} before)", flush=True)  # fmt: skip
    if options.plot is not None:
        import csv

        if options.csv is None:
            parser.error("--plot draws the rows of a file: pass --csv")
        with options.csv.open(newline="", encoding="utf-8") as file:
            plot(list(csv.DictReader(file)), options.plot)


if __name__ == "__main__":
    main()
