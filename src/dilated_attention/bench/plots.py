"""The plots: what they show, and the Vega-Lite specifications that draw it, for the page and as SVG and PNG files.

Colours are those for light paper. `dark_style` turns them where the reader prefers dark, in the page as in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

from dilated_attention.bench.conclude import TELLING
from dilated_attention.bench.results import DIRECTIONS, ENOUGH, Record, milliseconds, setting, with_ranks
from dilated_attention.branches.base import grouped
from dilated_attention.show import charts
from dilated_attention.units import bytes_text, number_text

LOST = "out of memory"
MOST_SHOWN = 8  # lines at first
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#e3e6ea", "#ffffff"
# One hue per family. Every shade has a contrast of at least 4.5 on its paper, as names are written in it.
SHADES = {
    "dense": ("#59636e", "#6e7781", "#424a53"),
    "others": ("#bc4c00", "#9a6700", "#c4314b", "#7a3b12", "#a04a00"),
    "head_groups": ("#0550ae", "#007a99", "#3b5bdb", "#2a6f97"),
    "longnet": ("#116329", "#1a7f37", "#4d7c0f", "#0f766e"),
    "torchscale": ("#6639ba", "#8250df", "#a626a4", "#5b4fc7"),
}
DARK = {  # what a colour becomes where the reader prefers dark pages
    INK: "#e6edf3", MUTED: "#9da7b1", GRID: "#2a3038", PAPER: "#0f1318",
    "#6e7781": "#8c959f", "#424a53": "#c9d1d9", "#bc4c00": "#f0883e", "#9a6700": "#d4a72c", "#c4314b": "#ff8fa3",
    "#7a3b12": "#ffe0c2", "#a04a00": "#c58a66", "#0550ae": "#58a6ff", "#007a99": "#39c5e0", "#2a6f97": "#6cb6d9",
    "#3b5bdb": "#9db1ff", "#116329": "#3fb950", "#1a7f37": "#56d364", "#4d7c0f": "#a3c957", "#0f766e": "#4fd1c5",
    "#6639ba": "#a371f7", "#8250df": "#bc8cff", "#a626a4": "#e38be1", "#5b4fc7": "#a9a3ff",
}  # fmt: skip
FIRST = (*TELLING[:-3], "FlexAttention", *TELLING[-3:])  # lines
FIGURES = {
    "time": "Time in ms", "memory": "Peak memory beyond the inputs",
    "relative": "Time as a multiple of the fastest line shown",
}  # fmt: skip
COLOUR, DRAWN = {"field": "colour", "scale": None}, "datum.y > 0"
NAME_HEIGHT = 15  # pixels between two names at the ends of lines
Y = "figure == 'memory' ? datum.peak : figure == 'relative' ? datum.{0} / datum.least : datum.{0}"
TOKENS = (
    "datum.value >= 1048576 ? datum.value / 1048576 + 'M' : "
    "datum.value >= 1024 ? datum.value / 1024 + 'k' : datum.value"
)
VALUES = (
    "figure == 'relative' ? format(datum.value, ',.3~g') + ' ×' : figure == 'time' ? format(datum.value, ',.3~r') : "
    "datum.value >= 1073741824 ? datum.value / 1073741824 + ' GiB' : "
    "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : datum.value / 1024 + ' KiB'"
)


def points(measurements: Iterable[Record]) -> list[Record]:
    """One for each thing that a plot shows: a time with its quartiles, memory, or that the memory ran out."""
    drawn = [one for one in measurements if one["ms"] or one["status"] == LOST]
    colours = _colours(drawn)
    return [
        {
            "series": with_ranks(one), "colour": colours[with_ranks(one)], "setting": setting(one), **_times(one["ms"]),
            "peak": one["peak_bytes"] or None, "memory": bytes_text(one["peak_bytes"]) if one["peak_bytes"] else "",
            **{key: one[key] for key in ("ours", "direction", "tokens")},
        }
        for one in drawn
    ]  # fmt: skip


def _times(ms: dict[str, float] | None) -> Record:
    if ms is None:
        return {"ms": None, "time": LOST, "spread": ""}
    found = {"ms": ms["median"], "time": f"{milliseconds(ms)} ms"}
    if ms["repeats"] < ENOUGH:
        return {**found, "few": True, "spread": "once" if ms["repeats"] == 1 else f"{ms['repeats']} repeats"}
    between = f"{number_text(ms['lower'])}–{number_text(ms['upper'])} ms"
    return {**found, "low": ms["lower"], "high": ms["upper"], "spread": between}


def _colours(measurements: Iterable[Record]) -> dict[str, str]:
    """By series. In a family each takes the next shade, the telling ones first."""
    families: dict[str, dict[str, None]] = {family: {} for family in SHADES}
    for one in sorted(measurements, key=lambda one: _place(one["implementation"])):
        rule = one["rule"] if one["rule"] in SHADES else "head_groups"
        families[rule if one["ours"] or rule == "dense" else "others"][with_ranks(one)] = None
    return {name: colour for family, names in families.items() for name, colour in zip(names, cycle(SHADES[family]))}


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def first(drawn: Iterable[Record], wanted: str) -> list[str]:
    """The lines of a setting that are seen before the reader asks for others."""
    names = dict.fromkeys(one["series"] for one in drawn if one["setting"] == wanted)
    return sorted(names, key=_place)[:MOST_SHOWN]


def settings(drawn: Iterable[Record]) -> list[str]:
    """Every setting, the one with the most lengths and then points first."""
    found = grouped(drawn, lambda one: one["setting"])
    start = max(found, key=lambda name: (len({one["tokens"] for one in found[name]}), len(found[name])), default="")
    return sorted(found, key=lambda name: name != start)


def line_chart(data: Record, height: int, inside: str = "true") -> Record:
    """Lines over tokens, both axes logarithmic, with the names at their ends, which are seen where ``inside`` holds.

    ``data`` has `points`; `parameters` are to be added.
    """
    lost = {"type": "point", "shape": "cross", "angle": 45, "size": 70, "filled": True}
    line, dot = {"type": "line", "strokeWidth": 2}, {"type": "point", "size": 26, "strokeWidth": 1.5}
    x = {"field": "tokens", "type": "quantitative", "scale": {"type": "log", "base": 2, "nice": False, "padding": 12}}
    y = {"field": "y", "type": "quantitative", "scale": {"type": "log", "nice": False, "padding": 18}, "title": None}
    values = {"expr": "figure == 'memory' ? powers : decades"}
    return {
        "data": data, "height": height,
        "transform": [
            {"joinaggregate": [{"op": "min", "field": "ms", "as": "least"}], "groupby": ["tokens"]},
            *({"calculate": Y.format(name), "as": to} for name, to in (("ms", "y"), ("low", "low"), ("high", "high"))),
        ],
        "encoding": {
            "x": {**x, "axis": {"labelExpr": TOKENS, "values": {"expr": "lengths"}}},
            "y": {**y, "axis": {"labelExpr": VALUES, "values": values}},
            "color": COLOUR, "detail": {"field": "series"},
        },
        "layer": [
            _layer("rule", f"{DRAWN} && figure != 'memory' && datum.low > 0", y={"field": "low"}, y2={"field": "high"}),
            _layer(line, DRAWN, strokeDash=either("datum.ours", [1, 0], [6, 3])),
            _layer(dot, DRAWN, fill=COLOUR, fillOpacity=either("datum.few", 0, 1)),
            _layer(lost, "!isValid(datum.ms)", y={"value": 8}),
            _names(height, inside),
        ],
    }  # fmt: skip


def _layer(mark: str | Record, which: str, **encoding: Record) -> Record:
    return {"mark": mark, "transform": [{"filter": which}], "encoding": encoding}


def either(test: str, value: Any, otherwise: Any) -> Record:
    return {"condition": {"test": test, "value": value}, "value": otherwise}


def _names(height: int, inside: str) -> Record:
    """Each name beside its last point. Where they would overlap, each is moved up to clear the one below.

    The names that end at one length are taken from the lowest up. If z is the logarithm of the value less the room that
    the names below need, the running maximum of z plus that room is the lowest place that is free.
    """
    room = f"datum.below * log(datum.top / datum.bottom) * {NAME_HEIGHT / height}"
    upwards: Record = {"groupby": ["tokens"], "sort": [{"field": "y"}]}
    extent = [{"op": "max", "field": "y", "as": "top"}, {"op": "min", "field": "y", "as": "bottom"}]
    free = [{"op": "max", "field": "z", "as": "free"}]
    text = {"type": "text", "align": "left", "dx": 7, "fontSize": 12, "baseline": "middle", "clip": False}
    halo = {**text, "stroke": PAPER, "strokeWidth": 4, "strokeJoin": "round"}
    return {
        "transform": [
            {"filter": DRAWN},
            {"joinaggregate": extent},
            {"joinaggregate": [{"op": "max", "field": "tokens", "as": "last"}], "groupby": ["series"]},
            {"filter": "datum.tokens == datum.last"},
            {"window": [{"op": "row_number", "as": "below"}], **upwards},
            {"calculate": f"log(datum.y) - {room}", "as": "z"},
            {"window": free, "frame": [None, 0], "ignorePeers": True, **upwards},
            {"calculate": f"exp(datum.free + {room})", "as": "at"},
            {"calculate": "isValid(datum.name) ? datum.name : datum.series", "as": "name"},
        ],
        "encoding": {"y": {"field": "at"}, "text": {"field": "name"}, "opacity": either(inside, 1, 0)},
        "layer": [{"mark": halo, "encoding": {"color": {"value": PAPER}}}, {"mark": text}],
    }


def parameters(figure: str = "time", lengths: Sequence[int] = ()) -> list[Record]:
    """What lines show: a figure, and the lengths that are named on the axis."""
    decades = [float(f"{digit}e{power}") for power in range(-6, 10) for digit in (1, 2, 5)]
    given = {"figure": figure, "lengths": [*lengths], "decades": decades, "powers": [2**power for power in range(50)]}
    return [{"name": name, "value": value} for name, value in given.items()]


def interactive(name: str) -> Record:
    """The specification for the page: with a crosshair at one length, and zoom. ``name`` is that of its data."""
    chart = line_chart({"name": name}, 420, "inrange(datum.at, domain('y')) && inrange(datum.tokens, domain('x'))")
    near = {"type": "point", "fields": ["tokens"], "nearest": True, "on": "pointermove", "clear": "pointerout"}
    zoom = {"type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey]"}
    chart["layer"][0]["params"] = [{"name": "zoom", "select": zoom, "bind": "scales"}]
    seen = {"condition": {"param": "near", "value": 0.8, "empty": False}, "value": 0}
    rule = {
        "data": {"name": name}, "mark": {"type": "rule", "color": MUTED}, "params": [{"name": "near", "select": near}],
        "transform": [{"aggregate": [{"op": "count", "as": "count"}], "groupby": ["tokens"]}],
        "encoding": {"x": {"field": "tokens", "type": "quantitative"}, "opacity": seen},
    }  # fmt: skip
    # page.js sets the width; names may lie outside of it
    return styled({"params": parameters(), "height": 420, "autosize": "none", "layer": [chart, rule]})


def pictures(results: Record) -> dict[str, Record | None]:
    """By name, the specification of a picture or, where there is nothing to draw, None."""
    drawn = points(results["measurements"])
    wanted = next(iter(settings(drawn)), "")
    shown = first(drawn, wanted)
    here = [one for one in drawn if one["setting"] == wanted and one["series"] in shown]
    return {"time": _panels(here, "time", wanted), "memory": _panels([x for x in here if x["peak"]], "memory", wanted)}


def _panels(drawn: Sequence[Record], figure: str, wanted: str) -> Record | None:
    panels = [
        {**line_chart({"values": data}, 380), "width": 420, "title": f"{FIGURES[figure]}, {words}"}
        for way, words in DIRECTIONS.items() if (data := [one for one in drawn if one["direction"] == way])
    ]  # fmt: skip
    given = parameters(figure, sorted({one["tokens"] for one in drawn}))
    chart = {"params": given, "hconcat": panels, "title": wanted, "resolve": {"scale": {"y": "shared"}}}
    return styled(chart) if panels else None


def heat_map(cells: Sequence[Record], value: str, x: str, y: str, title: str) -> Record:
    """Shares, from 0 to 1: darker is more."""
    axes = {at: {"field": name, "type": "ordinal", "axis": {"labelAngle": 0}} for at, name in (("x", x), ("y", y))}
    colour = {"field": value, "type": "quantitative", "title": None, "scale": {"domain": [0, 1], "scheme": "greens"}}
    size = {"width": {"step": 40}, "height": {"step": 24}}
    return {"data": {"values": cells}, "mark": "rect", "title": title, **size, "encoding": {**axes, "color": colour}}


def styled(chart: Record) -> Record:
    """The specification of a chart in our style. It names no address of a schema: nothing is to be loaded."""
    words = {"labelColor": MUTED, "titleColor": MUTED, "titleFontWeight": "normal", "labelFontSize": 12}
    lines = {"gridColor": GRID, "domainColor": GRID, "ticks": False, "labelPadding": 6}
    config = {
        "aria": False,  # the tables are there to be read aloud
        "axis": {**words, **lines, "titleFontSize": 12},
        "background": PAPER,
        "font": "system-ui, sans-serif",
        "legend": words,
        "padding": {"left": 5, "top": 5, "bottom": 5, "right": 45},  # a reader's font may be wider than the one here
        "title": {"anchor": "start", "frame": "group", "fontWeight": "normal", "fontSize": 13, "color": MUTED},
        "view": {"stroke": None},
    }  # fmt: skip
    return {**chart, "config": config}


def dark_style() -> str:
    """Style rules that turn the colours of a picture. A rule has precedence over the attribute that it looks for."""
    rules = [f'[{kind}="{one}"]{{{kind}:{other}}}' for one, other in DARK.items() for kind in ("fill", "stroke")]
    return "@media (prefers-color-scheme: dark){" + "".join(rules) + "}"


def svg(specification: Record) -> bytes:
    drawn = charts.drawn(specification, ".svg")
    return drawn.replace(b"</svg>", f"<style>{dark_style()}</style></svg>".encode())
