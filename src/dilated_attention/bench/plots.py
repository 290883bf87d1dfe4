"""The plots, as Altair specifications: one gives the interactive plot of the page, and SVG and PNG files.

Colours are those for light paper. `dark_style` turns them where the reader prefers dark, in the page as in a file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from dilated_attention import charts
from dilated_attention.bench import series
from dilated_attention.bench.series import BAD, DARK, GOOD, GRID, INK, MUTED, PAPER

DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
FIGURES = {
    "time": "Time in ms",
    "memory": "Peak memory beyond the inputs",
    "relative": "Time as a multiple of the fastest line shown",
}
MOST_ROWS = 18
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


def line_chart(
    data: alt.NamedData, height: int, figure: str = "time", lengths: Sequence[int] = (), inside: str = "true"
) -> alt.LayerChart:
    """Lines over tokens, both axes logarithmic, with the names at their ends. ``data`` are `series.points`, by
    name: every step that makes a chart copies all of it.

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
        alt.param(name="named", value=True),
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
        .transform_filter("named && datum.tokens == datum.last")
        .transform_window(below="row_number()", groupby=["tokens"], sort=[alt.SortField("y")])
        .transform_calculate(z=f"log(datum.y) - datum.below * {step}")
        .transform_window(
            free="max(z)", frame=[None, 0], groupby=["tokens"], sort=[alt.SortField("y")], ignorePeers=True
        )
        .transform_calculate(at=f"exp(datum.free + datum.below * {step})")
    )
    text = {"align": "left", "dx": 7, "fontSize": 12, "baseline": "middle", "clip": False}
    halo = ends.mark_text(**text, stroke=PAPER, strokeWidth=4, strokeJoin="round").encode(color=alt.value(PAPER))
    seen = alt.when(inside).then(alt.value(1)).otherwise(alt.value(0))
    return [one.encode(text="series:N", y="at:Q", opacity=seen) for one in (halo, ends.mark_text(**text))]


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
    drawn = series.points(results["measurements"])
    wanted = next(iter(series.settings(drawn)), "")
    shown = series.first(drawn, wanted)
    here = [one for one in drawn if one["setting"] == wanted and one["series"] in shown]
    return {
        "time": _panels(here, "time", wanted),
        "memory": _panels([one for one in here if one["peak"]], "memory", wanted),
        "errors": _errors(results["checks"]),
    }


def _panels(drawn: Sequence[dict[str, Any]], figure: str, wanted: str) -> dict[str, Any] | None:
    lengths = sorted({one["tokens"] for one in drawn})  # one list: panels cannot differ in a parameter
    points = {direction: [one for one in drawn if one["direction"] == direction] for direction in DIRECTIONS}
    panels = [
        line_chart(alt.NamedData(direction), 380, figure, lengths).properties(
            width=420, title=f"{FIGURES[figure]}, {DIRECTIONS[direction]}"
        )
        for direction, some in points.items()
        if some
    ]
    if not panels:
        return None
    return {**styled(alt.hconcat(*panels, title=wanted).resolve_scale(y="shared")), "datasets": points}


def _errors(checks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The largest error of each check as a multiple of its limit, the worst first."""
    rows: list[dict[str, Any]] = []
    for check in checks:
        times = [times_limit(error, check["limits"][name]) for name, error in check["errors"].items()]
        if times:
            name = f"{series.with_ranks(check['implementation'], check['ranks'])}, {check['dtype']}"
            is_wrong = check["verdict"] != "exact"
            rows.append({"check": name, "times": min(max(1e-4, *times), 1e9), "colour": BAD if is_wrong else GOOD})
    rows.sort(key=lambda row: (row["colour"] == GOOD, -row["times"]))
    kept = list(dict.fromkeys(row["check"] for row in rows))[:MOST_ROWS]
    if not kept:
        return None
    title = "largest error against float64, as a multiple of its limit (red: wrong, and not timed)"
    dots = (
        alt.Chart(alt.Data(values=[row for row in rows if row["check"] in kept]))
        .mark_point(filled=True, size=60)
        .encode(
            x=alt.X("times:Q", title=title)
            .scale(type="log", nice=False, padding=12)
            .axis(format=",~g", values=[10.0**power for power in range(-4, 10)]),
            y=alt.Y("check:N", title=None, sort=kept).axis(labelLimit=400),
            color=alt.Color("colour:N").scale(None),
        )
    )
    limit = alt.Chart(alt.Data(values=[{"times": 1}])).mark_rule(color=INK).encode(x="times:Q")
    return styled(alt.layer(limit, dots).properties(width=520, height={"step": 18}))


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
