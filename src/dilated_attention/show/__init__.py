"""Pictures of a pattern: which keys each query sees.

`View` counts what there is to see, and `counts` how. `terminal` prints it, and `chart` draws it. `save` writes a file:
a picture, or a page with style, script and data inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilated_attention import charts
from dilated_attention.pattern import DilatedPattern, Pattern
from dilated_attention.show import chart
from dilated_attention.show.view import COLOURS, MOST_CELLS, Colour, View

__all__ = ["ENDINGS", "MOST_CELLS", "Colour", "View", "plot", "save"]

ENDINGS = (".html", ".svg", ".png")


def plot(pattern: Pattern, tokens: int | None = None, heads: int | None = None, **options: Any) -> Any:
    """An Altair chart of a pattern; ``options`` are those of `View`."""
    if tokens is None:
        tokens = min(max(pattern.segment_lengths) if isinstance(pattern, DilatedPattern) else 256, MOST_CELLS)
    if heads is None:
        heads = max([4, len(pattern.branches), *(head + 1 for branch in pattern.listed for head in branch.members)])
    view = View(pattern, tokens, heads, **options)
    return charts.library("altair").Chart.from_dict(chart.panels(view))


def save(view: View, file: Path) -> None:
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"cannot save {file.name!r}: give it a name that ends in {', '.join(ENDINGS)}")
    if ending == ".html":
        captions, cells = {colour: view.caption(colour) for colour in COLOURS}, len(view.edges) - 1
        data = {"specification": chart.choosable(view), "captions": captions, "cells": cells}
        folder, scripts = Path(__file__).parent / "page", [charts.scripts()]
        content = charts.page(folder, data, scripts=scripts, view=view, facts=view.facts()).encode()
    else:
        content = charts.drawn(chart.panels(view), ending)
    charts.write(file, content)
