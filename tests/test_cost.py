"""The closed forms of `cost` against the messages themselves, listed one by one, and against runs that count them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern, testing
from dilated_attention._alltoall import bundles
from dilated_attention._exchange import Messages, traffic
from dilated_attention._packing import Field, Fields, part_bytes
from dilated_attention._shards import Channel, Heads, Shards, channels
from dilated_attention.cost import (
    EXCHANGES,
    LINKS,
    MOST_HELD,
    PlanCost,
    RankCost,
    duration,
    fastest_exchange,
    plan_cost,
    size,
)

DOCS = Path(__file__).parents[1] / "docs"


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
        patch.setattr("dilated_attention.cost.SMALL", 0)
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


# --- formulas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("shard", "span", "rate", "heads", "group"), [(64, 4, 8, 8, 1), (32, 8, 4, 8, 3), (16, 2, 1, 2, 1)]
)
def test_formulas_where_all_divides(shard: int, span: int, rate: int, heads: int, group: int, is_causal: bool) -> None:
    ranks, dim, size = 4 * span, 16, 2
    pattern = DilatedPattern.longnet([shard * span], [rate])
    cost = plan_cost(
        pattern, shard * ranks, ranks, num_heads=heads * group, num_kv_heads=heads, head_dim=dim, is_causal=is_causal
    )
    rows = shard // rate
    for rank in range(ranks):
        blocks = rank % span if is_causal else span - 1
        for exchange in ("ring", "allgather"):
            assert cost.of_rank(rank, exchange).bytes_received == 2 * heads * dim * size * blocks * rows
        found = cost.of_rank(rank, "alltoall")
        there_and_back = (2 * group * heads + 2 * heads) * dim * size + 4 * group * heads
        assert found.bytes_received == there_and_back * rows * (span - 1) // span == found.bytes_sent
    assert cost.exchanges["ring"].hops == span - 1
    assert cost.exchanges["allgather"].hops == 1
    assert cost.exchanges["alltoall"].hops == 2
    assert cost.naive_ring_bytes == 2 * heads * dim * size * shard * (ranks - 1)
    assert cost.naive_ring_hops == ranks - 1


def doubling(tokens: int) -> DilatedPattern:
    widths = [2**i for i in range(11, tokens.bit_length())]
    return DilatedPattern.longnet(widths, [width // 2048 for width in widths])


def test_a_billion_tokens() -> None:
    cost = plan_cost(doubling(2**30), 2**30, 1024, num_heads=12, head_dim=64)
    received = sum(2 * 12 * 64 * 2 * (2**i - 2**20) // 2 ** (i - 11) for i in range(21, 31))
    assert cost.exchanges["ring"].bytes_received_max == received
    assert cost.exchanges["allgather"].bytes_received_max == received
    assert size(received) == "56.6 MB"
    assert size(cost.naive_ring_bytes) == "3.3 TB"
    assert cost.exchanges["ring"].hops == cost.naive_ring_hops == 1023
    assert cost.exchanges["ring"].seconds == pytest.approx(1023 * 10e-6 + received / 50e9)


def test_nothing_is_sent_where_segments_lie_inside_shards() -> None:
    cost = plan_cost(DilatedPattern.longnet([64, 128], [1, 2]), 1024, 8, num_heads=4, head_dim=8)
    for exchange in EXCHANGES:
        found = cost.exchanges[exchange]
        assert (found.hops, found.bytes_total, found.backward_hops, found.held) == (0, 0, 0, 0)
        assert found.total_seconds == 0
    assert cost.best == "ring"


def test_memory_of_a_rank() -> None:
    cost = plan_cost(DilatedPattern.longnet([2048], [1]), 1001, 4, num_heads=8, num_kv_heads=2, head_dim=16, batch=3)
    memory, tokens = cost.memory, 3 * 251
    assert cost.tokens_per_rank == 251
    assert (memory.q, memory.k, memory.v, memory.out) == tuple(tokens * h * 16 * 2 for h in (8, 2, 2, 8))
    assert memory.lse == tokens * 8 * 4
    kept = DilatedPattern.longnet([1], [1]).saved_bytes(251, 8, 16, num_kv_heads=2)
    assert memory.saved == 3 * kept
    assert (memory.out_sums, memory.dq_sums, memory.dk_sums) == tuple(tokens * h * 16 * 4 for h in (8, 8, 2))
    assert memory.received == {name: cost.exchanges[name].held for name in EXCHANGES}
    block = tokens * 2 * 2 * 16 * (2 + 4)  # rows of K and V in bfloat16, their sums in float32
    assert memory.received["ring"] == 2 * block
    assert memory.received["allgather"] >= (4 - 1) * 750 * 2 * 2 * 16 * 2


# --- limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2**40, 2**40 - 54321])
def test_a_trillion_tokens_on_65536_ranks(tokens: int) -> None:
    cost = plan_cost(doubling(2**40), tokens, 65536, num_heads=2, head_dim=64)
    ring = cost.exchanges["ring"]
    assert ring.bytes_total == sum(cost._tallies["ring"].received[0].tolist())
    assert ring.bytes_received_max < cost.naive_ring_bytes / 1e6


def test_sums_beyond_64_bits() -> None:
    """One dense segment: every rank receives all others' rows."""
    cost = plan_cost(DilatedPattern.longnet([2**40], [1]), 2**40, 65536, num_heads=16, head_dim=128)
    per_token = 2 * 16 * 128 * 2
    assert cost.exchanges["ring"].bytes_total == 65535 * 2**40 * per_token > 2**64
    assert cost.of_rank(777, "ring").bytes_received == cost.naive_ring_bytes == (2**40 - 2**24) * per_token


