"""Which tiles of rows meet which: a call's work as a small table of integers that a kernel walks through.

A tile is some rows in arithmetic progression. A tile of queries meets runs of key tiles, and every pair of a run
counts equally often. Where the branches of a head are nested (each segment length and each rate divides the next one),
they can be one table: a pair that m branches share is computed once and counts m times, so nothing is merged and out is
written once. For the rates 1, 2, 4, 8, 16 that is a quarter less work than branch by branch.

The work repeats from period to period, so the table describes one period, and the shorter tails of all sequences.
Sequences come in all lengths, so tables of tails must be quick to make: tensors of integers, and no loop over rows or
sequences.

Legend: O offsets, T tiles, S segments of the first branch, L lists of runs, G regions that a list looks at, K kinds of
rows (those that take part in the same branches).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

CPU = torch.device("cpu")  # named everywhere: torch.set_default_device may say otherwise


class Run(NamedTuple):  # names the columns of `Tiling.runs`
    """Tiles in a row, at positions base, base + step, ... up to stop; each of their pairs counts ``times``."""

    base: int
    step: int
    stop: int
    tiles: int
    times: int


class Tile(NamedTuple):  # names the columns of `Tiling.tiles`
    """The rows of one program and the runs they meet: ``plain`` whole tiles, then ``edge`` tiles to be masked."""

    base: int
    step: int
    stop: int
    run: int  # index of the first run
    plain: int
    edge: int
    edge_run: int


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

    tiles: Tensor  # (O, T, 7), numbers of a `Tile`; run and edge_run count over all offsets
    runs: Tensor  # (runs, 5), numbers of a `Run`
    ragged: bool  # whether some tile is not full
    counts: tuple[int, ...]  # how many of the T tiles each period has, in their order


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


class Kinds(NamedTuple):
    """`rows_of` several offsets, which differ only in where rows start."""

    start: Tensor  # (O, K)
    step: Tensor  # (K,)
    level: Tensor  # (K,)

    @staticmethod
    def of(rates: tuple[int, ...], offsets: tuple[int, ...], device: torch.device) -> Kinds:
        found = torch.tensor([rows_of(rates, offset) for offset in offsets], device=device)
        return Kinds(found[:, :, 0], found[0, :, 1], found[0, :, 2])


class Regions(NamedTuple):
    """The tokens that rows meet: their own segment first, then what each further branch adds before and after it."""

    branch: Tensor  # (G,) the first in which they are met
    first: Tensor  # (S, G)
    last: Tensor  # (S, G), not included


class Lists(NamedTuple):
    """Who has a list of runs: the rows of a level in a segment, or each tile its own where it does not see all."""

    segment: Tensor  # (L,)
    level: Tensor  # (L,)


class Cut(NamedTuple):
    """Of the tiles in each region, [low, high) are met and [whole_low, whole_high) need no mask; (O, L, G, K) each."""

    low: Tensor
    whole_low: Tensor
    whole_high: Tensor
    high: Tensor


def tiling(
    widths: tuple[int, ...],
    rates: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    own: int,
    other: int,
    sees: str = "all",
    device: torch.device = CPU,
) -> Tiling:
    """The tiles of periods of so many tokens: ``own`` rows in a program, which meets tiles of ``other`` rows.

    Positions count from each period's start. ``sees``: "all", "earlier" (queries, when causal) or "later" (keys, when
    causal).
    """
    kinds, (period, regions) = Kinds.of(rates, offsets, device), _regions(widths, lengths, sees, device)
    start, stop = regions.first[:, 0], regions.last[:, 0]
    segment, kind, number = _numbered(_over(_over((stop - start)[:, None], kinds.step), own))
    step, stop = kinds.step[kind], stop[segment]
    base = start[segment] + kinds.start[:, kind] + number * own * step  # (O, T)
    end = base + (own - 1) * step
    if sees == "all":  # all tiles of a level share a list in each segment, else each has its own
        count = len(rates)
        every = torch.arange(len(start) * count, device=device)
        lists, mine = Lists(every // count, every % count), segment * count + kinds.level[kind]
    else:
        lists, mine = Lists(segment, kinds.level[kind]), torch.arange(len(segment), device=device)
    cut = _cut(kinds, regions, lists, other, sees, base, torch.minimum(end, stop - 1))
    runs, *about = _runs(kinds, regions, lists, other, cut)
    tiles = torch.stack([x.expand_as(base) for x in (base, step, stop, *(x[:, mine] for x in about))], -1)
    ragged = (runs[:, 0] + (runs[:, 3] * other - 1) * runs[:, 1] >= runs[:, 2]).any() | (end >= stop).any()
    counts = torch.bincount(period[segment], minlength=len(lengths))
    return Tiling(tiles, runs, bool(ragged), tuple(counts.tolist()))


def _over(x: Tensor, y: Tensor | int) -> Tensor:
    """x / y, rounded up."""
    return -((-x) // y)


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The segment, the kind and the number in it of each tile, given their (S, K) counts."""
    each = counts.flatten()
    which = torch.repeat_interleave(torch.arange(len(each), device=each.device), each)
    number = torch.arange(len(which), device=each.device) - (each.cumsum(0) - each)[which]
    return which // counts.shape[1], which % counts.shape[1], number


