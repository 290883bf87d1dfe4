"""The closed forms of `cost` against the messages themselves, listed one by one, and against runs that count them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern, testing
from dilated_attention.call import Call
from dilated_attention.pattern import Heads
from dilated_attention.ring.alltoall import bundles
from dilated_attention.ring.circulate import Messages, traffic
from dilated_attention.ring.cost import EXCHANGES, LINKS, MOST_HELD, PlanCost, RankCost, fastest_exchange, plan_cost
from dilated_attention.ring.packing import Field, Fields, part_bytes
from dilated_attention.ring.shards import Channel, Shards, channels


@dataclass(frozen=True)
class Case:
    pattern: DilatedPattern
    lengths: tuple[int, ...]
    kv_heads: int
    group: int = 1
    head_dim: int = 3
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    is_causal: bool = False
    has_padding: bool = False

    @property
    def shards(self) -> Shards:
        return Shards.of(self.lengths)

    @property
    def heads(self) -> Heads:
        return Heads(0, self.kv_heads, self.kv_heads)

    def channels(self, rank: int) -> tuple[Channel, ...]:
        return channels(self.pattern, self.shards, self.heads, rank)

    def cost(self) -> PlanCost:
        return plan_cost(
            self.pattern, sum(self.lengths), len(self.lengths), num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=self.dtype, batch=self.batch,
            is_causal=self.is_causal, has_padding=self.has_padding, lengths=self.lengths,
        )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 7))
    rule = draw(st.sampled_from(("longnet", "torchscale", "head_groups")))
    count = draw(st.integers(1, min(3, kv_heads)))
    branch = st.tuples(st.integers(1, 120), st.integers(1, 14))
    branches = draw(st.lists(branch, min_size=count, max_size=count))
    pattern = DilatedPattern.of(rule, *zip(*branches, strict=True))
    ranks = draw(st.integers(1, 12))
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks).filter(any))
    else:
        starts = Shards.even(draw(st.integers(1, 200)), ranks).starts
        lengths = [b - a for a, b in itertools.pairwise(starts)]
    return Case(
        pattern, tuple(lengths), kv_heads, draw(st.integers(1, 3)), draw(st.integers(1, 9)),
        draw(st.sampled_from((torch.bfloat16, torch.float32, torch.float64))), draw(st.integers(1, 3)),
        draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip


# --- the messages, one by one -----------------------------------------------------------------------------------


def fields(case: Case) -> dict[str, Fields]:
    """What a row is made of in each kind of message."""
    exact = torch.float64 if case.dtype is torch.float64 else torch.float32
    q, k = Field(case.dtype, case.group, (case.head_dim,)), Field(case.dtype, 1, (case.head_dim,))
    padding = (Field(torch.bool),) if case.has_padding else ()
    lse = Field(exact, case.group)
    return {
        "blocks": (k, k, *padding),
        "sums": (Field(exact, 1, (case.head_dim,)),) * 2,
        "there": (q, k, k, *padding),
        "back": (lse, q),
        "backward there": (lse, q, q, q, k, k, *padding),
        "backward back": (q, k, k),
    }


def circulated(case: Case, rank: int, exchange: str) -> RankCost:
    mine = case.channels(rank)
    plan = traffic(mine, exchange, case.is_causal, rank)

    def count(messages: tuple[Messages, ...], some: Fields) -> list[int]:
        """The bytes of each step."""
        parts = ([part for one in step.values() for part in one] for step in messages)
        return [
            sum(part_bytes(some, case.batch * mine[x.channel].packed_rows(case.shards, x.owner)) for x in step)
            for step in parts
        ]

    blocks, sums = fields(case)["blocks"], fields(case)["sums"]
    sent, received = count(plan.sends, blocks), count(plan.receives, blocks)
    sums_sent, sums_received = count(plan.sum_sends, sums), count(plan.sum_receives, sums)
    hops = sum(a + b > 0 for a, b in zip(sent, received, strict=True))
    sum_hops = sum(a + b > 0 for a, b in zip(sums_sent, sums_received, strict=True))
    back = (sum(sent) + sum(sums_sent), sum(received) + sum(sums_received))
    return RankCost(hops, sum(sent), sum(received), hops + sum_hops, *back)


def dealt(case: Case, rank: int) -> RankCost:
    numbers = []
    for there, back in (("there", "back"), ("backward there", "backward back")):
        hops = sent = received = 0
        for name, outward in ((there, True), (back, False)):
            away = home = 0
            for bundle in bundles(case.channels(rank), case.shards, case.has_padding and case.group > 1):
                for member in bundle.channel.members:
                    rows = case.batch * bundle.channel.packed_rows(case.shards, member)
                    count = part_bytes(fields(case)[name], rows)
                    if rank == member and rank != bundle.target:
                        away += count
                    if rank == bundle.target and rank != member:
                        home += count
            sent, received = (sent + away, received + home) if outward else (sent + home, received + away)
            hops += away + home > 0
        numbers += [hops, sent, received]
    return RankCost(*numbers)


def enumerated(case: Case, rank: int, exchange: str) -> RankCost:
    return dealt(case, rank) if exchange == "alltoall" else circulated(case, rank, exchange)


def check(case: Case) -> None:
    cost = case.cost()
    for exchange in EXCHANGES:
        ranks = [cost.of_rank(rank, exchange) for rank in range(len(case.lengths))]
        for rank, found in enumerate(ranks):
            assert found == enumerated(case, rank, exchange), (exchange, rank)
        assert sum(x.bytes_sent for x in ranks) == sum(x.bytes_received for x in ranks)
        summary = cost.exchanges[exchange]
        assert summary.hops == max(x.hops for x in ranks)
        assert summary.backward_hops == max(x.backward_hops for x in ranks)
        assert summary.bytes_sent_max == max(x.bytes_sent for x in ranks)
        assert summary.bytes_received_max == max(x.bytes_received for x in ranks)
        assert summary.bytes_total == sum(x.bytes_received for x in ranks)
        assert summary.backward_bytes_sent_max == max(x.backward_bytes_sent for x in ranks)
        assert summary.backward_bytes_received_max == max(x.backward_bytes_received for x in ranks)
        assert summary.backward_bytes_total == sum(x.backward_bytes_received for x in ranks)


@given(cases())
def test_every_rank_of_every_exchange(case: Case) -> None:
    check(case)


@given(cases())
def test_every_rank_as_counted_where_there_are_many(case: Case) -> None:
    """Branch by branch, even segments apart from the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dilated_attention.ring.traffic.AT_ONCE", 0)
        check(case)


