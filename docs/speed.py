"""Write speed.md from the CSV files in benchmarks/results.

python docs/speed.py
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
ORDER = ("stock", "functional", "unfused", "folded", "folded-fused", "stock-again")
HOW = {"": "eager", "default": "compiled", "reduce-overhead": "compiled, CUDA graphs"}
# What must be equal for two rows to be compared.
KEYS = (
    "date", "device", "threads", "torch", "transformers", "python", "dtype", "attention", "arm", "model", "mode",
    "batch", "cache", "prompt", "new_tokens", "compile_mode",
)  # fmt: skip
TABLES = ("speed", "graph_counts", "step_profile", "generate", "scale", "start")
Row = dict[str, str]

HEAD = """\
# Speed

What taking the norms out is worth in tokens a second, measured so that the answer could be "nothing".

## How it is measured

`tapernorm bench MODEL` makes the variants of a model and times them in one run:

| variant | its norms |
| --- | --- |
| `stock` | as transformers runs them |
| `functional` | `torch.nn.functional.rms_norm` or `layer_norm`: the quick norm that anybody can have |
| `unfused` | removed norms are a product by a vector, c·γ̃·h |
| `folded` | removed norms are gone, their scales are in the weights |
| `folded-fused` | folded; q, k, v are one product, gate and up another, and what follows takes fewer calls |
| `stock-again` | a second copy of stock: what it shows beside 1.00 is noise |

- All variants, eager and compiled, take turns in every round, in an order drawn anew. A ratio is the median over the
  rounds of stock's time over the variant's **in the same round**, so a machine whose speed drifts slows both; in
  brackets its 20th and 80th percentile. It is to stock with the same mode, batch, cache and compile mode.
- Compilation and warm-up happen before; a compilation in a timed part stops the run with an error. Garbage collection
  is off in a round. A GPU is synchronised before the clock is read. Parts under 0.03 s are repeated.
- `decode`: greedy tokens, one at a time, with a key-value cache; the prompt is not timed. Tokens of all sequences
  count. `last-token`: one forward over T tokens without a cache, logits of the last token only; `prefill`: the same,
  filling a cache. There the T tokens read are counted.
- A dynamic cache grows by copying; a static one has all its places from the start, and attention reads all of them.
  CUDA graphs need a static one.
- *of bandwidth*: tokens a second × the bytes that a token must at least read (every weight once a step, of a table of
  embeddings only where it is also the head; keys and values of the cache), as a share of what copying one large tensor
  reaches on the same machine with the same threads (bytes read and written, median of nine). Near 100 %, decoding
  waits for memory, and no norm can be felt. A model that fits in the processor's cache can pass 100 %.
- With arm `internal` the last norm stays, in stock's own form, in the unfused and folded variants too. Weights are
  random: speed does not depend on them, apart from numbers too small to be normal.
- Rows that differ in date, device, threads, versions, dtype, attention, mode, batch, cache, lengths or compile mode are
  in different tables, and must not be compared. A cell is empty where the variant has changed since that day.

This page is made by `python docs/speed.py` from the rows in `benchmarks/results`, which the scripts in `benchmarks`
append; on a GPU `sh benchmarks/gpu.sh OUT`.
"""

COUNTS = """\
## Operations

What no noise touches: how many operations one decoded token takes (batch 1). A small model waits for each of them to
be started, not for its arithmetic. On a processor an operation is one of torch's own that computes, with nothing inside
it that computes; views, allocations and questions about shapes are not counted (`tapernorm.kernels`). On a GPU it is a
kernel, a copy or a fill. A layer is a decoder layer, the median of all.

    tapernorm bench MODEL --counts
"""

PROFILE = """\
## Where the time of a step goes

One decoded token, batch 1, dynamic cache, one thread; processor time, medians of {rounds} rounds in which all take
turns. The parts are found by leaving them out: the MLPs, the attention, the calls around them with norms and sums, and
the rest (embedding, masks, rotary tables, last norm, head).

    python benchmarks/step_profile.py --csv benchmarks/results/step_profile.csv

| model | variant | ratio | step, ms | MLPs | attention | calls, norms, sums | rest |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""

GENERATING = """\
## Writing text

What a user meets, from the prompt to the last token: transformers' `generate` as it is, on the stock model, against
[`tapernorm.generate`](generating.md) on the folded one, whose step is compiled and kept on disk. Most of the difference
is the compiled step, and only a part the missing norms.

    python benchmarks/generate.py --csv benchmarks/results/generate.csv

| model | parameters | stock, tokens/s | folded and compiled | ratio [p20, p80] | first time, s | same tokens |
| --- | ---: | ---: | ---: | ---: | ---: | --- |
"""

