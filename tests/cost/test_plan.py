"""What `plan_cost` says: formulas where all divides, memory, limits, and the table for people."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.ring.cost import EXCHANGES, LINKS, RankCost, plan_cost
from dilated_attention.units import bytes_text


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("shard", "span", "rate", "heads", "group"), [(64, 4, 8, 8, 1), (32, 8, 4, 8, 3)])
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
    assert bytes_text(received) == "54 MiB"
    assert bytes_text(cost.naive_ring_bytes) == "3 TiB"
    assert cost.exchanges["ring"].hops == cost.naive_ring_hops == 1023
    assert cost.exchanges["ring"].seconds == pytest.approx(1023 * 10e-6 + received / 50e9)


def test_nothing_is_sent_where_segments_lie_inside_shards() -> None:
    cost = plan_cost(DilatedPattern.longnet([64, 128], [1, 2]), 1024, 8, num_heads=4, head_dim=8)
    for exchange in EXCHANGES:
        found = cost.exchanges[exchange]
        assert (found.hops, found.bytes_total, found.backward_hops, found.held) == (0, 0, 0, 0)
        assert found.total_seconds == 0
    assert cost.best == "ring"


def test_the_default_link_is_that_of_nccl() -> None:
    """Written out in the signature, where users read it."""
    given = inspect.signature(plan_cost).parameters
    assert (given["latency"].default, given["bandwidth"].default) == LINKS["nccl"]


def test_memory_of_a_rank() -> None:
    cost = plan_cost(DilatedPattern.longnet([2048], [1]), 1001, 4, num_heads=8, num_kv_heads=2, head_dim=16, batch=3)
    memory, tokens = cost.memory, 3 * 251
    assert cost.tokens_per_rank == 251
    assert (memory.q, memory.k, memory.v, memory.out) == tuple(tokens * h * 16 * 2 for h in (8, 2, 2, 8))
    assert memory.lse == tokens * 8 * 4
    kept = DilatedPattern.longnet([1], [1]).saved_bytes(251, 8, 16, num_kv_heads=2)
    assert memory.saved == 3 * kept
    assert memory.out_sums == tokens * 8 * 16 * 4
    assert (memory.dq, memory.dk, memory.dv) == (memory.q, memory.k, memory.v)
    assert memory.received == {name: cost.exchanges[name].held for name in EXCHANGES}
    block, sums = tokens * 2 * 2 * 16 * 2, tokens * 2 * 2 * 16 * 4  # K and V in bfloat16, their sums in float32
    assert memory.received["ring"] == 2 * (block + sums)
    own = tokens * (8 + 2 + 2) * 16 * 4  # dq, dk, dv of this rank's rows, all of which travel
    assert memory.sums == {"ring": own + 2 * sums, "allgather": own + 2 * 3 * 250 * 3 * 2 * 2 * 16 * 4, "alltoall": 0}
    assert memory.received["allgather"] >= (4 - 1) * 750 * 2 * 2 * 16 * 2


# --- limits -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trillion_tokens_on_65536_ranks() -> None:
    cost = plan_cost(doubling(2**40), 2**40 - 54321, 65536, num_heads=2, head_dim=64)
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
        ({"head_dim": 0}, "head_dim must be 1 or more"),
        ({"batch": 0}, "batch must be 1 or more"),
        ({"dtype": torch.int32}, "dtype must be a floating point torch.dtype"),
        ({"bandwidth": 0}, "bandwidth must be positive"),
        ({"flops_per_second": float("inf")}, "flops_per_second must be positive"),
        ({"latency": -1.0}, "latency must be the seconds that a hop takes"),
        ({"lengths": [50, 50]}, "lengths are 2 shards of 100 tokens .* each of 4 ranks"),
        ({"lengths": [50, 60, -10, 0]}, "the shortest of -10: give each of 4 ranks 0 or more of the 100 tokens"),
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


# --- for people -------------------------------------------------------------------------------------------------


def test_the_table_names_every_exchange() -> None:
    text = str(plan_cost(doubling(2**20), 2**20, 8, num_heads=12, head_dim=64))
    for word in (*EXCHANGES, "naive ring", "1,048,576 tokens on 8 ranks", "best: "):
        assert word in text
    rows = [line for line in text.splitlines() if re.match("ring|allgather|alltoall|naive", line)]
    assert all(len(line) <= 90 for line in text.splitlines()), text
    assert len(rows) == 4
