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
    "segments": "segments",
    "ranks": "ranks",
}
PICKED = [key for key in FACETS if key != "ranks"]
FIGURES = ("ms", "tokens_per_s", "tflops", "of_matmul", "gb_per_s", "of_copy", "peak_bytes")
LOST = "out of memory"
ENOUGH = 3  # repeats; quartiles of fewer say nothing
# Who is seen first where there are more lines than an eye can follow: one of each way to compute it.
TELLING = (
    "dense SDPA", "head_groups, auto", "head_groups, sdpa", "longnet, auto", "longnet, sdpa", "torchscale, auto",
    "torchscale, sdpa", "copy and gather, index_select", "copy and gather, slicing", "gather-pad-scatter",
)  # fmt: skip
MANY = 16


def prepared(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The measurements with their shape and series. Figures are kept only where the status is "measured"."""
    found = []
    for one in measurements:
        shape = f"B={one['samples']} H={one['heads']} D={one['head_dim']}"
        figures = {} if one["status"] == "measured" else dict.fromkeys(FIGURES)
        found.append({**one, **figures, "shape": shape})
    for one, name, segments in zip(found, _names(found), _segments(found), strict=True):
        one |= {"series": name, "segments": segments}
    return found


def _segments(measurements: Sequence[Measurement]) -> list[str]:
    """The pattern, unless a suite has one for each length: those make one line, with nothing to pick."""
    patterns, places = defaultdict(set), defaultdict(set)
    for one in measurements:
        patterns[one["suite"]].add(_pattern(one))
        place = [one[key] for key in ("suite", "implementation", "rule", "tokens", *FACETS) if key != "segments"]
        places[tuple(place)].add(_pattern(one))
    several = {place[0] for place, found in places.items() if len(found) > 1}
    return [
        _pattern(one) if one["suite"] in several or len(patterns[one["suite"]]) == 1 else "by length"
        for one in measurements
    ]


def _pattern(one: Measurement) -> str:
    return f"w={_list(one['lengths'])} r={_list(one['rates'])}"


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _names(measurements: Sequence[Measurement]) -> list[str]:
    """The implementation, and what else it takes to tell two lines apart: the rule, the ranks."""
    rules = defaultdict(set)
    for one in measurements:
        rules[one["implementation"]].add(one["rule"])
    names = []
    for one in measurements:
        name = with_ranks(one["implementation"], one["ranks"])
        names.append(f"{name}, {one['rule']}" if len(rules[one["implementation"]]) > 1 else name)
    return names


def with_ranks(name: str, ranks: int) -> str:
    """The name and over how many ranks, unless it is one or the name says so."""
    said = f"{ranks} ranks"
    return name if ranks == 1 or said in name else f"{name}, {said}"


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


def hidden(measurements: Sequence[Measurement]) -> list[str]:
    """The lines that the page does not show before it is asked to."""
    picked = start(measurements)
    here = names_in_order(one for one in measurements if one["ms"] and all(one[key] == picked[key] for key in PICKED))
    others = [name for name in here if name not in TELLING]
    return others if len(here) > MANY and len(here) - len(others) > 1 else []


def options(measurements: Iterable[Measurement]) -> dict[str, list[Any]]:
    """For each facet the values there are; numbers and False before True in order, the rest as they came."""
    found: dict[str, list[Any]] = {key: list(dict.fromkeys(one[key] for one in measurements)) for key in FACETS}
    return {key: sorted(values) if key in ("causal", "ranks") else values for key, values in found.items()}
