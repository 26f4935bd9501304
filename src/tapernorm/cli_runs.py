"""The commands about several runs: `report`, `watch` and `study`. `tapernorm.cli` registers them."""

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


def study(
    name: Annotated[str | None, typer.Argument(help="The study; without one, what studies there are.")] = None,
    scale: Annotated[str, typer.Option(help="small: for a processor; paper: the paper's sizes.")] = "small",
    data: Annotated[str | None, typer.Option("--data", help=f"{o.ONE_TEXT} Default: by study.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE,...", help="Only the runs with these; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for all studies; each has its own in it.")] = Path(
        "studies"
    ),
    minutes: Annotated[float | None, typer.Option(help="Begin no run after so many minutes.")] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Make no run: draw figures and page again.")] = False,
    extra: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the study's own.")
    ] = None,
    as_json: o.Json = False,
    config: o.Config = None,
) -> None:
    """Make one of the paper's tables or figures: the runs that results.csv does not hold yet, figures, a page.

    A study that was stopped goes on with the same command. A run that diverged is a row, and counts.

    Example: tapernorm study tinystories --data stories.jsonl --only size=1m
    """
    if name is None:
        from tapernorm.studies import load, names

        titles = {name: load(name).title for name in names()}
        return print_json(titles) if as_json else print("\n".join(f"{n:15} {title}" for n, title in titles.items()))
    from tapernorm.studies.runner import run_study

    made = run_study(name, scale, data, only or (), out, minutes, draw, extra or ())
    if as_json:
        return print_json(made)
    lost = f", {made['diverged']} of them diverged" if made["diverged"] else ""
    print(f"{made['runs']} runs made, {made['left']} left; {made['rows']} rows in {made['folder']}{lost}")
    for path in (*made["figures"], *filter(None, [made["page"]])):
        print(path)
    return None
