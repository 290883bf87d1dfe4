"""How many (query, key) pairs of a branch lie in each cell of a picture, counted without looking at tokens.

Queries and keys are cut by the same edges into stretches. Two different stretches share at most one segment of a
branch: the one that holds the last token of the earlier stretch, if it also holds the first of the later one. So a
cell off the diagonal is a product of two numbers of rows, and five numbers for each stretch give every cell exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dilated_attention.pattern import rows_at_offset


@dataclass(frozen=True, slots=True)
class BranchCells:
    """One branch of one head, by stretch."""

    first: tuple[int, ...]  # the segment of the stretch's first token
    last: tuple[int, ...]  # and of its last
    front: tuple[int, ...]  # rows of the stretch in its first segment
    back: tuple[int, ...]  # and in its last
    own: tuple[int, ...]  # pairs of the stretch with itself
    is_causal: bool

    @classmethod
    def of(cls, edges: Sequence[int], width: int, rate: int, offset: int, is_causal: bool) -> BranchCells:
        def rows(start: int, stop: int, segment: int) -> int:
            """The rows of a segment in [start, stop)."""
            begin, end = max(start - segment * width, 0), min(stop - segment * width, width)
            return rows_at_offset(end, rate, offset) - rows_at_offset(begin, rate, offset)

        stretches = list(itertools.pairwise(edges))
        first = tuple(start // width for start, _ in stretches)
        last = tuple((stop - 1) // width for _, stop in stretches)
        front = tuple(rows(*stretch, segment) for stretch, segment in zip(stretches, first, strict=True))
        back = tuple(rows(*stretch, segment) for stretch, segment in zip(stretches, last, strict=True))
        whole = _alone(rows_at_offset(width, rate, offset), is_causal)
        own = tuple(
            _alone(x, is_causal) + (_alone(y, is_causal) + (stop - start - 1) * whole if stop > start else 0)
            for start, stop, x, y in zip(first, last, front, back, strict=True)
        )
        return cls(first, last, front, back, own, is_causal)

    def pairs(self, row: int, column: int) -> int:
        """The pairs of the queries of one stretch with the keys of another."""
        if row == column:
            return self.own[row]
        if self.is_causal and column > row:
            return 0
        earlier, later = min(row, column), max(row, column)
        return self.back[earlier] * self.front[later] if self.last[earlier] == self.first[later] else 0

    def filled(self) -> Iterator[tuple[int, int]]:
        """(row, column) of every cell with a pair in it."""
        count = len(self.own)
        for row in range(count):
            if self.own[row]:
                yield row, row
            for later in range(row + 1, count) if self.back[row] else ():
                if self.first[later] != self.last[row]:
                    break
                if self.front[later]:
                    yield later, row
                    if not self.is_causal:
                        yield row, later


def _alone(rows: int, is_causal: bool) -> int:
    """The pairs of so many rows of a segment among themselves."""
    return rows * (rows + 1) // 2 if is_causal else rows * rows


def edges(start: int, stop: int, cells: int, numbers: Sequence[int]) -> tuple[int, ...]:
    """Where a picture of the tokens [start, stop) is cut: into stretches of one size, the last may be shorter.

    At most ``cells`` of them, and down to half as many where that puts them in step with all ``numbers``, the segment
    lengths and rates: a cell that is out of step with a rate would show a moiré that is not there.
    """
    size = -(-(stop - start) // cells)
    powers = (1 << (size - 1).bit_length(), 3 << max(0, (size - 1).bit_length() - 1))
    for fitting in sorted({size, *powers, *(x for x in numbers if size <= x <= 2 * size)}):
        if fitting <= 2 * size and start % fitting == 0 and all(x % fitting == 0 or fitting % x == 0 for x in numbers):
            size = fitting
            break
    return (*range(start, stop, size), stop)
