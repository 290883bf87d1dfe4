"""A view as an Altair chart: panels side by side for a file or a notebook, or one panel with choices for a page."""

from __future__ import annotations

import colorsys
import itertools
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, cast

import altair as alt

from dilated_attention import charts
from dilated_attention.show.view import COLOURS, Picture, View, shades

MOST_PANELS = 4  # side by side
GRID = 64  # up to so many cells down and across have gaps between them
OPACITY = (1.0, 0.62, 0.38, 0.24, 0.13)  # of the shades
BLUE, LIGHTNESS = "#2f7ed8", (0.5, 0.36)
ANY = "any branch"  # the one name where colours do not tell branches apart
LINE = "#e03131"
COLUMNS = ("picture", "q", "q_end", "k", "k_end", "share", "level", "branch")


def panels(view: View) -> alt.ConcatChart:
    """The first pictures, two in a row."""
    pictures = view.pictures()[:MOST_PANELS]
    cells = len(view.edges) - 1
    side = cells * max(1, (300 if len(pictures) > 1 else 440) // cells)  # whole pixels: others would make a moiré
    drawn = [_layers(view, [one], side).properties(width=side, height=side, title=one.name) for one in pictures]
    about = [view.subtitle, view.caption(view.colour), *view.facts(), *view.left_out(pictures)]
    about = [line for sentence in about for line in textwrap.wrap(sentence, 90)]
    made = (
        alt.concat(*drawn, columns=2)
        .add_params(alt.param(name="colour", value=view.colour))
        .properties(title=alt.TitleParams(view.title, subtitle=about, anchor="start", offset=16))
        .configure_view(fill="#f5f6f8", stroke=None)
    )
    return cast(alt.ConcatChart, made)


def choosable(view: View) -> alt.LayerChart:
    """One picture at a time: its heads and its colours can be chosen, and the wheel zooms."""
    pictures = view.pictures()
    names = [picture.name for picture in pictures]
    heads = alt.param(
        name="picture", value=0, bind=alt.binding_select(options=[*range(len(names))], labels=names, name="Heads ")
    )
    labels = ["share of pairs", "branch"]
    colour = alt.param(
        name="colour", value=view.colour, bind=alt.binding_radio(options=[*COLOURS], labels=labels, name="Colour ")
    )
    zoom = alt.selection_interval(name="zoom", bind="scales")
    resized = alt.AutoSizeParams(type="pad", resize=True)  # legends grow and shrink with the choices
    made = _layers(view, pictures, None).add_params(colour).properties(autosize=resized)
    made.layer[0] = made.layer[0].transform_filter("datum.picture == picture").add_params(zoom)
    return made.add_params(heads) if len(names) > 1 else made.add_params(alt.param(name="picture", value=0))


def _layers(view: View, pictures: Sequence[Picture], side: int | None) -> alt.LayerChart:
    """The cells of pictures one over the other, and lines above them. ``side``: in pixels, where it stays."""
    gap = 0.04 * view.cell_size if len(view.edges) <= GRID + 1 else 0
    tokens: dict[str, Any] = {"domain": [view.edges[0], view.edges[-1]], "nice": False, "zero": False}
    # A list per column takes a third of the space of an object per row. As one text, Altair does not check each number.
    levels = shades(pictures)
    rows = [*_rows(view, pictures, levels)]
    columns = charts.as_json([{name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}])
    cells = (
        alt.Chart(alt.InlineData(columns, alt.JsonDataFormat(type="json")))
        .transform_flatten([*COLUMNS])
        .transform_calculate(
            x=f"datum.k + {gap}", x2=f"datum.k_end - {gap}", y=f"datum.q + {gap}", y2=f"datum.q_end - {gap}",
            queries=_span("q"), keys=_span("k"), name=f"{json.dumps(view.branch_names)}[datum.branch]",
            about=f"{json.dumps([*levels])}[datum.level]", shown=f"colour == 'branch' ? datum.name : '{ANY}'",
        )
        .mark_rect(clip=True, aria=False)
        .encode(
            alt.X("x:Q", title="key").axis(orient="top", **_axis(view, "x", side)).scale(**tokens),
            alt.Y("y:Q", title="query").axis(**_axis(view, "y", side)).scale(reverse=True, **tokens),
            alt.X2("x2"),
            alt.Y2("y2"),
            _colour(view, is_fixed=side is not None),
            _shade(view, [*levels], 3 if side else 2),
            tooltip=[
                alt.Tooltip("queries:N"),
                alt.Tooltip("keys:N"),
                alt.Tooltip("name:N", title="branch"),
                alt.Tooltip("share:Q", title="share of pairs", format=".3~%"),
            ],
        )
    )  # fmt: skip
    return cast(alt.LayerChart, alt.layer(cells, *_lines(view)))


def _axis(view: View, scale: str, side: int | None) -> dict[str, Any]:
    """Ticks at multiples of a power of two, as segments mostly are; on a page they follow the zoom."""
    start, stop = view.edges[0], view.edges[-1]
    if side is None:
        low, high = f"domain('{scale}')[0]", f"domain('{scale}')[1]"
        step = f"pow(2, max(0, floor(log({high} - {low}) / LN2) - 2))"
        ticks: Any = alt.ExprRef(f"sequence(ceil({low} / {step}) * {step}, {high} + 1, {step})")
    else:
        size = max(1, 2 ** ((stop - start).bit_length() - 3))
        ticks = [*range(-(-start // size) * size, stop + 1, size)]
    return {"format": ",d", "values": ticks, "labelFlush": False, "grid": False}


def _span(name: str) -> str:
    """An expression: one token, or the first and the last."""
    last = f"datum.{name}_end - 1"
    return f"format(datum.{name}, ',') + (datum.{name} < {last} ? '–' + format({last}, ',') : '')"


def hues(count: int) -> list[str]:
    """A colour for each branch: all differ, and neighbours in lightness too."""
    parts = [colorsys.hls_to_rgb((0.58 + i / count) % 1, LIGHTNESS[i % 2], 0.7) for i in range(count)]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in colour) for colour in parts]


def _colour(view: View, *, is_fixed: bool) -> alt.Color:
    """One colour per branch or one for all, as the parameter `colour` says. The legend follows it."""
    names = view.branch_names
    values = alt.ExprRef(f"colour == 'branch' ? {json.dumps(names)} : ['{ANY}']")
    legend = None if is_fixed and view.colour == "share" else _legend("colour", 3 if is_fixed else 2, values=values)
    return alt.Color("shown:N", legend=legend).scale(domain=[*names, ANY], range=[*hues(len(names)), BLUE])


def _shade(view: View, names: list[str], columns: int) -> alt.Opacity:
    """A single pair is seen or not, so only larger cells need a legend."""
    legend = None if view.cell_size == 1 else _legend("share of pairs", columns, symbolFillColor=BLUE)
    return alt.Opacity("about:O", legend=legend, sort=names).scale(type="ordinal", domain=names, range=[*OPACITY])


def _legend(title: str, columns: int, **more: Any) -> alt.Legend:
    return alt.Legend(orient="bottom", columns=columns, title=title, symbolType="square", symbolStrokeWidth=0, **more)


def _rows(view: View, pictures: Sequence[Picture], levels: dict[str, float]) -> Iterator[tuple[float, ...]]:
    """The COLUMNS of each cell with pairs in it; where cells have no gaps, equal ones beside one another are one."""
    is_merged = len(view.edges) > GRID + 1
    for index, picture in enumerate(pictures):
        tables = (picture.share.tolist(), picture.levels(levels.values()).tolist(), picture.branch.tolist())
        for (top, bottom), *rows in zip(itertools.pairwise(view.edges), *tables, strict=True):
            left = 0
            for (share, level, branch), same in itertools.groupby(zip(*rows, strict=True)):
                right = left + len([*same])
                edges = view.edges[left : right + 1]
                left = right
                for start, stop in [(edges[0], edges[-1])] if is_merged else itertools.pairwise(edges):
                    if share:
                        yield index, top, bottom, start, stop, float(f"{share:.4g}"), level, branch


def _lines(view: View) -> Iterator[alt.Chart]:
    """The borders of ranks, and the query that was asked for."""
    if view.borders:
        borders = alt.Chart(alt.InlineData([{"token": token} for token in view.borders]))
        yield borders.mark_rule(color=LINE, strokeDash=[4, 3], clip=True).encode(x="token:Q")
        yield borders.mark_rule(color=LINE, strokeDash=[4, 3], clip=True).encode(y="token:Q")
    if view.query is not None:
        data = alt.InlineData([{"top": view.query, "bottom": view.query + 1}])
        frame = alt.Chart(data).mark_rect(fill=None, stroke=LINE, strokeWidth=1.5, clip=True)
        yield frame.encode(y="top:Q", y2="bottom:Q")
