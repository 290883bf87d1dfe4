"""A folder that tells the results: results.csv for spreadsheets, plots for a README, and index.html for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dilated_attention import charts
from dilated_attention.bench import plots
from dilated_attention.bench.page import page
from dilated_attention.bench.results import MEASURED_BY, measured

COLUMNS = (
    *MEASURED_BY, "ours", "status", "why", "ms_median", "ms_lower", "ms_upper", "ms_repeats", "flops", "peak_bytes",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would compute instead of show


def write_report(results: dict[str, Any], folder: Path, *, say: Callable[[str], None] = print) -> list[Path]:
    """Write the files, return them, and ``say`` what was left out: plots of what was not measured, and all but
    results.csv where what draws them is not installed."""
    charts.write(folder / "results.csv", table(results["measurements"]).encode())
    written = [folder / "results.csv"]
    try:
        charts.library("vl_convert", "the page needs")
    except ModuleNotFoundError as error:
        say(f"{error}, then run: dilated-attention report {folder}")
        return written
    for name, picture in plots.pictures(results).items():
        if picture is None:
            say(f"no plot of {name}: nothing of it was measured")
        for kind, drawn in (("svg", plots.svg), ("png", plots.png)):
            file = folder / "plots" / f"{name}.{kind}"
            if picture is None:
                file.unlink(missing_ok=True)  # it would be of another run
            else:
                charts.write(file, drawn(picture))
                written.append(file)
    charts.write(folder / "index.html", page(results).encode())
    return [*written, folder / "index.html"]


def table(measurements: Iterable[dict[str, Any]]) -> str:
    """The measurements as CSV, one per line. There are figures only where the status is "measured"."""
    written = io.StringIO()
    rows = csv.DictWriter(written, COLUMNS, extrasaction="ignore", lineterminator="\n")
    rows.writeheader()
    for one in map(measured, measurements):
        times = {f"ms_{name}": value for name, value in (one["ms"] or {}).items()}
        rows.writerow({name: _cell(value) for name, value in {**one, **times}.items()})
    return written.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        value = value.replace("\r", "\\r")  # csv leaves it as it is, and a spreadsheet begins a line there
        return f"'{value}" if value.lstrip().startswith(FORMULA) else value
    return value
