"""What a results file holds, and how one is read: every value is checked before anything is made of it.

A results file may come from anywhere. What is wrong with one is a ValueError of one line that names the place. Control
characters in its texts are escaped, so that no name can move the cursor of a terminal or end a line.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
DIRECTIONS = ("forward", "forward_backward")
Record = dict[str, Any]
Check = Callable[[Any], str]  # what a value must be; "" where it is
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
DEEPEST = 50  # lists and objects inside one another; those of a results file are nested six times
HUGE = 1e300  # JSON has whole numbers that no float can hold


def escaped(text: str) -> str:
    """With control characters as Python writes them."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def far_off(errors: Mapping[str, Any], limits: Mapping[str, Any]) -> list[str]:
    """What is beyond its limit, in words. An infinite error is a text, as JSON has no such number."""
    return [
        f"{name} off by {float(error):.1e}, allowed {float(limits[name]):.1e}"
        for name, error in errors.items()
        if not float(error) <= float(limits[name])
    ]


def _a(name: str, *types: type, test: Callable[[Any], bool] = lambda value: True) -> Check:
    def check(value: Any) -> str:
        is_bool = isinstance(value, bool) and bool not in types
        return "" if isinstance(value, types) and not is_bool and test(value) else name

    return check


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (ValueError, OverflowError):
        return False
    return True


TEXT = _a("a text", str)
FLAG = _a("true or false", bool)
COUNT = _a("a whole number from 1 to 2^63", int, test=lambda value: 0 < value < 2**63)
NUMBER = _a("a finite number of 0 or more", int, float, test=lambda value: 0 <= value < HUGE)
TIME = _a("a finite number of more than 0", int, float, test=lambda value: 0 < value < HUGE)
ERROR = _a("a number", int, float, str, test=_is_number)
CELL = _a(
    "a text or a number", str, int, float, bool, type(None), test=lambda x: isinstance(x, str) or _is_number(x or 0)
)
FIGURE = (NUMBER,)

TIMES = {"median": TIME, "lower": TIME, "upper": TIME, "repeats": COUNT}
WHAT = {"implementation": TEXT, "kind": TEXT, "rule": TEXT, "ranks": COUNT, "dtype": TEXT, "causal": FLAG}
MEASURED_BY = {
    "suite": TEXT, **WHAT, "samples": COUNT, "tokens": COUNT, "heads": COUNT, "head_dim": COUNT, "lengths": [COUNT],
    "rates": [COUNT], "direction": _a(" or ".join(DIRECTIONS), str, test=DIRECTIONS.__contains__),
}  # fmt: skip
FIGURES = ("tokens_per_s", "flops", "bytes", "tflops", "of_matmul", "gb_per_s", "of_copy")
# What `compare` needs, and what a page needs besides. A tuple is None or what it holds; {str: x} has any names.
NEEDED: dict[str, Any] = {
    "machine": {},
    "measurements": [{**MEASURED_BY, "status": TEXT, "ms": (TIMES,), "peak_bytes": FIGURE}],
    "checks": [{**WHAT, "verdict": TEXT}],
}
WHOLE: dict[str, Any] = {
    "machine": {
        "date": TEXT, "command": TEXT, "commit": (TEXT,), "dirty": (FLAG,), "device": TEXT, "cpu": TEXT,
        "cores": (COUNT,), "threads": COUNT, "load": FIGURE, "system": TEXT, "versions": {"torch": TEXT},
    },
    "measurements": [{"ours": FLAG, "why": TEXT, **dict.fromkeys(FIGURES, FIGURE)}],
    "checks": [{"ours": FLAG, "why": TEXT, "errors": {str: ERROR}, "limits": {str: ERROR}}],
    "tables": [{"suite": TEXT, "title": TEXT, "note": (TEXT,), "columns": [TEXT], "rows": [[CELL]]}],
    "claims": [dict.fromkeys(("claim", "claimed", "ours", "holds", "how"), TEXT)],
    "recommendations": [
        {"use_case": TEXT, "best": TEXT, "value": TEXT, "runner_up": (TEXT,), "factor": FIGURE, "ties": [TEXT]}
    ],
    "matrix": [
        {"implementation": TEXT, "ours": FLAG, "verdict": TEXT, "best_for": [TEXT], "slower": FIGURE, "note": TEXT}
    ],
    "ceilings": [{"dtype": TEXT, "matmul_tflops": NUMBER, "copy_gb_per_s": NUMBER}],
    "suites": [TEXT], "complete": FLAG, "seconds": NUMBER, "answer": (TEXT,),
}  # fmt: skip


