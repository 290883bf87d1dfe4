"""Tables of other branches than nested ones: rectangles of rows as tiles and the runs of tiles that these meet.

Where the rows that are met move along with the program's own on both sides, as in a window, all tiles but those at the
ends are alike: the table has one of them, whatever the length.

Legend: positions count from the start of a section; ``own`` rows of a program, which meets tiles of ``other`` rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dilated_attention.backends.triton.endless import stretches
from dilated_attention.backends.triton.tiling import Array, Tiling
from dilated_attention.branches import Blocks
from dilated_attention.branches.base import Rect, Rows
from dilated_attention.call import Call

NONE = 2**30  # a limit that is none


class Strip(NamedTuple):
    """Rows of programs and the rows that these meet, within limits; of some heads that follow one another."""

    branch: int
    head: int
    heads: int
    mine: Rows  # queries, or keys where programs have tiles of keys
    met: tuple[Rows, ...]
    low: int | None  # of the position met less that of mine
    high: int | None
    repeats: int = 1
    period: int = 0


Strips = tuple[Strip, ...]  # of one launch


@functools.lru_cache(maxsize=64)
def launches(call: Call, of_keys: bool = False) -> tuple[Strips, ...] | None:
    """What each launch has to do: no two strips of a launch have a row of their own in common.

    ``of_keys``: programs have tiles of keys. None: some pairs would have to be masked one by one.
    """
    found: list[list[Strip]] = []
    for branch, _ in enumerate(call.pattern.branches_for(call.held.total)):
        alike: dict[tuple[int, ...], list[int]] = {}
        for head, _ in call.placed(branch):
            alike.setdefault(call.pattern.looks(head + call.first_head, call.held.total), []).append(head)
        turns: dict[int, list[Strip]] = {}
        shared: dict[tuple[Rect | None, ...], list[int]] = {}
        for some in alike.values():
            shared.setdefault(tuple(_rects(call, branch, some[0] + call.first_head, of_keys)), []).extend(some)
        for rects, heads in shared.items():
            if None in rects:
                return None
            for turn, strip in _strips(branch, [rect for rect in rects if rect is not None]):
                for first, stop in stretches(sorted(heads)):
                    turns.setdefault(turn, []).append(strip._replace(head=first, heads=stop - first))
        found += [turns[turn] for turn in sorted(turns)]
    return tuple(map(tuple, found))


def _rects(call: Call, branch: int, head: int, of_keys: bool) -> Iterator[Rect | None]:
    """Those of a branch; None in the place of one with a mask."""
    heads, is_listed = call.held.total, isinstance(call.pattern.branches_for(call.held.total)[branch], Blocks)
    for begin, end in itertools.pairwise(call.cu_seqlens or (0, call.total)):
        mine = range(end - begin), end - begin, heads, call.is_causal, call.drops
        for rect, but in call.pattern.parts(branch, head, *mine):
            if but:
                yield None
            elif not rect.is_empty:
                moved = rect.moved(begin)
                moved = moved.turned() if of_keys else moved
                yield from moved.singles() if is_listed else [moved]


def _strips(branch: int, rects: Iterable[Rect]) -> Iterator[tuple[int, Strip]]:
    """Each with the number of its launch: rectangles with the same rows and limits are one strip."""
    together: dict[Hashable, list[Rect]] = {}
    for rect in rects:
        mine = rect.queries
        # at a limit of 0 the diagonal cuts off what no row meets, so that rows may be fewer than others'
        alike = mine.start, mine.step, None if (rect.low, rect.high) == (0, None) else mine.length
        together.setdefault((alike, *rect[2:]), []).append(rect)
    taken: list[list[Rect]] = []
    for some in together.values():
        longest = max(some, key=lambda rect: rect.queries.length)
        turn = next((i for i, others in enumerate(taken) if not _meets(longest, others)), len(taken))
        taken += [[]] if turn == len(taken) else []
        taken[turn].append(longest)
        met = tuple(_adjoined(rect.keys for rect in some))
        yield turn, Strip(branch, 0, 0, longest.queries, met, *longest[2:])


def _meets(rect: Rect, others: list[Rect]) -> bool:
    """Whether rectangles may have rows of their own in common with this one."""
    begin, end = rect.queries.start, rect.queries.last + (rect.repeats - 1) * rect.period
    for other in reversed(others):
        if begin > other.queries.last + (other.repeats - 1) * other.period or end < other.queries.start:
            continue
        if rect.period == other.period > 0:  # where in a period: alike in all of them
            after = (begin - other.queries.start) % rect.period
            if other.queries.last - other.queries.start < after < rect.period - (rect.queries.last - begin):
                continue
        steps = math.gcd(rect.queries.step, other.queries.step, rect.period, other.period)
        if (begin - other.queries.start) % steps == 0:
            return True
    return False


def _adjoined(keys: Iterable[Rows]) -> Iterator[Rows]:
    """The same keys in fewer runs: those that continue others are one with them."""
    waiting: Rows | None = None
    for rows in sorted(keys):
        if waiting is not None and rows.step == waiting.step and rows.start == waiting.last + waiting.step:
            waiting = waiting._replace(length=waiting.length + rows.length)
            continue
        if waiting is not None:
            yield waiting
        waiting = rows
    if waiting is not None:
        yield waiting


# --- tiles --------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Tiles at positions from ``start`` on, so many times."""

    start: int
    period: int
    repeats: int
    tiling: Tiling


