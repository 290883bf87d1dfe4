"""Which tiles of rows meet which: a call's work as a small table of integers that a kernel walks through.

A tile is some rows in arithmetic progression. A tile of queries meets runs of key tiles, and every pair of a run
counts equally often. Where the branches of a head are nested (each segment length and each rate divides the next one),
they can be one table: a pair that m branches share is computed once and counts m times, so nothing is merged and out is
written once. For the rates 1, 2, 4, 8, 16 that is a quarter less work than branch by branch.

The work repeats from period to period, so the table describes one period, and another one the shorter tail.
Pure integers; nothing here touches a device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Tiles in a row, at positions base, base + step, ... up to stop; each of their pairs counts ``times``."""

    base: int
    step: int
    stop: int
    tiles: int
    times: int


class Tile(NamedTuple):
    """The rows of one program and the runs they meet: ``plain`` whole tiles, then ``edge`` tiles to be masked."""

    base: int
    step: int
    stop: int
    run: int  # index of the first run
    plain: int
    edge: int
    edge_run: int


class Course(NamedTuple):
    """Branches that some key/value heads run in one table."""

    branch: int  # the first
    widths: tuple[int, ...]
    rates: tuple[int, ...]
    head: int  # the first head, counted from those here
    offsets: tuple[int, ...]  # of each head


Courses = tuple[Course, ...]  # of one launch: no two of them have a row in common


@dataclass(frozen=True, slots=True)
class Tiling:
    tiles: tuple[Tile, ...]
    runs: tuple[Run, ...]

    def is_ragged(self, own: int, other: int) -> bool:
        """Whether some tile is not full."""
        runs = any(run.base + (run.tiles * other - 1) * run.step >= run.stop for run in self.runs)
        return runs or any(tile.base + (own - 1) * tile.step >= tile.stop for tile in self.tiles)


class Rows(NamedTuple):
    """Rows of a head that take part in the same branches: positions ``start`` mod ``step``, branches 0 to level."""

    start: int
    step: int
    level: int


def are_nested(widths: tuple[int, ...], rates: tuple[int, ...]) -> bool:
    """Whether these branches can be one table, if each head's offset is the same number modulo every rate."""
    pairs = [*itertools.pairwise(widths), *itertools.pairwise(rates)]
    return all(after % before == 0 for before, after in pairs) and all(width % rates[-1] == 0 for width in widths)


def rows_of(rates: tuple[int, ...], offset: int) -> list[Rows]:
    """A head's rows by the branches they take part in."""
    found = []
    for level, (rate, after) in enumerate(itertools.pairwise(rates)):
        found += [Rows((offset + phase) % after, after, level) for phase in range(rate, after, rate)]
    return [*found, Rows(offset % rates[-1], rates[-1], len(rates) - 1)]


def tiling(
    widths: tuple[int, ...],
    rates: tuple[int, ...],
    offset: int,
    length: int,
    own: int,
    other: int,
    sees: str = "all",
) -> Tiling:
    """The tiles of one period of ``length`` tokens: ``own`` rows in a program, which meets tiles of ``other`` rows.

    ``sees``: "all", "earlier" (queries, when causal) or "later" (keys, when causal).
    """
    kinds = rows_of(rates, offset)
    tiles: list[Tile] = []
    runs: list[Run] = []
    known: dict[tuple[object, ...], tuple[int, int, int, int]] = {}
    for start in range(0, length, widths[0]):
        stop = min(start + widths[0], length)
        far: dict[int, tuple[list[Run], list[Run]]] = {}  # by level: what all rows of the segment meet outside of it
        for rows in kinds:
            for row in range(0, -(-(stop - start) // rows.step), own):  # as many for every offset; some may be empty
                base = start + rows.start + row * rows.step
                # when causal each tile has its own list in its own segment, else all tiles of a kind share one
                key = (start, rows.level, None if sees == "all" else base)
                if key not in known:
                    if rows.level not in far:
                        regions = _regions(widths, length, start, rows.level, sees)
                        far[rows.level] = _runs(regions, kinds, rows.level, other, (start, stop - 1), "all")
                    last = min(base + (own - 1) * rows.step, stop - 1)
                    near = _runs([(0, start, stop)], kinds, rows.level, other, (base, last), sees)
                    plain, edge = (here + there for here, there in zip(near, far[rows.level], strict=True))
                    known[key] = (len(runs), _total(plain), _total(edge), len(runs) + len(plain))
                    runs += plain + edge
                tiles.append(Tile(base, rows.step, stop, *known[key]))
    return Tiling(tuple(tiles), tuple(runs))


def _total(runs: list[Run]) -> int:
    return sum(run.tiles for run in runs)


def _regions(widths: tuple[int, ...], length: int, start: int, level: int, sees: str) -> list[tuple[int, int, int]]:
    """(branch, first, last) of the tokens that rows of a segment meet outside of it, first in that branch."""
    first, last = start, min(start + widths[0], length)
    found = []
    for branch in range(1, level + 1):
        before = start // widths[branch] * widths[branch]
        after = min(before + widths[branch], length)
        if sees != "later":
            found.append((branch, before, first))
        if sees != "earlier":
            found.append((branch, last, after))
        first, last = before, after
    return [region for region in found if region[1] < region[2]]


def _runs(
    regions: list[tuple[int, int, int]],
    kinds: list[Rows],
    level: int,
    other: int,
    span: tuple[int, int],
    sees: str,
) -> tuple[list[Run], list[Run]]:
    """The runs of whole tiles and those to be masked; ``span`` is the first and the last position of the tile."""
    plain: list[Run] = []
    edge: list[Run] = []
    for branch, first, last in regions:
        for rows in kinds:
            if rows.level < branch:
                continue
            start, step = first + rows.start, rows.step  # a region begins at a multiple of every step
            count = -((start - last) // step)
            if count <= 0:
                continue
            low, high = 0, -(-count // other)  # tiles [low, high) are met, of which [whole_low, whole_high) whole
            whole_low, whole_high = 0, count // other
            size = step * other
            if sees == "earlier":  # key tiles that begin by the last query; whole: end by the first
                high = min(high, max(0, (span[1] - start) // size + 1))
                whole_high = min(whole_high, max(0, (span[0] - start + step) // size))
            elif sees == "later":  # query tiles that end at the first key or later; whole: begin there
                low = min(high, max(0, -((start + size - step - span[0]) // size)))
                whole_low = min(high, max(low, -((start - span[1]) // size)))
            whole_high = min(high, max(whole_low, whole_high))
            weight = 1 + min(rows.level, level) - branch
            for runs, begin, end in ((plain, whole_low, whole_high), (edge, low, whole_low), (edge, whole_high, high)):
                if begin < end:
                    runs.append(Run(start + begin * size, step, last, end - begin, weight))
    return plain, edge
