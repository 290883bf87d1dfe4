"""Which tiles of rows meet which: a call's work as a small table of integers that a kernel walks through.

A tile is some rows in arithmetic progression. A tile of queries meets runs of key tiles, and every pair of a run
counts equally often. Where the branches of a head are nested (each segment length and each rate divides the next one),
they can be one table: a pair that m branches share is computed once and counts m times, so nothing is merged and out is
written once. For the rates 1, 2, 4, 8, 16 that is a quarter less work than branch by branch.

The work repeats from period to period, so the table describes one period, and the shorter tails of all sequences.
Sequences come in all lengths, so tables of tails must be quick to make: few steps on whole arrays of integers, and no
loop over rows or sequences. Small arrays are numpy's, whose steps cost least, and large ones are torch's on the device.

Legend: O offsets, T tiles, S segments of the first branch, L lists of runs, C columns: each of the G regions that a
list looks at, with each of the K kinds of rows (those that take part in the same branches); P places in a list where a
run can be: the whole tiles of each column, then those to be masked.
"""

from __future__ import annotations

import functools
import itertools
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")  # named everywhere: torch.set_default_device may say otherwise
FEW = 1 << 19  # places: those of more are looked through on the device
AT_ONCE = 1 << 24  # places, each of which takes some ten integers

Array = Any  # of integers: numpy's or torch's


class Nest(NamedTuple):
    """Branches that some key/value heads run in one table."""

    branch: int  # the first
    widths: tuple[int, ...]
    rates: tuple[int, ...]
    head: int  # the first head, counted from those here
    offsets: tuple[int, ...]  # of each head


Nests = tuple[Nest, ...]  # of one launch: no two of them have a row in common


class Tiling(NamedTuple):
    """The tables of some offsets; each has as many tiles, some of which may be empty."""

    # (O * T, 7), the rows of one program and what they meet: base, step, stop; the index of the first run, the
    # number of whole tiles, that of tiles to be masked, and the index of their first run. Both count over all offsets
    tiles: Array
    # (runs, 5), tiles in a row, at positions base, base + step, ... up to stop: base, step, stop, the number of tiles,
    # and how often each of their pairs counts
    runs: Array
    edges: bool  # whether some tile is masked
    ragged: bool  # whether some tile is not full
    counts: Array  # how many of the T tiles each period has, in their order


def are_nested(widths: tuple[int, ...], rates: tuple[int, ...]) -> bool:
    """Whether these branches can be one table, if each head's offset is the same number modulo every rate."""
    pairs = [*itertools.pairwise(widths), *itertools.pairwise(rates)]
    return all(after % before == 0 for before, after in pairs) and all(width % rates[-1] == 0 for width in widths)


def rows_of(rates: tuple[int, ...], offset: int) -> list[tuple[int, int, int]]:
    """(start, step, level) of a head's rows: positions start mod step, which are in the branches 0 to level."""
    found = []
    for level, (rate, after) in enumerate(itertools.pairwise(rates)):
        found += [((offset + phase) % after, after, level) for phase in range(rate, after, rate)]
    return [*found, (offset % rates[-1], rates[-1], len(rates) - 1)]


# What the pattern alone says of columns, all arrays.
PatternColumns = namedtuple(
    "PatternColumns",
    (
        "start",  # (C, O), of the rows in a region
        "step", "level",  # (C,), of the rows: they are in the branches 0 to level
        "times",  # (C, levels): how often a list of this level counts a row; 0 or less: never
        "place",  # (P,), the column
    ),
)  # fmt: skip

# What the lengths say, the same for all offsets, all arrays.
Shape = namedtuple(
    "Shape",
    (
        "first", "last",  # (C, S), where a region begins: at a multiple of every step; and ends
        # (L,), of a list: the rows of a level in a segment, or each tile its own where it does not see all
        "segment", "level",
        "base", "stop", "kind",  # (T,), the base less the start of its kind
        "mine",  # (T,), its list where it sees all
    ),
)  # fmt: skip


