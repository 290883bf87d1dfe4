"""A view as a picture: .png or .svg, with matplotlib.

Cells are drawn as few rectangles, not as an image: sharp at every size, and the file stays small. The same view gives
the same bytes.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline

from dilated_attention.ring.cost import size
from dilated_attention.show import colours, words
from dilated_attention.show.seen import View
from dilated_attention.show.travel import Sent, Travel

MOST_PANELS = 12
SETTINGS: dict[Any, Any] = {  # of matplotlib, while a picture is drawn and written
    "svg.hashsalt": "dilated attention",
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.titlesize": 8,
}
WIDTH = 8.0  # inches
STEPS = 24  # shades of a share
SOFT = "#58616b"


def drawn(view: View) -> Figure:
    """For a notebook."""
    with mpl.rc_context(SETTINGS):
        return picture(view)


def save_picture(view: View, file: Path) -> None:
    with mpl.rc_context(SETTINGS):
        write(picture(view), file)


def write(figure: Figure, file: Path) -> None:
    """Without a date or a version in the file. To be called under the SETTINGS."""
    nothing = {"Date": None, "Creator": None} if file.suffix.lower() == ".svg" else {"Software": None}
    figure.savefig(file, dpi=160, metadata=nothing)


def picture(view: View) -> Figure:
    """Heads above, then how far a query hears, then what travels. To be called under the SETTINGS."""
    panels = _panels(view)
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    each = min(WIDTH / columns, 5.0)
    caption = _caption(view)
    heights = [rows * (each + 0.15) + 0.5, 0.7 + 0.16 * len(view.reach.layers), 0.16 * len(caption) + 0.1]
    if view.travel is not None:
        heights.append(min(4.6, 1.4 + 0.45 * view.travel.shards.ranks) if view.travel.is_listed else 2.6)
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    figure.suptitle(f"{words.title(view)}\n{words.subtitle(view)}", fontsize=10)
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    axes = parts[0].subplots(rows, columns, squeeze=False).flat
    for axis, panel in itertools.zip_longest(axes, panels):
        if panel is None:
            axis.set_axis_off()
        else:
            draw_cells(axis, view, *panel)
    draw_key(parts[0], len(view.pattern.branches), words.legend(view))
    _draw_reach(parts[1], view)
    parts[2].text(0.01, 0.98, "\n".join(caption), va="top", fontsize=7.5, color=SOFT)
    if view.travel is not None:
        _draw_travel(parts[3], view.travel)
    return figure


def _panels(view: View) -> list[tuple[str, list[list[int]]]]:
    """What to draw, and its title: every head where they are few and single pairs are seen, else every picture."""
    pictures = view.pictures()
    if view.head is not None:
        return [(f"head {view.head}", pictures[0][1])]
    if view.heads <= MOST_PANELS and view.cell_size == 1:
        found = {head: counts for heads, counts in pictures for head in heads}
        return [(f"head {head}", found[head]) for head in range(view.heads)]
    return [(words.heads_name(heads, most=4), counts) for heads, counts in pictures[:MOST_PANELS]]


def _caption(view: View) -> list[str]:
    kinds = view.shown[:MOST_PANELS]
    told = words.told_once(kinds, [words.coverage(kind.coverage) for kind in kinds])
    told += words.told_once(kinds, [words.zeros(view, kind) for kind in kinds])
    if view.query is not None:
        told += [
            (f"query {view.query:,}, {x}", y) for x, y in words.told_once(kinds, [words.keys(view, k) for k in kinds])
        ]
    lines = [f"reach: {words.reach_end(view)}", *(f"{heads}: {sentence}" for heads, sentence in told)]
    if len(kinds) < len(view.shown):
        lines.append(f"{len(view.shown) - len(kinds):,} more kinds of heads are not told of")
    if len(lines) > 2 * MOST_PANELS:
        lines = [*lines[: 2 * MOST_PANELS], "…"]
    return [part for line in lines for part in textwrap.wrap(line, 128, subsequent_indent="    ")]


# --- cells --------------------------------------------------------------------------------------------------------


def draw_cells(axis: Axes, view: View, title: str, counts: list[list[int]]) -> None:
    """One of a view's pictures, on axes of its own."""
    _fill(axis, counts, colours.levels(len(view.pattern.branches)))
    axis.set_title(title)
    if view.query_stretch is not None:
        row = _outline([(0, view.query_stretch, len(counts), 1)])
        axis.add_patch(PathPatch(row, fill=False, edgecolor=colours.QUERY["light"], clip_on=False))


def _fill(axis: Axes, levels: Sequence[Sequence[int]], palette: Sequence[str]) -> None:
    """Cells in the colours of their levels; lines between them where they are few."""
    rows, columns = len(levels), len(levels[0])
    axis.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[], facecolor=palette[0])
    for spine in axis.spines.values():
        spine.set_visible(False)
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for level, rectangle in rectangles(levels):
        found.setdefault(level, []).append(rectangle)
    for level, some in sorted(found.items()):
        if level:  # the axes have the colour of 0; an edge of its own colour closes hairlines between rectangles
            axis.add_patch(PathPatch(_outline(some), facecolor=palette[level], edgecolor=palette[level], linewidth=0.2))
    if rows + columns > 2 and max(rows, columns) <= 32:
        across = [point for y in range(1, rows) for point in ((0, y), (columns, y))]
        down = [point for x in range(1, columns) for point in ((x, 0), (x, rows))]
        lines = Outline(across + down, [Outline.MOVETO, Outline.LINETO] * (rows + columns - 2))
        axis.add_patch(PathPatch(lines, fill=False, edgecolor="white", linewidth=0.6))
    if rows == columns:
        axis.set_aspect("equal")


