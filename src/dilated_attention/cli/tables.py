"""The results of a run on the terminal: the tables of the report, what is wrong, who is best for what, the answer."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from dilated_attention.bench import page
from dilated_attention.bench.results import far_off, with_ranks
from dilated_attention.cli.output import print_table
from dilated_attention.units import cell_text

Record = dict[str, Any]


def print_results(screen: Console, results: Record) -> None:
    """Everything but the claims, for which the report has the room, and what cannot run here."""
    run = [one for one in results["measurements"] if one["status"] != "skipped"]
    for suite in page.suites({**results, "measurements": run}):
        for table in suite["tables"]:
            _print(screen, {**table, "title": f"{suite['suite']}: {table['title']}"})
    failed = [check for check in results["checks"] if check["verdict"] != "exact"]  # these have no times
    for check in sorted(failed, key=lambda check: not check["ours"]):
        why = "; ".join(filter(None, [*far_off(check["errors"], check["limits"]), check["why"]]))
        text = f"{checked_as(check)}: {check['verdict']}: {why}"
        screen.print(Text(f"OURS: {text}", "bold red") if check["ours"] else text)
    if results["recommendations"]:
        _print(screen, page.recommendations(results))
    screen.print(Text("\n" + results["answer"].replace("`", ""), "bold"))
    machine = results["machine"]
    if machine.get("too_busy"):
        others = machine.get("others")
        took = "" if others is None else f": other work took {others:.0%} of its cores"
        screen.print(Text(f"The machine was too busy to trust these times{took}. Run it again when idle.", "bold red"))
    if not results["complete"]:
        screen.print("The run was interrupted: this is what it had until then.")


def _print(screen: Console, table: Record) -> None:
    rows = [[cell_text(cell).replace("`", "") for cell in row] for row in table["rows"]]
    print_table(screen, table["title"], table["columns"], rows)
    if table["note"]:
        screen.print(table["note"].replace("`", ""))


def checked_as(check: Record) -> str:
    return f"{with_ranks(check)} ({check['dtype']}{', causal' if check['causal'] else ''})"