SCALE = """\
## Time and memory of the rest

What finding, tapering, folding and saving take from a million to three billion parameters (bfloat16 Llamas with random
weights, each measurement a process of its own; memory above what the imports take). Both grow as the model does. From
100 million parameters on no peak is above {peak:.2f} times the weights.

    python benchmarks/scale.py --csv benchmarks/results/scale.csv --plot docs/scale.svg

![Seconds and peak memory against parameters](scale.svg)

| model | parameters | weights, MB | find_sites, s | taper_, s | fold_, s | save, s | largest peak / weights |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""

START = """\
## Start

Whole processes, the median of {times}. Whatever builds a model waits for torch and transformers to be imported first.

    python benchmarks/start.py --csv benchmarks/results/start.csv

| command | seconds |
| --- | ---: |
"""
COMMANDS = {
    "help": "`tapernorm --help`",
    "import": "`import transformers.models.llama.modeling_llama` alone",
    "inspect": "`tapernorm inspect` of a local model of a million parameters",
}

READING = """\
## Reading them

- **The first comparison is with `functional`, not with `stock`.** A norm written out in Python is several calls;
  torch's own is one (on a processor it starts as many operations as the other, but not from Python). What `functional`
  gains needs no training and no folding. The rest, from `functional` to `folded`, is what removing norms adds.
- **Eager and compiled are two questions.** Compiled, a norm can be part of a neighbour's kernel, and so can a product
  by a scale: look at the compiled rows before expecting there what the eager ones show.
- **Fusing projections is no removal of norms.** A stock model could have it as well, with its norms left where they
  are: `folded-fused` against `folded` is what the fusion brings, and only `folded` against the first rows is about
  norms.
