"""The closed forms of `cost` against the messages themselves, listed one by one, and against runs that count them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.call import Call
from dilated_attention.ring.alltoall import bundles
from dilated_attention.ring.circulate import Part, Step, traffic
from dilated_attention.ring.cost import LINKS, MOST_HELD, RankCost, fastest_exchange
from dilated_attention.ring.packing import Field, Fields, part_bytes
from dilated_attention.ring.shards import Shards
from tests.cases import DTYPES, EXCHANGES, Case
from tests.drawn import drawn, few, shards_of, shared_segments_of

CASES = drawn(most_ranks=12, most_tokens=200, dtypes=("bf16", "f32", "f64"))


def make(
    pattern: DilatedPattern,
    lengths: tuple[int, ...],
    kv_heads: int,
    group: int = 1,
    *,
    padded: bool = False,
    **more: Any,
) -> Case:
    given = {"is_causal": False, "samples": 1, "head_dim": 3, "dtype": "bf16", **more}
    return Case(
        "cost", 0, pattern.rule, pattern="own", tokens=sum(lengths), own_pattern=pattern, ranks=len(lengths),
        own_lengths=lengths, own_heads=(kv_heads * group, kv_heads), mask="random" if padded else "none", **given,
    )  # fmt: skip


def group_of(case: Case) -> int:
    heads, kv_heads = case.head_counts()
    return heads // kv_heads


# --- the messages, one by one -----------------------------------------------------------------------------------


def fields(case: Case) -> dict[str, Fields]:
    """What a row is made of in each kind of message."""
    dtype, group = DTYPES[case.dtype], group_of(case)
    exact = torch.promote_types(dtype, torch.float32)
    q, k, lse = Field(dtype, group, (case.head_dim,)), Field(dtype, 1, (case.head_dim,)), Field(exact, group)
    padding = (Field(torch.bool),) if case.mask != "none" else ()
    return {
        "blocks": (k, k, *padding),
        "sums": (Field(exact, 1, (case.head_dim,)),) * 2,
        "there": (q, k, k, *padding),
        "back": (lse, q),
        "backward there": (lse, q, q, q, k, k, *padding),
        "backward back": (q, k, k),
    }


def circulated(case: Case, rank: int, exchange: str) -> RankCost:
    mine, shards = shared_segments_of(case, rank), shards_of(case)
    plan = traffic(mine, exchange, case.is_causal, rank)

    def size(messages: dict[int, list[Part]], some: Fields) -> int:
        parts = [part for one in messages.values() for part in one]
        return sum(part_bytes(some, case.samples * mine[x.segment].packed_rows(shards, x.owner)) for x in parts)

    def count(steps: tuple[Step, ...], some: Fields) -> list[int]:
        """Hops, bytes sent and bytes received."""
        sizes = [(size(step.sends, some), size(step.receives, some)) for step in steps]
        return [sum(any(both) for both in sizes), sum(sent for sent, _ in sizes), sum(came for _, came in sizes)]

    forward, sums = count(plan.blocks, fields(case)["blocks"]), count(plan.sums, fields(case)["sums"])
    return RankCost(*forward, *(a + b for a, b in zip(forward, sums, strict=True)))


def dealt(case: Case, rank: int) -> RankCost:
    numbers, shards = [], shards_of(case)
    dealt_out = bundles(shared_segments_of(case, rank), shards, case.mask != "none" and group_of(case) > 1)
    for there, back in (("there", "back"), ("backward there", "backward back")):
        hops = sent = received = 0
        for name, outward in ((there, True), (back, False)):
            away = home = 0
            for bundle in dealt_out:
                for member in bundle.segment.members:
                    rows = case.samples * bundle.segment.packed_rows(shards, member)
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


@pytest.mark.parametrize("at_once", [2**21, 0])
@few(60)
@given(CASES)
def test_every_rank_of_every_exchange(at_once: int, case: Case) -> None:
    """With 0 as counted where there are many ranks: branch by branch, even segments apart from the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dilated_attention.ring.counts.AT_ONCE", at_once)
        cost = case.cost()
        for exchange in EXCHANGES:
            ranks = [cost.of_rank(rank, exchange) for rank in range(case.ranks)]
            assert ranks == [enumerated(case, rank, exchange) for rank in range(case.ranks)], exchange
            assert sum(x.bytes_sent for x in ranks) == sum(x.bytes_received for x in ranks)
            summary = cost.exchanges[exchange]
            for way in ("", "backward_"):
                most = {
                    x: max(getattr(one, way + x) for one in ranks) for x in ("hops", "bytes_sent", "bytes_received")
                }
                assert getattr(summary, way + "hops") == most["hops"]
                assert getattr(summary, way + "bytes_sent_max") == most["bytes_sent"]
                assert getattr(summary, way + "bytes_received_max") == most["bytes_received"]
                assert getattr(summary, way + "bytes_total") == sum(getattr(x, way + "bytes_received") for x in ranks)


