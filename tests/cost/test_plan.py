"""What `plan_cost` says: formulas where all divides, memory, limits, and the table for people."""

from __future__ import annotations

import inspect

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.context_parallel import EXCHANGES
from dilated_attention.ring.cost import LINKS, plan_cost


def doubling(tokens: int) -> DilatedPattern:
    widths = [2**i for i in range(11, tokens.bit_length())]
    return DilatedPattern.longnet(widths, [width // 2048 for width in widths])


def test_the_default_link_is_that_of_nccl() -> None:
    """Written out in the signature, where users read it."""
    given = inspect.signature(plan_cost).parameters
    assert (given["latency"].default, given["bandwidth"].default) == LINKS["nccl"]


def test_memory_of_a_rank() -> None:
    cost = plan_cost(DilatedPattern.longnet([2048], [1]), 1001, 4, num_heads=8, num_kv_heads=2, head_dim=16, batch=3)
    memory, tokens = cost.memory, 3 * 251
    assert cost.tokens_per_rank == 251
    assert (cost.naive_ring.hops, cost.naive_ring.bytes_received) == (3, 2 * 3 * (1001 - 250) * 2 * 16 * 2)
    assert (memory.q, memory.k, memory.lse) == (tokens * 8 * 16 * 2, tokens * 2 * 16 * 2, tokens * 8 * 4)
    assert memory.saved == 3 * DilatedPattern.longnet([1], [1]).saved_bytes(251, 8, 16, num_kv_heads=2)
    assert memory.gradients == memory.q + 2 * memory.k
    assert memory.out_sums == tokens * 8 * 16 * 4
    own = tokens * (8 + 2 + 2) * 16 * 4  # dq, dk, dv of this rank's rows, all of which travel, in float32
    other = 3 * 250  # tokens of another rank
    block, sums, more_sums = other * 2 * 2 * 16 * 2, other * 2 * 2 * 16 * 4, tokens * 2 * 2 * 16 * 4  # of K and V
    assert [x.sums for x in cost.exchanges.values()] == [own + 2 * sums, own + 3 * sums, 0]
    assert cost.exchanges["ring"].held == 2 * (block + more_sums)
    assert cost.exchanges["allgather"].held >= (4 - 1) * 750 * 2 * 2 * 16 * 2


# --- limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len must be 1 or more, got 0"),
        ({"num_ranks": 0}, "num_ranks must be 1 or more, got 0"),
        ({"num_kv_heads": 3}, "4 query heads cannot be shared evenly by 3"),
        ({"dtype": torch.int32}, "dtype must be a floating point torch.dtype"),
        ({"bandwidth": 0}, "bandwidth must be positive"),
        ({"latency": -1.0}, "latency must be the seconds that a hop takes"),
        ({"lengths": [50, 50]}, "lengths are 2 shards of 100 tokens .* each of 4 ranks"),
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
    for word in (*EXCHANGES, "naive ring", "1,048,576 tokens on 8 ranks", "best exchange: alltoall", "12.8 MiB + "):
        assert word in text
    assert all(len(line) <= 110 for line in text.splitlines()), text
    assert "one device" in str(plan_cost(doubling(2**14), 2**14, 1, num_heads=12, head_dim=64))
