"""How many (query, key) pairs of a branch are in each cell of a picture, and how large a cell is.

Queries and keys are cut by the same edges into stretches of tokens. The pairs are those of the branch's rectangles, of
which no work grows with the number of tokens: repeats that lie in one cell are counted together.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dilated_attention.branches import Branch
from dilated_attention.branches.base import Rect, inside

OVERVIEW = 128  # stretches of several tokens
BEYOND = 2**60  # farther than any token


@functools.lru_cache(maxsize=16)  # of one head the next has many branches, too
def shares(branch: Branch, head: int, tokens: int, is_causal: bool, edges: tuple[int, ...]) -> Tensor:
    """(stretches of queries, stretches of keys): the share of the cell's pairs that the branch shows, 0 to 1."""
    cuts = (-BEYOND, *edges, BEYOND)  # the outermost cells are not shown
    alone = defaultdict[tuple[int, int], float](float)
    counts = torch.zeros(len(cuts) - 1, len(cuts) - 1, dtype=torch.float64)  # which does not overflow
    for rect in branch.rects(head, range(edges[0], edges[-1]), tokens, is_causal):
        pairs = float(rect._replace(repeats=1).pairs())
        for first, stop in _runs(rect, edges) if pairs else ():
            one = rect.some(first, first + 1)
            down, across = (slice(bisect_right(cuts, x.start) - 1, bisect_right(cuts, x[-1])) for x in one[:2])
            if down.stop - down.start == across.stop - across.start == 1:
                alone[down.start, across.start] += pairs * (stop - first)
                continue
            at = cuts[down.start]  # from here on, so that repeats are alike
            sides = (tuple(cut - at for cut in cuts[x.start : x.stop + 1]) for x in (down, across))
            counts[down, across] += _spread(one.moved(-at), *sides)
    cells = torch.tensor([*alone], dtype=torch.int64).view(-1, 2).T
    counts.index_put_((*cells,), torch.tensor([*alone.values()], dtype=torch.float64), accumulate=True)
    lengths = torch.tensor(edges).diff().double()
    return counts[1:-1, 1:-1] / (lengths[:, None] * lengths)


def _runs(rect: Rect, edges: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The repeats in runs, [first, stop): those of a run lie in the same cell each, or are one only."""
    cuts = {*range(min(rect.repeats, len(edges))), rect.repeats}
    for rows, edge in itertools.product(rect[:2], edges if len(cuts) <= rect.repeats else ()):
        # the first whose last row is not before the edge, and the first that has no row before it
        first, after = (-((token - edge) // rect.period) for token in (rows[-1], rows[0]))
        cuts.update(range(max(0, first), min(after, rect.repeats) + 1))
    return itertools.pairwise(sorted(cuts))


@functools.lru_cache(maxsize=8)
def _spread(rect: Rect, down: tuple[int, ...], across: tuple[int, ...]) -> Tensor:
    """The pairs of one rectangle in each cell between these edges."""
    (rows, first, last), (columns, left, right) = _in_stretches(rect.queries, down), _in_stretches(rect.keys, across)
    counts = rows[:, None].double() * columns
    least, most = left - last[:, None], right - first[:, None]  # key - query in the corners of a cell
    counts[(most < rect.low) | (least > rect.high)] = 0
    for i, j in ((counts > 0) & ((least < rect.low) | (most > rect.high))).nonzero().tolist():
        queries, keys = inside(rect.queries, *down[i : i + 2]), inside(rect.keys, *across[j : j + 2])
        counts[i, j] = float(rect._replace(queries=queries, keys=keys).pairs())
    return counts


def _in_stretches(rows: range, edges: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each stretch: how many rows it has, the first and the last of them."""
    before = (-((rows.start - torch.tensor(edges)) // rows.step)).clamp(0, len(rows))
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
