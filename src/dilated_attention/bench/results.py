"""What a results file holds, how one is read, and how its records, of measurements or checks, are named.

What is wrong with a file is a ValueError of one line that names the place. Control characters in its texts are escaped,
so that no name can move the cursor of a terminal or end a line.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilated_attention.show import charts
from dilated_attention.units import measured_text, number_text

SCHEMA = 1
DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
Record = dict[str, Any]
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
LARGEST, DEEPEST = 2.0**63, 50  # numbers, and lists in lists
ENOUGH = 3  # repeats; quartiles of fewer say nothing

WHAT = {"implementation": str, "kind": str, "rule": str, "ranks": int, "dtype": str, "causal": bool}
MEASURED_BY: Record = {
    "suite": str, **WHAT, "samples": int, "tokens": int, "heads": int, "head_dim": int, "lengths": [int],
    "rates": [int], "direction": str,
}  # fmt: skip
NAMES: dict[Any, str] = {dict: "an object", list: "a list", str: "a text", int: "a whole number", bool: "true or false"}
NUMBER = int | float
TIMES = {"median": NUMBER, "lower": NUMBER, "upper": NUMBER, "repeats": int}
# A tuple is null or what it holds.
SPEC: Record = {
    "machine": {
        "date": str, "command": str, "commit": str | None, "dirty": bool | None, "device": str, "cpu": str,
        "cores": int | None, "threads": int, "load": NUMBER | None, "system": str,
        "versions": {"torch": str},
    },
    "measurements": [
        {**MEASURED_BY, "ours": bool, "status": str, "why": str, "ms": (TIMES,), "peak_bytes": NUMBER | None}
    ],
    "checks": [{**WHAT, "ours": bool, "verdict": str, "why": str, "errors": dict, "limits": dict}],
    "tables": [
        {"suite": str, "title": str, "note": str | None, "columns": [str], "rows": [[str | NUMBER | bool | None]]}
    ],
    "claims": [dict.fromkeys(("claim", "claimed", "ours", "holds", "how"), str)],
    "recommendations": [
        {"use_case": str, "best": str, "value": str, "runner_up": str | None, "factor": NUMBER | None, "ties": [str]}
    ],
    "suites": [str], "complete": bool, "seconds": NUMBER, "answer": str | None,
}  # fmt: skip


def load(path: Path) -> Record:
    """A results file, or the one in a folder. What was not measured has no figures."""
    file = path / "results.json" if path.is_dir() else path
    try:
        text = file.read_bytes().decode("utf-8")
        steps = (
            1 if token in "[{" else -1 for token in re.findall(r'"(?:[^"\\]|\\.)*"|[][{}]', text) if token in "[]{}"
        )
        if max(itertools.accumulate(steps), default=0) > DEEPEST:  # counted before anything goes down
            raise ValueError("its values are nested too deeply")
        found = charts.changed(json.loads(text), _leaf)
        if not isinstance(found, dict) or "schema" not in found:
            raise ValueError("it has no schema; `dilated-attention bench` writes one")
        if found["schema"] != SCHEMA:
            raise ValueError(f"it has schema {found['schema']!r:.60}, and this version reads {SCHEMA}")
        _check(found, SPEC)
        _check_figures(found)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not a results file: {error}") from error
    every = found["measurements"]
    every[:] = [one if one["status"] == "measured" else {**one, "ms": None, "peak_bytes": None} for one in every]
    return found


def _leaf(value: Any) -> Any:
    """A text that is escaped, or a finite number."""
    if isinstance(value, int | float) and not abs(value) < LARGEST:
        raise ValueError(f"{str(value)[:20]} is not a finite number below 2^63")
    return escaped(value) if isinstance(value, str) else value


def _check(value: Any, spec: Any, place: str = "") -> None:
    if isinstance(spec, tuple):
        if value is None:
            return
        (spec,) = spec
    kind: Any = type(spec) if isinstance(spec, list | dict) else spec
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ValueError(f"{place} must be {NAMES.get(kind, kind)}, got {repr(value)[:60]}")
    if isinstance(spec, list):
        for index, item in enumerate(value):
            _check(item, spec[0], f"{place}[{index}]")
    if isinstance(spec, dict):
        if missing := [name for name in spec if name not in value]:
            raise ValueError(f"{place or 'it'} has no {', '.join(missing)}")
        for name in spec:
            _check(value[name], spec[name], f"{place}.{name}".lstrip("."))


def _check_figures(found: Record) -> None:
    """What no single value shows."""
    for index, one in enumerate(found["measurements"]):
        place = f"measurements[{index}]"
        if one["direction"] not in DIRECTIONS:
            raise ValueError(f"{place}.direction must be {' or '.join(DIRECTIONS)}")
        if one["ms"] and not 0 < one["ms"]["lower"] <= one["ms"]["median"] <= one["ms"]["upper"]:
            raise ValueError(f"the median of {place} is not between its quartiles, or they are not above 0")
    for index, table in enumerate(found["tables"]):
        if any(len(row) != len(table["columns"]) for row in table["rows"]):
            raise ValueError(f"a row of tables[{index}] has another number of cells")
    for index, check in enumerate(found["checks"]):
        try:
            far_off(check["errors"], check["limits"])
        except (KeyError, TypeError, ValueError) as error:  # an error without a limit, or what is no number
            raise ValueError(f"checks[{index}] has errors that cannot be compared with limits: {error!s:.60}") from None


def escaped(text: str) -> str:
    """With control characters as Python writes them."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def first_line(error: object) -> str:
    """Some go on with a C++ trace."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def far_off(errors: Mapping[str, Any], limits: Mapping[str, Any]) -> list[str]:
    pairs = [(name, float(error), float(limits[name])) for name, error in errors.items()]
    return [f"{name} off by {error:.1e}, allowed {limit:.1e}" for name, error, limit in pairs if not error <= limit]


def share_of_limit(error: float, limit: float) -> float:
    """How many times its limit an error is. What is no number is infinitely far off, as is any where 0 is allowed."""
    if not limit or math.isnan(error):
        return math.inf if error else 0.0
    return error / limit


def with_ranks(one: Record) -> str:
    """The name and over how many ranks, unless it is one or the name says so."""
    name, said = str(one["implementation"]), f"{one['ranks']} ranks"
    return name if one["ranks"] == 1 or said in name else f"{name}, {said}"


def segments(one: Record) -> str:
    return "w={} r={}".format(*(",".join(map(str, one[key])) for key in ("lengths", "rates")))


def setting(one: Record) -> str:
    """All that two measurements must share to be compared, but for their length, from which `suggest` has segments."""
    chosen = "suggested w and r" if one.get("suggested") else segments(one)
    shape = "B={samples} H={heads} D={head_dim}".format(**one)
    return f"{one['suite']}: {one['dtype']}{', causal' * one['causal']}, {shape}, {chosen}"


def in_words(one: Record, unit: str = "") -> str:
    """Its time, or why there is none."""
    return f"{milliseconds(one['ms'])}{unit}" if one["ms"] else str(one["status"])


def milliseconds(ms: Mapping[str, float]) -> str:
    """The median, with as many digits as its quartiles support; of a few repeats there are no quartiles."""
    if ms["repeats"] < ENOUGH:
        return number_text(ms["median"], 2)
    return measured_text(ms["median"], ms["lower"], ms["upper"])