def _regions(
    widths: tuple[int, ...], lengths: tuple[int, ...], sees: str, device: torch.device
) -> tuple[Tensor, Regions]:
    """Which period each segment of the first branch is in, (S,), and its regions."""
    length = torch.tensor(lengths, device=device)
    period, _, number = _numbered(_over(length, widths[0])[:, None])
    start, length = number * widths[0], length[period]
    first, last = start, torch.minimum(start + widths[0], length)
    found = [(0, first, last)]
    for branch, width in enumerate(widths[1:], 1):
        before = start // width * width
        after = torch.minimum(before + width, length)
        if sees != "later":
            found.append((branch, before, first))
        if sees != "earlier":
            found.append((branch, last, after))
        first, last = before, after
    branches, firsts, lasts = zip(*found, strict=True)
    return period, Regions(torch.tensor(branches, device=device), torch.stack(firsts, 1), torch.stack(lasts, 1))


def _cut(kinds: Kinds, regions: Regions, lists: Lists, other: int, sees: str, first: Tensor, last: Tensor) -> Cut:
    """``first`` and ``last``: positions of the tile that a list is for, (O, L); not read where it sees all."""
    # a region begins at a multiple of every step
    start = regions.first[lists.segment, :, None] + kinds.start[:, None, None]
    count = _over(regions.last[lists.segment, :, None] - start, kinds.step).clamp(min=0)
    met = torch.minimum(kinds.level, lists.level[:, None])[:, None] >= regions.branch[:, None]  # (L, G, K)
    count = torch.where(met, count, 0)
    cut = Cut(torch.zeros_like(count), torch.zeros_like(count), count // other, _over(count, other))
    if sees == "all":
        return cut
    # only in its own segment, the first region, does a tile meet others in part
    low, whole_low, whole_high, high = (x[:, :, 0] for x in cut)
    near, size, first, last = start[:, :, 0], kinds.step * other, first[..., None], last[..., None]
    if sees == "earlier":  # tiles that begin by the last row; whole: end by the first
        high.clamp_(max=((last - near) // size + 1).clamp(min=0))
        whole_high.clamp_(max=((first - near + kinds.step) // size).clamp(min=0)).clamp_(max=high)
    else:  # tiles that end at the first row or later; whole: begin there
        low.copy_(_over(first - near - size + kinds.step, size).clamp(min=0)).clamp_(max=high)
        whole_low.copy_(_over(last - near, size)).clamp_(min=low).clamp_(max=high)
        whole_high.clamp_(min=whole_low).clamp_(max=high)
    return cut


def _runs(kinds: Kinds, regions: Regions, lists: Lists, other: int, cut: Cut) -> tuple[Tensor, ...]:
    """All runs; and of each list, (O, L): its first run, its whole tiles, its tiles to be masked, their first run."""
    begin = torch.cat([cut.whole_low.flatten(2), torch.stack([cut.low, cut.whole_high], -1).flatten(2)], -1)
    end = torch.cat([cut.whole_high.flatten(2), torch.stack([cut.whole_low, cut.high], -1).flatten(2)], -1)
    tiles, whole = end - begin, cut.low[0, 0].numel()  # (O, L, 3 G K), of which the first G K are of whole tiles
    offset, index, column = tiles.nonzero(as_tuple=True)
    place = torch.where(column < whole, column, (column - whole) // 2)
    region, kind = place // len(kinds.step), place % len(kinds.step)
    segment, step = lists.segment[index], kinds.step[kind]
    base = regions.first[segment, region] + kinds.start[offset, kind] + begin[offset, index, column] * step * other
    times = 1 + torch.minimum(kinds.level[kind], lists.level[index]) - regions.branch[region]
    runs = torch.stack([base, step, regions.last[segment, region], tiles[offset, index, column], times], -1)
    many = (tiles > 0).flatten(0, 1).sum(1)
    first = (many.cumsum(0) - many).view(tiles.shape[:2])
    plain, edge = tiles[..., :whole], tiles[..., whole:]
    return runs, first, plain.sum(-1), edge.sum(-1), first + (plain > 0).sum(-1)
