"""What travels between ranks when a sequence is cut into shards: which rank sends how many rows of which branch to
which other, forward. Listed from the plan that the library itself follows, message by message.

A row is one token of one key/value head: its K and V in a ring and an all-gather; in an all-to-all its q, k and v on
the way to the rank that computes it, and out and lse on the way back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from dilated_attention.context_parallel import Route
from dilated_attention.pattern import DilatedPattern, Heads
from dilated_attention.ring.alltoall import bundles
from dilated_attention.ring.circulate import traffic
from dilated_attention.ring.cost import EXCHANGES, RankCost, plan_cost
from dilated_attention.ring.packing import Travelling, part_bytes
from dilated_attention.ring.shards import Channel, Shards, channels

MOST_RANKS = 64  # up to so many, messages are listed one by one


class Sent(NamedTuple):
    """All that goes from one rank to another for one branch."""

    source: int
    target: int
    branch: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Travel:
    exchange: str
    is_auto: bool  # the exchange is the library's own choice
    head_dim: int
    dtype: torch.dtype
    shards: Shards
    cut: tuple[int, ...]  # by branch: segments that lie on several ranks,
    segments: tuple[int, ...]  # of so many
    of_rank: tuple[RankCost, ...]
    sent: tuple[Sent, ...]  # from the rank that sends; empty beyond MOST_RANKS
    needed: tuple[Sent, ...]  # from the rank whose rows they are: another one where a ring passes rows on

    @property
    def is_listed(self) -> bool:
        return self.shards.ranks <= MOST_RANKS

    @classmethod
    def of(
        cls,
        pattern: DilatedPattern,
        tokens: int,
        heads: int,
        kv_heads: int,
        is_causal: bool,
        ranks: int,
        exchange: str,
        head_dim: int,
        dtype: torch.dtype,
    ) -> Travel:
        if exchange not in (*EXCHANGES, "auto"):
            raise ValueError(f"unknown exchange {exchange!r}: use one of {', '.join(EXCHANGES)} or auto")
        cost = plan_cost(
            pattern, tokens, ranks, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
            is_causal=is_causal,
        )  # fmt: skip
        chosen = cost.best if exchange == "auto" else cast(Route, exchange)
        shards = Shards.even(tokens, ranks)
        borders = sorted({border for border in shards.starts if 0 < border < tokens})
        widths = pattern.segment_lengths
        sent: list[Sent] = []
        needed: list[Sent] = []
        if ranks <= MOST_RANKS:
            fields = Travelling.of(dtype, heads // kv_heads, head_dim, False)
            plan = [channels(pattern, shards, Heads(0, kv_heads, kv_heads), rank) for rank in range(ranks)]
            if chosen == "alltoall":
                sent = needed = list(_dealt(plan, shards, fields))
            else:
                messages = list(_circulated(plan, shards, fields, chosen, is_causal))
                sent, needed = [one for one, _ in messages], [one for _, one in messages]
        return cls(
            chosen, exchange == "auto", head_dim, dtype, shards,
            tuple(len({border // width for border in borders if border % width}) for width in widths),
            tuple(-(-tokens // width) for width in widths),
            tuple(cost.of_rank(rank, chosen) for rank in range(ranks)), _summed(sent), _summed(needed),
        )  # fmt: skip


Plan = list[tuple[Channel, ...]]  # the channels of each rank


def _circulated(
    plan: Plan, shards: Shards, fields: Travelling, exchange: str, is_causal: bool
) -> Iterator[tuple[Sent, Sent]]:
    """Every part of every message: from its sender, and from its owner."""
    rows_of = functools.cache(lambda channel, owner: channel.packed_rows(shards, owner))
    for rank, mine in enumerate(plan):
        for step in traffic(mine, exchange, is_causal, rank).receives:
            for source, parts in step.items():
                for part in parts:
                    channel = mine[part.channel]
                    rows = rows_of(channel, part.owner)
                    what = (rank, channel.branch, rows, part_bytes(fields.blocks, rows))
                    yield Sent(source, *what), Sent(part.owner, *what)


def _dealt(plan: Plan, shards: Shards, fields: Travelling) -> Iterator[Sent]:
    """Rows to the rank that computes them, and results back."""
    for rank, mine in enumerate(plan):
        for channel, target in bundles(mine, shards, False):
            for member in channel.members if target == rank else ():
                if member != rank:
                    rows = channel.packed_rows(shards, member)
                    yield Sent(member, rank, channel.branch, rows, part_bytes(fields.inputs, rows))
                    yield Sent(rank, member, channel.branch, rows, part_bytes(fields.results, rows))


def _summed(messages: list[Sent]) -> tuple[Sent, ...]:
    """One entry for each pair of ranks and branch."""
    messages = sorted(messages)
    return tuple(
        Sent(source, target, branch, sum(one.rows for one in some), sum(one.bytes for one in some))
        for (source, target, branch), group in itertools.groupby(messages, key=lambda one: one[:3])
        for some in [list(group)]
    )
