"""What a call over a group of ranks will cost, before there is a group: bytes, hops, memory, operations, and a time.

Every message is counted, those of the forward pass and those of the backward pass (in which K and V travel again), with
sums over vectors of all ranks at once: no tensor has the length of the sequence, and N = 2**40 on 65,536 ranks take
about a second. Bytes and hops of every rank are exact; the time is a model, hops x latency + bytes / bandwidth.

Legend: P ranks; a shard is one rank's tokens; a piece is what a rank holds of a segment, n pieces of S segments in a
branch (of each rank the first segment and the last: those between lie inside its shard); heads are key/value heads, and
a kind is the heads with equally many rows in every piece, K of them. rows (K, n); e bytes an element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dilated_attention import _packing
from dilated_attention._packing import Field, Fields
from dilated_attention._shards import Heads, Shards
from dilated_attention.backends.problem import accumulate_dtype
from dilated_attention.pattern import DilatedPattern, rows_at_offset, whole_number

# Seconds a hop and bytes a second: round figures of today's machines, not measurements. The first is for the rest.
LINKS = {"nccl": (10e-6, 50e9), "gloo": (200e-6, 1e9)}
# When two take equally long the first is taken. A ring waits only for the ranks whose rows it needs, holds the least,
# and on gloo its errors name one rank; with two ranks it sends the same messages as an all-gather.
EXCHANGES = ("ring", "allgather", "alltoall")
# An exchange may hold this many times what a shard keeps for the backward pass anyway. A ring always may: two blocks.
MOST_HELD = 2


@dataclass(frozen=True, slots=True)
class RankCost:
    """What one rank sends and receives, as `Transport.stats` counts it; the backward pass comes on top."""

    hops: int
    bytes_sent: int
    bytes_received: int
    backward_hops: int
    backward_bytes_sent: int
    backward_bytes_received: int


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """One exchange: of each number that of the busiest rank, but ``bytes_total``, received by all ranks together."""

    hops: int
    bytes_sent_max: int
    bytes_received_max: int
    bytes_total: int
    backward_hops: int
    backward_bytes_sent_max: int
    backward_bytes_received_max: int
    backward_bytes_total: int
    held: int  # bytes of received rows at one time, at most, in either pass
    flops: float  # forward; exact below 2**53
    backward_flops: float
    seconds: float  # forward: communication alone
    backward_seconds: float
    compute_seconds: float  # forward and backward

    @property
    def total_seconds(self) -> float:
        """Communication, forward and backward."""
        return self.seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the busiest rank. The first five are kept from the forward pass to the backward pass."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    out_sums: int  # out in float32 while parts are merged
    dq_sums: int
    dk_sums: int
    dv_sums: int
    received: Mapping[str, int]  # by exchange: `ExchangeCost.held`

    @property
    def saved(self) -> int:
        return self.q + self.k + self.v + self.out + self.lse


@dataclass(frozen=True)
class PlanCost:
    """The cost of one call; print it for a table."""

    pattern: DilatedPattern
    tokens: int
    ranks: int
    tokens_per_rank: int  # of the longest shard
    memory: Memory
    exchanges: Mapping[str, ExchangeCost]  # ring, allgather, alltoall
    naive_ring_bytes: int  # that each rank receives where all K and V go round
    naive_ring_hops: int
    naive_ring_seconds: float
    best: str  # the exchange with the least communication time, forward and backward, that does not hold too much
    _tallies: Mapping[str, _Tally] = field(repr=False, compare=False)

    def of_rank(self, rank: int, exchange: str) -> RankCost:
        """The exact numbers of one rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank} among {self.ranks}: count from 0 to {self.ranks - 1}")
        if exchange not in self._tallies:
            raise ValueError(f"unknown exchange {exchange!r}: use one of {', '.join(EXCHANGES)}")
        tally = self._tallies[exchange]
        columns = (tally.hops, tally.sent, tally.received)
        return RankCost(*(int(column[way, rank]) for way in (0, 1) for column in columns))

    def __str__(self) -> str:
        memory, rest = self.memory, self.memory.out_sums, self.memory.dq_sums + 2 * self.memory.dk_sums
        lines = [
            f"{self.tokens:,} tokens on {self.ranks:,} ranks, at most {self.tokens_per_rank:,} on one; {self.pattern}",
            f"memory of a rank: {size(memory.saved)} saved, {size(rest[0] if isinstance(rest, tuple) else rest)}",
        ]
        return "\n".join(lines)
