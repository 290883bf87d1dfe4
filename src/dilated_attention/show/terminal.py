"""A view as text for a terminal, in rich's terms. A cell is two characters wide, which makes it about square."""

from __future__ import annotations

import itertools

from rich.console import Console
from rich.text import Text
from torch import Tensor

from dilated_attention.show.view import Plot, shades

MOST_CELLS, MOST_PANELS = 64, 2  # more would not be seen together
BLOCKS, BLUES = ("██", "▓▓", "▒▒", "░░", "::", "· "), (117, 74, 31, 24, 17, 236)
SIGNS = [Text(block, f"color({blue})") for block, blue in zip(BLOCKS, BLUES, strict=True)]  # of shades, and of nothing
ASCII = str.maketrans({"–": "-", "…": "...", "×": "x", "▸": ">", "·": ".", **dict(zip("█▓▒░", "#*+-", strict=True))})


def _margin(tokens: int) -> int:
    """Columns for the number of a token and the mark of a query."""
    return len(f"{tokens:,}") + 3


def cells_in(console: Console, tokens: int) -> int:
    return max(1, min(MOST_CELLS, (console.width - _margin(tokens)) // 2))


def text(view: Plot, console: Console) -> Text:
    """The whole view. Shades are shares of pairs, whatever colour the view asks for."""
    pictures = view.pictures[:MOST_PANELS]
    levels = shades(pictures)
    screen = Text(f"{view.title}\n{view.subtitle}\nQueries go down and keys across. {view.caption('share')}\n")
    if view.cell_size > 1:
        for name, sign in zip(levels, SIGNS, strict=False):
            screen.append_text(sign).append(f" {name}   ")
        screen.append("\n")
    for picture in pictures:
        screen.append(f"\n{picture.name}\n").append_text(_drawn(view, picture.levels(levels)))
    screen.append("".join(f"\n{sentence}" for sentence in view.facts(MOST_PANELS)))
    return Text(screen.plain.translate(ASCII)) if console.options.ascii_only else screen


def _drawn(view: Plot, levels: Tensor) -> Text:
    """A picture, with the numbers of some tokens above it and at its left."""
    margin, count = _margin(view.tokens), len(levels)
    every = max(16 if count > 16 else 4, 2 ** (margin // 2).bit_length())  # cells between two numbers
    numbers = [f"{token:,}" if at % every == 0 else "" for at, token in enumerate(view.edges[:-1])]
    across = "".join(number.ljust(2 * every) for number in numbers[: max(1, count - every + 1) : every])
    drawn = Text(f"{' ' * margin}{across.rstrip()}\n")
    for number, row, (start, stop) in zip(numbers, levels.tolist(), itertools.pairwise(view.edges), strict=True):
        is_query = view.query is not None and start <= view.query < stop
        cells = Text().join(SIGNS[level] for level in row)
        cells.rstrip()
        drawn.append(f"{number:>{margin - 3}} {'▸' if is_query else ' '} ").append_text(cells).append("\n")
    return drawn
