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
from dataclasses import dataclass, replace

import numpy as np

from dilated_attention.backends.triton import nesting
from dilated_attention.backends.triton.endless import stretches
from dilated_attention.backends.triton.tiling import Array, Nest, Nests
from dilated_attention.branches import Blocks
from dilated_attention.branches.base import FOREVER, Rect, grouped
from dilated_attention.call import Call
from dilated_attention.checks import Ints
from dilated_attention.pattern import DilatedPattern

NONE = 2**30  # a limit that is none


@dataclass(frozen=True, eq=False)
class Strip:
    """Rows of programs and the rows that these meet, within limits; of some heads that follow one another."""

    branch: int
    low: int  # of the position met less that of mine
    high: int
    repeats: int
    period: int
    mine: Array  # (M, 3): start, step and stop of queries, or of keys where programs have tiles of keys
    met: Array  # (K, 5): which of mine, rising; start, step, stop, and 1
    turn: int = 0  # the number of its launch, of those of the branch
    start: int = 0  # of all positions
    head: int = 0
    heads: int = 0


Strips = tuple[Strip, ...]  # of one launch


def launches(call: Call, kernel: str = "forward") -> tuple[Nests | Strips, ...] | None:
    """What each launch of a kernel has to do: no two strips of a launch have a row of their own in common. None: some
    pairs would have to be masked one by one."""
    if isinstance(call.pattern, DilatedPattern):
        return nesting.launches(call)
    about = {name: getattr(call, name) for name in ("kv_heads", "total", "first_head", "total_heads", "cu_seqlens")}
    return _launches(Call(call.pattern, call.is_causal, dropout_p=float(call.drops), **about), kernel == "dkdv")


@functools.lru_cache(maxsize=64)
def _launches(call: Call, of_keys: bool) -> tuple[Strips, ...] | None:
    """``of_keys``: programs have tiles of keys."""
    found: list[Strips] = []
    for branch in range(len(call.branches)):
        alike = grouped((head for head, _ in call.placed(branch)), call.looks)
        shared: dict[tuple[Rect, ...], list[int]] = {}
        # whether all pairs of listed blocks count
        is_first = call.pattern.counts == "sum" or call.pattern.order(call.drops)[0] == branch
        is_listed = is_first and isinstance(call.branches[branch], Blocks)
        for some in alike.values():
            rects = () if is_listed else _rects(call, branch, some[0], of_keys)
            if rects is None:
                return None
            shared.setdefault(rects, []).extend(some)
        strips = [
            replace(strip, head=first, heads=stop - first)
            for rects, heads in shared.items()
            for strip in (_listed(call, branch, of_keys) if is_listed else _strips(branch, rects))
            for first, stop in stretches(sorted(heads))
        ]
        found += [tuple(some) for _, some in sorted(grouped(strips, lambda strip: strip.turn).items())]
    return tuple(found)


def _rects(call: Call, branch: int, head: int, of_keys: bool) -> tuple[Rect, ...] | None:
    """Those of a branch; None if one has a mask."""
    found: list[Rect] = []
    has_blocks = isinstance(call.branches[branch], Blocks)
    for begin, end in itertools.pairwise(call.full_cu_seqlens):
        for rect, but in call.parts(branch, head, range(end - begin), end - begin):
            if but:
                return None
            if not rect.is_empty:
                moved = rect.moved(begin)
                moved = moved.turned() if of_keys else moved
                found += moved.singles() if has_blocks else [moved]
    return tuple(found)


def _strips(branch: int, rects: Iterable[Rect]) -> Iterator[Strip]:
    """Rectangles with the same limits are one strip."""
    together: dict[Hashable, list[Rect]] = {}
    for rect in rects:
        mine = rect.queries
        # at a limit of 0 the diagonal cuts off what no row meets, so that rows may be fewer than others'
        alike = mine.start, mine.step, None if (rect.low, rect.high) == (0, FOREVER) else len(mine)
        together.setdefault((alike, *rect[2:]), []).append(rect)
    taken: list[list[Rect]] = []
    strips: dict[Hashable, tuple[int, Rect, list[Ints], list[Ints]]] = {}
    for number, some in enumerate(together.values()):
        longest = max(some, key=lambda rect: len(rect.queries))
        turn = next((i for i, others in enumerate(taken) if not _meets(longest, others)), len(taken))
        taken += [[]] if turn == len(taken) else []
        taken[turn].append(longest)
        alone = number if longest.low > -FOREVER and longest.high < FOREVER else None  # its tiles may be alike
        *_, owned, met = strips.setdefault((turn, alone, *longest[2:]), (turn, longest, [], []))
        met += sorted((len(owned), x.start, x.step, x[-1] + 1, 1) for x in [rect.keys for rect in some])
        owned.append((longest.queries.start, longest.queries.step, longest.queries[-1] + 1))
    for turn, rect, owned, met in strips.values():
        yield Strip(branch, *rect[2:], np.array(owned), np.array(met), turn)