- **What fusing gains is calls, not arithmetic.** A decoded token of a small model waits for Python. From one product
  queries and keys are turned together, and views, transpositions and module calls between the products are made once
  or not at all ([Fused products](deploying.md#fused-products)): a third fewer operations a layer than folded. The
  products alone, with the stock code around them, gain little.
- **Fused is for decoding.** Over hundreds of tokens its slices lie apart in memory, which costs what the calls save:
  look at the rows with T 512 before fusing for those. Compiled, it runs the stock code around its products.
- **A model that waits for its weights** (a share of the bandwidth near 100 %), or in one forward over many tokens for
  its products, spends little of its time on norms, and cannot gain more than that.
- A ratio within the spread of `stock-again` is no difference.
"""


def rows_of(name: str) -> list[Row]:
    """The rows of a file in benchmarks/results; none where it was not measured."""
    path = RESULTS / name
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured() -> dict[str, list[Row]]:
    """The rows of every file."""
    return {name: rows_of(f"{name}.csv") for name in TABLES}


def page(tables: dict[str, list[Row]]) -> str:
    """The text of speed.md, from the rows of each file."""
    speeds, counts = tables["speed"], tables["graph_counts"]
    parts = [HEAD, "## Tokens a second\n"]
    if not speeds:
        parts.append("No rows yet: `python benchmarks/speed.py --csv benchmarks/results/speed.csv`.\n")
    for place in _distinct(speeds, KEYS[:9]):
        own = [row for row in speeds if _key(row, KEYS[:9]) == place]
        parts += [_place(own[0]), _summary(own)]
        for key in _distinct(own, KEYS):
            parts.append(_speed_table([row for row in own if _key(row, KEYS) == key]))
    parts.append(COUNTS)
    parts += _count_tables(counts) if counts else ["No rows yet: `python benchmarks/graph_counts.py --csv ...`.\n"]
    others = {"step_profile": _profile, "generate": _generating, "scale": _scale, "start": _start}
    parts += [write(tables[name]) for name, write in others.items() if tables[name]]
    parts.append(READING)
    return "\n".join(parts)


def _profile(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        parts = [f"{float(row[f'{name}_ms']):.2f}" for name in ("step", "mlp", "attention", "calls", "rest")]
        lines.append(f"| {row['size']} | `{row['variant']}` | {float(row['ratio']):.2f} | " + " | ".join(parts) + " |")
    return PROFILE.format(rounds=rows[0]["rounds"]) + "\n".join(lines) + "\n"


def _generating(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        stock, folded = (float(row[f"{name}_tokens_per_second"]) for name in ("stock", "folded"))
        ratio = f"**{float(row['ratio']):.1f}** [{float(row['ratio_p20']):.1f}, {float(row['ratio_p80']):.1f}]"
        same = "yes" if row["same_tokens"] == "True" else "no"
        lines.append(
            f"| {row['size']} | {int(row['parameters']):,} | {stock:,.0f} | {folded:,.0f} | {ratio} | "
            f"{float(row['first_seconds']):.0f} | {same} |"
        )
    return GENERATING + "\n".join(lines) + "\n"


def _scale(rows: list[Row]) -> str:
    lines = []
    large = max(float(row["peak_ratio"]) for row in rows if float(row["parameters"]) >= 1e8)
    for (size,) in _distinct(rows, ("size",)):
        own = {row["operation"]: row for row in rows if row["size"] == size}
        build = own["build"]
        seconds = [f"{float(own[name]['seconds']):.2g}" for name in ("find_sites", "taper", "fold", "save")]
        peak = max(float(row["peak_ratio"]) for row in own.values())
        start = f"| {size} | {int(build['parameters']):,} | {float(build['model_mb']):,.0f} | "
        lines.append(start + " | ".join(seconds) + f" | {peak:.2f} |")
    return SCALE.format(peak=large) + "\n".join(lines) + "\n"


def _start(rows: list[Row]) -> str:
    lines = [f"| {COMMANDS[row['command']]} | {float(row['seconds']):.2f} |" for row in rows]
    return START.format(times=rows[0]["times"]) + "\n".join(lines) + "\n"


def _key(row: Row, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(row.get(name, "") for name in names)


def _distinct(rows: list[Row], names: Iterable[str]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(_key(row, names) for row in rows))


def _place(row: Row) -> str:
    threads = "one thread" if row["threads"] == "1" else f"{row['threads']} threads"
    bandwidth = f"{float(row['copy_bandwidth']) / 1e9:.1f} GB/s copied"
    versions = f"torch {row['torch']}, transformers {row['transformers']}, Python {row['python']}"
    arm = {"internal": "all norms but the last removed", "all": "all norms removed"}.get(row["arm"], row["arm"])
    what = f"{row['dtype']}, {row['attention']} attention, {arm}"
    return f"### {row['device']}, {row['date']}\n\n{threads}, {bandwidth}; {versions}; {what}.\n"


def _summary(rows: list[Row]) -> str:
    """All settings of one place by their ratios alone, a line each."""
    present = [name for name in ORDER[1:] if any(row["variant"] == name for row in rows)]
    lines = [
        "| ratio to stock | " + " | ".join(present) + " |",
        "| --- |" + " ---: |" * len(present),
    ]
    for key in _distinct(rows, KEYS):
        group = {row["variant"]: row for row in rows if _key(row, KEYS) == key}
        cells = [f"{float(group[name]['ratio']):.2f}" if name in group else "" for name in present]
        lines.append(f"| {_setting(next(iter(group.values())))} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _setting(row: Row) -> str:
    words = [row["model"], row["mode"], f"batch {row['batch']}"]
    if row["mode"] == "decode":
        words.append(f"{row['new_tokens']} tokens after {row['prompt']}")
    else:
        words.append(f"T {row['prompt']}")
    if row["cache"] != "none":
        words.append(f"{row['cache']} cache")
    return ", ".join([*words, HOW.get(row["compile_mode"], row["compile_mode"])])


def _speed_table(rows: list[Row]) -> str:
    rows = sorted(rows, key=lambda row: ORDER.index(row["variant"]) if row["variant"] in ORDER else 9)
    lines = [
        f"**{_setting(rows[0])}** ({rows[0]['rounds']} rounds)\n",
        "| variant | tokens/s | p20 to p80 | ratio | of bandwidth |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        low, high = (f"{float(row[key]):,.0f}" for key in ("p20", "p80"))
        ratio = f"{float(row['ratio']):.3f} [{float(row['ratio_p20']):.2f}, {float(row['ratio_p80']):.2f}]"
        share = f"{100 * float(row['bandwidth_share']):.0f} %"
        speed = f"{float(row['tokens_per_second']):,.0f}"
        lines.append(f"| `{row['variant']}` | {speed} | {low} to {high} | {ratio} | {share} |")
    return "\n".join(lines) + "\n"


def _count_tables(rows: list[Row]) -> list[str]:
    """One table for each kind of count and pair of versions; the last row of each setting counts."""
    parts = []
    names = ("counted", "torch", "transformers", "dtype")
    for place in _distinct(rows, names):
        own = [row for row in rows if _key(row, names) == place]
        settings = _distinct(own, ("model", "arm", "cache", "compiled"))
        present = [name for name in ORDER[:-1] if any(row["variant"] == name for row in own)]
        counted, torch, transformers, dtype = place
        parts.append(
            f"{counted.capitalize()} a token (a layer); torch {torch}, transformers {transformers}, {dtype}.\n"
        )
        lines = ["| model | " + " | ".join(present) + " |", "| --- |" + " ---: |" * len(present)]
        for key in settings:
            group = {row["variant"]: row for row in own if _key(row, ("model", "arm", "cache", "compiled")) == key}
            cells = [_count_cell(group.get(name)) for name in present]
            model, arm, cache, compiled = key
            how = ", compiled" if compiled == "True" else ""
            layers = next(iter(group.values()))["layers"]
            depth = f", {layers} layers" if layers else ""
            lines.append(f"| {model}{depth}, arm {arm}, {cache} cache{how} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return parts


def _count_cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['per_token']} ({float(row['per_layer']):g})" if row["per_layer"] else row["per_token"]


if __name__ == "__main__":
    text = page(measured())
    (HERE / "speed.md").write_text(text, encoding="utf-8")
