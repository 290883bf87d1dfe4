"""A folder that tells the results: results.csv for spreadsheets, plots for a README, and index.html for people.

Each file is written at once or not at all, so that a report is never half of a new one and half of an old one's file.
"""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dilated_attention.bench import plots, series
from dilated_attention.bench.page import page

__all__ = ["page", "table", "write_report"]

COLUMNS = (
    "suite", "implementation", "kind", "ours", "rule", "ranks", "samples", "tokens", "heads", "head_dim", "lengths",
    "rates", "dtype", "causal", "direction", "status", "why", "ms_median", "ms_lower", "ms_upper", "ms_repeats",
    "tokens_per_s", "flops", "bytes", "tflops", "of_matmul", "gb_per_s", "of_copy", "peak_bytes",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would compute instead of show


def write_report(results: dict[str, Any], folder: Path, *, say: Callable[[str], None] = print) -> list[Path]:
    """Write results.csv, plots/*.png, plots/*.svg and index.html; return what was written.

    ``say`` is told which plots were left out as nothing of theirs was measured. An older picture of that name is
    removed: it would be of another run.
    """
    written = [_write(folder / "results.csv", table(results["measurements"]).encode())]
    for name, figure in plots.figures(results).items():
        for kind in ("png", "svg"):
            file = folder / "plots" / f"{name}.{kind}"
            if figure is None:
                file.unlink(missing_ok=True)
            else:
                written.append(_write(file, plots.encoded(figure, kind)))
        if figure is None:
            say(f"no plot of {name}: nothing of it was measured")
    written.append(_write(folder / "index.html", page(results).encode()))
    return written


def table(measurements: Iterable[dict[str, Any]]) -> str:
    """The measurements as CSV, one per line. There are figures only where the status is "measured"."""
    written = io.StringIO()
    rows = csv.DictWriter(written, COLUMNS, extrasaction="ignore", lineterminator="\n")
    rows.writeheader()
    for one in series.prepared(measurements):
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


def _write(file: Path, content: bytes) -> Path:
    """At once or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, half_written = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(half_written, 0o644)  # mkstemp makes it readable by its owner alone
        os.replace(half_written, file)
    except BaseException:
        os.unlink(half_written)
        raise
    return file
