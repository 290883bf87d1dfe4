"""Where a sequence lies on the ranks, and the segments that cross a border between two shards. Pure integers.

Legend: a shard is one rank's contiguous tokens, [starts[rank], starts[rank + 1]); heads are key/value heads.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from dataclasses import dataclass, replace

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
    dilation: int
    start: int
    stop: int
    sequence: int  # tokens of the sequence that it is in
    heads: tuple[tuple[int, int], ...]  # (head, offset)
    members: tuple[int, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()  # that the members hold, counted from the segment's start

    def piece(self, rank: int) -> tuple[int, int]:
        return self.pieces[self.members.index(rank)]

    def rows(self, offset: int, piece: tuple[int, int]) -> int:
        """How many rows of the offset lie in a piece."""
        return rows_at_offset(piece[1], self.dilation, offset) - rows_at_offset(piece[0], self.dilation, offset)

    def first_row(self, offset: int, piece: tuple[int, int]) -> int:
        """The first token of the offset in a piece, or after it."""
        return self.start + offset + self.dilation * rows_at_offset(piece[0], self.dilation, offset)

    def packed_rows(self, rank: int) -> int:
        """The rows of all heads that the rank owns."""
        piece = self.piece(rank)
        return sum(self.rows(offset, piece) for _, offset in self.heads)


@functools.lru_cache(maxsize=512)
def shared_segments(pattern: DilatedPattern, shards: Shards, heads: Heads, rank: int) -> tuple[SharedSegment, ...]:
    """Those that a rank is a member of, in an order that all members share."""
    found: list[SharedSegment] = []
    mine, end = shards.starts[rank], shards.starts[rank + 1]
    if mine == end:
        return ()
    for branch, (width, dilation) in enumerate(pattern.branches):
        for segment in sorted({shards.segment(token, width) for token in (mine, end - 1)}):  # others lie inside
            if segment[0] < mine or segment[1] > end:
                of_branch = tuple(heads.of_branch(pattern, branch))
                found += split_by_members(SharedSegment(branch, dilation, *segment, of_branch), shards)
    return tuple(shared for shared in found if rank in shared.members)


def split_by_members(whole: SharedSegment, shards: Shards) -> list[SharedSegment]:
    """Heads together whose rows lie on the same two or more ranks."""
    pieces = {}
    for rank in shards.holders(whole.start, whole.stop):
        first, last = shards.piece(rank, whole.start, whole.stop)
        pieces[rank] = first - whole.start, last - whole.start

    @functools.cache
    def members_of(offset: int) -> tuple[int, ...]:
        return tuple(rank for rank, piece in pieces.items() if whole.rows(offset, piece))

    together: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for head, offset in whole.heads:
        together.setdefault(members_of(offset), []).append((head, offset))
    return [
        replace(whole, heads=tuple(some), members=members, pieces=tuple(pieces[rank] for rank in members))
        for members, some in together.items()
        if len(members) > 1
    ]


def crosses(pattern: DilatedPattern, shards: Shards) -> bool:
    """Whether some segment lies on two ranks: alike on every rank, also on one that holds nothing."""
    borders = {border for border in shards.starts if 0 < border < shards.tokens}
    return any(shards.segment(border, width)[0] < border for border in borders for width in pattern.segment_lengths)
