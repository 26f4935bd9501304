"""The commands that look at runs: `report` and `watch`. `tapernorm.cli` registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapernorm import options as o
from tapernorm.output import print_json


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folder of a run; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Several runs: the page's file, or a folder for it. Default: ./compare.html."),
    ] = None,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Write report.html of a run again, also of one that is not finished; or compare several runs on one page.

    Example: tapernorm report runs/internal runs/all --out compare.html
    """
    if len(runs) == 1:
        if out is not None:
            raise ValueError("--out names the page that compares several runs; a run's own report goes into its folder")
        from tapernorm.report import write_report

        path = write_report(runs[0])
    else:
        from tapernorm.compare_page import write_comparison

        path = write_comparison(runs, out)
    return print_json({"report": str(path)}) if as_json else print(path)


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    every: Annotated[
        float | None, typer.Option(help="Seconds between two looks. Default: 1 on a terminal, 5 in a pipe.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show how far it is, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="How far it is, once, as one JSON object.")] = False,
    config: o.Config = None,
) -> None:
    """Watch a run while it runs: phase, step, gate, loss, gap, events, speed, time left. Ends with the run.

    Exit code 3 where the run stopped before its end or failed its checks. Ctrl-C ends the watching, not the run.

    Example: tapernorm watch runs/mine
    """
    from tapernorm.watch import watch_run

    watch_run(run, every, once, as_json)