def rectangles(levels: Sequence[Sequence[int]]) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """A table as few rectangles of one level each: (level, (x, y, width, height))."""
    waiting: dict[tuple[int, int, int], int] = {}  # (level, first column, width) of runs to the row where they began
    for at, row in enumerate([*levels, ()]):
        column, runs = 0, set()
        for level, same in itertools.groupby(row):
            width = len(list(same))
            runs.add((level, column, width))
            column += width
        for run in [run for run in waiting if run not in runs]:
            top = waiting.pop(run)
            yield run[0], (run[1], top, run[2], at - top)
        for run in runs:
            waiting.setdefault(run, at)


def _outline(some: Iterable[tuple[int, int, int, int]]) -> Outline:
    corners, codes = [], []
    for x, y, width, height in some:
        corners += [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
        codes += [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    return Outline(corners, codes)


def draw_key(figure: Figure | SubFigure, most: int, title: str) -> None:
    """What the colours mean, below the pictures."""
    step = -(-most // 10)
    shown = sorted({*range(0, most + 1, step), most})
    palette = colours.levels(most)
    patches = [Patch(facecolor=palette[level], edgecolor="#d8dde3", label=str(level)) for level in shown]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), title="\n".join(textwrap.wrap(title, 125)),
        frameon=False, handlelength=1.1, handleheight=1.1, columnspacing=1.2, title_fontsize=8,
    )  # fmt: skip


# --- reach --------------------------------------------------------------------------------------------------------


def _shades(table: Sequence[Sequence[int]], whole: Callable[[int], int]) -> list[list[int]]:
    """Shares of a whole, by column, as levels: 0 for nothing, STEPS for all."""
    return [[-(-x * STEPS // whole(column)) for column, x in enumerate(row)] for row in table]


def _draw_reach(figure: SubFigure, view: View) -> None:
    axis = figure.subplots()
    layers = view.reach.layers
    axis.set_title(words.reach_title(view).capitalize(), loc="left")
    if not layers:
        axis.set_axis_off()
        return
    shades = _shades([layer.cells for layer in layers], lambda i: view.edges[i + 1] - view.edges[i])
    _fill(axis, shades, colours.levels(STEPS))
    axis.set_yticks([i + 0.5 for i in range(len(layers))], words.reach_layers(view.reach))
    axis.tick_params(length=0)


# --- ranks --------------------------------------------------------------------------------------------------------


def _draw_travel(figure: SubFigure, travel: Travel) -> None:
    about = f"{words.travel_title(travel).capitalize()}\n{words.travel_total(travel)}"
    figure.suptitle(f"{about}\n", fontsize=8)
    if not travel.is_listed:
        axis = figure.subplots()
        axis.step(
            range(travel.shards.ranks),
            [x.bytes_sent for x in travel.of_rank],
            where="mid",
            label="sent",
            color="#1f4e79",
        )
        axis.step(
            range(travel.shards.ranks),
            [x.bytes_received for x in travel.of_rank],
            where="mid",
            label="received",
            color="#d9480f",
        )
        axis.set(xlabel="rank", ylim=(0, None))
        axis.yaxis.set_major_formatter(lambda count, _: size(count))
        axis.legend(frameon=False)
        return
    pictures = {"who sends (down) to whom (across)": travel.sent}
    if travel.needed != travel.sent:
        pictures["whose rows (down) are needed by whom (across)"] = travel.needed
    axes = figure.subplots(1, len(pictures), squeeze=False).flat
    for axis, (title, messages) in zip(axes, pictures.items(), strict=True):
        _draw_matrix(axis, title, messages, travel.shards.ranks)


def _draw_matrix(axis: Axes, title: str, messages: Sequence[Sent], ranks: int) -> None:
    table = [[0] * ranks for _ in range(ranks)]
    for one in messages:
        table[one.source][one.target] += one.bytes
    most = max(map(max, table)) or 1
    _fill(axis, _shades(table, lambda _: most), colours.levels(STEPS))
    step = -(-ranks // 16)
    ticks = range(0, ranks, step)
    axis.set_xticks([i + 0.5 for i in ticks], [str(i) for i in ticks])
    axis.set_yticks([i + 0.5 for i in ticks], [str(i) for i in ticks])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.set_title(title)
    for row, column in itertools.product(range(ranks), repeat=2) if ranks <= 8 else ():
        if table[row][column]:
            ink = "white" if table[row][column] > most / 2 else "#1b1f24"
            axis.text(
                column + 0.5, row + 0.5, size(table[row][column]), ha="center", va="center", fontsize=6, color=ink
            )
