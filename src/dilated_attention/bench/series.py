"""Which measurement belongs to which line of a plot, and which lines are seen first: one answer for pictures and page.

A facet is a property that a reader picks one value of, such as the dtype; a series is what is left to compare then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Measurement = dict[str, Any]

# What is picked before anything is compared, in the order of the page. Ranks are compared, so they may all be shown.
FACETS = {
    "direction": "direction",
    "causal": "causal",
    "dtype": "dtype",
    "suite": "suite",
    "shape": "shape",
    "ranks": "ranks",
}
PICKED = [key for key in FACETS if key != "ranks"]
FIGURES = ("ms", "tokens_per_s", "tflops", "of_matmul", "gb_per_s", "of_copy", "peak_bytes")
LOST = "out of memory"
ENOUGH = 3  # repeats; quartiles of fewer say nothing


def prepared(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The measurements with their shape and series. Figures are kept only where the status is "measured"."""
    found = []
    for one in measurements:
        shape = f"B={one['samples']} H={one['heads']} D={one['head_dim']}"
        figures = {} if one["status"] == "measured" else dict.fromkeys(FIGURES)
        found.append({**one, **figures, "shape": shape})
    for one, name in zip(found, _names(found), strict=True):
        one["series"] = name
    return found


def _names(measurements: Sequence[Measurement]) -> list[str]:
    """The implementation, and what else it takes to tell two lines apart: the rule, the ranks, the segments."""
    rules, patterns = defaultdict(set), defaultdict(set)
    for one in measurements:
        rules[one["implementation"]].add(one["rule"])
        patterns[_place(one)].add(_pattern(one))
    several = {place[:3] for place, found in patterns.items() if len(found) > 1}
    names = []
    for one in measurements:
        name = with_ranks(one["implementation"], one["ranks"])
        if len(rules[one["implementation"]]) > 1:
            name += f", {one['rule']}"
        if _place(one)[:3] in several:
            name += f", {_pattern(one)}"
        names.append(name)
    return names


def with_ranks(name: str, ranks: int) -> str:
    """The name and over how many ranks, unless it is one or the name says so."""
    said = f"{ranks} ranks"
    return name if ranks == 1 or said in name else f"{name}, {said}"


def _place(one: Measurement) -> tuple[Any, ...]:
    """Where a line may have one point only."""
    return (one["implementation"], one["rule"], one["suite"], one["tokens"], *(one[key] for key in FACETS))


def _pattern(one: Measurement) -> str:
    return f"w={','.join(map(str, one['lengths']))} r={','.join(map(str, one['rates']))}"


def names_in_order(measurements: Iterable[Measurement]) -> list[str]:
    """Every series once; its place here gives its colour and marker on the page."""
    return list(dict.fromkeys(one["series"] for one in measurements))


def start(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """The facets of the selection with the most to see: first by lengths, then by points. Ranks: None, all."""
    if not measurements:
        return {}
    groups: dict[tuple[Any, ...], list[int | None]] = defaultdict(list)
    for one in measurements:
        groups[tuple(one[key] for key in PICKED)].append(one["tokens"] if one["ms"] or one["status"] == LOST else None)

    def much(key: tuple[Any, ...]) -> tuple[int, int]:
        tokens = [number for number in groups[key] if number is not None]
        return len(set(tokens)), len(tokens)

    most = max(groups, key=much)
    return {**dict(zip(PICKED, most, strict=True)), "ranks": None}


def options(measurements: Iterable[Measurement]) -> dict[str, list[Any]]:
    """For each facet the values there are; numbers and False before True in order, the rest as they came."""
    found: dict[str, list[Any]] = {key: list(dict.fromkeys(one[key] for one in measurements)) for key in FACETS}
    return {key: sorted(values) if key in ("causal", "ranks") else values for key, values in found.items()}
