"""The results of a run on the terminal: measurements by setting, what is wrong, who is best for what, the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from dilated_attention.bench.conclude import code_of
from dilated_attention.bench.results import WHAT, far_off, milliseconds, segments, with_ranks
from dilated_attention.cli.output import print_table
from dilated_attention.units import bytes_text, cell_text, number_text

Record = dict[str, Any]
STYLES = {
    "exact": "green", "right": "green", "faster": "green", "is right": "green", "skipped": "dim", "same": "dim",
    "unclear": "yellow", "": "",
}  # fmt: skip
LEGEND = "times: median (quartiles); memory: most beyond the inputs, of forward + backward where that was run"


def print_results(screen: Console, results: Record) -> None:
    """Everything but the claims, for which the report has the room."""
    verdicts = {_checked(check): check["verdict"] for check in results["checks"]}

    def row(x: Record) -> list[str | Text]:
        memory = cell_text(x["peak_bytes"] and bytes_text(x["peak_bytes"]))
        return [with_ranks(x), direction(x), _time(x), memory, styled(verdicts.get(_checked(x), ""))]

    run = [x for x in results["measurements"] if x["status"] != "skipped"]  # these cannot run here
    print_groups(screen, titled, run, ["implementation", "<pass", "ms", "memory", "<verdict"], row)
    for made in results["tables"]:
        rows = [[*map(cell_text, cells)] for cells in made["rows"]]
        print_table(screen, f"{made['suite']}: {made['title']}", made["columns"], rows)
        screen.print(made["note"])
    if run:
        screen.print(f"\n{LEGEND}")
    failed = [check for check in results["checks"] if check["verdict"] != "exact"]  # these have no times
    for check in sorted(failed, key=lambda check: not check["ours"]):
        why = "; ".join(filter(None, [*far_off(check["errors"], check["limits"]), check["why"]]))
        text = f"{checked_as(check)}: {check['verdict']}: {why}"
        screen.print(Text(f"OURS: {text}", "bold red") if check["ours"] else text)
    if results["recommendations"]:
        columns = ["use case", "<best", "<value", "<runner-up", "factor"]
        print_table(screen, "which to use", columns, map(_recommendation, results["recommendations"]))
    screen.print(Text("\n" + results["answer"].replace("`", ""), "bold"))
    machine = results["machine"]
    if machine.get("too_busy"):
        others = machine.get("others")
        took = "" if others is None else f": other work took {others:.0%} of its cores"
        screen.print(Text(f"The machine was too busy to trust these times{took}. Run it again when idle.", "bold red"))
    if not results["complete"]:
        screen.print("The run was interrupted: this is what it had until then.")


def print_groups(
    screen: Console, title: Callable[[Any], str], things: Iterable[Any], columns: list[str], row: Callable[[Any], Any]
) -> None:
    """A table for each title."""
    found: dict[str, list[Any]] = {}
    for thing in things:
        found.setdefault(title(thing), []).append(row(thing))
    for name, rows in found.items():
        print_table(screen, name, columns, rows)


def styled(verdict: str) -> Text:
    """In the colour of what is good, and what is not good in red."""
    return Text(verdict, STYLES.get(verdict, "bold red"))


def checked_as(check: Record) -> str:
    return f"{with_ranks(check)} ({check['dtype']}{', causal' if check['causal'] else ''})"


def direction(record: Record) -> str:
    return str(record["direction"]).replace("_", " + ")


def titled(record: Record) -> str:
    """The suite and what was run, whatever ran it."""
    shape = "{suite}: B={samples} N={tokens:,} H={heads} D={head_dim}".format(**record)
    return f"{shape} {segments(record)} {record['dtype']}{' causal' if record['causal'] else ''}"


def _time(record: Record) -> str | Text:
    """Median and quartiles, or why there are none; quartiles need three repeats."""
    ms = record["ms"]
    if ms is None:
        return styled(record["status"])
    quartiles = f"{number_text(ms['lower'])}–{number_text(ms['upper'])}"
    spread = {1: "once", 2: "twice"}.get(ms["repeats"], quartiles)
    return f"{milliseconds(ms)} ({spread})"


def _checked(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in WHAT)


def _recommendation(one: Record) -> list[str]:
    ties = f" (level with {', '.join(one['ties'])})" if one["ties"] else ""
    rest = [cell_text(one[x]) for x in ("value", "runner_up", "factor")]
    return [one["use_case"], code_of(one["best"]) + ties, *rest]
