"""How many (query, key) pairs of a branch are in each cell of a picture, and how large a cell is.

Queries and keys are cut by the same edges into stretches of tokens. Two different stretches share at most one segment
of a branch: the one that holds the last token of the earlier stretch and the first token of the later one. So five
numbers per stretch give every cell, and no work grows with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

OVERVIEW = 128  # stretches of several tokens


def branch_shares(edges: Sequence[int], width: int, rate: int, offset: int, *, is_causal: bool) -> Tensor:
    """(stretches of queries, stretches of keys): the share of the cell's pairs that the branch computes, 0 to 1."""
    cuts = torch.tensor(edges)
    start, stop = cuts[:-1], cuts[1:]
    first, last = start // width, (stop - 1) // width

    def before(token: Tensor) -> Tensor:
        """How many rows of a segment come before one of its tokens: as float64, whose squares do not overflow."""
        return (-((offset - token.clamp(0, width)) // rate)).clamp(min=0).double()

    def rows(segment: Tensor) -> Tensor:
        """How many rows of a segment are in each stretch."""
        return before(stop - segment * width) - before(start - segment * width)

    def alone(count: Tensor) -> Tensor:
        """The pairs of so many rows of one segment among themselves."""
        return count * (count + 1) / 2 if is_causal else count * count

    front, back, whole = rows(first), rows(last), before(torch.tensor(width))
    inside = alone(back) + (last - first - 1) * alone(whole)
    own = alone(front) + torch.where(last > first, inside, 0)
    pairs = torch.where(first[:, None] == last, front[:, None] * back, 0).tril(-1)  # queries after keys
    if not is_causal:
        pairs = pairs + pairs.T
    lengths = (stop - start).double()
    return (pairs + own.diag()) / (lengths[:, None] * lengths)


def edges(start: int, stop: int, most: int, numbers: Iterable[int]) -> tuple[int, ...]:
    """Where a picture of the tokens [start, stop) is cut: each token for itself if they are at most ``most``.

    Longer stretches are in step with ``numbers``, the segment lengths and dilation rates: of two, one divides the
    other. A stretch that is out of step with a rate would show a moiré that the pattern does not have. Where no length
    is in step with all of them, one is taken that is much longer or much shorter than those it does not fit, if any is.
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
