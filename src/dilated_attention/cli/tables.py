"""The results of a run on the terminal: measurements by setting, what is wrong, who is best for what, the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from dilated_attention.bench.results import DIRECTIONS, WHAT, far_off
from dilated_attention.bench.series import with_ranks
from dilated_attention.cli.output import print_table
from dilated_attention.units import bytes_text, cell_text, measured_text, number_text

Record = dict[str, Any]
STYLES = {
    "exact": "green", "right": "green", "faster": "green", "is right": "green", "yes": "green",
    "slower": "bold red", "wrong": "bold red", "out of memory": "bold red", "became wrong": "bold red", "no": "red",
    "skipped": "dim", "same": "dim", "unclear": "yellow",
}  # fmt: skip
LEGEND = "times: median (quartiles); memory: most beyond the inputs, of forward + backward where that was run"
TOO_BUSY = "The machine was too busy to trust these times{}. Run it again when idle."


def print_results(screen: Console, results: Record) -> None:
    """Everything but the claims, for which the report has the room."""
    verdicts = {_checked(check): check["verdict"] for check in results["checks"]}
    for (suite, name), records in grouped(results["measurements"]).items():
        columns = ["implementation", "forward ms", "fwd + bwd ms", "memory", "<verdict"]
        print_table(screen, f"{suite}: {name}", columns, _rows(records, verdicts))
    for made in results["tables"]:
        rows = ([cell_text(x) for x in row] for row in made["rows"])
        print_table(screen, f"{made['suite']}: {made['title']}", made["columns"], rows)
        if made["note"]:
            screen.print(made["note"], soft_wrap=True)
    screen.print()
    if results["measurements"]:
        screen.print(LEGEND, soft_wrap=True)
    for line in wrong(results):
        screen.print(line, soft_wrap=True)
    if results["recommendations"]:
        columns = ["use case", "<best", "<value", "<runner-up", "factor"]
        print_table(screen, "which to use", columns, map(_recommendation, results["recommendations"]))
    screen.print()
    if results["answer"]:
        screen.print(Text(results["answer"].replace("`", ""), "bold"))
    if results["machine"].get("too_busy"):
        others = results["machine"].get("others")
        took = "" if others is None else f": other work took {others:.0%} of its cores"
        screen.print(Text(TOO_BUSY.format(took), "bold red"))
    if not results["complete"]:
        screen.print("The run was interrupted: this is what it had until then.")


def wrong(results: Record) -> Iterator[Text]:
    """Each check that failed, ours first: it has no times, and this is why."""
    failed = [check for check in results["checks"] if check["verdict"] != "exact"]
    for check in sorted(failed, key=lambda check: not check["ours"]):
        why = "; ".join(filter(None, [*far_off(check["errors"], check["limits"]), check["why"]]))
        ours = "OURS: " if check["ours"] else ""
        where = f"{check['dtype']}{', causal' if check['causal'] else ''}"
        yield Text(f"{ours}{name_of(check)} ({where}): {check['verdict']}: {why}", "bold red" if check["ours"] else "")


def name_of(record: Record) -> str:
    return with_ranks(str(record["implementation"]), record["ranks"])


def setting(record: Record) -> str:
    """What was run, whatever ran it."""
    shape = f"B={record['samples']} N={record['tokens']:,} H={record['heads']} D={record['head_dim']}"
    pattern = f"w={','.join(map(str, record['lengths']))} r={','.join(map(str, record['rates']))}"
    return f"{shape} {pattern} {record['dtype']}{' causal' if record['causal'] else ''}"


def grouped(measurements: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """By suite and setting."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in measurements:
        found.setdefault((record["suite"], setting(record)), []).append(record)
    return found


def _rows(records: Iterable[Record], verdicts: dict[tuple[Any, ...], str]) -> Iterator[Sequence[str | Text]]:
    """One per implementation, with both directions."""
    found: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        found.setdefault(_checked(record), {})[record["direction"]] = record
    for key, ways in found.items():
        some = [ways.get(way) for way in DIRECTIONS]
        if all(one is None or one["status"] == "skipped" for one in some):  # it cannot run here; the report says why
            continue
        peaks = [one["peak_bytes"] for one in some if one is not None and one["peak_bytes"] is not None]
        verdict = verdicts.get(key, "")
        style = STYLES.get(verdict, "bold red")
        memory = bytes_text(peaks[-1]) if peaks else "–"
        yield [name_of(next(iter(ways.values()))), *map(_time, some), memory, Text(verdict, style)]


def _time(record: Record | None) -> Text:
    """Median and quartiles, or why there are none; quartiles need three repeats."""
    if record is None:
        return Text("–")
    ms = record["ms"]
    if ms is None:
        return Text(record["status"], STYLES.get(record["status"], ""))
    if ms["repeats"] < 3:
        return Text(f"{number_text(ms['median'])} ({'once' if ms['repeats'] == 1 else 'twice'})")
    spread = f"{number_text(ms['lower'])}–{number_text(ms['upper'])}"
    return Text(f"{measured_text(ms['median'], ms['lower'], ms['upper'])} ({spread})")


def _checked(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in WHAT)


def _recommendation(one: Record) -> list[str]:
    ties = f" (level with {', '.join(one['ties'])})" if one["ties"] else ""
    factor = "–" if one["factor"] is None else f"{one['factor']:.2f}"
    return [one["use_case"], one["best"] + ties, one["value"], one["runner_up"] or "–", factor]
