"""What a study is: its runs, how one is made, and what is drawn and said of them.

Rows come from `results.csv` with numbers as numbers, empty fields as None and all else as text, so a study's figures
and page depend on the file alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Scale = Literal["small", "paper"]
SCALES = ("small", "paper")
Cell = dict[str, Any]
Row = dict[str, Any]

# Columns that the runner fills where a study lists them. `scale` tells runs apart like a key.
FILLED = ("scale", "data", "seconds", "device", "threads", "torch", "date")


@dataclass(frozen=True)
class Context:
    """What a run of a cell gets.

    Args:
        scale: `"small"` for a processor, `"paper"` for the paper's sizes.
        data: what `tapernorm.data.load_text` reads, `Study.data` by default.
        folder: the study's folder, which holds results.csv.
        extra: the study's own options, `--set NAME=VALUE` on the command line; see `Study.extras`.
    """

    scale: Scale
    data: str | None
    folder: Path
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def counts(self, *names: str) -> dict[str, int]:
        """Those of these options that are given, as whole numbers. Raises ValueError for one that is none."""
        given = {name: str(self.extra[name]) for name in names if name in self.extra}
        odd = next((name for name, value in given.items() if not value.isdecimal() or int(value) < 1), None)
        if odd is not None:
            raise ValueError(f"--set {odd}={given[odd]}: it must be a whole number, at least 1")
        return {name: int(value) for name, value in given.items()}


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper as runs, rows, figures and a page.

    Args:
        name: of the command and of the folder.
        title: one line for `--help` and pages.
        columns: of results.csv, keys first. Those in `FILLED` are filled by the runner. A study whose runs can
            diverge has a column `diverged`, 0 or 1.
        keys: the columns that name one run, a cell.
        cells: all runs, in the order in which they are worth having.
        run: one run, its row. Never raises where a training diverged: the row says so.
        draw: SVG figures of the rows in a folder, the study's own, where a run may have left more than its row.
        page: the rows as Markdown, the paper's numbers beside them, and what differs in the setting. A figure is
            linked by its name alone.
        more: runs that are made only where they are asked for: where `--only` names each value that none of `cells`
            has.
        extras: the names of `Context.extra` and what each is for.
        data: the text that is taken where none is named, None for a study without text.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    cells: Callable[[Scale], list[Cell]]
    run: Callable[[Cell, Context], Row]
    draw: Callable[[list[Row], Path], list[Path]]
    page: Callable[[list[Row]], str]
    more: Callable[[Scale], list[Cell]] = lambda scale: []
    extras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data: str | None = None
