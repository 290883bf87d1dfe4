"""Tables of other branches than nested ones: rectangles of rows as tiles and the runs of tiles that these meet.

Where the rows that are met move along with the program's own on both sides, as in a window, all tiles but those at the
ends are alike: the table has one of them, whatever the length.

Legend: positions count from the start of a section; ``own`` rows of a program, which meets tiles of ``other`` rows; T
tiles; E pairs of a tile and rows that it meets.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dilated_attention.backends.triton import nesting
from dilated_attention.backends.triton.endless import stretches
from dilated_attention.backends.triton.tiling import Array, Nests, Tiling
from dilated_attention.branches import Blocks
from dilated_attention.branches.base import Rect, Rows
from dilated_attention.call import Call
from dilated_attention.pattern import DilatedPattern

NONE = 2**30  # a limit that is none


@dataclass(frozen=True, eq=False)
class Strip:
    """Rows of programs and the rows that these meet, within limits; of some heads that follow one another."""

    branch: int
    low: int | None  # of the position met less that of mine
    high: int | None
    repeats: int
    period: int
    mine: Array  # (M, 3): start, step and length of queries, or of keys where programs have tiles of keys
    met: Array  # (K, 4): which of mine, rising; start, step and length
    head: int = 0
    heads: int = 0


Strips = tuple[Strip, ...]  # of one launch


def work(call: Call, kernel: str) -> tuple[Nests | Strips, ...]:
    """What each launch of a kernel has to do."""
    if isinstance(call.pattern, DilatedPattern):
        return nesting.launches(call)
    return launches(call, kernel == "dkdv") or ()


def launches(call: Call, of_keys: bool = False) -> tuple[Strips, ...] | None:
    """What each launch has to do: no two strips of a launch have a row of their own in common.

    ``of_keys``: programs have tiles of keys. None: some pairs would have to be masked one by one.
    """
    about = {name: getattr(call, name) for name in ("kv_heads", "total", "first_head", "total_heads", "cu_seqlens")}
    return _launches(Call(call.pattern, call.is_causal, dropout_p=float(call.drops), **about), of_keys)


@functools.lru_cache(maxsize=64)
def _launches(call: Call, of_keys: bool) -> tuple[Strips, ...] | None:
    found: list[list[Strip]] = []
    for branch, _ in enumerate(call.pattern.branches_for(call.held.total)):
        alike: dict[tuple[int, ...], list[int]] = {}
        for head, _ in call.placed(branch):
            alike.setdefault(call.pattern.looks(head + call.first_head, call.held.total), []).append(head)
        turns: dict[int, list[Strip]] = {}
        shared: dict[tuple[Rect | None, ...], list[int]] = {}
        is_listed = _is_listed(call, branch)
        for some in alike.values():
            rects = () if is_listed else tuple(_rects(call, branch, some[0] + call.first_head, of_keys))
            shared.setdefault(rects, []).extend(some)
        for rects, heads in shared.items():
            if None in rects:
                return None
            some_rects = [rect for rect in rects if rect is not None]
            strips = [(0, _listed(call, branch, of_keys))] if is_listed else _strips(branch, some_rects)
            for turn, strip in strips:
                for first, stop in stretches(sorted(heads)):
                    turns.setdefault(turn, []).append(replace(strip, head=first, heads=stop - first))
        found += [turns[turn] for turn in sorted(turns)]
    return tuple(map(tuple, found))


def _sequences(call: Call) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(call.cu_seqlens or (0, call.total))


def _rects(call: Call, branch: int, head: int, of_keys: bool) -> Iterator[Rect | None]:
    """Those of a branch; None in the place of one with a mask."""
    heads, has_blocks = call.held.total, isinstance(call.pattern.branches_for(call.held.total)[branch], Blocks)
    for begin, end in _sequences(call):
        mine = range(end - begin), end - begin, heads, call.is_causal, call.drops
        for rect, but in call.pattern.parts(branch, head, *mine):
            if but:
                yield None
            elif not rect.is_empty:
                moved = rect.moved(begin)
                moved = moved.turned() if of_keys else moved
                yield from moved.singles() if has_blocks else [moved]


def _strips(branch: int, rects: Iterable[Rect]) -> Iterator[tuple[int, Strip]]:
    """Each with the number of its launch: rectangles with the same limits are one strip."""
    together: dict[Hashable, list[Rect]] = {}
    for rect in rects:
        mine = rect.queries
        # at a limit of 0 the diagonal cuts off what no row meets, so that rows may be fewer than others'
        alike = mine.start, mine.step, None if (rect.low, rect.high) == (0, None) else mine.length
        together.setdefault((alike, *rect[2:]), []).append(rect)
    taken: list[list[Rect]] = []
    strips: dict[Hashable, tuple[int, Rect, list[Rows], list[tuple[int, ...]]]] = {}
    for number, some in enumerate(together.values()):
        longest = max(some, key=lambda rect: rect.queries.length)
        turn = next((i for i, others in enumerate(taken) if not _meets(longest, others)), len(taken))
        taken += [[]] if turn == len(taken) else []
        taken[turn].append(longest)
        alone = number if longest.low is not None and longest.high is not None else None  # its tiles may be alike
        *_, owned, met = strips.setdefault((turn, alone, *longest[2:]), (turn, longest, [], []))
        met += [(len(owned), *rows) for rows in _adjoined(rect.keys for rect in some)]
        owned.append(longest.queries)
    for turn, rect, owned, met in strips.values():
        yield turn, Strip(branch, *rect[2:], np.array(owned), np.array(met))


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


def _adjoined(keys: Iterable[Rows]) -> list[Rows]:
    """The same keys in fewer runs: those that continue others are one with them."""
    joined: list[Rows] = []
    for rows in sorted(keys):
        if joined and rows.step == joined[-1].step and rows.start == joined[-1].last + rows.step:
            joined[-1] = joined[-1]._replace(length=joined[-1].length + rows.length)
        else:
            joined.append(rows)
    return joined


def _is_listed(call: Call, branch: int) -> bool:
    """Whether all pairs of listed blocks count."""
    pattern = call.pattern
    is_first = pattern.counts == "sum" or pattern.order(call.drops)[0] == branch
    return is_first and isinstance(pattern.branches_for(call.held.total)[branch], Blocks)


def _listed(call: Call, branch: int, of_keys: bool) -> Strip:
    """The blocks as one strip: a list may have a million, which rectangles would take a minute for."""
    blocks = call.pattern.branches_for(call.held.total)[branch]
    assert isinstance(blocks, Blocks)
    size, pairs = blocks.size, np.array(blocks.pairs)
    pairs = pairs[pairs[:, 1] <= pairs[:, 0]] if call.is_causal else pairs
    mine, met = (pairs[np.lexsort(pairs.T)][:, ::-1] if of_keys else pairs).T
    rows: list[Array] = []
    runs: list[Array] = []
    before = 0
    for begin, end in _sequences(call):
        some = (mine * size < end - begin) & (met * size < end - begin)
        own, other = mine[some], met[some]
        is_new = np.append(True, (np.diff(own) != 0) | (np.diff(other) != 1))[: len(own)]
        first, last = np.flatnonzero(is_new), np.flatnonzero(np.append(is_new[1:], True)[: len(own)])
        numbers, which = np.unique(own, return_inverse=True)
        for found, index, from_block, to_block in ((rows, 0, numbers, numbers), (runs, 1, other[first], other[last])):
            start = from_block * size
            length = np.minimum((to_block + 1) * size, end - begin) - start
            step = np.ones_like(start)
            found.append(np.stack([*([before + which[first]] if index else []), begin + start, step, length], 1))
        before += len(numbers)
    low, high = (0 if call.is_causal and is_later else None for is_later in (of_keys, not of_keys))
    return Strip(branch, low, high, 1, 0, np.concatenate(rows), np.concatenate(runs))


# --- tiles --------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Tiles at positions from ``start`` on, so many times."""

    start: int
    period: int
    repeats: int
    tiling: Tiling


