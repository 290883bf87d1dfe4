"""What a results file holds, how one is read, and how its records are named.

What is wrong with a file is a ValueError of one line that names the place. Control characters in its texts are escaped,
so that no name can move the cursor of a terminal or end a line.

Legend: a record is one entry of results["measurements"] or results["checks"].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dilated_attention import charts
from dilated_attention.units import measured_text, number_text

SCHEMA = 1
DIRECTIONS = ("forward", "forward_backward")
Record = dict[str, Any]
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
ENOUGH = 3  # repeats; quartiles of fewer say nothing

WHAT = ("implementation", "kind", "rule", "ranks", "dtype", "causal")
MEASURED_BY = ("suite", *WHAT, "samples", "tokens", "heads", "head_dim", "lengths", "rates", "direction")
NEEDED = {  # parts of a file, and what each of their records has
    "machine": (
        "date", "command", "commit", "dirty", "device", "cpu", "cores", "threads", "load", "system", "versions",
    ),
    "measurements": (*MEASURED_BY, "ours", "status", "why", "ms", "peak_bytes"),
    "checks": (*WHAT, "ours", "verdict", "why", "errors", "limits"),
    "tables": ("suite", "title", "note", "columns", "rows"),
    "claims": ("claim", "claimed", "ours", "holds", "how"),
    "recommendations": ("use_case", "best", "value", "runner_up", "factor", "ties"),
    "suites": (), "complete": (), "seconds": (), "answer": (),
}  # fmt: skip


def load(path: Path) -> Record:
    """A results file, or the one in a folder."""
    file = path / "results.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict) or "schema" not in found:
            raise ValueError("it has no schema; `dilated-attention bench` writes one")
        if found["schema"] != SCHEMA:
            raise ValueError(f"it has schema {found['schema']!r}, and this version reads {SCHEMA}")
        _check(found)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a results file: {error}") from error
    checked: Record = charts.changed(found, lambda leaf: escaped(leaf) if isinstance(leaf, str) else leaf)
    return checked


def _check(found: Record) -> None:
    _check_names("it", found, NEEDED)
    for part, names in NEEDED.items():
        if isinstance(found[part], dict):
            _check_names(part, found[part], names)
        elif names:
            for index, record in enumerate(found[part]):
                _check_names(f"{part}[{index}]", record, names)
    for index, one in enumerate(found["measurements"]):
        if one["ms"] and not 0 < one["ms"]["lower"] <= one["ms"]["median"] <= one["ms"]["upper"]:
            raise ValueError(
                f"the median of measurements[{index}] is not between its quartiles, or they are not above 0"
            )


def _check_names(place: str, record: Record, names: Iterable[str]) -> None:
    if missing := [name for name in names if name not in record]:
        raise ValueError(f"{place} has no {', '.join(missing)}")


def escaped(text: str) -> str:
    """With control characters as Python writes them."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


# --- records ----------------------------------------------------------------------------------------------------


def far_off(errors: Mapping[str, Any], limits: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} off by {float(error):.1e}, allowed {float(limits[name]):.1e}"
        for name, error in errors.items()
        if not float(error) <= float(limits[name])
    ]


def share_of_limit(error: float, limit: float) -> float:
    """How many times its limit an error is. What is no number is infinitely far off, as is any where 0 is allowed."""
    if not limit or math.isnan(error):
        return math.inf if error else 0.0
    return error / limit


def measured(one: Record) -> Record:
    """The measurement, without figures unless its status is "measured"."""
    return one if one["status"] == "measured" else {**one, "ms": None, "peak_bytes": None}


def with_ranks(one: Record) -> str:
    """The name and over how many ranks, unless it is one or the name says so."""
    name, said = str(one["implementation"]), f"{one['ranks']} ranks"
    return name if one["ranks"] == 1 or said in name else f"{name}, {said}"


def segments(one: Record) -> str:
    return "w={} r={}".format(*(",".join(map(str, one[key])) for key in ("lengths", "rates")))


def setting(one: Record) -> str:
    """All that two measurements must share to be compared, but for their length, from which `suggest` has segments."""
    causal = ", causal" if one["causal"] else ""
    chosen = "suggested w and r" if one.get("suggested") else segments(one)
    shape = "B={samples} H={heads} D={head_dim}".format(**one)
    return f"{one['suite']}: {one['dtype']}{causal}, {shape}, {chosen}"


def milliseconds(ms: Mapping[str, float]) -> str:
    """The median, with as many digits as its quartiles support; of a few repeats there are no quartiles."""
    if ms["repeats"] < ENOUGH:
        return number_text(ms["median"], 2)
    return measured_text(ms["median"], ms["lower"], ms["upper"])
