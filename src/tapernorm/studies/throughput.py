"""What removed norms are worth in tokens a second: the paper's two tables, by `tapernorm.bench`.

The paper, 30M on an H100: decoding with a key-value cache 1.15 to 1.18 times RMS norm when folded, 1.10 to 1.14 times
unfused; one forward with the last logits alone up to 1.22 times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapernorm.studies.base import Cell, Context, Row, Scale, Study
from tapernorm.studies.rows import distinct, table

KEYS = ("size", "mode", "batch", "length", "how")
SIZES = {"small": ("1m", "30m"), "paper": ("30m",)}
ALL_SIZES = ("1m", "3m", "9m", "30m")
BATCHES = (1, 4)
LENGTHS = {"decode": (16,), "last-token": (128, 256, 512)}  # a prompt that is not timed; T of the forward
VARIANTS = ("functional", "unfused", "folded", "folded-fused", "stock-again")
HOW = {"eager": "", "compiled": "default", "graphs": "reduce-overhead"}
PAPER = {"decode": ("1.10 to 1.14", "1.15 to 1.18"), "last-token": ("", "up to 1.22")}  # unfused, folded
ROUNDS = 15


def cells(scale: Scale) -> list[Cell]:
    """Decoding first, then one forward by batch and length."""
    return _cells(SIZES[scale], ("eager",))


def more(scale: Scale) -> list[Cell]:
    """Compiled, and the other sizes. CUDA graphs need a static cache, and are for one forward here."""
    made = _cells(ALL_SIZES, tuple(HOW))
    return [cell for cell in made if cell["how"] != "graphs" or cell["mode"] == "last-token"]


def _cells(sizes: tuple[str, ...], hows: tuple[str, ...]) -> list[Cell]:
    return [
        {"size": size, "mode": mode, "batch": batch, "length": length, "how": how}
        for how, mode, size in itertools.product(hows, LENGTHS, sizes)
        for batch, length in itertools.product(BATCHES, LENGTHS[mode])
    ]


def run(cell: Cell, context: Context) -> Row:
    """All variants of one setting, interleaved.

    Raises:
        ValueError: scale paper without a GPU, or compiled without a compiler.
    """
    import torch

    from tapernorm.bench import bench, compile_modes
    from tapernorm.material import device, random_llama
    from tapernorm.run_config import SIZES as SHAPES
    from tapernorm.variants import variants

    where = device()
    if context.scale == "paper" and where.type != "cuda":
        raise ValueError("scale paper is the paper's table for a GPU, and there is none; --scale small is for here")
    how = HOW[cell["how"]]
    if how:
        cache = "none" if cell["mode"] == "last-token" else "dynamic"
        if how not in compile_modes(where, cache):
            raise ValueError(f"how={cell['how']} needs a GPU and tensors that keep their places")
    dtype = torch.bfloat16 if context.scale == "paper" else torch.float32
    model: Any = random_llama(*SHAPES[cell["size"]]).eval()
    models = variants(model.to(where, dtype), again=True)
    given: dict[str, Any] = {"rounds": ROUNDS} | context.counts("rounds", "new_tokens")
    rows = bench(
        models, cell["batch"], cell["length"], name=cell["size"], mode=cell["mode"], compile=(how,), **given
    )  # fmt: skip
    found = {row["variant"]: row for row in rows}
    first = rows[0]
    shared = ("new_tokens", "cache", "dtype", "attention", "rounds", "transformers")
    made = cell | {name: first[name] for name in shared} | {"tokens_per_second": found["stock"]["tokens_per_second"]}
    for variant in VARIANTS:
        for suffix in ("ratio", "ratio_p20", "ratio_p80"):
            made[_column(variant, suffix)] = found[variant][suffix] if variant in found else None
    return made


def _column(variant: str, suffix: str = "ratio") -> str:
    return f"{variant.replace('-', '_')}_{suffix}"


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """The gain in percent of each variant, by setting; one figure for each mode."""
    from tapernorm.canvas import save

    made = []
    for mode in distinct(rows, "mode"):
        own = [row for row in rows if row["mode"] == mode]
        made.append(save(_bars(own), folder / f"{mode}.svg", f"Tokens a second beside stock, {mode}"))
    return made


def _bars(rows: list[Row]) -> Callable[[int], Any]:
    """A dot with its spread for each variant, on a line for each setting."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    from tapernorm.canvas import ACCENT, GREY, MUTED, THIRD, legend_above, new_figure, place_axes, tick_text

    drawn = {"functional": GREY, "unfused": THIRD, "folded": ACCENT}

    def draw(width: int) -> Figure:
        height = 34 * len(rows)
        fig = new_figure(width, height + 92)
        ax = place_axes(fig, 210, 40, width - 240, height)
        ax.axvline(1, color=MUTED, linewidth=1)
        for line, row in enumerate(rows):
            for place, (variant, colour) in enumerate(drawn.items()):
                ratio, low, high = (row[_column(variant, each)] for each in ("ratio", "ratio_p20", "ratio_p80"))
                if ratio is None:
                    continue
                y = line + 0.24 * (place - 1)
                ax.plot([low, high], [y, y], color=colour, linewidth=1.2)
                ax.plot(ratio, y, "o", color=colour, markersize=5, label=variant if line == 0 else None)
        ax.set(ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)), yticklabels=[_setting(row) for row in rows])
        ax.grid(visible=False)
        ax.xaxis.set_major_formatter(FuncFormatter(tick_text))
        ax.set_xlabel("tokens a second, times stock", loc="right")
        legend_above(fig, ax, width)
        return fig

    return draw


