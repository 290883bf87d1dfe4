"""`report`: the page of a results file, made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dilated_attention import charts
from dilated_attention.bench.results import load
from dilated_attention.cli import arguments, options
from dilated_attention.cli.output import console, print_written


def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results.json, or a folder that holds one.")],
    out: options.Out = None,
    conclude: Annotated[
        bool, typer.Option("--conclude", help="Draw the conclusions again, and write them to results.json.")
    ] = False,
) -> None:
    """Make the report of a results file again.

    With --conclude it also works out again which implementation is best, what it recommends, and which published claims
    hold, and stores this in results.json.

    Example: dilated-attention report my-results/
    """
    with arguments.refusing():
        found = load(results, whole=True)
        folder = charts.writable(out or (results if results.is_dir() else results.parent))
    # here and not above: help needs no torch, and what the page needs may not be installed: `main` says so
    from dilated_attention.bench import machine
    from dilated_attention.bench.claims import conclusions
    from dilated_attention.bench.report import NEEDED, write_report

    for name in NEEDED:
        charts.library(name)
    screen = console()
    files = []
    if conclude:
        found = {**found, **conclusions(found)}
        machine.write_json(folder / "results.json", found)
        files.append(folder / "results.json")
    files += write_report(found, folder, say=screen.print)
    print_written(screen, folder, files)
