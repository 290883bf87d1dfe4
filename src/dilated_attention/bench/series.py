"""What a plot shows: which line a measurement belongs to, its colour, and which lines are seen first.

The page and the pictures draw the same points. Nothing here needs more than Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dilated_attention.units import bytes_text, measured_text, number_text

Measurement = dict[str, Any]

FIGURES = ("ms", "tokens_per_s", "tflops", "of_matmul", "gb_per_s", "of_copy", "peak_bytes")
LOST = "out of memory"
ENOUGH = 3  # repeats; quartiles of fewer say nothing
MOST_SHOWN = 8  # lines at first
# One of each way to compute it: they are timed at every length, and seen first.
TELLING = (
    "dense SDPA", "head_groups, auto", "longnet, auto", "torchscale, auto", "copy and gather, slicing",
    "gather-pad-scatter", "copy and gather, index_select", "head_groups, sdpa", "longnet, sdpa", "torchscale, sdpa",
)  # fmt: skip
FIRST = (*TELLING[:-3], "FlexAttention", *TELLING[-3:])
# On one device these classes call that function and do nothing else, so they share its line.
ONE_FUNCTION = {
    "DilatedAttention": "head_groups, auto",
    "ImprovedDilatedAttention": "head_groups, auto",
    "RingDilatedAttention": "head_groups, auto",
    "RingDilatedAttentionV2Collective": "head_groups, auto",
    "RingMultiheadDilatedAttention": "MultiheadDilatedAttention",
}
INK, MUTED, GRID, PAPER, GOOD, BAD = "#1f2328", "#59636e", "#e3e6ea", "#ffffff", "#1a7f37", "#cf222e"
# One hue per family. Every shade has a contrast of at least 4.5 on its paper, as names are written in it.
SHADES = {
    "dense": ("#59636e", "#6e7781", "#424a53"),
    "others": ("#bc4c00", "#9a6700", "#c4314b", "#7a3b12", "#a04a00"),
    "head_groups": ("#0550ae", "#0969da", "#2a6f97", "#3b5bdb"),
    "longnet": ("#116329", "#1a7f37", "#4d7c0f", "#0f766e"),
    "torchscale": ("#6639ba", "#8250df", "#a626a4", "#5b4fc7"),
}
DARK = {  # what a colour becomes where the reader prefers dark pages
    INK: "#e6edf3", MUTED: "#9da7b1", GRID: "#2a3038", PAPER: "#0f1318", BAD: "#ff7b72",
    "#6e7781": "#8c959f", "#424a53": "#c9d1d9", "#bc4c00": "#f0883e", "#9a6700": "#d4a72c", "#c4314b": "#ff8fa3",
    "#7a3b12": "#ffe0c2", "#a04a00": "#c58a66", "#0550ae": "#58a6ff", "#0969da": "#79c0ff", "#2a6f97": "#6cb6d9",
    "#3b5bdb": "#9db1ff", "#116329": "#3fb950", "#1a7f37": "#56d364", "#4d7c0f": "#a3c957", "#0f766e": "#4fd1c5",
    "#6639ba": "#a371f7", "#8250df": "#bc8cff", "#a626a4": "#e38be1", "#5b4fc7": "#a9a3ff",
}  # fmt: skip


def measured(one: Measurement) -> Measurement:
    """The measurement, without figures unless its status is "measured"."""
    return one if one["status"] == "measured" else {**one, **dict.fromkeys(FIGURES)}


def with_ranks(name: str, ranks: int) -> str:
    """The name and over how many ranks, unless it is one or the name says so."""
    said = f"{ranks} ranks"
    return name if ranks == 1 or said in name else f"{name}, {said}"


def setting(one: Measurement) -> str:
    """All that two measurements must share to be compared, but for their length."""
    pattern = "w={} r={}".format(*(",".join(map(str, one[key])) for key in ("lengths", "rates")))
    causal = ", causal" if one["causal"] else ""
    return f"{one['suite']}: {one['dtype']}{causal}, B={one['samples']} H={one['heads']} D={one['head_dim']}, {pattern}"


def folded(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Without the other names of a function where the function itself was measured, too."""
    found = list(measurements)
    present = {(setting(one), one["tokens"], one["direction"], one["implementation"]) for one in found}

    def is_alias(one: Measurement) -> bool:
        function = ONE_FUNCTION.get(one["implementation"])
        return one["ranks"] == 1 and (setting(one), one["tokens"], one["direction"], function) in present

    return [one for one in found if not is_alias(one)]


def points(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One for each thing that a plot shows: a time with its quartiles, memory, or that the memory ran out."""
    found = [measured(one) for one in measurements]
    drawn = [one for one in folded(found) if one["ms"] or one["status"] == LOST]
    colours = _colours(drawn)
    return [
        {
            "series": with_ranks(one["implementation"], one["ranks"]),
            "colour": colours[with_ranks(one["implementation"], one["ranks"])],
            "ours": one["ours"],
            "setting": setting(one),
            "direction": one["direction"],
            "tokens": one["tokens"],
            "peak": one["peak_bytes"] or None,
            "memory": bytes_text(one["peak_bytes"]) if one["peak_bytes"] else "",
            **_times(one["ms"]),
        }
        for one in drawn
    ]


def _times(ms: dict[str, float] | None) -> dict[str, Any]:
    if ms is None:
        return {"ms": None, "time": LOST, "spread": ""}
    found = {"ms": ms["median"], "time": f"{milliseconds(ms)} ms"}
    if ms["repeats"] < ENOUGH:
        return {**found, "few": True, "spread": "once" if ms["repeats"] == 1 else f"{ms['repeats']} repeats"}
    between = f"{number_text(ms['lower'])}–{number_text(ms['upper'])} ms"
    return {**found, "low": ms["lower"], "high": ms["upper"], "spread": between}


def _colours(measurements: Iterable[Measurement]) -> dict[str, str]:
    """By series. In a family each takes the next shade, the telling ones first."""
    families: dict[str, list[str]] = {}
    for one in sorted(measurements, key=lambda one: _place(one["implementation"])):
        rule = one["rule"] if one["rule"] in SHADES else "head_groups"
        family = "dense" if one["rule"] == "dense" or one["implementation"].startswith("dense") else rule
        name = with_ranks(one["implementation"], one["ranks"])
        names = families.setdefault(family if one["ours"] or family == "dense" else "others", [])
        if name not in names:
            names.append(name)
    return {
        name: SHADES[family][place % len(SHADES[family])]
        for family, names in families.items()
        for place, name in enumerate(names)
    }


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def first(drawn: Iterable[Measurement], wanted: str) -> list[str]:
    """The lines of a setting that are seen before the reader asks for others."""
    names = dict.fromkeys(one["series"] for one in drawn if one["setting"] == wanted)
    return sorted(names, key=_place)[:MOST_SHOWN]


def settings(drawn: Sequence[Measurement]) -> list[str]:
    """Every setting, the one with the most lengths and then points first."""
    tokens: dict[str, list[int]] = {}
    for one in drawn:
        tokens.setdefault(one["setting"], []).append(one["tokens"])
    start = max(tokens, key=lambda name: (len(set(tokens[name])), len(tokens[name])), default="")
    return sorted(tokens, key=lambda name: name != start)


def milliseconds(ms: dict[str, float]) -> str:
    """The median, with as many digits as its quartiles support; of a few repeats there are no quartiles."""
    if ms["repeats"] < ENOUGH:
        return number_text(ms["median"], 2)
    return measured_text(ms["median"], ms["lower"], ms["upper"])