def pieces(strip: Strip, own: int, other: int) -> Iterator[Piece]:
    """The tables of a strip."""
    mine, met, low, high = strip.mine, strip.met, strip.low, strip.high
    tiles, size, inner = -(-mine.length // own), own * mine.step, range(0)
    if low is not None and high is not None and strip.repeats == 1 and len(met) == 1:
        inner = _inner(mine, met[0], low, high, own)
    if len(inner) < 3:
        inner = range(0)
    for some in (range(inner.start), range(inner.stop, tiles)) if inner else (range(tiles),):
        if some:
            rows = Rows(mine.start + some.start * size, mine.step, min(mine.length - some.start * own, len(some) * own))
            yield Piece(0, strip.period, strip.repeats, _tiling(rows, met, low, high, own, other))
    if inner:
        at = mine.start + inner.start * size
        rows, around = Rows(0, mine.step, own), tuple(x.moved(-at) for x in met)
        yield Piece(at, size, len(inner), _tiling(rows, around, low, high, own, other))


def _inner(mine: Rows, met: Rows, low: int, high: int, own: int) -> range:
    """The tiles that are full and meet as many rows as any."""
    size = own * mine.step
    first = max(0, -((mine.start + low - met.start) // size))
    last = min(mine.length // own, (met.last - high - (own - 1) * mine.step - mine.start) // size + 1)
    return range(first, max(first, last)) if met.step == mine.step else range(0)


def _tiling(mine: Rows, met: tuple[Rows, ...], low: int | None, high: int | None, own: int, other: int) -> Tiling:
    tiles = -(-mine.length // own)
    base = mine.start + np.arange(tiles, dtype=np.int64) * own * mine.step
    last, stop = np.minimum(base + (own - 1) * mine.step, mine.last), np.full(tiles, mine.last + 1)
    if low is None and high is None:  # all tiles meet the same
        start, step, length = np.array(met).T
        whole, ends = length // other, start + (length - 1) * step + 1
        plain = np.stack([start, step, ends, whole, np.ones_like(start)], 1)[whole > 0]
        rests = np.stack([start + whole * other * step, step, ends, np.ones_like(start), np.ones_like(start)], 1)
        rests = rests[length % other > 0]
        about = (mine.step, 0, whole.sum(), len(rests), len(plain))
        step, first, many, masked, first_masked = (np.full(tiles, number) for number in about)
        table = np.stack([base, step, stop, first, many, masked, first_masked], 1)
        return Tiling(table, np.concatenate([plain, rests]), len(rests) > 0, True, np.array([tiles]))
    lists = [_runs_of(rows, base, last, low, high, other) for rows in met]
    runs, numbers, made = [], [], 0
    wholes, edges = np.stack([whole for whole, _ in lists], 1), np.concatenate([edges for _, edges in lists], 1)
    for some in (wholes, edges):  # (T, R, 5)
        there = some[:, :, 3] > 0
        number = there.sum(1)
        numbers.append((made + number.cumsum() - number, (some[:, :, 3] * there).sum(1)))
        runs.append(some[there])
        made += int(number.sum())
    (first, plain), (first_edge, masked) = numbers
    table = np.stack([base, np.full(tiles, mine.step), stop, first, plain, masked, first_edge], 1)
    return Tiling(table, np.concatenate(runs), bool(masked.any()), True, np.array([tiles]))


def _runs_of(
    rows: Rows, base: Array, last: Array, low: int | None, high: int | None, other: int
) -> tuple[Array, Array]:
    """What each tile of rows from ``base`` to ``last`` meets of these: a run of whole tiles (T, 5), and one on either
    side of them that the limits cut (T, 2, 5)."""
    start, step, count = rows

    def from_token(token: Array) -> Array:
        return np.clip(-((start - token) // step), 0, count)

    nothing, everything = np.zeros_like(base), np.full_like(base, count)
    begin, sure = (nothing, nothing) if low is None else (from_token(base + low), from_token(last + low))
    end, upto = (everything, everything) if high is None else (from_token(x + high + 1) for x in (last, base))
    end, sure = np.maximum(begin, end), np.maximum(sure, begin)
    tiles = -(-(end - begin) // other)
    before = np.minimum(-(-(sure - begin) // other), tiles)
    inside = np.clip((np.minimum(upto, end) - begin) // other - before, 0, None)
    stop, ones = start + (end - 1) * step + 1, np.ones_like(base)
    found = [
        np.stack([start + (begin + skipped * other) * step, step * ones, stop, number, ones], 1)
        for skipped, number in ((before, inside), (nothing, before), (before + inside, tiles - before - inside))
    ]
    return found[0], np.stack(found[1:], 1)


def shows_itself(strip: Strip) -> bool:
    """Whether each query sees its own key."""
    mine, met = strip.mine, strip.met[0]
    in_step = mine.step == met.step and (mine.start - met.start) % met.step == 0
    inside = met.start <= mine.start and mine.last <= met.last
    return in_step and inside and (strip.low or 0) <= 0 <= (strip.high or 0)


def cover(strips: Strips, call: Call) -> bool:
    """Whether they have every row of every head."""
    return sum(strip.heads * strip.mine.length * strip.repeats for strip in strips) == call.kv_heads * call.queries
