"""Make the report of a results file again.

With --conclude it also works out again which implementation is best, what it
recommends, and which published claims hold, and stores this in results.json.

Example: dilated-attention report my-results/
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from dilated_attention.bench.results import load
from dilated_attention.cli import options
from dilated_attention.cli.options import flag, option
from dilated_attention.show import charts

RESULTS = "A results.json, or a folder that holds one."
OPTIONS = (
    option("results", "RESULTS", RESULTS, Path),
    option("--out", "FOLDER", "The folder to write into; by default, that of the results.", Path),
    flag("--conclude", "Draw the conclusions again, and write them to results.json."),
)


def run(given: Namespace) -> None:
    with options.refusing():
        found = load(given.results)
        folder = charts.writable(given.out or (given.results if given.results.is_dir() else given.results.parent))
    # here and not above: help needs no torch, and what the page needs may not be installed: `main` says so
    from dilated_attention.bench import machine
    from dilated_attention.bench.conclude import conclusions
    from dilated_attention.bench.page import write_report
    from dilated_attention.cli.output import console

    charts.library("vl_convert")
    screen = console()
    if given.conclude:
        found = {**found, **conclusions(found)}
        machine.write_json(folder / "results.json", found)
        screen.print(f"written: {folder / 'results.json'}")
    write_report(found, folder, say=screen.print)
