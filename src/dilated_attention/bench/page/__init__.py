"""The page of the report: one file that needs nothing else, works from a disk, and lets nothing in or out.

What a reader needs first is made here as plain HTML, so that it is there without JavaScript; the plots and the table of
measurements are drawn by page.js from the JSON at the end of the page. Text of the results passes `text` or that JSON.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from string import Template
from typing import Any

from dilated_attention.bench import series

Html = str  # markup: whatever comes from the results has been through `text`

FILES = ("page.css", "page.html", "plot.js", "table.js", "page.js")
GOOD = {"exact", "yes"}
NONE = "–"
UNKNOWN = {"not measured"}
LABELS = {
    "date": "date",
    "command": "command",
    "commit": "commit",
    "dirty": "tree had changes",
    "device": "device",
    "cpu": "CPU",
    "cores": "cores",
    "threads": "threads",
    "load": "load at the start",
    "system": "system",
}


def page(results: dict[str, Any]) -> str:
    """The whole page as one HTML text."""
    folder = resources.files(__package__)
    style, template, *scripts = (folder.joinpath(name).read_text(encoding="utf-8") for name in FILES)
    script = "\n".join(scripts)
    machine = results["machine"]
    return Template(template).substitute(
        policy=_policy(style, script),
        style=style,
        script=script,
        data=_embedded(results),
        title=text(f"Dilated attention on {machine['device']}"),
        machine=text(_one_line(machine)),
        notices=_notices(results),
        answer=prose(results["answer"] or "Nothing was measured, so there is nothing to recommend."),
        recommendations=_recommendations(results["recommendations"]),
        matrix=_matrix(results["matrix"]),
        correctness=_correctness(results["checks"]),
        claims=_claims(results["claims"]),
        tables=_tables(results["tables"]),
        environment=_environment(results),
    )


def _policy(style: str, script: str) -> Html:
    """Nothing may be loaded or sent; the style and the script of this very page are known by their hashes."""

    def known(content: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {known(script)}; style-src {known(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _embedded(results: dict[str, Any]) -> str:
    """What page.js draws from. JSON has no infinity, and a `<` could end the element that the JSON stands in."""
    measurements = series.prepared(results["measurements"])
    ours = {one["series"]: one["ours"] for one in measurements}
    found = {
        "measurements": measurements,
        "series": [{"name": name, "ours": ours[name]} for name in series.names_in_order(measurements)],
        "facets": [
            {"key": key, "title": series.FACETS[key], "options": values}
            for key, values in series.options(measurements).items()
        ],
        "start": series.start(measurements),
        "hidden": series.hidden(measurements),
        "enough": series.ENOUGH,
        "ceilings": results["ceilings"],
    }
    return json.dumps(_finite(found), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- text and tables --------------------------------------------------------------------------------------------


def text(value: object) -> Html:
    """Anything as people read it, harmless in HTML."""
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return html.escape(str(value))


def prose(value: object) -> Html:
    """Text in which names stand between backticks."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", text(value))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Html]], kind: str, right: Sequence[int]) -> Html:
    """A table in a box that scrolls; of the kind "stack" each row becomes a card where the screen is narrow."""
    sides = ["number" if index in right else "" for index in range(len(columns))]
    titles = zip(columns, sides, strict=True)
    head = "".join(f'<th scope="col" class="{side}">{text(column)}</th>' for column, side in titles)

    def line(row: Sequence[Html]) -> Html:
        cells = zip(columns, sides, row, strict=True)
        return "".join(
            f'<td data-label="{text(column)}" class="{side}{" empty" if cell == NONE else ""}">{cell}</td>'
            for column, side, cell in cells
        )

    body = "\n".join(f"<tr>{line(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{text(title)}">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _verdict(verdict: str) -> Html:
    """In words, with a sign and a colour that say the same."""
    if verdict in UNKNOWN:
        return f'<span class="verdict open">– {text(verdict)}</span>'
    kind, sign = ("good", "✓") if verdict in GOOD else ("bad", "✗")
    return f'<span class="verdict {kind}">{sign} {text(verdict)}</span>'


def _name(name: str, ours: bool) -> Html:
    return f'<b class="{"ours" if ours else "other"}">{text(name)}</b>'


# --- sections ---------------------------------------------------------------------------------------------------


def _one_line(machine: dict[str, Any]) -> str:
    changes = " with changes" if machine["dirty"] else ""
    parts = [
        machine["device"],
        f"{machine['threads']} threads",
        f"torch {machine['versions']['torch']}",
        f"commit {str(machine['commit'])[:12]}{changes}",
        str(machine["date"])[:10],
    ]
    return " · ".join(map(str, parts))


def _notices(results: dict[str, Any]) -> Html:
    found = []
    if not results["complete"]:
        found.append(f"This run was interrupted{_where(results)}: what follows is what it had measured by then.")
    if results["machine"]["dirty"]:
        found.append("The tree had uncommitted changes: the commit alone does not say what was measured.")
    return "\n".join(f'<p class="notice">{text(sentence)}</p>' for sentence in found)


def _where(results: dict[str, Any]) -> str:
    begun = results["suites"]
    left = [name for name in results.get("planned", ()) if name not in begun]
    inside, before = f" in the suite {begun[-1]}" if begun else "", f" before {', '.join(left)}" if left else ""
    return inside + (f", and{before}" if inside and before else before)


def _recommendations(found: list[dict[str, Any]]) -> Html:
    if not found:
        return ""
    rows = []
    for one in found:
        runner_up = text(one["runner_up"])
        if one["runner_up"] and one["factor"] is not None:
            runner_up += f' <span class="muted nowrap">{one["factor"]:.2f} ×</span>'
        best = f"<b>{text(one['best'])}</b>"
        if one["ties"]:
            best += f' <span class="muted">level with {text(", ".join(one["ties"]))}</span>'
        rows.append([text(one["use_case"]), best, text(one["value"]), runner_up])
    return "<h2>Which one to use</h2>\n" + _table(
        "Which one to use", ["use case", "best", "value", "runner-up"], rows, "stack", []
    )


def _matrix(found: list[dict[str, Any]]) -> Html:
    if not found:
        return ""
    rows = [
        [
            _name(one["implementation"], one["ours"]),
            _verdict(one["verdict"]),
            text(", ".join(one["best_for"])),
            NONE if one["slower"] is None else f"{one['slower']:.2f}×",
            prose(one["note"]),
        ]
        for one in sorted(found, key=lambda one: not one["best_for"])
    ]
    columns = ["implementation", "verdict", "best for", "times the best", "note"]
    return (
        "<h3>Every implementation</h3>\n"
        '<p class="lead"><b class="ours">Marked</b>: this library. Times the best: how many times as long as the best, '
        "the median over its cases.</p>" + _table("Every implementation", columns, rows, "stack tall", [3])
    )


def _correctness(checks: list[dict[str, Any]]) -> Html:
    if not checks:
        return '<p class="nothing">Nothing was checked.</p>'
    exact = sum(check["verdict"] == "exact" for check in checks)
    rows = [
        [
            _checked(check),
            _verdict(check["verdict"]),
            text(f"{check['dtype']}, causal" if check["causal"] else check["dtype"]),
            *_errors(check["errors"], check["limits"]),
        ]
        for check in sorted(checks, key=lambda check: check["verdict"] == "exact")
    ]
    columns = ["implementation", "verdict", "dtype", "out", "worst gradient", "errors"]
    return (
        f'<p class="lead"><b>{exact} of {len(checks)} checks are exact.</b> Each error is the largest distance from '
        "the float64 oracle, followed by its limit. Whatever is wrong is not timed.</p>"
        + _table("Correctness", columns, rows, "stack tall", [3, 4])
    )


def _checked(check: dict[str, Any]) -> Html:
    why = f'<p class="why">{prose(check["why"])}</p>' if check["why"] else ""
    return _name(series.with_ranks(check["implementation"], check["ranks"]), check["ours"]) + why


def _errors(errors: dict[str, float | str], limits: dict[str, float]) -> tuple[Html, Html, Html]:
    """The error of out, the gradient nearest to its limit or farthest beyond it, and a list of all."""
    shown = {name: _error(name, float(errors[name]), limits[name]) for name in errors}
    gradients = [name for name in errors if name != "out"]
    worst = max(gradients, key=lambda name: times_limit(errors[name], limits[name]), default=None)
    every = "".join(f"<li>{item}</li>" for item in shown.values())
    return (
        shown.get("out", NONE),
        shown[worst] if worst else NONE,
        f"<details><summary>all {len(shown)}</summary><ul>{every}</ul></details>" if shown else NONE,
    )


def times_limit(error: float | str, limit: float) -> float:
    """How many times its limit an error is; what is not a number is infinitely far off."""
    number = float(error)
    return math.inf if math.isnan(number) or not limit else number / limit


def _error(name: str, error: float, limit: float) -> Html:
    over = not error <= limit
    label = "" if name == "out" else f"{text(name)} "
    figures = f"{label}{error:.1e} <span class='limit'>{'over' if over else 'of'} {limit:.1e}</span>"
    return f'<span class="{"over" if over else "within"}">{figures}</span>'


def _claims(claims: list[dict[str, Any]]) -> Html:
    if not claims:
        return '<p class="nothing">No claim was tested.</p>'
    rows = [
        [prose(one["claim"]), text(one["claimed"]), text(one["ours"]), _verdict(one["holds"]), prose(one["how"])]
        for one in claims
    ]
    return _table("Claims", ["claim", "claimed", "measured here", "holds", "how"], rows, "stack", [])


def _tables(tables: list[dict[str, Any]]) -> Html:
    if not tables:
        return '<p class="nothing">This run made no tables.</p>'
    found = []
    for suite in dict.fromkeys(table["suite"] for table in tables):
        found.append(f'<h3>Suite <span class="suite">{text(suite)}</span></h3>\n<div class="tables">')
        for table in (table for table in tables if table["suite"] == suite):
            columns, rows = table["columns"], table["rows"]
            right = [i for i in range(len(columns)) if any(isinstance(row[i], int | float) for row in rows)]
            note = f'<p class="lead">{prose(table["note"])}</p>' if table["note"] else ""
            sentences = any(len(str(cell)) > 60 for row in rows for cell in row)
            wide = ' class="wide"' if sentences or len(columns) > 4 else ""
            cells = [[_cell(cell) for cell in row] for row in rows]
            body = _table(table["title"], columns, cells, "stack" if sentences else "", right)
            found.append(f"<div{wide}><h4>{text(table['title'])}</h4>{note}{body}</div>")
        found.append("</div>")
    return "\n".join(found)


def _cell(value: object) -> Html:
    """What is short stays on one line, so that a long neighbour wraps instead."""
    shown = text(value)
    return f'<span class="nowrap">{shown}</span>' if len(shown) <= 24 else shown


def _environment(results: dict[str, Any]) -> Html:
    machine = results["machine"]
    found: dict[str, object] = {label: machine[key] for key, label in LABELS.items()}
    found |= machine["versions"]
    found |= {
        "suites": ", ".join(results["suites"]),
        "run": "complete" if results["complete"] else "interrupted",
        "took": f"{results['seconds']:,.0f} s",
        "schema": str(results["schema"]),
    }
    for number, again in enumerate(machine.get("continued", []), 1):
        found[f"continued {number}"] = f"{again['date']}, commit {again['commit'][:12]}: {again['command']}"
    if machine["dirty"] is None:
        found["tree had changes"] = "not known"
    return "<dl>" + "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>\n" for k, v in found.items()) + "</dl>"