LARGE = [
    make(DilatedPattern.longnet([64, 256, 1024, 4096], [1, 3, 16, 64]), (64,) * 64, 8, is_causal=True),
    make(DilatedPattern.longnet([100, 1000, 10000], [1, 7, 90]), (37, 52, 61) * 33, 6, 2, padded=True),
    make(DilatedPattern.torchscale([128, 512, 4096], [1, 4, 32]), (16,) * 255 + (9,), 12, is_causal=True),
    make(DilatedPattern.head_groups([8, 64, 10**6], [1, 5, 100]), (8,) * 1024, 5, 2, samples=2),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"{case.ranks} ranks")
def test_many_ranks(case: Case) -> None:
    cost, ranks = case.cost(), case.ranks
    for exchange in EXCHANGES:
        for rank in {0, 1, 2, ranks // 3, ranks // 2, ranks - 2, ranks - 1}:
            assert cost.of_rank(rank, exchange) == enumerated(case, rank, exchange), (exchange, rank)


# --- what is counted is what is sent ----------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("is_causal", "padded"), [(False, False), (True, False), (False, True)])
def test_runs_count_the_same(exchange: str, is_causal: bool, padded: bool) -> None:
    pattern, lengths = DilatedPattern.longnet([8, 20, 60], [1, 3, 4]), (13, 10, 0, 20, 17)
    given = {"head_dim": 8, "dtype": "f32", "samples": 2, "is_causal": is_causal, "padded": padded}
    case = make(pattern, lengths, 4, 2, exchange=exchange, dlse=False, **given)  # which an alltoall would send, too
    cost = case.cost()
    for rank, transport in enumerate(case.on_threads()[1]):
        stats, found = transport.stats, cost.of_rank(rank, exchange)
        assert stats.hops == found.hops + found.backward_hops
        assert stats.bytes_sent == found.bytes_sent + found.backward_bytes_sent
        assert stats.bytes_received == found.bytes_received + found.backward_bytes_received
        assert stats.peak_buffer_bytes <= cost.exchanges[exchange].held


def computed(case: Case, exchange: str) -> list[int]:
    """(query, key) pairs by rank: whole segments head by head."""
    found, shards = [0] * case.ranks, shards_of(case)
    owner_of = [rank for rank, length in enumerate(case.lengths()) for _ in range(length)]
    dealt = {
        (bundle.segment.branch, bundle.segment.start, head): bundle.target
        for rank in range(shards.ranks)
        for bundle in bundles(shared_segments_of(case, rank), shards, False)
        for head, _ in bundle.segment.heads
    }
    for branch, start, head, tokens in segments(case):
        for index, token in enumerate(tokens):
            rank = owner_of[token]
            if exchange == "alltoall":
                rank = dealt.get((branch, start, head), rank)
            found[rank] += group_of(case) * (index + 1 if case.is_causal else len(tokens))
    return found


def segments(case: Case) -> Iterator[tuple[int, int, int, range]]:
    pattern, (_, kv_heads) = case.the_pattern(), case.head_counts()
    for branch, (width, rate) in enumerate(pattern.branches):
        for start in range(0, case.tokens, width):
            for head in pattern.heads(branch, kv_heads):
                offset = pattern.offset(branch, head, kv_heads)
                yield branch, start, head, range(start + offset, min(start + width, case.tokens), rate)


@few(60)
@given(CASES)
def test_operations(case: Case) -> None:
    cost, (heads, kv_heads) = case.cost(), case.head_counts()
    for exchange in EXCHANGES:
        pairs = computed(case, exchange)
        every = case.the_pattern().pairs(case.tokens, heads, num_kv_heads=kv_heads, is_causal=case.is_causal)
        assert sum(pairs) == every
        found = cost.exchanges[exchange]
        assert found.flops == 4 * case.head_dim * case.samples * max(pairs)
        assert found.backward_flops == 10 * case.head_dim * case.samples * max(pairs)


# --- sums in float32 --------------------------------------------------------------------------------------------


def summed(case: Case, rank: int, exchange: str) -> int:
    """Bytes of the sums of a backward pass, as `_exchange` makes them."""
    mine, shards, sums = shared_segments_of(case, rank), shards_of(case), fields(case)["sums"]
    plan = traffic(mine, exchange, case.is_causal, rank)

    def size(shared: int, owner: int) -> int:
        return part_bytes(sums, case.samples * mine[shared].packed_rows(shards, owner))

    used = {x.segment for step in plan.blocks for parts in step.receives.values() for x in parts}
    home = {x.segment for step in plan.sums for parts in step.receives.values() for x in parts if x.owner == rank}
    made = [sum(size(*part) for parts in step.receives.values() for part in parts) for step in plan.blocks]
    dq = sum(size(shared, rank) // 2 * group_of(case) for shared in used | home)
    # those of a step, while the ones before are on their way or they themselves are joined to a message
    return dq + sum(size(shared, rank) for shared in home) + 2 * max(made, default=0)


@few(60)
@given(CASES)
def test_sums_are_never_more(case: Case) -> None:
    memory = case.cost().memory
    for exchange in ("ring", "allgather"):
        most = max(summed(case, rank, exchange) for rank in range(case.ranks))
        assert most <= memory.sums[exchange]
        if not case.is_causal and exchange == "allgather":
            assert most == memory.sums[exchange]
    assert memory.sums["alltoall"] == 0


# --- the choice -------------------------------------------------------------------------------------------------


def choice(case: Case, backend: str = "nccl") -> str:
    heads, kv_heads = case.head_counts()
    call = Call(
        case.the_pattern(), case.is_causal, samples=1, heads=heads, kv_heads=kv_heads, head_dim=case.head_dim,
        dtype=DTYPES[case.dtype],
    )  # fmt: skip
    return fastest_exchange(call, shards_of(case), backend)


@few(60)
@given(CASES, st.sampled_from(("nccl", "gloo", "other")))
def test_the_fastest_that_fits_is_chosen(case: Case, backend: str) -> None:
    latency, bandwidth = LINKS.get(backend, LINKS["nccl"])
    cost = case.cost(batch=1, has_padding=False, latency=latency, bandwidth=bandwidth)
    chosen = choice(case, backend)
    assert chosen == cost.best
    fits = [x for x in EXCHANGES if x == "ring" or cost.exchanges[x].held <= MOST_HELD * cost.memory.saved]
    assert chosen in fits
    assert cost.exchanges[chosen].total_seconds == min(cost.exchanges[x].total_seconds for x in fits)


def test_choices() -> None:
    dense = make(DilatedPattern.longnet([2**20], [1]), (2**14,) * 64, 4, head_dim=64)
    assert choice(dense) == "ring"  # undilated, one segment would be the whole sequence on every rank
    assert choice(replace(dense, own_pattern=DilatedPattern.longnet([2**20], [64]))) != "ring"
    pair = make(DilatedPattern.longnet([64], [1]), (32, 32), 1, head_dim=64)
    assert choice(pair) == "ring"  # an allgather sends the same; one head cannot be dealt to two ranks
    with torch.device("meta"):  # it is made on the host, whatever device new tensors go to by default
        assert choice(make(DilatedPattern.longnet([64, 128], [1, 2]), (32,) * 8, 5, head_dim=24)) in EXCHANGES


@pytest.mark.parametrize("small", [0, 2**15])
def test_heads_split_over_processes(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may hold no head of a branch that crosses borders."""
    monkeypatch.setattr("dilated_attention.ring.counts.AT_ONCE", small)
    pattern, shards = DilatedPattern.head_groups([16, 24 + small, 96], [1, 2, 4]), Shards.even(96, 6)
    for first in range(3):
        call = Call(pattern, samples=1, heads=1, kv_heads=1, head_dim=8, first_head=first, total_heads=3)
        chosen = fastest_exchange(call, shards, "gloo")
        assert chosen == "ring" if first == 0 else chosen in EXCHANGES
