"""Which tiles of rows meet which: a call's work as a small table of integers that a kernel walks through.

A tile is some rows in arithmetic progression. A tile of queries meets runs of key tiles, and every pair of a run
counts equally often. Where the branches of a head are nested (each segment length and each rate divides the next one),
they can be one table: a pair that m branches share is computed once and counts m times, so nothing is merged and out is
written once. For the rates 1, 2, 4, 8, 16 that is a quarter less work than branch by branch.

The work repeats from period to period, so the table describes one period, and the shorter tails of all sequences.
Sequences come in all lengths, so tables of tails must be quick to make: few steps on whole arrays of integers, and no
loop over rows or sequences, on the device where there are many.

Legend: ``own`` rows of a program, which meets tiles of ``other`` rows; O offsets, S segments of the first branch, K
kinds of rows (those that take part in the same branches), M rows of programs, T tiles, E pairs of a tile and rows that
it meets.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilated_attention.branches.base import FOREVER
from dilated_attention.checks import Ints

CPU = torch.device("cpu")  # named everywhere: torch.set_default_device may say otherwise
FEW = 1 << 17  # rows that are met: more are looked through on the device

Array = Any  # of integers: numpy's


class Nest(NamedTuple):
    """Branches that some key/value heads run in one table."""

    branch: int  # the first
    widths: Ints
    rates: Ints
    head: int  # the first head, counted from those here
    offsets: Ints  # of each head


Nests = tuple[Nest, ...]  # of one launch: no two of them have a row in common


class Tiling(NamedTuple):
    """The tables of some offsets; each has as many tiles, some of which may be empty."""

    # (O * T, 7), the rows of one program and what they meet: base, step, stop; the index of the first run, the
    # number of whole tiles, that of tiles to be masked, and the index of their first run. Both count over all offsets
    tiles: Tensor
    # (runs, 5), tiles in a row, at positions base, base + step, ... up to stop: base, step, stop, the number of tiles,
    # and how often each of their pairs counts
    runs: Tensor
    edges: bool  # whether some tile is masked
    ragged: bool  # whether some tile is not full
    counts: Array  # how many of the T tiles each period has, in their order


def are_nested(widths: Ints, rates: Ints) -> bool:
    """Whether these branches can be one table, if each head's offset is the same number modulo every rate."""
    pairs = [*itertools.pairwise(widths), *itertools.pairwise(rates)]
    return all(after % before == 0 for before, after in pairs) and all(width % rates[-1] == 0 for width in widths)


def rows_of(rates: Ints, offset: int) -> list[tuple[int, int, int]]:
    """(start, step, level) of a head's rows: positions start mod step, which are in the branches 0 to level."""
    found = []
    for level, (rate, after) in enumerate(itertools.pairwise(rates)):
        found += [((offset + phase) % after, after, level) for phase in range(rate, after, rate)]
    return [*found, (offset % rates[-1], rates[-1], len(rates) - 1)]


LIMITS: dict[str, tuple[int, int]] = {"all": (-FOREVER, FOREVER), "earlier": (-FOREVER, 0), "later": (0, FOREVER)}


