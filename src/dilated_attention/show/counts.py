"""How many (query, key) pairs of a branch are in each cell of a picture, and how large a cell is.

Queries and keys are cut by the same edges into stretches of tokens. The pairs are those of the branch's rectangles, of
which no work grows with the number of tokens: repeats that lie in one cell are counted together, and of a band only the
cells at its sides need more than a product.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dilated_attention.branches.base import Rect, Rows

OVERVIEW = 128  # stretches of several tokens


def pairs_in_cells(rects: Iterable[Rect], edges: Sequence[int]) -> Tensor:
    """(stretches of queries, stretches of keys): the pairs of these rectangles, in float64, which does not overflow."""
    cells = len(edges) - 1
    counts = torch.zeros(cells, cells, dtype=torch.float64)
    for rect in rects:
        pairs = float(rect._replace(repeats=1).pairs())
        for index in range(rect.repeats) if rect.repeats <= cells else _add_many(counts, rect, pairs, edges):
            one = rect.some(index, index + 1)
            queries, keys = (rows.inside(edges[0], edges[-1]) for rows in one[:2])
            if pairs and queries.length and keys.length:
                _add(counts, one._replace(queries=queries, keys=keys), edges)
    return counts


def _add_many(counts: Tensor, rect: Rect, pairs: float, edges: Sequence[int]) -> Iterator[int]:
    """Count the repeats that lie in one cell each; the others are still to be counted."""
    cuts, period = torch.tensor(edges), rect.period
    tokens = torch.tensor([token for rows in rect[:2] for token in (rows.start, rows.last)])
    # the first repeats that have no row before an edge, or whose last row is not before it: from one of all these to
    # the next, repeats lie in the same cells
    firsts = (-((tokens - cuts[:, None]) // period)).clamp(0, rect.repeats)
    runs = torch.tensor(sorted({0, rect.repeats, *firsts.flatten().tolist()}))
    i, last, j, right = torch.searchsorted(cuts, tokens[:, None] + runs[:-1] * period, right=True) - 1
    is_shown = (i >= 0) & (i < len(counts)) & (j >= 0) & (j < len(counts))
    alone = (i == last) & (j == right)
    found = alone & is_shown
    counts.index_put_((i[found], j[found]), runs.diff()[found].double() * pairs, accumulate=True)
    for first, stop in torch.stack([runs[:-1], runs[1:]], 1)[~alone].tolist():
        yield from range(first, stop)


def _add(counts: Tensor, rect: Rect, edges: Sequence[int]) -> None:
    """Count the pairs of one rectangle in each cell that it meets."""
    (down, down_stop), (across, across_stop) = (
        (_stretch(x.start, edges), _stretch(x.last, edges) + 1) for x in rect[:2]
    )
    if (down_stop, across_stop) == (down + 1, across + 1):
        counts[down, across] += float(rect.pairs())
        return
    at = edges[down]  # from here on, so that repeats are alike
    sides = (tuple(x - at for x in some) for some in (edges[down : down_stop + 1], edges[across : across_stop + 1]))
    one = rect._replace(queries=rect.queries.moved(-at), keys=rect.keys.moved(-at))
    counts[down:down_stop, across:across_stop] += _spread(one, *sides)


def _stretch(token: int, edges: Sequence[int]) -> int:
    return bisect_right(edges, token) - 1


@functools.lru_cache(maxsize=8)
def _spread(rect: Rect, down: tuple[int, ...], across: tuple[int, ...]) -> Tensor:
    """The pairs of a rectangle in each cell between these edges."""
    (rows, first, last), (columns, left, right) = _in_stretches(rect.queries, down), _in_stretches(rect.keys, across)
    counts = rows[:, None].double() * columns
    least, most = left - last[:, None], right - first[:, None]  # key - query of a cell's corners
    low, high = least.min() if rect.low is None else rect.low, most.max() if rect.high is None else rect.high
    counts[(most < low) | (least > high)] = 0
    for i, j in ((counts > 0) & ((least < low) | (most > high))).nonzero().tolist():
        queries, keys = rect.queries.inside(*down[i : i + 2]), rect.keys.inside(*across[j : j + 2])
        counts[i, j] = float(rect._replace(queries=queries, keys=keys).pairs())
    return counts


def _in_stretches(rows: Rows, edges: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each stretch: how many rows it has, the first and the last of them."""
    before = (-((rows.start - torch.tensor(edges)) // rows.step)).clamp(0, rows.length)
    return before.diff(), rows.start + before[:-1] * rows.step, rows.start + (before[1:] - 1) * rows.step


def edges(start: int, stop: int, most: int, numbers: Iterable[int]) -> tuple[int, ...]:
    """Where a picture of the tokens [start, stop) is cut: each token for itself if they are at most ``most``.

    Longer stretches are in step with ``numbers``, the lengths of segments and blocks and the rates: of two, one divides
    the other. A stretch that is out of step with a rate would show a moiré that the pattern does not have. Where no
    length is in step with all of them, one is taken that is much longer or much shorter than those it does not fit, if
    any is.
    """
    if stop - start <= most:
        return (*range(start, stop + 1),)
    least, numbers = -(-(stop - start) // min(most, OVERVIEW)), [x for x in numbers if 1 < x < stop - start]

    def misfit(size: int) -> float:
        return max((min(size, x) / max(size, x) for x in numbers if size % x and x % size), default=0.0)

    sizes = [4 * least, *(x * -(-least // x) for x in (*numbers, 1))]
    sizes += [x // parts for x in numbers for parts in range(1, x // least + 1) if x % parts == 0]
    size = min((size for size in sizes if size <= 4 * least), key=lambda size: (misfit(size), size))
    return (start, *range(start - start % size + size, stop, size), stop)
