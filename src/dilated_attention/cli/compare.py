"""`compare`: two results files beside one another, and an exit code for scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dilated_attention.bench.regress import Change, Regression
from dilated_attention.bench.regress import compare as compare_results
from dilated_attention.bench.results import load
from dilated_attention.cli import arguments
from dilated_attention.cli.output import console, print_table
from dilated_attention.cli.tables import STYLES, name_of, setting
from dilated_attention.units import number_text

HELP = "A results.json, or a folder that holds one."


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help=HELP)],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help=HELP)],
    threshold: Annotated[
        float, typer.Option(metavar="RATIO", help="The smallest ratio that counts as a change.")
    ] = 1.05,
) -> int:
    """Compare two results files.

    It says what became slower, faster, wrong or right, what is in only one of the files, and where they come from. A
    change of time counts if the ratio of the medians passes the threshold and the quartiles do not overlap. The exit
    code is 1 if something became slower, wrong or too large for the memory, else 0.

    Example: dilated-attention compare before/results.json report
    """
    with arguments.refusing():
        found = compare_results(load(before), load(after), threshold)
    _print(console(), found)
    return int(found.is_worse)


def _print(screen: Console, found: Regression) -> None:
    if found.origins:
        print_table(screen, "where they come from", ["", "<before", "<after"], found.origins)
    if found.is_other_machine:
        screen.print("warning: the machines differ; ratios of times say as much about them as about the code")
    for change in found.verdicts:
        one = change.before
        what = f"{name_of(one)}, {one['dtype']}{', causal' if one['causal'] else ''}"
        text = f"{what} {change.verdict}: {one['verdict']}, now {change.after['verdict']}"
        screen.print(Text(text, STYLES.get(change.verdict, "")), soft_wrap=True)
    groups: dict[str, list[Change]] = {}
    for change in found.changes:
        groups.setdefault(f"{change.before['suite']}: {setting(change.before)}", []).append(change)
    for name, changes in groups.items():
        columns = ["implementation", "<direction", "before ms", "after ms", "ratio", "interval", "memory", "<verdict"]
        print_table(screen, name, columns, map(_row, changes))
    screen.print()
    for title, records in (("only before", found.only_before), ("only after", found.only_after)):
        names = Counter(f"{x['suite']}: {x['implementation']}" for x in records)
        if names:
            screen.print(f"{title}: {len(records)} measurements")
        for name, number in names.items():
            screen.print(f"    {name}, {number} times" if number > 1 else f"    {name}", soft_wrap=True)
    for change in (change for change in found.changes if change.is_worse):
        times = "" if change.ratio is None else f", {change.ratio:.2f} times"
        one = change.before
        where = f"{one['suite']}: {setting(one)}: {name_of(one)}, {_direction(one)}"
        screen.print(Text(f"{change.verdict}: {where}{times}", "bold red"), soft_wrap=True)
    screen.print(summary(found))


def summary(found: Regression) -> str:
    """How many of each kind of change."""
    count = Counter(change.verdict for change in found.changes)
    return ", ".join(f"{number} {verdict}" for verdict, number in count.most_common()) or "nothing in common"


def _row(change: Change) -> Sequence[str | Text]:
    one, other = change.before, change.after
    times = [x["status"] if x["ms"] is None else number_text(x["ms"]["median"]) for x in (one, other)]
    ratio, memory = ("" if x is None else f"{x:.2f}" for x in (change.ratio, change.memory))
    interval = "" if change.low is None or change.high is None else f"{change.low:.2f}–{change.high:.2f}"
    verdict = Text(change.verdict, STYLES.get(change.verdict, ""))
    return [name_of(one), _direction(one), *times, ratio, interval, memory, verdict]


def _direction(record: dict[str, Any]) -> str:
    return str(record["direction"]).replace("_", " + ")
