"""A view as text for a terminal, in rich's terms.

With colours a character shows two cells, one above the other. Without, a cell is two characters wide, which makes it
about square.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from dilated_attention.show.view import Picture, View, shades

MOST_CELLS, MOST_PANELS = 64, 2  # more would not be seen together
COLOURS = [f"color({number})" for number in (117, 74, 31, 24, 17, 236)]  # of the shades, and of an empty cell
SIGNS = ["██", "▓▓", "▒▒", "░░", "::", "· "]  # the same without colours
ASCII = str.maketrans({"–": "-", "…": "...", "×": "x", "▸": ">", "·": ".", **dict(zip("█▓▒░", "#*+-", strict=True))})


def _is_coloured(console: Console) -> bool:
    """Two cells in one character need a block, which ASCII does not have."""
    return console.color_system is not None and not console.no_color and not console.options.ascii_only


def _margin(tokens: int) -> int:
    """Columns for the number of a token and the mark of a query."""
    return len(f"{tokens:,}") + 3


def cells_in(console: Console, tokens: int) -> int:
    """How many cells fit beside each other."""
    room = max(2, console.width - _margin(tokens))
    return min(MOST_CELLS, room if _is_coloured(console) else room // 2)


def text(view: View, console: Console) -> Text:
    """The whole view. Shades are shares of pairs, whatever colour the view asks for."""
    pictures, is_coloured = view.pictures[:MOST_PANELS], _is_coloured(console)
    screen = Text(f"{view.title}\n{view.subtitle}\nQueries go down and keys across. {view.caption('share')}\n")
    levels = shades(pictures)
    if view.cell_size > 1:
        for name, colour, sign in zip(levels, COLOURS, SIGNS, strict=False):
            screen.append(*("██", colour) if is_coloured else (sign,)).append(f" {name}   ")
        screen.append("\n")
    for picture in pictures:
        screen.append(f"\n{picture.name}\n").append_text(_drawn(view, picture, [*levels.values()], is_coloured))
    screen.append("".join(f"\n{sentence}" for sentence in view.facts(MOST_PANELS)))
    return Text(screen.plain.translate(ASCII)) if console.options.ascii_only else screen


def _drawn(view: View, picture: Picture, limits: list[float], is_coloured: bool) -> Text:
    """A picture, with the numbers of some tokens above it and at its left."""
    levels, margin = picture.levels(limits).tolist(), _margin(view.tokens)
    count, (high, wide) = len(levels), (2, 1) if is_coloured else (1, 2)
    every = max(16 if count > 16 else 4, 2 ** (margin // wide).bit_length())  # cells between two numbers
    numbers = [f"{token:,}" if at % every == 0 else "" for at, token in enumerate(view.edges[:-1])]
    across = "".join(number.ljust(every * wide) for number in numbers[: max(1, count - every + 1) : every])
    drawn = Text(f"{' ' * margin}{across.rstrip()}\n")
    for at in range(0, count, high):
        is_query = view.query is not None and view.edges[at] <= view.query < view.edges[min(at + high, count)]
        drawn.append(f"{numbers[at]:>{margin - 3}} {'▸' if is_query else ' '} ")
        if is_coloured:
            for cells in zip(*levels[at : at + 2], strict=True):
                drawn.append("▀", " on ".join(COLOURS[level] for level in cells))
        else:
            drawn.append("".join(SIGNS[level] for level in levels[at]).rstrip())
        drawn.append("\n")
    return drawn
