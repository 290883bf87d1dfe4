"""The page of the report: one file that needs nothing else, works from a disk, and lets nothing in or out.

Tables are plain HTML, so they are there without JavaScript. Jinja2 escapes every text of the results. The plot is drawn
by Vega, whose script is in the page; page.js gives it the points that the reader asks for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from dilated_attention import charts
from dilated_attention.bench import plots, series
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
ENVIRONMENT = {
    "date": "date", "command": "command", "commit": "commit", "dirty": "uncommitted changes", "device": "device",
    "cpu": "CPU", "cores": "cores", "threads": "threads", "load": "load at the start", "system": "system",
}  # fmt: skip


def page(results: dict[str, Any]) -> str:
    """The whole page as one HTML text."""
    points = series.points(results["measurements"])
    settings = series.settings(points)
    told = {
        "specification": plots.interactive("points"),
        "points": points,
        "figures": plots.FIGURES,
        "directions": plots.DIRECTIONS,
        "first": {name: series.first(points, name) for name in settings},
    }
    return charts.page(
        Path(__file__).parent,
        told,
        scripts=[charts.scripts()],
        styles=[plots.dark_style()],
        text=cell_text,
        prose=_prose,
        results=results,
        machine=results["machine"],
        directions=plots.DIRECTIONS,
        settings=_by_suite(settings),
        questions=QUESTIONS,
        recommendations=[_recommendation(one) for one in results["recommendations"]],
        aliases=sorted(set(series.ONE_FUNCTION) & {one["implementation"] for one in results["measurements"]}),
        suites=_suites(results),
        checks=_checks(results["checks"]),
        where=_where(results),
        environment=_environment(results),
    )


def _by_suite(settings: Iterable[str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for name in settings:
        found[name.partition(": ")[0]].append(name)
    return found


# --- text -------------------------------------------------------------------------------------------------------


def _prose(value: object) -> Markup:
    """Text in which names stand between backticks."""
    if isinstance(value, Markup):
        return value
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(cell_text(value)))))


# --- what the tables hold ---------------------------------------------------------------------------------------


def _recommendation(one: dict[str, Any]) -> list[str]:
    behind = f"{one['runner_up']}, {one['factor']:.2f} times that" if one["runner_up"] and one["factor"] else ""
    return [one["use_case"], f"`{one['best']}`", one["value"], ", ".join(one["ties"]), behind]


def _suites(results: dict[str, Any]) -> list[dict[str, Any]]:
    """For each suite its question, its measurements as tables, and the tables that it made itself."""
    measurements = [series.measured(one) for one in results["measurements"]]
    found = []
    for suite in dict.fromkeys([*results["suites"], *(table["suite"] for table in results["tables"])]):
        mine = [one for one in measurements if one["suite"] == suite]
        tables = [*_by_length(mine), *(table for table in results["tables"] if table["suite"] == suite)]
        if tables:
            found.append({"question": QUESTIONS.get(suite, suite), "suite": suite, "tables": tables})
    return found


def _by_length(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A table for each setting, with a column for each length. Settings of a single length share a table."""
    lengths = defaultdict(set)
    for one in measurements:
        lengths[series.setting(one)].add(one["tokens"])
    tables: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for one in sorted(measurements, key=lambda one: int(one["tokens"])):
        name, column = series.setting(one).partition(": ")[2], f"{one['tokens']:,}"
        if len(lengths[series.setting(one)]) == 1:
            shape = f"B={one['samples']} H={one['heads']} D={one['head_dim']}"
            name, column = name.replace(f", {shape}", ""), f"{shape}, {column}"
        who = series.with_ranks(one["implementation"], one["ranks"])
        tables.setdefault(name, {}).setdefault(column, {}).setdefault(who, {})[one["direction"]] = one
    return [_table(name, columns) for name, columns in tables.items()]


def _table(name: str, columns: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    names = dict.fromkeys(who for cells in columns.values() for who in cells)
    return {
        "title": name,
        "note": "ms forward / forward + backward, and below them the peak memory beyond the inputs in MiB",
        "columns": ["tokens", *columns],
        "rows": [[who, *(_cell(cells.get(who, {})) for cells in columns.values())] for who in names],
    }


def _cell(passes: dict[str, Any]) -> Markup | str | None:
    """Both passes; in words where neither was measured."""
    both = [passes.get(name, {"status": "–", "ms": None, "peak_bytes": None}) for name in plots.DIRECTIONS]
    untimed = {"measured": "–"}  # its memory was
    times = [series.milliseconds(one["ms"]) if one["ms"] else untimed.get(one["status"], one["status"]) for one in both]
    sizes = [number_text(one["peak_bytes"] / 2**20) if one["peak_bytes"] else "–" for one in both]
    if times[0] == times[1] and sizes == ["–", "–"]:
        return str(times[0])
    return Markup("{} / {}").format(*times) + Markup("<br><small>{} / {}</small>").format(*sizes)


def _checks(checks: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """One for each implementation, under "wrong" or "right", with the error that is the largest for its limit."""
    by_name = defaultdict(list)
    for check in checks:
        by_name[series.with_ranks(check["implementation"], check["ranks"])].append(check)
    found: dict[str, list[dict[str, Any]]] = {"wrong": [], "right": []}
    for name, mine in by_name.items():
        bad = [check for check in mine if check["verdict"] != "exact"]
        errors = [
            (plots.times_limit(error, check["limits"][part]), part, error, check)
            for check in bad or mine
            for part, error in check["errors"].items()
        ]
        row = {"name": name, "verdict": (bad or mine)[0]["verdict"], "why": (bad or mine)[0]["why"], "worst": "–"}
        if errors:
            _, part, error, check = max(errors, key=lambda one: one[0])
            of = f"{float(error):.1e} with a limit of {float(check['limits'][part]):.1e}"
            what = part.replace("d ", "gradient of ", 1)
            row["worst"] = f"{what}: {of}, {check['dtype']}{', causal' if check['causal'] else ''}"
        found["wrong" if bad else "right"].append(row)
    return found


def _where(results: dict[str, Any]) -> str:
    """In which suite a run was interrupted, and before which ones."""
    begun = results["suites"]
    left = [name for name in results.get("planned", ()) if name not in begun]
    parts = [f"in the suite {begun[-1]}"] if begun else []
    return " and ".join([*parts, f"before {', '.join(left)}"] if left else parts)


def _environment(results: dict[str, Any]) -> dict[str, object]:
    machine = results["machine"]
    found: dict[str, object] = {label: machine[key] for key, label in ENVIRONMENT.items()}
    found |= machine["versions"]
    if machine["dirty"] is None:
        found["uncommitted changes"] = "not known"
    for number, again in enumerate(machine.get("continued", []), 1):
        found[f"continued {number}"] = f"{again['date']}, commit {again['commit'][:12]}: {again['command']}"
    for ceiling in results["ceilings"]:
        said = (
            f"{ceiling['matmul_tflops']:.3g} TFLOP/s in a matrix product, {ceiling['copy_gb_per_s']:.3g} GB/s in a copy"
        )
        found[f"reaches in {ceiling['dtype']}"] = said
    run = "complete" if results["complete"] else "interrupted"
    return {**found, "suites": ", ".join(results["suites"]), "run": f"{run}, {results['seconds']:,.0f} s"}
