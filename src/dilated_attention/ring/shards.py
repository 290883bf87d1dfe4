"""Where a sequence lies on the ranks. Pure integers.

Legend: a shard is one rank's contiguous tokens, [starts[rank], starts[rank + 1]).
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from dilated_attention.checks import Ints


@dataclass(frozen=True, slots=True)
class Shards:
    """The lengths of all ranks' shards, in the order of the tokens."""

    starts: Ints  # one more than ranks: the last is the number of tokens
    cu_seqlens: Ints  # of the sequences that are packed, or of the one that there is

    @classmethod
    def of(cls, lengths: Ints, cu_seqlens: Ints = ()) -> Shards:
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

    def of_rank(self, rank: int) -> tuple[int, int]:
        """Its first token, and the first one after it."""
        return self.starts[rank], self.starts[rank + 1]

    def sequence(self, token: int) -> tuple[int, int]:
        """Where the sequence of a token begins and ends."""
        after = bisect.bisect_right(self.cu_seqlens, token)
        return self.cu_seqlens[after - 1], self.cu_seqlens[after]

    def cut(self, start: int, stop: int) -> tuple[range, Ints]:
        """The ranks from the first to the last that hold some of [start, stop), at least one token, and where their
        shards cut it, counted from its start. Those between may be empty."""
        ranks = range(bisect.bisect_right(self.starts, start) - 1, bisect.bisect_left(self.starts, stop))
        borders = self.starts[ranks.start : ranks.stop + 1]
        return ranks, tuple(min(max(border, start), stop) - start for border in borders)
