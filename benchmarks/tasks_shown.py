"""What docs/results.md shows of the results of benchmarks/tasks.py: tables, and pictures for light and dark pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dilated_attention import charts

Result = dict[str, Any]

UNITS = {"code": "byte", "genome": "base"}
COLOURS = {  # of the report, so that each has a form for dark pages
    "longnet-8k": "#9a6700", "longnet-32k": "#1a7f37", "longnet-128k": "#0550ae", "longnet-1m": "#0550ae",
    "longnet-8k-large-steps": "#1a7f37", "dense-8k": "#c4314b", "dense-32k": "#8250df",
}  # fmt: skip
MOST_BITS = {"code": 3.0, "genome": 2.1}  # in a picture: what a model does beyond its training may be far off
TOKENS = "datum.value >= 1024 ? datum.value / 1024 + 'k' : datum.value"


def read(folder: Path, task: str) -> tuple[list[Result], dict[str, float]]:
    """The runs that have come to their end, in the order of COLOURS, and the baselines."""
    files = {name: folder / f"{task}-{name}.json" for name in (*COLOURS, "baselines")}
    there = {name: json.loads(file.read_text("utf-8")) for name, file in files.items() if file.exists()}
    there = {name: one for name, one in there.items() if one["complete"]}
    last = there.pop("baselines", {"bits": {}})
    return list(there.values()), last["bits"]


# --- tables -----------------------------------------------------------------------------------------------------


def table(runs: list[Result], baselines: dict[str, float], task: str) -> str:
    """Every run, and what needs no network; the machine on top, so that no number goes alone."""
    windows, made = list(runs[0]["held_out"]), dict[str, list[str]]()
    for one in runs:
        about = one["machine"]
        by = f"{about['device']}, torch {about['versions']['torch']}, commit {about['commit']}"
        made.setdefault(by, []).append(one["run"])
    lines = [
        *(f"{', '.join(names)}: {by}.\n" for by, names in made.items()),
        f"Held-out bits per {UNITS[task]}, in windows of:",
        "",
        rule("", "seconds", "tokens", "TFLOP", *(f"{int(window):,}" for window in windows), left=1),
    ]
    for one in runs:
        work = one["tokens"] * one["operations_per_token"] / 1e12
        cells = one["run"], f"{one['seconds']:.0f}", f"{one['tokens'] / 1e6:,.0f}M", f"{work:,.0f}"
        lines.append(row(*cells, *(f"{one['held_out'][window]['bits']:.3f}" for window in windows)))
    dashes = ["–"] * (3 + len(windows) - 1)
    best = min((name for name in baselines if name.startswith("order")), key=baselines.__getitem__, default=None)
    shown = [name for name in baselines if name == best or not name.startswith("order")]
    return "\n".join([*lines, *(row(name, *dashes, f"{baselines[name]:.3f}") for name in shown)])


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def rule(*cells: str, left: int) -> str:
    """The head of a table, and the line below it: the first columns to the left, the others to the right."""
    return f"{row(*cells)}\n|{'---|' * left}{'---:|' * (len(cells) - left)}"


# --- pictures ---------------------------------------------------------------------------------------------------


def lines_of(runs: list[Result], what: str) -> list[Result]:
    """Points of a picture: bits by position in the longest windows, or over the seconds of training."""
    found = []
    for one in runs:
        points = [(seconds, bits) for seconds, _, bits in one["held_out_curve"]]
        if what == "position":
            bins = one["held_out"][list(one["held_out"])[-1]]["by_position"]
            points = [(((x["first"] + 1) * (x["last"] + 1)) ** 0.5, x["bits"]) for x in bins if x["first"] >= 16]
        found += [{"run": one["run"], "x": x, "bits": bits} for x, bits in points]
    return found


def picture(runs: list[Result], task: str, what: str) -> bytes:
    from dilated_attention.bench.plots import either, styled, svg

    rows, names = lines_of(runs, what), [one["run"] for one in runs]
    least, most = (choose(point["bits"] for point in rows) for choose in (min, max))
    scale = {"domain": [least, max(least + 0.01, min(most, MOST_BITS[task]))]}
    x: dict[str, Any] = {"field": "x", "type": "quantitative", "title": "seconds of training"}
    if what == "position":
        axis = {"values": [1 << i for i in range(4, 21, 2)], "labelExpr": TOKENS}
        x |= {"title": "position", "scale": {"type": "log", "base": 2, "nice": False}, "axis": axis}
    y = {"field": "bits", "type": "quantitative", "title": f"held-out bits per {UNITS[task]}", "scale": scale}
    colours = {"domain": names, "range": [COLOURS[name] for name in names]}
    chart = {
        "data": {"values": rows}, "mark": {"type": "line", "strokeWidth": 2, "clip": True}, "width": 520, "height": 300,
        "encoding": {"x": x, "y": y, "color": {"field": "run", "title": None, "scale": colours},
                     "strokeDash": either("substring(datum.run, 0, 5) == 'dense'", [6, 3], [1, 0])},
    }  # fmt: skip
    return svg(styled(chart))


# --- the page ---------------------------------------------------------------------------------------------------

PICTURES = {"position": "Bits by position", "training": "Held-out bits over the seconds of training"}


def section(folder: Path, task: str) -> str:
    """What the page shows of a task, between its two marks."""
    runs, baselines = read(folder, task)
    if not runs:
        return "No run of this task has been measured yet."
    pictures = [f"![{words}, {task}](tasks-{task}-{what}.svg)" for what, words in PICTURES.items()]
    return "\n\n".join((table(runs, baselines, task), *pictures))


def marks(task: str) -> tuple[str, str]:
    return f"<!-- {task}: written by `python benchmarks/tasks.py draw` -->\n", f"\n<!-- {task}: end -->"


def show(folder: Path, docs: Path) -> None:
    """Write the tables into results.md, and draw its pictures."""
    if not any(read(folder, task)[0] for task in UNITS):
        raise SystemExit(f"error: {folder} has no run that came to its end: give the folder of the results with --out")
    text = (docs / "results.md").read_text(encoding="utf-8")
    for task in UNITS:
        runs, _ = read(folder, task)
        first, last = marks(task)
        before, _, rest = text.partition(first)
        text = f"{before}{first}{section(folder, task)}{last}{rest.partition(last)[2]}"
        for what in PICTURES if runs else ():
            charts.write(docs / f"tasks-{task}-{what}.svg", picture(runs, task, what))
        print(section(folder, task), end="\n\n")
    charts.write(docs / "results.md", text.encode())