def tiling(
    widths: Ints, rates: Ints, offsets: Ints, lengths: Ints, own: int,
    other: int, sees: str = "all", device: torch.device = CPU,
) -> Tiling:  # fmt: skip
    """The tiles of nested branches in periods of so many tokens; positions count from each period's start.

    ``sees``: "all", "earlier" (queries, when causal) or "later" (keys, when causal).
    """
    kinds = np.array([rows_of(rates, offset) for offset in offsets])  # (O, K, 3)
    step, level = kinds[0, :, 1], kinds[0, :, 2]
    period, branch, firsts, lasts = _regions(widths, np.array(lengths), sees)
    tiles = -(-(lasts[0] - firsts[0])[:, None] // (own * step))  # (S, K), as many for all offsets
    counts = np.bincount(period, tiles.sum(1), len(lengths)).astype(np.int64)
    # what rows of a kind meet: another kind in a region of tokens, (C,) each
    times = 1 + np.minimum(level[:, None, None], level) - branch[:, None]
    kind, region, met_kind = (times > 0).nonzero()
    many = len(offsets) * len(period)
    where = device if many * len(kind) > FEW else CPU
    given = firsts, lasts, kinds[..., 0], tiles, step, kind, region, met_kind, times[kind, region, met_kind]
    first, last, start, many_tiles, steps, kind, region, met_kind, times = (
        torch.as_tensor(x, device=where) for x in given
    )
    mine = first[0, :, None] + start[:, None], steps, last[0, :, None], many_tiles
    which = torch.arange(many, device=where).view(len(offsets), -1, 1) * len(step) + kind
    met = which, first[region].T + start[:, None, met_kind], steps[met_kind], last[region].T, times
    both = ((torch.broadcast_tensors(*x), len(x)) for x in (mine, met))  # type: ignore[no-untyped-call]
    rows, rows_met = (torch.stack(x, -1).view(-1, many) for x, many in both)
    return tiles_of(rows, rows_met, *LIMITS[sees], own, other)._replace(counts=counts)


def _regions(widths: Ints, length: Array, sees: str) -> tuple[Array, Array, Array, Array]:
    """Which period each segment of the first branch is in, (S,), and the tokens that its rows meet: first and last of
    their own segment, then of what each further branch adds before and after it, (G, S), and that branch, (G,)."""
    period, number = (x.numpy() for x in counted(torch.from_numpy(-(-length // widths[0]))))
    start, length = number * widths[0], length[period]
    first, last = start, np.minimum(start + widths[0], length)
    firsts, lasts, branches = [first], [last], [0]
    for branch, width in enumerate(widths[1:], 1):
        before = start // width * width
        after = np.minimum(before + width, length)
        for is_met, begin, end in ((sees != "later", before, first), (sees != "earlier", last, after)):
            firsts += [begin] * is_met
            lasts += [end] * is_met
            branches += [branch] * is_met
        first, last = before, after
    return period, np.array(branches), np.array(firsts), np.array(lasts)


def tiles_of(mine: Tensor, met: Tensor, low: int, high: int, own: int, other: int) -> Tiling:
    """The tiles of rows and what these meet, if low <= position met - own position <= high.

    ``mine``: (M, 4), start, step, stop and number of tiles; ``met``: (..., 5), which of mine, rising; start, step,
    stop, and how often a pair counts.
    """
    strip, number = counted(mine[:, 3])
    start, step, stop = mine[strip, :3].T
    base = start + number * own * step
    last = torch.minimum(base + (own - 1) * step, stop - 1)
    many = met[:, 0].bincount(minlength=len(mine))
    tile, number = counted(many[strip])  # (E,)
    rows = met[(many.cumsum(0) - many)[strip[tile]] + number, 1:]
    whole, edges = _runs_of(rows, base[tile], last[tile], low, high, other)
    runs: list[Tensor] = []
    columns: list[Tensor] = []
    for some, which in ((whole, tile), (edges.view(-1, 5), tile.repeat_interleave(2))):
        there = some[:, 3] > 0
        count = which[there].bincount(minlength=len(base))
        columns += [sum(len(x) for x in runs) + count.cumsum(0) - count]
        columns += [torch.zeros_like(base).index_add_(0, which, some[:, 3])]
        runs.append(some[there])
    first, plain, first_edge, masked = columns
    table = torch.stack([base, step, stop, first, plain, masked, first_edge], 1)
    found = torch.cat(runs)
    ragged = _ends_late(found, found[:, 3] * other) | _ends_late(table, own)
    return Tiling(table, found, bool(masked.any()), bool(ragged), np.array([len(base)]))


def counted(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of things that are counted: which count has it, and its number there."""
    which = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return which, torch.arange(len(which), device=counts.device) - (counts.cumsum(0) - counts)[which]


def _ends_late(x: Tensor, rows: Tensor | int) -> Tensor:
    """Whether some tile or run of so many rows has one at its stop or beyond."""
    return (x[:, 0] + (rows - 1) * x[:, 1] >= x[:, 2]).any()


def _runs_of(rows: Tensor, base: Tensor, last: Tensor, low: int, high: int, other: int) -> tuple[Tensor, Tensor]:
    """What tiles of rows from ``base`` to ``last`` meet of these: a run of whole tiles (E, 5), and one on either side
    of them that the limits cut (E, 2, 5)."""
    start, step, stop, times = rows.T
    count = -((start - stop) // step).clamp(max=0)

    def before(token: Tensor) -> Tensor:
        return torch.minimum(-((start - token) // step).clamp(max=0), count)

    begin, sure = before(base + low) // other * other, before(last + low)  # whole tiles: none ends beyond the last
    end, upto = before(last + high + 1), before(base + high + 1)
    tiles = -((begin - torch.maximum(begin, end)) // other)
    cut = torch.minimum(-((begin - torch.maximum(begin, sure)) // other), tiles)
    inside = ((torch.minimum(upto, end) - begin) // other - cut).clamp(min=0)
    found = [
        torch.stack([start + (begin + skipped * other) * step, step, stop, number, times], 1)
        for skipped, number in ((cut, inside), (0, cut), (cut + inside, tiles - cut - inside))
    ]
    return found[0], torch.stack(found[1:], 1)
