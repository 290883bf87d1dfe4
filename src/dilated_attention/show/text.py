"""A view for a terminal, as one string.

With colours a character shows two cells, one above the other; without, a cell is two characters wide, which makes it
about square. Where a picture is wider than the terminal, neighbouring cells are drawn as one.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dilated_attention.ring.cost import size
from dilated_attention.show import words
from dilated_attention.show.kinds import Kind
from dilated_attention.show.seen import View
from dilated_attention.show.travel import Sent, Travel

MOST_KINDS = 8  # kinds of heads that are drawn and described
NOTHING, RAMP = 236, (24, 31, 38, 79, 150, 228)  # of the 256 colours of terminals: dark blue to light yellow
PLAIN = str.maketrans({"–": "-", "…": "...", "×": "x", "▸": ">", "·": "."})


class Style(NamedTuple):
    width: int
    colour: bool
    ascii_only: bool

    def plain(self, sentence: str) -> str:
        """To be asked before lengths are: some signs become longer."""
        return sentence.translate(PLAIN) if self.ascii_only else sentence

    def level(self, count: int, most: int) -> int:
        """The colour for a number of branches out of so many."""
        if not count:
            return NOTHING
        return RAMP[2] if most == 1 else RAMP[(count - 1) * (len(RAMP) - 1) // (most - 1)]

    def glyph(self, count: int, most: int) -> str:
        """The same without colours, two characters wide."""
        if self.ascii_only:
            return ". " if not count else str(count) * 2 if count < 10 else "++"
        if not count:
            return "· "
        return "░▒▓█"[count - 1 if most <= 4 else -(-count * 4 // most) - 1] * 2

    def share(self, part: int, whole: int) -> str:
        """A character for a share of something: nothing and all of it stand out."""
        shades = " .:+#" if self.ascii_only else " ░▒▓█"
        return shades[0 if not part else 4 if part == whole else 1 + 3 * part // whole]


def text(view: View, width: int = 80, colour: bool = False, *, ascii_only: bool = False) -> str:
    """The whole view, in lines of at most ``width`` columns (but for numbers that cannot be broken).

    ``colour``: with ANSI escapes. ``ascii_only``: for terminals that cannot show block characters.
    """
    style = Style(max(width, 20), colour, ascii_only)
    kinds = view.shown[:MOST_KINDS]
    parts = [
        _wrapped([words.title(view), words.subtitle(view)], style),
        _panels(view, style),
        _facts(view, kinds, style),
        _reach(view, style),
    ]
    if view.travel is not None:
        parts.append(_travel(view, view.travel, style))
    return style.plain("\n\n".join("\n".join(part) for part in parts) + "\n")


def _wrapped(sentences: Sequence[str], style: Style) -> list[str]:
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(style.plain(sentence), style.width, subsequent_indent="  ")
    ]


# --- the pictures -------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """Lines that all take so many columns on the screen."""

    columns: int
    lines: list[str]


def _panels(view: View, style: Style) -> list[str]:
    """The pictures of heads, side by side where there is room."""
    count, most = len(view.edges) - 1, len(view.pattern.branches)
    across = max(1, min(len(view.pictures()), (style.width + 25) // 50))
    room = (style.width - 2 * (across - 1)) // across - 2
    is_half = style.colour and not style.ascii_only and 2 * count > room
    merged = -(-count // room) if is_half else -(-2 * count // room)
    pictures = view.pictures(merged)
    draw, per_cell = (_half_blocks, 1) if is_half else (_squares, 2)
    panels = []
    for heads, counts in pictures[:MOST_KINDS]:
        name, columns = style.plain(words.heads_name(heads, most=4)), per_cell * len(counts)
        at = None if view.query_stretch is None else view.query_stretch // (merged * 2 // per_cell)
        panels.append(_panel(name, draw(counts, most, style), columns, at))
    across = max(1, (style.width + 2) // (max(panel.columns for panel in panels) + 2))
    found = _wrapped([words.legend(view, merged)], style)
    found += [" ".join(_key(level, most, style) for level in range(most + 1))] if most <= 9 else []
    for at in range(0, len(panels), across):
        rows = zip(*(panel.lines for panel in panels[at : at + across]), strict=True)
        found += ["", *("  ".join(row).rstrip() for row in rows)]
    if len(pictures) > MOST_KINDS:
        found += [
            "",
            *_wrapped([f"{len(pictures) - MOST_KINDS:,} more pictures are not shown: ask for one head"], style),
        ]
    return found


def _panel(name: str, lines: list[str], columns: int, at: int | None) -> Panel:
    """A picture of so many columns with a title, and a mark at the line of the query."""
    width = max(columns, len(name))
    marked = [f"{'▸' if i == at else ' '} {line}{' ' * (width - columns)}" for i, line in enumerate(lines)]
    return Panel(width + 2, [f"  {name.ljust(width)}", *marked])


def _key(level: int, most: int, style: Style) -> str:
    if style.colour:
        return f"\x1b[48;5;{style.level(level, most)}m  \x1b[0m {level}"
    return f"{style.glyph(level, most)}{'' if style.ascii_only and 0 < level < 10 else f' {level}'}"


def _squares(counts: list[list[int]], most: int, style: Style) -> list[str]:
    """A cell is two characters."""
    if not style.colour:
        return ["".join(style.glyph(count, most) for count in row) for row in counts]
    lines = []
    for row in counts:
        runs = ((level, len(list(same))) for level, same in itertools.groupby(style.level(x, most) for x in row))
        lines.append("".join(f"\x1b[48;5;{level}m{'  ' * many}" for level, many in runs) + "\x1b[0m")
    return lines


def _half_blocks(counts: list[list[int]], most: int, style: Style) -> list[str]:
    """Two rows of cells in a line of characters: the upper half is drawn, the lower is the background."""
    lines = []
    for at in range(0, len(counts), 2):
        upper = (f"38;5;{style.level(x, most)}" for x in counts[at])
        lower = (
            (f"48;5;{style.level(x, most)}" for x in counts[at + 1]) if at + 1 < len(counts) else itertools.repeat("49")
        )
        both = zip(upper, lower, strict=False)
        runs = ((codes, len(list(same))) for codes, same in itertools.groupby(both))
        lines.append("".join(f"\x1b[{up};{down}m{'▀' * many}" for (up, down), many in runs) + "\x1b[0m")
    return lines


# --- the numbers --------------------------------------------------------------------------------------------------


def _facts(view: View, kinds: Sequence[Kind], style: Style) -> list[str]:
    """Coverage, zero keys, and the keys of the query."""

    def told(of_kind: Callable[[Kind], str]) -> list[str]:
        return [f"{heads}: {sentence}" for heads, sentence in words.told_once(kinds, [of_kind(kind) for kind in kinds])]

    facts = ["Rows:", *told(lambda kind: words.coverage(kind.coverage))]
    if len(view.kinds) > 1:
        facts.append(f"all heads together: {words.coverage(view.coverage)}")
    lines = _wrapped([*facts, *told(lambda kind: words.zeros(view, kind))], style)
    if view.query is not None:
        keys = told(lambda kind: words.keys(view, kind))
        lines += ["", *_wrapped([f"Keys of query {view.query:,}:", *keys], style)]
    return lines


def _reach(view: View, style: Style) -> list[str]:
    reach = view.reach
    lines = _wrapped([f"Reach: {words.reach_title(view)}"], style)
    sentences = words.reach_layers(reach)
    lengths = [stop - start for start, stop in itertools.pairwise(view.edges)]
    longest = max(map(len, sentences), default=0)
    room = style.width - longest - 3
    for sentence, layer in zip(sentences, reach.layers, strict=True):
        if room < 16:
            lines += _wrapped([sentence], style)
            continue
        merged = -(-len(lengths) // room)
        starts = range(0, len(lengths), merged)
        strip = (style.share(sum(layer.cells[i : i + merged]), sum(lengths[i : i + merged])) for i in starts)
        edge = "|" if style.ascii_only else "▕"
        lines.append(f"{sentence.ljust(longest)} {edge}{''.join(strip)}{'|' if style.ascii_only else '▏'}")
    return lines + _wrapped([words.reach_end(view)], style)


# --- ranks --------------------------------------------------------------------------------------------------------


def _travel(view: View, travel: Travel, style: Style) -> list[str]:
    lines = _wrapped([f"Ranks: {words.travel_title(travel)}"], style)
    lines += _table([("branch", "segments cut", "rows sent", "bytes"), *words.travel_branches(view, travel)], style)
    lines += _wrapped(words.travel_facts(travel), style)
    if not any(rank.bytes_sent for rank in travel.of_rank):
        return lines
    ranks = travel.shards.ranks
    if travel.is_listed and 5 + 8 * ranks <= style.width:
        lines += ["", *_matrix("sends to", travel.sent, ranks)]
        if travel.needed != travel.sent:
            lines += ["", *_matrix("is needed by", travel.needed, ranks)]
        return lines
    step = -(-ranks // 16)
    lines += [
        "",
        f"{'rank' if step == 1 else 'ranks':>12}{'sent':>12}{'received':>12}{'' if step == 1 else '  (sums)'}",
    ]
    for first in range(0, ranks, step):
        some = travel.of_rank[first : first + step]
        name = str(first) if step == 1 else f"{first}–{first + len(some) - 1}"
        sent, received = sum(one.bytes_sent for one in some), sum(one.bytes_received for one in some)
        lines.append(f"{name:>12}{size(sent):>12}{size(received):>12}")
    return lines


def _table(rows: Sequence[Sequence[str]], style: Style) -> list[str]:
    """In columns, or where those are too wide row by row."""
    rows = [row[:2] for row in rows] if not any(rows[1][2:]) else rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(widths) + 2 * len(widths) > style.width:
        named = ((f"{name} {cell}" for name, cell in zip(rows[0], row, strict=True)) for row in rows[1:])
        return _wrapped([", ".join(cells) for cells in named], style)
    aligned = ([*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])] for row in rows)
    return ["  ".join(cells).rstrip() for cells in aligned]


def _matrix(verb: str, messages: Sequence[Sent], ranks: int) -> list[str]:
    """Bytes from each rank (down) to each other (across)."""
    total: dict[tuple[int, int], int] = {}
    for one in messages:
        total[one.source, one.target] = total.get((one.source, one.target), 0) + one.bytes
    cells = [[size(total[a, b]) if (a, b) in total else "·" for b in range(ranks)] for a in range(ranks)]
    lines = [f"rank (down) {verb} rank (across):", " " * 5 + "".join(f"{rank:>8}" for rank in range(ranks))]
    return lines + [f"{rank:>5}" + "".join(f"{cell:>8}" for cell in row) for rank, row in enumerate(cells)]
