"""A view as a Vega-Lite specification: panels side by side for a file or a notebook, one with choices for a page.

`charts` makes a file of it: a picture, or a page with style, script and data inside.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dilated_attention.pattern import DilatedPattern, Pattern
from dilated_attention.show import charts
from dilated_attention.show.view import COLOURS, MOST_CELLS, Picture, Plot, shades

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
ENDINGS = (".html", ".svg", ".png")
MOST_PANELS = 4  # side by side
GRID = 64  # up to so many cells down and across have gaps between them
OPACITY = [1.0, 0.62, 0.38, 0.24, 0.13]  # of the shades
BLUE = "#2f7ed8"
ANY = "any branch"  # the one name where colours do not tell branches apart
LINE = "#e03131"
COLUMNS = ["picture", "q", "q_end", "k", "k_end", "share", "level", "branch", "count"]  # the last under "sum"
Specification = dict[str, Any]


def plot(pattern: Pattern, tokens: int | None = None, heads: int | None = None, **options: Any) -> Any:
    """An Altair chart of a pattern; ``options`` are those of `Plot`."""
    if tokens is None:
        tokens = min(max(pattern.segment_lengths) if isinstance(pattern, DilatedPattern) else 256, MOST_CELLS)
    if heads is None:
        heads = max([4, len(pattern.branches), *(head + 1 for branch in pattern.listed for head in branch.members)])
    view = Plot(pattern, tokens, heads, **options)
    return charts.library("altair").Chart.from_dict(panels(view))


def save(view: Plot, file: Path) -> None:
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"cannot save {file.name!r}: give it a name that ends in {', '.join(ENDINGS)}")
    if ending == ".html":
        captions, cells = {colour: view.caption(colour) for colour in COLOURS}, len(view.edges) - 1
        data = {"specification": choosable(view), "captions": captions, "cells": cells}
        folder, scripts = Path(__file__).parent / "page", [charts.scripts()]
        content = charts.page(folder, data, scripts=scripts, view=view, facts=view.facts()).encode()
    else:
        content = charts.drawn(panels(view), ending)
    charts.write(file, content)


def panels(view: Plot) -> Specification:
    """The first pictures, two in a row."""
    pictures, cells = view.pictures[:MOST_PANELS], len(view.edges) - 1
    side = cells * max(1, (300 if len(pictures) > 1 else 440) // cells)  # whole pixels: others would make a moiré
    about = [view.subtitle, view.caption(view.colour), *view.facts(MOST_PANELS)]
    about = [line for sentence in about for line in textwrap.wrap(sentence, 90)]
    return {
        "$schema": SCHEMA, "columns": 2, "config": {"view": {"fill": "#f5f6f8", "stroke": None}},
        "title": {"text": view.title, "subtitle": about, "anchor": "start", "offset": 16},
        "params": [{"name": "colour", "value": view.colour}],
        "concat": [
            {"title": x.name, "width": side, "height": side, "layer": _layers(view, [x], is_fixed=True)}
            for x in pictures
        ],
    }  # fmt: skip


def choosable(view: Plot) -> Specification:
    """One picture at a time: its heads and its colours can be chosen, and the wheel zooms."""
    names = [picture.name for picture in view.pictures]
    heads = {"input": "select", "name": "Heads ", "options": [*range(len(names))], "labels": names}
    colours = {"input": "radio", "name": "Colour ", "options": [*COLOURS], "labels": ["share of pairs", "branch"]}
    layers = _layers(view, view.pictures, is_fixed=False)
    layers[0]["transform"].append({"filter": "datum.picture == picture"})
    layers[0]["params"] = [{"name": "zoom", "select": "interval", "bind": "scales"}]
    chosen = [{"name": "colour", "value": view.colour, "bind": colours}, {"name": "picture", "value": 0, "bind": heads}]
    # legends grow and shrink with the choices
    return {"$schema": SCHEMA, "params": chosen, "layer": layers, "autosize": {"type": "pad", "resize": True}}


def _layers(view: Plot, pictures: Sequence[Picture], *, is_fixed: bool) -> list[Specification]:
    """The cells of pictures one over the other, and lines above them. ``is_fixed``: nothing can be chosen."""
    gap = 0.04 * view.cell_size if len(view.edges) <= GRID + 1 else 0
    levels, names = shades(pictures), view.branch_names
    # a list per column takes a third of the space of an object per row; in a text Altair does not check each number
    rows = [*_rows(view, pictures, levels)]
    named = COLUMNS if view.pattern.counts == "sum" else COLUMNS[:-1]
    columns = charts.as_json([{name: [row[i] for row in rows] for i, name in enumerate(named)}])
    calculated = {
        "x": f"datum.k + {gap}", "x2": f"datum.k_end - {gap}", "y": f"datum.q + {gap}", "y2": f"datum.q_end - {gap}",
        "queries": _span("q"), "keys": _span("k"), "name": f"{json.dumps(names)}[datum.branch]",
        "about": f"{json.dumps([*levels])}[datum.level]", "shown": f"colour == 'branch' ? datum.name : '{ANY}'",
    }  # fmt: skip
    transform = [{"calculate": how, "as": name} for name, how in calculated.items()]
    legend = {"orient": "bottom", "columns": 2, "symbolType": "square", "symbolStrokeWidth": 0}
    listed = {"expr": f"colour == 'branch' ? {json.dumps(names)} : ['{ANY}']"}
    colours = None if is_fixed and view.colour == "share" else {**legend, "title": "colour", "values": listed}
    shares = {**legend, "title": "share of pairs", "symbolFillColor": BLUE} if view.cell_size > 1 else None
    tooltip: list[Specification] = [
        {"field": "queries"}, {"field": "keys"}, {"field": "name", "title": "branch"},
        {"field": "share", "type": "quantitative", "title": "share of pairs", "format": ".3~%"},
        {"field": "count", "type": "quantitative", "title": "counts", "format": ".3~"},
    ]  # fmt: skip
    cells = {
        "data": {"values": columns, "format": {"type": "json"}}, "transform": [{"flatten": named}, *transform],
        "mark": {"type": "rect", "clip": True, "aria": False},
        "encoding": {
            "x": _tokens(view, "x", "key", is_fixed=is_fixed), "x2": {"field": "x2"},
            "y": _tokens(view, "y", "query", is_fixed=is_fixed), "y2": {"field": "y2"},
            "color": {
                "field": "shown", "type": "nominal", "legend": colours,
                "scale": {"domain": [*names, ANY], "range": [*hues(len(names)), BLUE]},
            },
            "opacity": {
                "field": "about", "type": "ordinal", "sort": [*levels], "legend": shares,
                "scale": {"type": "ordinal", "domain": [*levels], "range": OPACITY},
            },
            "tooltip": tooltip if view.pattern.counts == "sum" else tooltip[:-1],
        },
    }  # fmt: skip
    return [cells, *_lines(view)]


def _tokens(view: Plot, channel: str, title: str, *, is_fixed: bool) -> Specification:
    """An axis with ticks at multiples of a power of two, as segments mostly are; on a page they follow the zoom."""
    low, high = view.shown if is_fixed else (f"domain('{channel}')[0]", f"domain('{channel}')[1]")
    step = f"pow(2, max(0, floor(log({high} - {low}) / LN2) - 2))"
    ticks = {"expr": f"sequence(ceil({low} / {step}) * {step}, {high} + 1, {step})"}
    axis = {"format": ",d", "values": ticks, "labelFlush": False, "grid": False}
    axis["orient"] = "top" if channel == "x" else "left"
    scale = {"domain": [*view.shown], "nice": False, "zero": False, "reverse": channel == "y"}
    return {"field": channel, "type": "quantitative", "title": title, "axis": axis, "scale": scale}


def _span(name: str) -> str:
    """An expression: one token, or the first and the last."""
    last = f"datum.{name}_end - 1"
    return f"format(datum.{name}, ',') + (datum.{name} < {last} ? '–' + format({last}, ',') : '')"


def hues(count: int) -> list[str]:
    """A colour for each branch: all differ, and neighbours in lightness too."""
    return [f"hsl({(209 + 360 * i // count) % 360}, 70%, {(50, 36)[i % 2]}%)" for i in range(count)]


def _rows(view: Plot, pictures: Sequence[Picture], levels: dict[str, float]) -> Iterator[tuple[float, ...]]:
    """The COLUMNS of each cell with pairs in it; where cells have no gaps, equal ones beside one another are one."""
    edges, has_gaps = view.edges, len(view.edges) <= GRID + 1
    for index, picture in enumerate(pictures):
        looks = torch.stack([picture.share, picture.levels(levels), picture.branch, picture.times], -1).tolist()
        for (top, bottom), row in zip(itertools.pairwise(edges), looks, strict=True):
            cells = itertools.groupby(enumerate(row), lambda cell: (cell[1], has_gaps and cell[0]))
            for ((share, level, branch, count), _), alike in cells:
                (first, _), *more = alike
                if share:
                    stop = edges[first + len(more) + 1]
                    numbers = float(f"{share:.4g}"), int(level), int(branch), float(f"{count:.4g}")
                    yield index, top, bottom, edges[first], stop, *numbers


def _lines(view: Plot) -> Iterator[Specification]:
    """The borders of ranks, and the query that was asked for."""
    for channel in "xy" if view.borders else "":
        dashes = {"type": "rule", "color": LINE, "strokeDash": [4, 3], "clip": True}
        where = {channel: {"field": "token", "type": "quantitative"}}
        yield {"data": {"values": [{"token": x} for x in view.borders]}, "mark": dashes, "encoding": where}
    if view.query is not None:
        frame = {"type": "rect", "fill": None, "stroke": LINE, "strokeWidth": 1.5, "clip": True}
        where = {"y": {"field": "top", "type": "quantitative"}, "y2": {"field": "bottom"}}
        yield {"data": {"values": [{"top": view.query, "bottom": view.query + 1}]}, "mark": frame, "encoding": where}
