"""The report: results.csv for spreadsheets, plots for a README, and index.html for people.

The page is one file that needs nothing else, works from a disk, and lets nothing in or out. Tables are plain HTML, so
they are there without JavaScript; `cli.bench` prints some of them, too. Jinja2 escapes every text of the results. The
plot is drawn by Vega, whose script is in the page; page.js gives it the points that the reader asks for.

Legend: a column whose name begins with < is to be read, and the others, but for the first, hold numbers. In a cell,
whatever follows a line break is small.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from dilated_attention.bench import plots
from dilated_attention.bench.conclude import code_of
from dilated_attention.bench.results import (
    DIRECTIONS,
    MEASURED_BY,
    SPEC,
    Record,
    in_words,
    segments,
    setting,
    share_of_limit,
    with_ranks,
)
from dilated_attention.branches.base import grouped
from dilated_attention.show import charts
from dilated_attention.units import cell_text, number_text

QUESTIONS = {
    "quick": "How do all of them compare?",
    "copies": "Is a ring of one device (ring_size=1) slower, and what do copies cost?",
    "improved": "Is ImprovedDilatedAttention faster or smaller than DilatedAttention?",
    "ring": "How do the ring classes V2Simple, V2Collective and Production compare?",
    "profile": "Why is one faster than another?",
    "scaling": "How do all of them compare by length, batch size, heads and dtype?",
    "optimisations": "What does each optimisation save?",
}
LABELS = {"dirty": "uncommitted changes", "cpu": "CPU", "load": "load at the start"}  # of what is said of a machine
USES = ["use case", "<use", "<measured", "<equally fast", "<next best"]
CLAIMS = {"claim": "claim", "claimed": "<claimed", "ours": "<measured here", "holds": "<holds", "how": "<how"}
COLUMNS = (
    *MEASURED_BY, "ours", "status", "why", "ms_median", "ms_lower", "ms_upper", "ms_repeats", "flops", "peak_bytes",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would compute instead of show
Row = Sequence[Any]


def write_report(results: Record, folder: Path, *, say: Callable[[str], None] = print) -> None:
    """Write the files, and ``say`` which and what was left out. Plots are seen on the page."""
    charts.write(folder / "results.csv", csv_text(results["measurements"]).encode())
    say(f"written: {folder / 'results.csv'}")
    try:
        charts.library("vl_convert", "the page needs")
    except ModuleNotFoundError as error:
        say(f"{error}, then run: dilated-attention report {folder}")
        return
    for name, picture in plots.pictures(results).items():
        files = [folder / "plots" / f"{name}.{kind}" for kind in ("svg", "png")]
        if picture is None:
            say(f"no plot of {name}: nothing of it was measured")
            for file in files:
                file.unlink(missing_ok=True)  # it would be of another run
        else:
            charts.write(files[0], plots.svg(picture))
            charts.write(files[1], charts.drawn(picture, ".png", scale=1.5))
    charts.write(folder / "index.html", page(results).encode())
    say(f"written: {folder / 'index.html'}")


def page(results: Record) -> str:
    points = plots.points(results["measurements"])
    settings = grouped(plots.settings(points), lambda name: name.partition(": ")[0])  # by suite
    first = {name: plots.first(points, name) for names in settings.values() for name in names}
    told = {
        "specification": plots.interactive("points"), "points": points, "first": first, "figures": plots.FIGURES,
        "directions": DIRECTIONS,
    }  # fmt: skip
    claims = [[one[name] for name in CLAIMS] for one in results["claims"] if one["holds"] != "not measured"]
    return charts.page(
        Path(__file__).parent, told, scripts=[charts.scripts()], styles=[plots.dark_style()], text=cell_text,
        prose=_prose, results=results, machine=results["machine"], directions=DIRECTIONS, settings=settings,
        questions=QUESTIONS, recommendations=recommendations(results), suites=suites(results), checks=checks(results),
        claims=_table("Claims", [*CLAIMS.values()], claims), environment=_environment(results),
    )  # fmt: skip


def _prose(value: object) -> Markup:
    """Text in which names stand between backticks."""
    text = re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(cell_text(value))))
    return Markup(re.sub(r"\n(.+)", r"<br><small>\1</small>", text))


def _table(title: str, columns: Sequence[str], rows: Iterable[Row], note: str | None = "") -> Record:
    return {"title": title, "note": note, "columns": columns, "rows": [*rows]}


def recommendations(results: Record) -> Record:
    rows = []
    for one in results["recommendations"]:
        behind = f"{one['runner_up']}, {one['factor']:.2f} times that" if one["runner_up"] and one["factor"] else ""
        rows.append([one["use_case"], f"`{code_of(one['best'])}`", one["value"], ", ".join(one["ties"]), behind])
    return _table("Which one should I use?", USES, rows)


def suites(results: Record) -> list[Record]:
    """For each suite its question, a table for each setting that it measured, and the tables that it made itself."""
    tables: dict[str, list[Record]] = {name: [] for name in results["suites"]}
    measured = sorted(results["measurements"], key=lambda one: int(one["tokens"]))
    for title, mine in grouped(measured, setting).items():
        tables.setdefault(mine[0]["suite"], []).append(_of_setting(title.partition(": ")[2], mine))
    for one in results["tables"]:
        is_number = [any(isinstance(row[at], int | float) for row in one["rows"]) for at in range(len(one["columns"]))]
        names = [name if number else f"<{name}" for name, number in zip(one["columns"], is_number, strict=True)]
        tables.setdefault(one["suite"], []).append({**one, "columns": names})
    return [{"question": QUESTIONS.get(name, name), "suite": name, "tables": x} for name, x in tables.items() if x]


def _of_setting(title: str, measurements: Sequence[Record]) -> Record:
    """Rows are implementations, columns lengths; the note has the patterns and why something was not measured."""
    found: dict[str, dict[str, dict[str, Record]]] = defaultdict(lambda: defaultdict(dict))
    notes = ["ms forward / forward + backward, and below them the peak memory beyond the inputs in MiB."]
    reasons: dict[str, str] = {}
    columns = dict.fromkeys(f"{one['tokens']:,}" for one in measurements)
    for one in measurements:
        who, column = with_ranks(one), f"{one['tokens']:,}"
        found[who][column][one["direction"]] = one
        if one.get("suggested") and one["rule"] != "dense":
            notes.append(f"{column} tokens: {segments(one)}.")
        if one["why"]:
            reasons.setdefault(who, f"{who}: {one['status']}, {one['why']}.")
    rows = [[who, *(_cell(mine[column]) for column in columns)] for who, mine in found.items()]
    return _table(title, ["tokens", *columns], rows, " ".join([*dict.fromkeys(notes), *reasons.values()]))


def _cell(passes: dict[str, Record]) -> str:
    """Both passes; in words where neither was measured."""
    both = [passes.get(name, {"status": "–", "ms": None, "peak_bytes": None}) for name in DIRECTIONS]
    times = [in_words(one) for one in both]
    sizes = [number_text(one["peak_bytes"] / 2**20) if one["peak_bytes"] else "–" for one in both]
    if times[0] == times[1] and sizes == ["–", "–"]:
        return times[0]
    return "{} / {}\n{} / {}".format(*times, *sizes)


def checks(results: Record) -> dict[str, Record]:
    """Those that are "wrong", ours first, or "right": each with the error that is the largest for its limit."""
    ours_first = sorted(results["checks"], key=lambda check: not check["ours"])
    found: dict[str, list[Row]] = {"wrong": [], "right": []}
    for name, mine in grouped(ours_first, with_ranks).items():
        bad = [check for check in mine if check["verdict"] != "exact"]
        shown = bad or mine
        found["wrong" if bad else "right"].append([name, shown[0]["verdict"], _worst(shown), shown[0]["why"]])
    columns = ["implementation", "<verdict", "<largest error for its limit", "<why"]
    return {kind: _table(kind, columns, rows) for kind, rows in found.items() if rows}


def _worst(checks: Iterable[Record]) -> str:
    told = {"": -1.0}
    for check in checks:
        for name, value in check["errors"].items():
            error, limit, part = float(value), float(check["limits"][name]), name.replace("d ", "gradient of ", 1)
            where = f"{check['dtype']}{', causal' * check['causal']}"
            told[f"{part}: {error:.1e} with a limit of {limit:.1e}, {where}"] = share_of_limit(error, limit)
    return max(told, key=lambda text: told[text])


def _environment(results: Record) -> Record:
    machine = results["machine"]
    found = {LABELS.get(name, name): machine[name] for name in SPEC["machine"] if name != "versions"}
    found |= machine["versions"]
    if machine["dirty"] is None:
        found["uncommitted changes"] = "not known"
    run = "complete" if results["complete"] else "interrupted"
    return {**found, "suites": ", ".join(results["suites"]), "run": f"{run}, {results['seconds']:,.0f} s"}


def csv_text(measurements: Iterable[Record]) -> str:
    written = io.StringIO()
    rows = csv.DictWriter(written, COLUMNS, extrasaction="ignore", lineterminator="\n")
    rows.writeheader()
    for one in measurements:
        times = {f"ms_{name}": value for name, value in (one["ms"] or {}).items()}
        rows.writerow({name: _csv_cell(value) for name, value in {**one, **times}.items()})
    return written.getvalue()


def _csv_cell(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        value = value.replace("\r", "\\r")  # csv leaves it as it is, and a spreadsheet begins a line there
        return f"'{value}" if value.lstrip().startswith(FORMULA) else value
    return value