LARGE = [
    Case(DilatedPattern.longnet([64, 256, 1024, 4096], [1, 3, 16, 64]), (64,) * 64, 8, is_causal=True),
    Case(DilatedPattern.longnet([100, 1000, 10000], [1, 7, 90]), (37, 52, 61) * 33, 6, 2, has_padding=True),
    Case(DilatedPattern.torchscale([128, 512, 4096], [1, 4, 32]), (16,) * 255 + (9,), 12, is_causal=True),
    Case(DilatedPattern.head_groups([8, 64, 10**6], [1, 5, 100]), (8,) * 1024, 5, 2, batch=2),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"{len(case.lengths)} ranks")
def test_many_ranks(case: Case) -> None:
    cost, ranks = case.cost(), len(case.lengths)
    for exchange in EXCHANGES:
        for rank in {0, 1, 2, ranks // 3, ranks // 2, ranks - 2, ranks - 1}:
            assert cost.of_rank(rank, exchange) == enumerated(case, rank, exchange), (exchange, rank)


# --- what is counted is what is sent ----------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_runs_count_the_same(exchange: str, is_causal: bool, has_padding: bool) -> None:
    case = Case(
        DilatedPattern.longnet([8, 20, 60], [1, 3, 4]), (13, 10, 0, 20, 17), 4, 2, 8, torch.float32, 2,
        is_causal, has_padding,
    )  # fmt: skip
    qkv = testing.make_qkv(2, 60, 8, 8, kv_heads=4)
    padding = torch.zeros(2, 60, dtype=torch.bool) if has_padding else None
    dout = torch.ones_like(qkv[0])
    _, transports = testing.run_sharded(
        qkv, case.lengths, case.pattern, dout, exchange=exchange, is_causal=is_causal, key_padding_mask=padding
    )
    cost = case.cost()
    for rank, transport in enumerate(transports):
        stats, found = transport.stats, cost.of_rank(rank, exchange)
        assert stats.hops == found.hops + found.backward_hops
        assert stats.bytes_sent == found.bytes_sent + found.backward_bytes_sent
        assert stats.bytes_received == found.bytes_received + found.backward_bytes_received
        assert stats.peak_buffer_bytes <= cost.exchanges[exchange].held


def computed(case: Case, exchange: str) -> list[int]:
    """(query, key) pairs by rank: whole segments head by head."""
    found, shards = [0] * len(case.lengths), case.shards
    owner_of = [rank for rank, length in enumerate(case.lengths) for _ in range(length)]
    dealt = {
        (bundle.channel.branch, bundle.channel.start, head): bundle.target
        for rank in range(shards.ranks)
        for bundle in bundles(case.channels(rank), shards, False)
        for head, _ in bundle.channel.heads
    }
    for branch, start, head, tokens in segments(case):
        for index, token in enumerate(tokens):
            rank = owner_of[token]
            if exchange == "alltoall":
                rank = dealt.get((branch, start, head), rank)
            found[rank] += case.group * (index + 1 if case.is_causal else len(tokens))
    return found


def segments(case: Case) -> Iterator[tuple[int, int, int, range]]:
    total = sum(case.lengths)
    for branch, (width, rate) in enumerate(case.pattern.branches):
        for start in range(0, total, width):
            for head in case.pattern.heads(branch, case.kv_heads):
                offset = case.pattern.offset(branch, head, case.kv_heads)
                yield branch, start, head, range(start + offset, min(start + width, total), rate)


@given(cases())
def test_operations(case: Case) -> None:
    cost = case.cost()
    for exchange in EXCHANGES:
        pairs = computed(case, exchange)
        every = case.pattern.pairs(
            sum(case.lengths), case.kv_heads * case.group, num_kv_heads=case.kv_heads, is_causal=case.is_causal
        )
        assert sum(pairs) == every
        found = cost.exchanges[exchange]
        assert found.flops == 4 * case.head_dim * case.batch * max(pairs)
        assert found.backward_flops == 10 * case.head_dim * case.batch * max(pairs)


# --- sums in float32 --------------------------------------------------------------------------------------------


def summed(case: Case, rank: int, exchange: str) -> int:
    """Bytes of the sums of a backward pass, as `_exchange` makes them."""
    mine, sums = case.channels(rank), fields(case)["sums"]
    plan = traffic(mine, exchange, case.is_causal, rank)

    def size(channel: int, owner: int) -> int:
        return part_bytes(sums, case.batch * mine[channel].packed_rows(case.shards, owner))

    used = {x.channel for step in plan.receives for parts in step.values() for x in parts}
    home = {x.channel for step in plan.sum_receives for parts in step.values() for x in parts if x.owner == rank}
    made = [sum(size(*part) for parts in step.values() for part in parts) for step in plan.receives]
    dq = sum(size(channel, rank) // 2 * case.group for channel in used | home)
    # those of a step, while the ones before are on their way or they themselves are joined to a message
    return dq + sum(size(channel, rank) for channel in home) + 2 * max(made, default=0)


@given(cases())
def test_sums_are_never_more(case: Case) -> None:
    memory = case.cost().memory
    for exchange in ("ring", "allgather"):
        most = max(summed(case, rank, exchange) for rank in range(len(case.lengths)))
        assert most <= memory.sums[exchange]
        if not case.is_causal and exchange == "allgather":
            assert most == memory.sums[exchange]
    assert memory.sums["alltoall"] == 0


# --- the choice -------------------------------------------------------------------------------------------------


def choice(case: Case, backend: str = "nccl") -> str:
    call = Call(
        case.pattern, case.is_causal, samples=1, heads=case.kv_heads * case.group, kv_heads=case.kv_heads,
        head_dim=case.head_dim, dtype=case.dtype,
    )  # fmt: skip
    return fastest_exchange(call, case.shards, backend)


@given(cases(), st.sampled_from(("nccl", "gloo", "other")))
def test_the_fastest_that_fits_is_chosen(case: Case, backend: str) -> None:
    case = replace(case, batch=1, has_padding=False)
    latency, bandwidth = LINKS.get(backend, LINKS["nccl"])
    cost = plan_cost(
        case.pattern, sum(case.lengths), len(case.lengths), num_heads=case.kv_heads * case.group,
        num_kv_heads=case.kv_heads, head_dim=case.head_dim, dtype=case.dtype, is_causal=case.is_causal,
        lengths=case.lengths, latency=latency, bandwidth=bandwidth,
    )  # fmt: skip
    chosen = choice(case, backend)
    assert chosen == cost.best
    fits = [x for x in EXCHANGES if x == "ring" or cost.exchanges[x].held <= MOST_HELD * cost.memory.saved]
    assert chosen in fits
    assert cost.exchanges[chosen].total_seconds == min(cost.exchanges[x].total_seconds for x in fits)


def test_one_segment_over_many_ranks_is_not_gathered() -> None:
    """Undilated it would be the whole sequence on every rank."""
    dense = Case(DilatedPattern.longnet([2**20], [1]), (2**14,) * 64, 4, head_dim=64)
    assert choice(dense) == "ring"
    assert choice(replace(dense, pattern=DilatedPattern.longnet([2**20], [64]))) != "ring"


def test_the_choice_is_made_on_the_host() -> None:
    """Whatever device new tensors go to by default."""
    case = Case(DilatedPattern.longnet([64, 128], [1, 2]), (32,) * 8, 5, head_dim=24)
    with torch.device("meta"):
        assert choice(case) in EXCHANGES


@pytest.mark.parametrize("small", [0, 2**15])
def test_heads_split_over_processes(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may hold no head of a branch that crosses borders."""
    monkeypatch.setattr("dilated_attention.ring.traffic.AT_ONCE", small)
    pattern, shards = DilatedPattern.head_groups([16, 24 + small, 96], [1, 2, 4]), Shards.even(96, 6)
    for first in range(3):
        call = Call(pattern, samples=1, heads=1, kv_heads=1, head_dim=8, first_head=first, total_heads=3)
        chosen = fastest_exchange(call, shards, "gloo")
        assert chosen == "ring" if first == 0 else chosen in EXCHANGES


def test_two_ranks_take_a_ring_before_an_allgather() -> None:
    """They send the same; one head cannot be dealt to two ranks."""
    assert choice(Case(DilatedPattern.longnet([64], [1]), (32, 32), 1, head_dim=64)) == "ring"