def _meets(rect: Rect, others: list[Rect]) -> bool:
    """Whether rectangles may have rows of their own in common with this one."""
    begin, end = rect.queries[0], rect.queries[-1] + (rect.repeats - 1) * rect.period
    for other in reversed(others):
        if begin > other.queries[-1] + (other.repeats - 1) * other.period or end < other.queries.start:
            continue
        if rect.period == other.period > 0:  # where in a period: alike in all of them
            after = (begin - other.queries.start) % rect.period
            if other.queries[-1] - other.queries[0] < after < rect.period - (rect.queries[-1] - begin):
                continue
        steps = math.gcd(rect.queries.step, other.queries.step, rect.period, other.period)
        if (begin - other.queries.start) % steps == 0:
            return True
    return False


def _listed(call: Call, branch: int, of_keys: bool) -> Iterator[Strip]:
    """The blocks as one strip, if any is there: a list may have a million, which rectangles would take a minute for."""
    blocks = call.branches[branch]
    assert isinstance(blocks, Blocks)
    size, pairs = blocks.size, np.array(blocks.pairs)
    pairs = pairs[pairs[:, 1] <= pairs[:, 0]] if call.is_causal else pairs
    pairs = (pairs[np.lexsort(pairs.T)][:, ::-1] if of_keys else pairs).T
    rows: list[Array] = []
    runs: list[Array] = []
    before = 0
    for begin, end in itertools.pairwise(call.full_cu_seqlens):
        own, other = pairs[:, pairs.max(0) * size < end - begin]
        # runs of neighbours
        first = np.flatnonzero((np.diff(own, prepend=-1) != 0) | (np.diff(other, prepend=-1) != 1))
        after = np.append(first, len(own))[1:]
        numbers, which = np.unique(own, return_inverse=True)
        ends = (np.minimum((x + 1) * size, end - begin) + begin for x in (numbers, other[after - 1]))
        rows.append(np.stack(np.broadcast_arrays(begin + numbers * size, 1, next(ends)), 1))
        met = before + which[first], begin + other[first] * size, 1, next(ends), 1
        runs.append(np.stack(np.broadcast_arrays(*met), 1))
        before += len(numbers)
    low = 0 if call.is_causal and of_keys else -FOREVER
    high = FOREVER if of_keys or not call.is_causal else 0
    if before:
        yield Strip(branch, low, high, 1, 0, np.concatenate(rows), np.concatenate(runs))


# --- tiles --------------------------------------------------------------------------------------------------------


def pieces(strip: Strip, own: int) -> list[Strip]:
    """What the table of a strip has: all of it, or its first tiles, its last, and one for all in between."""
    inner = _inner(strip, own)
    if len(inner) < 3:
        return [strip]
    start, step, stop = strip.mine[0].tolist()
    size = own * step
    at, last = (start + number * size for number in (inner.start, inner.stop))
    ends = [np.array([[first, step, end]]) for first, end in ((start, at), (last, stop)) if first < end]
    around = strip.met - np.array([0, at, 0, last - size, 0])  # rows that are there for all of them
    return [
        *(replace(strip, mine=mine, period=0) for mine in ends),
        replace(strip, mine=np.array([[0, step, size]]), met=around, start=at, period=size, repeats=len(inner)),
    ]


def tiles_in(mine: Array, own: int) -> Array:
    """How many tiles the rows of a strip fill."""
    start, step, stop = mine.T
    return -((start - stop) // (step * own))


def _inner(strip: Strip, own: int) -> range:
    """The tiles that are full and meet as many rows as any, where all move along on both sides."""
    if strip.low == -FOREVER or strip.high == FOREVER or strip.repeats > 1 or len(strip.met) > 1:
        return range(0)
    (start, step, stop), (_, key, key_step, key_stop, _) = strip.mine[0].tolist(), strip.met[0].tolist()
    size = own * step
    first = max(0, -((start + strip.low - key) // size))
    last = min((stop - 1 - start + step) // size, (key_stop - 1 - strip.high - size + step - start) // size + 1)
    return range(first, max(first, last)) if key_step == step else range(0)


def shows_itself(strip: Strip) -> bool:
    """Whether each query sees its own key."""
    which, first, step, stop, _ = strip.met.T
    mine = strip.mine[which].T
    in_step = (mine[1] == step) & ((mine[0] - first) % step == 0)
    own = np.bincount(which[in_step & (first <= mine[0]) & (mine[2] <= stop)], minlength=len(strip.mine))
    return bool(own.all()) and strip.low <= 0 <= strip.high


def fills(nests: Nests | Strips) -> bool:
    """Whether the first launch also writes the rows between its own: where each nest is one branch."""
    rates = [nest.rates for nest in nests if isinstance(nest, Nest)]
    return all(len(some) == 1 for some in rates) and any(some[0] > 1 for some in rates)


def cover(nests: Nests | Strips, call: Call) -> bool:
    """Whether the first launch writes every row of every head."""
    if isinstance(nests[0], Nest):
        return fills(nests) or all(nest.rates[0] == 1 for nest in nests)
    rows = sum(strip.heads * strip.repeats * int(tiles_in(strip.mine, 1).sum()) for strip in nests)
    return rows == call.kv_heads * call.queries
