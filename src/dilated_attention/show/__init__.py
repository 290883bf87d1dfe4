"""Pictures of a pattern: which keys each query sees.

`View` counts what there is to see, and `counts` how. `terminal` prints it, `chart` draws it, and `page` puts the chart
on a page. `save` writes a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilated_attention import charts
from dilated_attention.pattern import DilatedPattern
from dilated_attention.show.view import MOST_CELLS, Colour, View

__all__ = ["ENDINGS", "MOST_CELLS", "Colour", "View", "plot", "save"]

ENDINGS = (".html", ".svg", ".png")


def plot(pattern: DilatedPattern, tokens: int | None = None, heads: int | None = None, **options: Any) -> Any:
    """An Altair chart of a pattern; ``options`` are those of `View`."""
    charts.library("altair")
    from dilated_attention.show.chart import panels

    tokens = min(max(pattern.segment_lengths), MOST_CELLS) if tokens is None else tokens
    if heads is None:
        heads = len(pattern.branches) if pattern.head_rule.splits_heads else min(4, max(pattern.dilation_rates))
    return panels(View(pattern, tokens, heads, **options))


def save(view: View, file: Path) -> None:
    """Write a page (.html) or a picture (.svg, .png)."""
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"cannot save {file.name!r}: give it a name that ends in {', '.join(ENDINGS)}")
    charts.library("altair")
    if ending == ".html":
        from dilated_attention.show.page import page

        content = page(view).encode()
    else:
        from dilated_attention.show.chart import panels

        content = charts.drawn(panels(view).to_dict(), ending)
    charts.write(file, content)
