"""The pieces of segments that ranks hold, and how many rows of each head lie in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.cost.call import Call

# Rows of so many pieces and heads are counted all at once: there the time goes into calls, not into numbers.
SMALL = 2**15


def sums_before(x: Tensor) -> Tensor:
    """(..., n + 1): the sum of all before each place. It may wrap around; the differences that are used do not."""
    found = x.new_zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=torch.int64)
    torch.cumsum(x, -1, out=found[..., 1:])
    return found


class Pieces(NamedTuple):
    """Branch after branch, in the order of the tokens; (n,) unless said otherwise."""

    branch: Tensor
    rank: Tensor
    begin: Tensor  # as counted from the segment's start
    end: Tensor
    segment: Tensor
    first: Tensor  # (S,) the segment's first piece,
    stop: Tensor  # (S,) and the one behind its last

    @staticmethod
    def of(starts: Tensor, widths: Sequence[int]) -> Pieces:
        width = torch.tensor(widths)[:, None, None]
        begin, end = starts[:-1, None], starts[1:, None]
        segment = torch.cat((begin, end - 1), 1) // width  # (branches, P, 2)
        there = (begin < end).repeat(len(widths), 1, 2)
        there[:, :, 1] &= segment[:, :, 1] > segment[:, :, 0]
        at = segment * width
        begin, end = torch.maximum(begin, at) - at, torch.minimum(end, at + width) - at
        branch, rank, _ = there.nonzero(as_tuple=True)
        return Pieces.in_segments(branch, rank, begin[there], end[there], segment[there] * len(widths) + branch)

    @staticmethod
    def in_segments(branch: Tensor, rank: Tensor, begin: Tensor, end: Tensor, segment: Tensor) -> Pieces:
        """``segment``: any numbers that tell neighbouring segments apart."""
        _, index, count = torch.unique_consecutive(segment, return_inverse=True, return_counts=True)
        stop = count.cumsum(0)
        return Pieces(branch, rank, begin, end, index, stop - count, stop)

    def some(self, segments: Tensor) -> Pieces:
        """Those of some segments, (S,) bool."""
        here = segments[self.segment]
        return Pieces.in_segments(*(x[here] for x in self[:5]))

    def per_segment(self, x: Tensor) -> Tensor:
        """(..., S): sums of x (..., n)."""
        before = sums_before(x)
        return before[..., self.stop] - before[..., self.first]

    def alike(self, x: Tensor) -> Tensor:
        """(K, S): the first kind whose x (K, n) is the same in all pieces of the segment."""
        if bool((x == x[:1]).all()):
            return torch.zeros(len(x), len(self.first), dtype=torch.int64)
        at_once = max(1, 128 * SMALL // x.numel())
        same = (self.per_segment(some.unsqueeze(1) != x) == 0 for some in torch.split(x, at_once))
        return torch.cat([one.byte().argmax(1) for one in same])  # the first of the ones


class Branches(NamedTuple):
    """One or more branches, and which head is at which offset in each."""

    numbers: Tensor  # (branches,) which of the pattern's
    widths: list[int]
    rates: Tensor  # (branches,)
    offsets: Tensor  # (kinds, branches); a width where the heads do not run the branch: no row lies there
    kinds: Tensor  # (heads,) heads of one kind have equal offsets

    @staticmethod
    def groups(call: Call, some: Sequence[int], ranks: int) -> Iterator[Branches]:
        """All together where that is little, else one by one; also one by one where offsets tell heads apart."""
        is_small = 2 * ranks * call.heads.held * len(some) < SMALL and not call.heads_apart
        for group in [some] if is_small and some else [[branch] for branch in some]:
            yield Branches.of(call, group)

    @staticmethod
    def of(call: Call, some: Sequence[int]) -> Branches:
        widths = [min(call.pattern.segment_lengths[branch], call.shards.tokens) for branch in some]
        rates = torch.tensor([call.pattern.dilation_rates[branch] for branch in some])
        offsets = [dict(call.heads.of_branch(call.pattern, branch)) for branch in some]
        columns = [
            tuple(of_heads.get(head, width) for of_heads, width in zip(offsets, widths, strict=True))
            for head in sorted({head for of_heads in offsets for head in of_heads})
        ]
        distinct = list(dict.fromkeys(columns))
        kinds = torch.tensor([distinct.index(column) for column in columns])
        return Branches(torch.tensor(some), widths, rates, torch.tensor(distinct), kinds)

    def rows_before(self, token: Tensor, pieces: Pieces, offsets: Tensor) -> Tensor:
        """(kinds, n): how many of each segment's rows come before a token (n,) of it; offsets (kinds, branches)."""
        rows = (token + (self.rates - 1 - offsets)[:, pieces.branch]) // self.rates[pieces.branch]
        return rows.clamp_(min=0)

    def work(self, pieces: Pieces) -> Iterator[Work]:
        """Where pieces are many, segments in which all heads have equally many rows go as one kind, apart from the
        others, which most often are few."""
        offsets = self.offsets
        if len(pieces.rank) * len(offsets) >= SMALL:
            # rows before a token differ among heads only if they do between the lowest offset and the highest
            ends = torch.stack((offsets.amin(0), offsets.amax(0)))
            before = torch.stack([self.rows_before(token, pieces, ends) for token in (pieces.begin, pieces.end)])
            even = pieces.per_segment((before[:, 0] != before[:, 1]).any(0)) == 0
            if bool(even.any()):
                yield Work.of(self, pieces.some(even), offsets[:1])
            if bool(even.all()):
                return
            pieces = pieces.some(~even)
        yield Work.of(self, pieces, offsets)


class Work(NamedTuple):
    """Pieces and the rows in them; a kind is now heads with equally many rows in each of these pieces."""

    pieces: Pieces
    rows: Tensor  # (K, n)
    kinds: Tensor  # (heads,) the kind of each head
    heads: Tensor  # (K, 1) how many heads are of a kind
    offsets: Tensor  # (heads,) equal where the heads' offsets are
    members: Tensor  # (K, S) how many pieces of the segment have rows
    channel: Tensor  # (K, S) the first kind that has rows in the same pieces of the segment
    turn: Tensor  # (S,) the number of the segment's branch

    @staticmethod
    def of(branches: Branches, pieces: Pieces, offsets: Tensor) -> Work:
        before, after = (branches.rows_before(token, pieces, offsets) for token in (pieces.begin, pieces.end))
        rows, kinds = after - before, branches.kinds
        if bool((rows == rows[:1]).all()):
            rows, kinds = rows[:1], torch.zeros_like(kinds)
        has = rows > 0
        heads = torch.bincount(kinds).unsqueeze(1)
        turn = branches.numbers[pieces.branch[pieces.first]]
        return Work(pieces, rows, kinds, heads, branches.kinds, pieces.per_segment(has), pieces.alike(has), turn)

    def channel_rows(self) -> Tensor:
        """(K, n): the rows of all heads of a channel, in the place of its first kind."""
        rows = self.rows * self.heads
        if len(rows) == 1:
            return rows
        return torch.zeros_like(rows).scatter_add_(0, self.channel[:, self.pieces.segment], rows)
