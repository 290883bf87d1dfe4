"""Where a sequence lies on the ranks, and the segments that cross a border between two shards. Pure integers.

Legend: a shard is one rank's contiguous tokens, [starts[rank], starts[rank + 1]); heads are key/value heads.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from dataclasses import dataclass

from dilated_attention.call import Heads
from dilated_attention.pattern import DilatedPattern, rows_at_offset


@dataclass(frozen=True, slots=True)
class Shards:
    """The lengths of all ranks' shards, in the order of the tokens."""

    starts: tuple[int, ...]  # one more than ranks: the last is the number of tokens
    cu_seqlens: tuple[int, ...]  # of the sequences that are packed, or of the one that there is

    @classmethod
    def of(cls, lengths: tuple[int, ...], cu_seqlens: tuple[int, ...] = ()) -> Shards:
        starts = tuple(itertools.accumulate(lengths, initial=0))
        return cls(starts, cu_seqlens or (0, starts[-1]))

    @classmethod
    def even(cls, tokens: int, ranks: int) -> Shards:
        """As torch.tensor_split cuts: the first tokens % ranks shards have one token more."""
        each, extra = divmod(tokens, ranks)
        return cls.of((each + 1,) * extra + (each,) * (ranks - extra))

    @property
    def ranks(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def segment(self, token: int, width: int) -> tuple[int, int, int]:
        """The segment that a token is in, [start, stop), and the tokens of its sequence."""
        after = bisect.bisect_right(self.cu_seqlens, token)
        begin, end = self.cu_seqlens[after - 1 : after + 1]
        start = token - (token - begin) % width
        return start, min(start + width, end), end - begin

    def piece(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """What of the tokens [start, stop) the rank holds."""
        first, last = max(start, self.starts[rank]), min(stop, self.starts[rank + 1])
        return first, max(first, last)

    def holders(self, start: int, stop: int) -> range:
        """The ranks from the first to the last that hold some of [start, stop); those between may be empty."""
        if start >= stop:
            return range(0)
        return range(bisect.bisect_right(self.starts, start) - 1, bisect.bisect_left(self.starts, stop))


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """A segment that lies on several ranks, for those of its heads that have rows on the same ranks."""

    branch: int
    start: int
    stop: int
    dilation: int
    sequence: int  # tokens of the sequence that it is in
    heads: tuple[tuple[int, int], ...]  # (head, offset)
    members: tuple[int, ...]

    def rows(self, offset: int, piece: tuple[int, int]) -> int:
        """How many rows of the offset lie in [piece[0], piece[1])."""
        first, last = (rows_at_offset(token - self.start, self.dilation, offset) for token in piece)
        return last - first

    def first_row(self, offset: int, piece: tuple[int, int]) -> int:
        """The first token of the offset at or after the piece's start."""
        return self.start + offset + self.dilation * rows_at_offset(piece[0] - self.start, self.dilation, offset)

    def piece(self, shards: Shards, rank: int) -> tuple[int, int]:
        return shards.piece(rank, self.start, self.stop)

    def packed_rows(self, shards: Shards, rank: int) -> int:
        """The rows of all heads that the rank owns."""
        piece = self.piece(shards, rank)
        return sum(self.rows(offset, piece) for _, offset in self.heads)


@functools.lru_cache(maxsize=512)
def shared_segments(pattern: DilatedPattern, shards: Shards, heads: Heads, rank: int) -> tuple[SharedSegment, ...]:
    """The shared_segments that a rank is a member of, in an order that all members share."""
    found: list[SharedSegment] = []
    mine, end = shards.starts[rank], shards.starts[rank + 1]
    if mine == end:
        return ()
    for branch, (width, dilation) in enumerate(pattern.branches):
        for segment in sorted({shards.segment(token, width) for token in (mine, end - 1)}):  # others lie inside
            if segment[0] < mine or segment[1] > end:
                found += _split_by_members(heads.of_branch(pattern, branch), shards, branch, *segment, dilation)
    return tuple(shared for shared in found if rank in shared.members)


def _split_by_members(
    heads: list[tuple[int, int]], shards: Shards, branch: int, start: int, stop: int, sequence: int, dilation: int
) -> list[SharedSegment]:
    """Channels of one segment: heads together whose rows lie on the same two or more ranks."""
    pieces = {rank: shards.piece(rank, start, stop) for rank in shards.holders(start, stop)}
    members_of: dict[int, tuple[int, ...]] = {}
    for offset in {offset for _, offset in heads}:
        whole = SharedSegment(branch, start, stop, dilation, sequence, ((0, offset),), ())
        members_of[offset] = tuple(rank for rank, piece in pieces.items() if whole.rows(offset, piece))
    together: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for head, offset in heads:
        together.setdefault(members_of[offset], []).append((head, offset))
    return [
        SharedSegment(branch, start, stop, dilation, sequence, tuple(some), members)
        for members, some in together.items()
        if len(members) > 1
    ]


def crosses(pattern: DilatedPattern, shards: Shards) -> bool:
    """Whether some segment lies on two ranks: alike on every rank, also on one that holds nothing."""
    borders = {border for border in shards.starts if 0 < border < shards.tokens}
    return any(shards.segment(border, width)[0] < border for border in borders for width in pattern.segment_lengths)