def tiling(
    widths: tuple[int, ...], rates: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...], own: int,
    other: int, sees: str = "all", device: torch.device = CPU,
) -> Tiling:  # fmt: skip
    """The tiles of periods of so many tokens: ``own`` rows in a program, which meets tiles of ``other`` rows.

    Positions count from each period's start. ``sees``: "all", "earlier" (queries, when causal) or "later" (keys, when
    causal).
    """
    columns, kinds = _columns(rates, offsets, sees)
    period, first, last = _regions(widths, np.array(lengths), sees)
    segment, kind, number = _numbered(_over((last[0] - first[0])[:, None], own * columns.step[:kinds]))
    counts = np.bincount(period[segment], minlength=len(lengths))
    base = first[0, segment] + number * own * columns.step[kind]
    mine = segment * len(rates) + columns.level[kind]
    lists = np.arange(len(period) * len(rates)) if sees == "all" else mine
    shape = Shape(
        np.repeat(first, kinds, 0), np.repeat(last, kinds, 0), lists // len(rates), lists % len(rates), base,
        last[0, segment], kind, mine,
    )  # fmt: skip
    places = len(lists) * len(columns.place)
    dtype = np.int32 if max(lengths) + 2 * max(own, other) * rates[-1] < 2**31 else np.int64  # fewer bytes, less time
    xp: Any = np if places * len(offsets) <= FEW else torch
    put = functools.partial(np.asarray, dtype=dtype) if xp is np else functools.partial(tensor_on, device, dtype=dtype)
    columns, shape = PatternColumns(*map(put, columns)), Shape(*map(put, shape))
    parts, at_once, runs_before = [], max(1, AT_ONCE // places), 0
    for at in range(0, len(offsets), at_once):
        some = columns._replace(start=columns.start[:, at : at + at_once])
        tiles, runs = _tables(xp, some, shape, kinds, own, other, sees)
        if runs_before:
            tiles[:, 3::3] += runs_before
        runs_before += len(runs)
        parts.append((tiles, runs))
    tiles, runs = (x[0] if len(x) == 1 else xp.concatenate(x) for x in zip(*parts, strict=True))
    ragged = _ends_late(runs, runs[:, 3] * other) | _ends_late(tiles, own)
    return Tiling(tiles, runs, bool(tiles[:, 5].any()), bool(ragged), counts)


def tensor_on(device: torch.device, x: Array, dtype: Any = None) -> Tensor:
    return torch.from_numpy(np.asarray(x, dtype)).to(device) if isinstance(x, np.ndarray) else x.to(device)


def stacked(numbers: tuple[Array, ...], like: Array) -> Array:
    """All of them side by side, each for every number of ``like``."""
    shape = (*like.shape, len(numbers))
    found = np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)
    for index, number in enumerate(numbers):
        found[..., index] = number
    return found


def _taken(x: Array, rows: Array) -> Array:
    """x[rows], for which numpy needs three times as long."""
    return x.take(rows, 0) if isinstance(x, np.ndarray) else x[rows]


def _ends_late(x: Array, rows: Array) -> Array:
    """Whether some tile or run of so many rows has one at its stop or beyond."""
    return (x[:, 0] + (rows - 1) * x[:, 1] >= x[:, 2]).any()