def _setting(row: Row) -> str:
    length = f", T {row['length']}" if row["mode"] != "decode" else ""
    how = "" if row["how"] == "eager" else f", {row['how']}"
    return f"{row['size']}, batch {row['batch']}{length}{how}"


HEAD = """\
# Throughput

The paper's two tables: greedy decoding with a key-value cache, and one forward over T tokens with the logits of the
last one alone. Ratios are to the model with its norms, `stock`; all variants of a line take turns in every round, and
a ratio is the median over rounds, in brackets its 20th and 80th percentile. `functional` is the norm by
`torch.nn.functional`, which needs no taper; `stock again` is a second copy of stock, and shows the noise. Weights are
random, the final norm stays.

    tapernorm study throughput
    tapernorm study throughput --only how=compiled --only size=30m
"""

DIFFERENT = """\
## What differs from the paper

The paper measures a 30M Llama in bfloat16 on an H100; the device and the dtype of our rows stand above each table. A
small model on a GPU waits for each kernel to be started, which is what a norm costs there; on a processor it is the
arithmetic and the reading of weights. Whether the paper compiles is not known to us.
"""


def page(rows: list[Row]) -> str:
    """A table for each mode, device and dtype."""
    parts = [HEAD]
    for mode in distinct(rows, "mode"):
        parts += [f"## {mode}\n", f"![Tokens a second beside stock, {mode}]({mode}.svg)\n"]
        own = [row for row in rows if row["mode"] == mode]
        places = ("device", "dtype", "threads", "torch", "transformers", "attention", "new_tokens")
        for place in dict.fromkeys(tuple(row[key] for key in places) for row in own):
            group = [row for row in own if tuple(row[key] for key in places) == place]
            parts += [_place(group[0]), _table(group)]
    return "\n".join([*parts, DIFFERENT])


def _place(row: Row) -> str:
    tokens = f"; {row['new_tokens']} tokens after {row['length']}" if row["mode"] == "decode" else ""
    threads = f", {row['threads']} threads" if row["threads"] != 1 else ", 1 thread"
    return (
        f"{row['device']}{threads}, {row['dtype']}, torch {row['torch']}, transformers {row['transformers']}, "
        f"attention {row['attention']}; {row['rounds']} rounds{tokens}.\n"
    )


def _table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        ratios = [_ratio(row, variant) for variant in VARIANTS]
        lines.append([_setting(row), f"{row['tokens_per_second']:,.0f}", *ratios, *_paper(row)])
    names = [variant.replace("-", " ") for variant in VARIANTS]
    return table(("setting", "stock, tokens/s", *names, "paper, unfused", "paper, folded"), lines)


def _ratio(row: Row, variant: str) -> str:
    ratio, low, high = (row[_column(variant, each)] for each in ("ratio", "ratio_p20", "ratio_p80"))
    return "" if ratio is None else f"{ratio:.3f} [{low:.2f}, {high:.2f}]"


def _paper(row: Row) -> tuple[str, str]:
    return PAPER[row["mode"]] if row["size"] == "30m" and row["how"] == "eager" else ("", "")


STUDY = Study(
    name="throughput",
    title="Tokens a second with norms, unfused and folded: decoding, and one forward with the last logits",
    columns=(
        *KEYS, "scale", "tokens_per_second",
        *(_column(variant, each) for variant in VARIANTS for each in ("ratio", "ratio_p20", "ratio_p80")),
        "new_tokens", "cache", "dtype", "attention", "rounds", "transformers", "seconds", "device", "threads", "torch",
        "date",
    ),
    keys=KEYS, cells=cells, more=more, run=run, draw=draw, page=page,
    extras={"rounds": f"timed parts of each variant, {ROUNDS} by default", "new_tokens": "decoded in one timed part"},
)  # fmt: skip
