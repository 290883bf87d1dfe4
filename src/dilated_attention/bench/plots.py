"""The plots: what they show, and the Altair specifications that draw it, for the page and as SVG and PNG files.

Colours are those for light paper. `dark_style` turns them where the reader prefers dark, in the page as in a file.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from dilated_attention import charts
from dilated_attention.bench.conclude import TELLING, folded
from dilated_attention.bench.results import ENOUGH, Record, measured, milliseconds, setting, with_ranks
from dilated_attention.units import bytes_text, number_text

LOST = "out of memory"
MOST_SHOWN = 8  # lines at first
INK, MUTED, GRID, PAPER, GOOD, BAD = "#1f2328", "#59636e", "#e3e6ea", "#ffffff", "#1a7f37", "#cf222e"
# One hue per family. Every shade has a contrast of at least 4.5 on its paper, as names are written in it.
SHADES = {
    "dense": ("#59636e", "#6e7781", "#424a53"),
    "others": ("#bc4c00", "#9a6700", "#c4314b", "#7a3b12", "#a04a00"),
    "head_groups": ("#0550ae", "#007a99", "#3b5bdb", "#2a6f97"),
    "longnet": ("#116329", "#1a7f37", "#4d7c0f", "#0f766e"),
    "torchscale": ("#6639ba", "#8250df", "#a626a4", "#5b4fc7"),
}
DARK = {  # what a colour becomes where the reader prefers dark pages
    INK: "#e6edf3", MUTED: "#9da7b1", GRID: "#2a3038", PAPER: "#0f1318", BAD: "#ff7b72",
    "#6e7781": "#8c959f", "#424a53": "#c9d1d9", "#bc4c00": "#f0883e", "#9a6700": "#d4a72c", "#c4314b": "#ff8fa3",
    "#7a3b12": "#ffe0c2", "#a04a00": "#c58a66", "#0550ae": "#58a6ff", "#007a99": "#39c5e0", "#2a6f97": "#6cb6d9",
    "#3b5bdb": "#9db1ff", "#116329": "#3fb950", "#1a7f37": "#56d364", "#4d7c0f": "#a3c957", "#0f766e": "#4fd1c5",
    "#6639ba": "#a371f7", "#8250df": "#bc8cff", "#a626a4": "#e38be1", "#5b4fc7": "#a9a3ff",
}  # fmt: skip
FIRST = (*TELLING[:-3], "FlexAttention", *TELLING[-3:])  # lines
DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
FIGURES = {
    "time": "Time in ms",
    "memory": "Peak memory beyond the inputs",
    "relative": "Time as a multiple of the fastest line shown",
}
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


# --- what is shown ----------------------------------------------------------------------------------------------


def points(measurements: Iterable[Record]) -> list[Record]:
    """One for each thing that a plot shows: a time with its quartiles, memory, or that the memory ran out."""
    drawn = [one for one in folded(map(measured, measurements)) if one["ms"] or one["status"] == LOST]
    colours = _colours(drawn)
    found = []
    for one in drawn:
        name, peak = with_ranks(one["implementation"], one["ranks"]), one["peak_bytes"] or None
        shown = {"series": name, "colour": colours[name], "setting": setting(one), **_times(one["ms"])}
        shown |= {"peak": peak, "memory": bytes_text(peak) if peak else ""}
        found.append({**shown, **{key: one[key] for key in ("ours", "direction", "tokens")}})
    return found


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
    families: dict[str, dict[str, None]] = defaultdict(dict)
    for one in sorted(measurements, key=lambda one: _place(one["implementation"])):
        is_dense = one["rule"] == "dense" or one["implementation"].startswith("dense")
        rule = one["rule"] if one["rule"] in SHADES else "head_groups"
        family = "dense" if is_dense else rule if one["ours"] else "others"
        families[family][with_ranks(one["implementation"], one["ranks"])] = None
    return {
        name: SHADES[family][place % len(SHADES[family])]
        for family, names in families.items()
        for place, name in enumerate(names)
    }


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def first(drawn: Iterable[Record], wanted: str) -> list[str]:
    """The lines of a setting that are seen before the reader asks for others."""
    names = dict.fromkeys(one["series"] for one in drawn if one["setting"] == wanted)
    return sorted(names, key=_place)[:MOST_SHOWN]


def settings(drawn: Sequence[Record]) -> list[str]:
    """Every setting, the one with the most lengths and then points first."""
    tokens: dict[str, list[int]] = defaultdict(list)
    for one in drawn:
        tokens[one["setting"]].append(one["tokens"])
    start = max(tokens, key=lambda name: (len(set(tokens[name])), len(tokens[name])), default="")
    return sorted(tokens, key=lambda name: name != start)


# --- charts -----------------------------------------------------------------------------------------------------


def line_chart(
    data: alt.NamedData, height: int, figure: str = "time", lengths: Sequence[int] = (), inside: str = "true"
) -> alt.LayerChart:
    """Lines over tokens, both axes logarithmic, with the names at their ends. ``data`` are `points`, by name:
    every step that makes a chart copies all of it.

    ``lengths`` are named on the axis. ``inside`` says of a name whether it is on the plot: after zooming it may not be.
    """
    base = (
        alt.Chart(data)
        .transform_joinaggregate(least="min(ms)", groupby=["tokens"])
        .transform_calculate(y=Y.format("ms"), low=Y.format("low"), high=Y.format("high"))
        .encode(
            x=alt.X("tokens:Q", title="tokens")
            .scale(type="log", base=2, nice=False, padding=12)
            .axis(labelExpr=TOKENS, values=alt.ExprRef("lengths")),
            y=alt.Y("y:Q", title=None)
            .scale(type="log", nice=False, padding=18)
            .axis(labelExpr=VALUES, values=alt.ExprRef("figure == 'memory' ? powers : decades")),
            color=alt.Color("colour:N").scale(None),
            detail="series:N",
        )
    )
    drawn = base.transform_filter("datum.y > 0")
    dash = alt.when("datum.ours").then(alt.value([1, 0])).otherwise(alt.value([6, 3]))
    hollow = alt.when("datum.few").then(alt.value(0)).otherwise(alt.value(1))
    lines = drawn.mark_line(strokeWidth=2).encode(strokeDash=dash)
    dots = drawn.mark_point(size=26, strokeWidth=1.5).encode(fill=alt.Fill("colour:N").scale(None), fillOpacity=hollow)
    quartiles = drawn.transform_filter("figure != 'memory' && datum.low > 0").mark_rule()
    lost = base.transform_filter("!isValid(datum.ms)").mark_point(shape="cross", angle=45, size=70, filled=True)
    return alt.layer(
        quartiles.encode(y="low:Q", y2="high:Q"),
        lines,
        dots,
        lost.encode(y=alt.value(8)),
        *_names(drawn, height, inside),
    ).properties(height=height).add_params(
        alt.param(name="figure", value=figure),
        alt.param(name="lengths", value=list(lengths)),
        alt.param(name="decades", value=[float(f"{digit}e{power}") for power in range(-6, 10) for digit in (1, 2, 5)]),
        alt.param(name="powers", value=[2**power for power in range(50)]),
    )  # fmt: skip


def _names(drawn: alt.Chart, height: int, inside: str) -> list[alt.Chart]:
    """Each name beside its last point. Where they would overlap, each is moved up to clear the one below.

    The names that end at one length are taken from the lowest up. If z is the logarithm of the value less the room that
    the names below need, the running maximum of z plus that room is the lowest place that is free.
    """
    step = f"(log(datum.top / datum.bottom) * {NAME_HEIGHT / height})"
    ends = (
        drawn.transform_joinaggregate(top="max(y)", bottom="min(y)")
        .transform_joinaggregate(last="max(tokens)", groupby=["series"])
        .transform_filter("datum.tokens == datum.last")
        .transform_window(below="row_number()", groupby=["tokens"], sort=[alt.SortField("y")])
        .transform_calculate(z=f"log(datum.y) - datum.below * {step}")
        .transform_window(
            free="max(z)", frame=[None, 0], groupby=["tokens"], sort=[alt.SortField("y")], ignorePeers=True
        )
        .transform_calculate(
            at=f"exp(datum.free + datum.below * {step})", name="isValid(datum.name) ? datum.name : datum.series"
        )
    )
    text = {"align": "left", "dx": 7, "fontSize": 12, "baseline": "middle", "clip": False}
    halo = ends.mark_text(**text, stroke=PAPER, strokeWidth=4, strokeJoin="round").encode(color=alt.value(PAPER))
    seen = alt.when(inside).then(alt.value(1)).otherwise(alt.value(0))
    return [one.encode(text="name:N", y="at:Q", opacity=seen) for one in (halo, ends.mark_text(**text))]


@functools.cache
def interactive(name: str) -> dict[str, Any]:
    """The specification for the page: with a crosshair at one length, and zoom. ``name`` is that of its data."""
    data = alt.NamedData(name)
    chart = line_chart(data, 420, inside="inrange(datum.at, domain('y')) && inrange(datum.tokens, domain('x'))")
    near = alt.selection_point(
        "near", fields=["tokens"], nearest=True, on="pointermove", clear="pointerout", empty=False
    )
    zoom = alt.selection_interval("zoom", bind="scales", zoom="wheel![event.ctrlKey || event.metaKey]")
    rule = (
        alt.Chart(data)
        .transform_aggregate(count="count()", groupby=["tokens"])
        .mark_rule(color=MUTED)
        .encode(x="tokens:Q", opacity=alt.when(near).then(alt.value(0.8)).otherwise(alt.value(0)))
    )
    both = alt.layer(chart, rule.add_params(near)).add_params(zoom)
    return styled(both.properties(autosize="none"))  # page.js sets the width; names may lie outside of it


def pictures(results: dict[str, Any]) -> dict[str, dict[str, Any] | None]:
    """By name, the specification of a picture or, where there is nothing to draw, None."""
    drawn = points(results["measurements"])
    wanted = next(iter(settings(drawn)), "")
    shown = first(drawn, wanted)
    here = [one for one in drawn if one["setting"] == wanted and one["series"] in shown]
    return {
        "time": _panels(here, "time", wanted),
        "memory": _panels([one for one in here if one["peak"]], "memory", wanted),
    }


def _panels(drawn: Sequence[dict[str, Any]], figure: str, wanted: str) -> dict[str, Any] | None:
    lengths = sorted({one["tokens"] for one in drawn})  # one list: panels cannot differ in a parameter
    data = {direction: [one for one in drawn if one["direction"] == direction] for direction in DIRECTIONS}
    panels = [
        line_chart(alt.NamedData(direction), 380, figure, lengths).properties(
            width=420, title=f"{FIGURES[figure]}, {DIRECTIONS[direction]}"
        )
        for direction, some in data.items()
        if some
    ]
    if not panels:
        return None
    return {**styled(alt.hconcat(*panels, title=wanted).resolve_scale(y="shared")), "datasets": data}


def times_limit(error: float | str, limit: float) -> float:
    """How many times its limit an error is; what is not a number is infinitely far off."""
    number = float(error)
    return math.inf if math.isnan(number) or not limit else number / limit


# --- files ------------------------------------------------------------------------------------------------------


def styled(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The specification of a chart in our style. It names no address of a schema: nothing is to be loaded."""
    axis = alt.AxisConfig(
        labelColor=MUTED, titleColor=MUTED, titleFontWeight="normal", labelFontSize=12, titleFontSize=12,
        gridColor=GRID, domainColor=GRID, ticks=False, labelPadding=6,
    )  # fmt: skip
    config = alt.Config(
        axis=axis,
        aria=False,  # the tables are there to be read aloud
        background=PAPER,
        font="system-ui, sans-serif",
        header=alt.HeaderConfig(labelColor=MUTED, labelFontSize=12),
        padding={"left": 5, "top": 5, "bottom": 5, "right": 45},  # a reader's font may be wider than the one here
        legend=alt.LegendConfig(labelColor=MUTED, titleColor=MUTED, labelFontSize=12, titleFontWeight="normal"),
        title=alt.TitleConfig(anchor="start", frame="group", fontWeight="normal", fontSize=13, color=MUTED),
        view=alt.ViewConfig(stroke=None),
    )
    found: dict[str, Any] = chart.properties(config=config).to_dict(validate=False)  # its parts were, when made
    del found["$schema"]
    return found


def dark_style(dark: dict[str, str] = DARK) -> str:
    """Style rules that turn the colours of a picture. A rule has precedence over the attribute that it looks for."""
    rules = [f'[{kind}="{one}"]{{{kind}:{other}}}' for one, other in dark.items() for kind in ("fill", "stroke")]
    return "@media (prefers-color-scheme: dark){" + "".join(rules) + "}"


def svg(specification: dict[str, Any], dark: dict[str, str] = DARK) -> bytes:
    drawn = charts.drawn(specification, ".svg")
    return drawn.replace(b"</svg>", f"<style>{dark_style(dark)}</style></svg>".encode())


def png(specification: dict[str, Any]) -> bytes:
    return charts.drawn(specification, ".png", scale=1.5)
