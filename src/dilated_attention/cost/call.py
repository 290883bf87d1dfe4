"""What is asked: the shape of a call, what a row of each message is made of, and how much can be counted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dilated_attention.pattern import DilatedPattern, Heads
from dilated_attention.ring.packing import Travelling
from dilated_attention.ring.shards import Shards


@dataclass(frozen=True)
class Call:
    pattern: DilatedPattern
    shards: Shards
    heads: Heads
    group: int  # query heads to a key/value head
    head_dim: int
    dtype: torch.dtype
    batch: int
    is_causal: bool
    has_padding: bool

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in itertools.pairwise(self.shards.starts)]

    @functools.cached_property
    def fields(self) -> Travelling:
        return Travelling.of(self.dtype, self.group, self.head_dim, self.has_padding)

    @property
    def heads_apart(self) -> bool:
        """Whether an alltoall bundles only heads of one offset: kernels that group heads want one padding for all."""
        return self.has_padding and self.group > 1

    def check_range(self) -> None:
        """Raise if a rank's bytes could leave 64 bits."""
        row, longest = sum(field.bytes_per_row() for fields in self.fields for field in fields), max(self.lengths)
        rows = 0
        for branch, (width, rate) in enumerate(self.pattern.branches):
            width = min(width, self.shards.tokens)
            most = max(width // rate + 1, (min(width, longest) // rate + 1) * self.shards.ranks)
            rows += 2 * most * len(self.heads.of_branch(self.pattern, branch))
        if rows * row * self.batch + longest >= 2**62:
            raise ValueError(
                f"up to {rows:,} rows of {row:,} bytes in {self.batch} samples may touch one rank: more than 2**62 "
                "bytes are not counted; ask for a batch of 1, fewer heads or a shorter sequence, and multiply"
            )


def shards_of(tokens: int, ranks: int, lengths: Sequence[int] | None) -> Shards:
    """Cut evenly, unless the length of every shard is given."""
    if lengths is None:
        return Shards.even(tokens, ranks)
    shortest = min(lengths, default=0)
    if len(lengths) != ranks or sum(lengths) != tokens or shortest < 0:
        raise ValueError(
            f"lengths are {len(lengths)} shards of {sum(lengths)} tokens in all, the shortest of {shortest}: give each "
            f"of {ranks} ranks 0 or more of the {tokens} tokens, or leave lengths out to cut evenly"
        )
    return Shards.of(tuple(lengths))