def test_one_rank_and_one_token() -> None:
    cost = plan_cost(DilatedPattern.longnet([4], [2]), 1, 1, num_heads=1, head_dim=1)
    assert cost.exchanges["ring"].bytes_total == cost.naive_ring_bytes == 0
    many = plan_cost(DilatedPattern.longnet([4], [2]), 1, 5, num_heads=1, head_dim=1)
    assert many.tokens_per_rank == 1
    assert many.of_rank(4, "alltoall") == RankCost(0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len must be 1 or more, got 0"),
        ({"seq_len": 10.5}, "seq_len must be a whole number, got 10.5"),
        ({"num_ranks": 0}, "num_ranks must be 1 or more, got 0"),
        ({"num_kv_heads": 3}, "4 query heads cannot be shared evenly by 3"),
        ({"num_kv_heads": 0}, "num_kv_heads must be 1 or more, got 0"),
        ({"head_dim": 0}, "head_dim must be 1 or more"),
        ({"batch": 0}, "batch must be 1 or more"),
        ({"dtype": torch.int32}, "dtype must be a floating point torch.dtype"),
        ({"bandwidth": 0}, "bandwidth must be positive"),
        ({"flops_per_second": float("inf")}, "flops_per_second must be positive"),
        ({"latency": -1.0}, "latency must be the seconds that a hop takes"),
        ({"lengths": [50, 50]}, "lengths are 2 shards of 100 tokens .* each of 4 ranks"),
        ({"lengths": [50, 60, -10, 0]}, "the shortest of -10: give each of 4 ranks 0 or more of the 100 tokens"),
        ({"lengths": []}, "lengths are 0 shards"),
        ({"seq_len": 2**48, "head_dim": 2**20}, r"more than 2\*\*62 bytes are not counted"),
    ],
)
def test_errors_say_what_to_do(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"seq_len": 100, "num_ranks": 4, "num_heads": 4, "head_dim": 8} | change
    with pytest.raises((ValueError, TypeError), match=message):
        plan_cost(DilatedPattern.longnet([2**48], [1]), **arguments)  # type: ignore[arg-type]


def test_errors_of_one_rank() -> None:
    cost = plan_cost(DilatedPattern.longnet([64], [1]), 100, 4, num_heads=4, head_dim=8)
    with pytest.raises(ValueError, match="no rank 4 among 4: count from 0 to 3"):
        cost.of_rank(4, "ring")
    with pytest.raises(ValueError, match="unknown exchange 'star': use one of ring, allgather, alltoall"):
        cost.of_rank(0, "star")


# --- the choice -------------------------------------------------------------------------------------------------


def choice(case: Case, backend: str = "nccl") -> str:
    return fastest_exchange(
        case.pattern, case.shards, case.heads, case.group, case.head_dim, case.dtype, case.is_causal, backend
    )


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
    monkeypatch.setattr("dilated_attention.cost.SMALL", small)
    pattern, shards = DilatedPattern.head_groups([16, 24 + small, 96], [1, 2, 4]), Shards.even(96, 6)
    for first in range(3):
        heads = Heads(first, 1, 3)
        chosen = fastest_exchange(pattern, shards, heads, 1, 8, torch.float32, False, "gloo")
        assert chosen == "ring" if first == 0 else chosen in EXCHANGES


def test_two_ranks_take_a_ring_before_an_allgather() -> None:
    """They send the same; one head cannot be dealt to two ranks."""
    assert choice(Case(DilatedPattern.longnet([64], [1]), (32, 32), 1, head_dim=64)) == "ring"


# --- for people -------------------------------------------------------------------------------------------------


def test_units() -> None:
    assert [size(x) for x in (0, 999, 1000, 56.6e6, 3.3e12, 4e18)] == [
        "0 B",
        "999 B",
        "1 kB",
        "56.6 MB",
        "3.3 TB",
        "4,000 PB",
    ]
    assert [duration(x) for x in (0.0, 12.3e-6, 0.9999e-3, 0.0112, 65.9, 22518.4)] == [
        "0 µs", "12.3 µs", "1 ms", "11.2 ms", "65.9 s", "22,518 s",
    ]  # fmt: skip


def test_the_table_names_every_exchange() -> None:
    text = str(plan_cost(doubling(2**20), 2**20, 8, num_heads=12, head_dim=64))
    for word in (*EXCHANGES, "naive ring", "1,048,576 tokens on 8 ranks", "best: "):
        assert word in text
    rows = [line for line in text.splitlines() if re.match("ring|allgather|alltoall|naive", line)]
    assert all(len(line) <= 90 for line in text.splitlines()), text
    assert len(rows) == 4


def test_the_table_in_the_docs_is_what_the_script_prints() -> None:
    command = [sys.executable, DOCS / "scaling.py", "--table"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    assert printed.strip() in (DOCS / "scaling.md").read_text(encoding="utf-8"), "paste what docs/scaling.py prints"
