"""The command `bench`: settings from options, all variants of a model in one run for each, tables, CSV and JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tapernorm.bench import EAGER, Setting, append_csv, bench, compile_modes
from tapernorm.config import TaperConfig, nearest
from tapernorm.inputs import context_length
from tapernorm.kernels import count_rows
from tapernorm.output import console, print_json
from tapernorm.progress import bar
from tapernorm.variants import stock_like, variants

LENGTHS = {"decode": 16, "last-token": 128, "prefill": 128}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def run(options: dict[str, Any]) -> None:
    """`bench`, from the options of the command line.

    Raises:
        ValueError: an unknown arm, mode, cache, device or dtype; a length beyond the model's context; no compiler.
    """
    source, csv, as_json = options["model"], options["csv"], options["as_json"]
    TaperConfig(arm=options["arm"])  # refuses an unknown arm
    where = read_device(options["device"])
    asked = settings(options, where)  # before the model is loaded
    dtype = read_dtype(options["dtype"])
    stock = stock_like(source).to(device=where, dtype=dtype)
    models = variants(stock, arm=options["arm"], again=options["self_check"])
    name = Path(source).name
    if options["counts"]:
        rows = [row for cache in options["cache"] or ["dynamic"] for row in count_rows(models, cache, name=name)]
    else:
        refuse_long(asked, stock)
        rows = measure(models, asked, name)
    rows = [{**row, "arm": options["arm"]} for row in rows]
    if csv is not None:
        append_csv(csv, rows)
    if as_json:
        return print_json({"counts" if options["counts"] else "rows": rows})
    for made in [count_table(rows, source)] if options["counts"] else tables(rows, source):
        console().print(made)
    return None


def settings(options: dict[str, Any], device: torch.device) -> list[Setting]:
    """One setting for each mode, cache, batch and length that was asked for. last-token has no cache."""
    found = []
    for mode in dict.fromkeys(options["mode"] or ["decode"]):
        caches = ["none"] if mode == "last-token" else options["cache"] or ["dynamic"]
        lengths = options["length"] or [LENGTHS.get(mode, 16)]
        for cache, batch, length in itertools.product(caches, options["batch"] or [1, 4], lengths):
            how = compile_modes(device, cache) if options["compile"] else (EAGER,)
            found.append(Setting(mode, batch, cache, length, options["new_tokens"], how, options["rounds"]))
    return found


def measure(models: dict[str, Any], asked: Iterable[Setting], name: str) -> list[dict[str, Any]]:
    """The rows of all settings, one after another, under one bar."""
    asked, rows = list(asked), []
    with bar("speed", sum(setting.rounds + 1 for setting in asked)) as advance:
        for s in asked:
            rows += bench(
                models, s.batch, s.prompt, s.new_tokens, s.rounds, name, advance, s.mode, s.cache, s.compile
            )  # fmt: skip
    return rows


def refuse_long(asked: Iterable[Setting], model: Any) -> None:
    """Before the first measurement, not after an hour of them."""
    context = context_length(model)
    for setting in asked:
        if setting.mode != "decode" and setting.prompt > context:
            raise ValueError(f"length={setting.prompt} is longer than the model's context of {context} tokens")


def read_device(name: str | None) -> torch.device:
    """The device of that name; None: a GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is none that torch knows; such as cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} cannot be timed here: cpu and cuda can")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: torch sees {torch.cuda.device_count()} GPUs")
    return device


def read_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None: the model's own."""
    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not one of {', '.join(DTYPES)}{nearest(name, DTYPES)}")
    return None if name is None else DTYPES[name]


def tables(rows: list[dict[str, Any]], source: str) -> list[Any]:
    """One narrow table for each setting: rows of different settings are not to be compared."""
    from rich.table import Table

    def setting(row: dict[str, Any]) -> str:
        words = [row["mode"], f"batch {row['batch']}"]
        words += [f"T {row['prompt']}"] if row["mode"] != "decode" else []
        words += [f"{row['cache']} cache"] if row["cache"] != "none" else []
        how = {"": "eager", "default": "compiled"}.get(row["compile_mode"], "compiled, CUDA graphs")
        return ", ".join([*words, how, row["dtype"]])

    made = []
    for title, group in itertools.groupby(rows, setting):
        table = Table(title=f"{Path(source).name}: {title}", title_justify="left")
        table.add_column("variant", no_wrap=True)
        for column in ("tokens/s", "p20–p80", "ratio", "p20–p80", "of bandwidth"):
            table.add_column(column, justify="right")
        for row in group:
            spread = f"{row['p20']:,.0f}–{row['p80']:,.0f}"
            ratios = f"{row['ratio_p20']:.2f}–{row['ratio_p80']:.2f}"
            share = f"{100 * row['bandwidth_share']:.0f} %"
            table.add_row(
                row["variant"], f"{row['tokens_per_second']:,.0f}", spread, f"{row['ratio']:.3f}", ratios, share
            )
        made.append(table)
    return made


def count_table(rows: list[dict[str, Any]], source: str) -> Any:
    """Operations of a decoded token, by variant and cache."""
    from rich.table import Table

    table = Table(title=f"{Path(source).name}: {rows[0]['counted']} per decoded token", title_justify="left")
    table.add_column("variant", no_wrap=True)
    table.add_column("cache")
    for column in ("per token", "per layer"):
        table.add_column(column, justify="right")
    for row in rows:
        layer = f"{row['per_layer']:g}" if row["per_layer"] != "" else "–"
        table.add_row(row["variant"], row["cache"], str(row["per_token"]), layer)
    return table
