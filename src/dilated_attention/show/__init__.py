"""Pictures of a pattern: which keys each query sees, and what follows from it.

`View.of` counts what there is to see; `text` draws it for a terminal, `save` writes a page (.html) or a picture
(.png, .svg). Only pictures need matplotlib.

`cells`: pairs in a cell. `coverage`: rows that some branch covers. `reach`: receptive fields. `kinds`: one head.
`travel`: what goes between ranks. `seen`: all of it. `words`: the sentences, `text`, `picture`, `page`: the drawings.
"""

from __future__ import annotations

from typing import Any

from dilated_attention.pattern import DilatedPattern
from dilated_attention.show.save import needing_matplotlib, save
from dilated_attention.show.seen import View
from dilated_attention.show.text import text

__all__ = ["View", "figure", "save", "text"]

MOST_CELLS = 512  # down and across; up to so many tokens each has a cell of its own


def figure(pattern: DilatedPattern, tokens: int | None = None, heads: int | None = None, **options: Any) -> Any:
    """A matplotlib figure of a pattern; ``options`` are those of `View.of`."""
    with needing_matplotlib("a figure needs", "or print the text of `dilated-attention show`"):
        from dilated_attention.show.picture import drawn

    tokens = min(max(pattern.segment_lengths), MOST_CELLS) if tokens is None else tokens
    if heads is None:
        heads = len(pattern.branches) if pattern.dealing.is_divided else min(4, max(pattern.dilation_rates))
    return drawn(View.of(pattern, tokens, heads, **{"cells": MOST_CELLS, **options}))