def pieces(strip: Strip, own: int, other: int) -> Iterator[Piece]:
    """The tables of a strip."""
    limits = strip.low, strip.high, own, other
    inner = _inner(strip, own)
    if len(inner) < 3:
        yield Piece(0, strip.period, strip.repeats, _tiling(strip.mine, strip.met, *limits))
        return
    start, step, length = strip.mine[0].tolist()
    size = own * step
    for some in (range(inner.start), range(inner.stop, -(-length // own))):
        if some:
            rows = [start + some.start * size, step, min(length - some.start * own, len(some) * own)]
            yield Piece(0, 0, 1, _tiling(np.array([rows]), strip.met, *limits))
    at = start + inner.start * size
    around = strip.met - np.array([0, at, 0, 0])
    yield Piece(at, size, len(inner), _tiling(np.array([[0, step, own]]), around, *limits))


def _inner(strip: Strip, own: int) -> range:
    """The tiles that are full and meet as many rows as any, where all move along on both sides."""
    if strip.low is None or strip.high is None or strip.repeats > 1 or len(strip.met) > 1:
        return range(0)
    mine, met = Rows(*strip.mine[0].tolist()), Rows(*strip.met[0, 1:].tolist())
    size = own * mine.step
    first = max(0, -((mine.start + strip.low - met.start) // size))
    last = min(mine.length // own, (met.last - strip.high - (own - 1) * mine.step - mine.start) // size + 1)
    return range(first, max(first, last)) if met.step == mine.step else range(0)


def _tiling(mine: Array, met: Array, low: int | None, high: int | None, own: int, other: int) -> Tiling:
    start, step, length = mine.T
    tiles = -(-length // own)
    strip, number = _counted(tiles)
    base, last = start[strip] + number * own * step[strip], (start + (length - 1) * step)[strip]
    many = np.bincount(met[:, 0], minlength=len(mine))
    tile, number = _counted(many[strip])  # (E,)
    rows = met[(many.cumsum() - many)[strip[tile]] + number, 1:]
    end = np.minimum(base + (own - 1) * step[strip], last)
    whole, edges = _runs_of(rows, base[tile], end[tile], low, high, other)
    runs: list[Array] = []
    columns: list[Array] = []
    for some, which in ((whole, tile), (edges.reshape(-1, 5), tile.repeat(2))):
        there = some[:, 3] > 0
        count = np.bincount(which[there], minlength=len(base))
        first = sum(len(x) for x in runs) + count.cumsum() - count
        columns += [first, np.bincount(which, some[:, 3], len(base)).astype(np.int64)]
        runs.append(some[there])
    first, plain, first_edge, masked = columns
    table = np.stack([base, step[strip], last + 1, first, plain, masked, first_edge], 1)
    return Tiling(table, np.concatenate(runs), bool(masked.any()), True, np.array([len(base)]))


def _counted(counts: Array) -> tuple[Array, Array]:
    """Of things that are counted: which count has it, and its number there."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (counts.cumsum() - counts)[which]


def _runs_of(
    rows: Array, base: Array, last: Array, low: int | None, high: int | None, other: int
) -> tuple[Array, Array]:
    """What tiles of rows from ``base`` to ``last`` meet of these: a run of whole tiles (E, 5), and one on either side
    of them that the limits cut (E, 2, 5)."""
    start, step, count = rows.T

    def from_token(token: Array) -> Array:
        return np.clip(-((start - token) // step), 0, count)

    begin = sure = np.zeros_like(base)
    end = upto = count
    if low is not None:
        begin, sure = from_token(base + low), from_token(last + low)
    if high is not None:
        end, upto = from_token(last + high + 1), from_token(base + high + 1)
    end, sure = np.maximum(begin, end), np.maximum(sure, begin)
    tiles = -(-(end - begin) // other)
    before = np.minimum(-(-(sure - begin) // other), tiles)
    inside = np.clip((np.minimum(upto, end) - begin) // other - before, 0, None)
    stop, ones = start + (end - 1) * step + 1, np.ones_like(base)
    found = [
        np.stack([start + (begin + skipped * other) * step, step, stop, number, ones], 1)
        for skipped, number in ((before, inside), (0 * before, before), (before + inside, tiles - before - inside))
    ]
    return found[0], np.stack(found[1:], 1)


def shows_itself(strip: Strip) -> bool:
    """Whether each query sees its own key."""
    which, *met = strip.met.T
    mine = strip.mine[which].T
    in_step = (mine[1] == met[1]) & ((mine[0] - met[0]) % met[1] == 0)
    inside = (met[0] <= mine[0]) & (mine[0] + (mine[2] - 1) * mine[1] <= met[0] + (met[2] - 1) * met[1])
    own = np.bincount(which[in_step & inside], minlength=len(strip.mine))
    return bool(own.all()) and (strip.low or 0) <= 0 <= (strip.high or 0)


def cover(strips: Iterable[Strip], call: Call) -> bool:
    """Whether they have every row of every head."""
    rows = sum(strip.heads * int(strip.mine[:, 2].sum()) * strip.repeats for strip in strips)
    return rows == call.kv_heads * call.queries
