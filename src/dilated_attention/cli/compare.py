"""Compare two results files.

It says what became slower, faster, wrong or right, what is in only one of the
files, and where they come from. A change of time counts if the ratio of the
medians passes the threshold and the quartiles do not overlap. The exit code is
1 if something became slower, wrong or too large for the memory, else 0.

Example: dilated-attention compare before/results.json report
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention.bench import regress
from dilated_attention.bench.results import DIRECTIONS, load, setting, with_ranks
from dilated_attention.cli import options
from dilated_attention.cli.options import option
from dilated_attention.cli.report import RESULTS
from dilated_attention.units import number_text

if TYPE_CHECKING:
    from rich.console import Console

OPTIONS = (
    option("before", "BEFORE", RESULTS, Path), option("after", "AFTER", RESULTS, Path),
    option("--threshold", "RATIO", "The least ratio that counts as a change.", float, 1.05), options.JSON,
)  # fmt: skip


def run(given: Namespace) -> int:
    from dilated_attention.cli.output import console, print_json

    with options.refusing():
        regression = regress.compare(load(given.before), load(given.after), given.threshold)
    if given.json:
        print_json(regression)
    else:
        _print(console(), regression)
    return int(regression.is_worse)


def _print(screen: Console, regression: regress.Regression) -> None:
    """What is the same is only counted."""
    from dilated_attention.cli.output import print_table

    if regression.origins:
        print_table(screen, "where they come from", ["", "<before", "<after"], regression.origins)
    if regression.is_other_machine:
        screen.print("warning: the machines differ; ratios of times say as much about them as about the code")
    for x in regression.verdicts:
        who = f"{with_ranks(x.before)} ({x.before['dtype']}{', causal' * x.before['causal']})"
        screen.print(f"{who} {x.verdict}: {x.before['verdict']}, now {x.after['verdict']}")
    tables: dict[str, list[list[str]]] = defaultdict(list)
    for change in regression.changes:
        if change.verdict != "same":
            tables[f"{setting(change.before)}, {change.before['tokens']:,} tokens"].append(_row(change))
    columns = ["implementation", "<pass", "before ms", "after ms", "ratio", "interval", "memory", "<verdict"]
    for title, rows in tables.items():
        print_table(screen, title, columns, rows)
    for title, records in (("before", regression.only_before), ("after", regression.only_after)):
        for name, number in Counter(f"{x['suite']}: {x['implementation']}" for x in records).items():
            screen.print(f"only {title}: {name}, {number} measurements")
    screen.print(f"\n{summary(regression)}")


def _row(change: regress.Change) -> list[str]:
    who = [with_ranks(change.before), DIRECTIONS[change.before["direction"]]]
    both = (change.before, change.after)
    times = [x["status"] if x["ms"] is None else number_text(x["ms"]["median"]) for x in both]
    figures = (change.ratio, change.low, change.high, change.memory)
    ratio, low, high, memory = ("" if x is None else f"{x:.2f}" for x in figures)
    return [*who, *times, ratio, low and f"{low}–{high}", memory, change.verdict]


def summary(regression: regress.Regression) -> str:
    count = Counter(change.verdict for change in regression.changes)
    return ", ".join(f"{number} {verdict}" for verdict, number in count.most_common()) or "nothing in common"