def _over(x: Array, y: Array) -> Array:
    """x / y, rounded up."""
    return -(-x // y)


def _numbered(counts: Array) -> tuple[Array, Array, Array]:
    """The row, the column and the number in it of each thing that is counted."""
    each = counts.ravel()
    which = np.repeat(np.arange(len(each)), each)
    number = np.arange(len(which)) - (each.cumsum() - each)[which]
    return which // counts.shape[1], which % counts.shape[1], number


@functools.lru_cache(maxsize=256)
def _columns(rates: tuple[int, ...], offsets: tuple[int, ...], sees: str) -> tuple[PatternColumns, int]:
    """And the number of kinds."""
    branch = [0, *np.repeat(range(1, len(rates)), 2 if sees == "all" else 1)]
    rows = np.array([rows_of(rates, offset) for offset in offsets]).transpose(2, 1, 0)
    kinds = rows.shape[1]
    start, step, level = np.tile(rows, (1, len(branch), 1))  # (C, O) each
    times = 1 + np.minimum(level[:, :1], range(len(rates))) - np.repeat(branch, kinds)[:, None]
    every = np.arange(len(times))
    edges = np.concatenate([np.repeat(every[:kinds], 2), every[kinds:]]) if sees == "later" else every
    return PatternColumns(start, step[:, 0], level[:, 0], times, np.concatenate([every, edges])), kinds


def _regions(widths: tuple[int, ...], length: Array, sees: str) -> tuple[Array, Array, Array]:
    """Which period each segment of the first branch is in, (S,), and the tokens that its rows meet, (G, S): first and
    last of their own segment, then of what each further branch adds before and after it."""
    period, _, number = _numbered(_over(length, widths[0])[:, None])
    start, length = number * widths[0], length[period]
    first, last = start, np.minimum(start + widths[0], length)
    firsts, lasts = [first], [last]
    for width in widths[1:]:
        before = start // width * width
        after = np.minimum(before + width, length)
        firsts += [before] * (sees != "later") + [last] * (sees != "earlier")
        lasts += [first] * (sees != "later") + [after] * (sees != "earlier")
        first, last = before, after
    return period, np.array(firsts), np.array(lasts)


def _tables(
    xp: Any, columns: PatternColumns, shape: Shape, kinds: int, own: int, other: int, sees: str
) -> tuple[Array, Array]:
    """The tiles and the runs of some offsets."""
    start, step, _, times, place = columns
    segment, step, times = shape.segment, step[:, None, None], times[:, None, shape.level]
    near = shape.first[:, None] + start[:, :, None]  # (C, O, S)
    rows = _over(shape.last[:, None] - near, step).clip(0)
    near, met = near[:, :, segment], times > 0
    whole, high = (rows // other)[:, :, segment] * met, _over(rows, other)[:, :, segment] * met
    base, steps = shape.base + start[shape.kind].T, columns.step[shape.kind]  # (O, T)
    last = xp.minimum(base + (own - 1) * steps, shape.stop - 1)
    begin, end = _cut(xp, whole, high, near[:kinds], step[:kinds], base, last, other, sees)
    tiles, step = end - begin, step[place]
    first, stop = near[place] + begin * step * other, shape.last[place][:, None, segment]
    runs = stacked((first, step, stop, tiles, times[place]), tiles).reshape(-1, 5)
    is_run, plain = tiles > 0, len(whole)  # places
    found = xp.argwhere(is_run.swapaxes(0, 1).swapaxes(1, 2).reshape(-1))[:, 0]  # list by list
    runs = _taken(runs, found % len(place) * (len(runs) // len(place)) + found // len(place))
    many = is_run.sum(0)
    run = many.reshape(-1).cumsum(0).reshape(many.shape) - many
    about = (run, tiles[:plain].sum(0), tiles[plain:].sum(0), run + is_run[:plain].sum(0))
    if sees == "all":  # the tiles of a level share a list in each segment
        about = tuple(x[:, shape.mine] for x in about)
    return stacked((base, steps, shape.stop, *about), base).reshape(-1, 7), runs


def _cut(
    xp: Any, whole: Array, high: Array, near: Array, step: Array, first: Array, last: Array, other: int, sees: str
) -> tuple[Array, Array]:
    """Which of its column's tiles are in each place, [begin, end), (P, O, L).

    A column has ``high`` tiles from ``near`` on, of which ``whole`` are full, (C, O, L). Only those of the list's own
    segment, in the first columns, does it meet in part: its tile has the rows from ``first`` to ``last``, (O, L).
    """
    kinds, size = len(near), step * other
    if sees == "earlier":  # tiles that begin by the last row; whole: end by the first
        high[:kinds] = top = xp.minimum(high[:kinds], (last - near) // size + 1)
        whole[:kinds] = xp.minimum(xp.minimum(whole[:kinds], (first - near + step) // size), top)
    begin, end = [xp.zeros_like(whole), whole], [whole, high]
    if sees == "later":  # tiles that end at the first row or later; whole: begin there
        top = high[:kinds]
        low = xp.minimum(_over(first - near - size + step, size), top)
        begin[0][:kinds] = full = xp.minimum(xp.maximum(_over(last - near, size), low), top)
        whole[:kinds] = xp.minimum(xp.maximum(whole[:kinds], full), top)
        begin[1:] = [xp.stack([low, whole[:kinds]], 1).reshape(-1, *top.shape[1:]), whole[kinds:]]
        end[1:] = [xp.stack([full, top], 1).reshape(-1, *top.shape[1:]), high[kinds:]]
    return xp.concatenate(begin), xp.concatenate(end)