def load(path: Path, whole: bool = False) -> Record:
    """A results file, or the one in a folder. ``whole``: with all that a report is made of."""
    try:
        file = path / "results.json" if path.is_dir() else path
        text = file.read_text(encoding="utf-8")
        is_deep = _depth(text) > DEEPEST  # how deep Python can read differs between versions and machines
        found = None if is_deep else json.loads(text)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise ValueError(f"{file} is not a results file, because it is not JSON: {error}") from error
    if is_deep:
        raise ValueError(f"{file} is not a results file: its values are nested too deeply")
    if not isinstance(found, dict) or "schema" not in found:
        raise ValueError(f"{file} is not a results file: it has no schema; `dilated-attention bench` writes one")
    if found["schema"] != SCHEMA:
        raise ValueError(
            f"{file} has schema {found['schema']!r}, and this version reads {SCHEMA}: use the one that wrote it"
        )
    for spec in (NEEDED, WHOLE) if whole else (NEEDED,):
        wrong = _wrong(found, spec, "")
        if wrong:
            raise ValueError(f"{file} is not a results file: {wrong}")
    wrong = _wrong(found["machine"].get("versions", {}), {str: CELL}, "machine.versions")
    for index, one in enumerate(found["measurements"]):
        if one["ms"] is not None and not one["ms"]["lower"] <= one["ms"]["median"] <= one["ms"]["upper"]:
            wrong = wrong or f"the median of measurements[{index}] is not between its quartiles"
    if wrong:
        raise ValueError(f"{file} is not a results file: {wrong}")
    if whole:
        _check_tables(file, found)
    checked: Record = _escaped(found)
    return checked


def _depth(text: str) -> int:
    """How deep brackets are nested in JSON, those in strings left out."""
    marks = (mark[0] for mark in re.finditer(r'(?s)"(?:[^"\\]|\\.)*"?|[][{}]', text))
    return max(itertools.accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(mark, 0) for mark in marks), default=0)


def _wrong(value: Any, spec: Any, place: str) -> str:
    """What is wrong first, and where; "" if nothing is."""
    if callable(spec):
        expected = spec(value)
        return f"{place} must be {expected}, got {_short(value)}" if expected else ""
    if isinstance(spec, tuple):
        return "" if value is None else _wrong(value, spec[0], place)
    if isinstance(spec, list):
        if not isinstance(value, list):
            return f"{place} must be a list, got {_short(value)}"
        found = (_wrong(item, spec[0], f"{place}[{index}]") for index, item in enumerate(value))
        return next(filter(None, found), "")
    if not isinstance(value, dict):
        return f"{place} must be an object, got {_short(value)}"
    if str in spec:
        found = (_wrong(item, spec[str], f"{place}.{name}") for name, item in value.items())
        return next(filter(None, found), "")
    missing = [name for name in spec if name not in value]
    if missing:
        return f"{place or 'it'} has no {', '.join(missing)}"
    found = (_wrong(value[name], one, f"{place}.{name}".lstrip(".")) for name, one in spec.items())
    return next(filter(None, found), "")


def _check_tables(file: Path, found: Record) -> None:
    for index, table in enumerate(found["tables"]):
        if any(len(row) != len(table["columns"]) for row in table["rows"]):
            raise ValueError(f"{file} is not a results file: a row of tables[{index}] has another number of cells")
    for index, check in enumerate(found["checks"]):
        if not check["errors"].keys() <= check["limits"].keys():
            raise ValueError(f"{file} is not a results file: checks[{index}] has an error without a limit")


def _short(value: Any) -> str:
    text = escaped(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, Mapping):
        return {escaped(name): _escaped(item) for name, item in value.items()}
    return value
