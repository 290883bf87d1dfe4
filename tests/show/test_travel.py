"""What travels: against `plan_cost`, and against the rows that ranks see of one another, counted by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern, plan_cost
from dilated_attention.ring.cost import EXCHANGES
from dilated_attention.ring.shards import Shards
from dilated_attention.show import View
from dilated_attention.show.travel import MOST_RANKS, Travel

from .views import Case, cases


def of(case: Case, ranks: int, exchange: str, head_dim: int = 3, dtype: torch.dtype = torch.float32) -> Travel:
    return Travel.of(
        case.pattern, case.tokens, case.heads, case.kv_heads, case.is_causal, ranks, exchange, head_dim, dtype
    )  # fmt: skip


@given(cases(most_tokens=120), st.integers(1, 9), st.sampled_from(EXCHANGES), st.integers(1, 9), st.booleans())
def test_every_rank_sends_and_receives_what_the_plan_says(
    case: Case, ranks: int, exchange: str, head_dim: int, is_half: bool
) -> None:
    dtype = torch.bfloat16 if is_half else torch.float32
    found = of(case, ranks, exchange, head_dim, dtype)
    cost = plan_cost(
        case.pattern, case.tokens, ranks, num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=head_dim,
        dtype=dtype, is_causal=case.is_causal,
    )  # fmt: skip
    sent, received, needed = Counter[int](), Counter[int](), Counter[int]()
    for one in found.sent:
        assert one.source != one.target
        sent[one.source] += one.bytes
        received[one.target] += one.bytes
    for one in found.needed:
        needed[one.target] += one.bytes
    for rank in range(ranks):
        expected = cost.of_rank(rank, exchange)
        assert found.of_rank[rank] == expected
        assert (sent[rank], received[rank]) == (expected.bytes_sent, expected.bytes_received)
        assert needed[rank] == expected.bytes_received


@given(cases(most_tokens=60), st.integers(1, 7), st.sampled_from(["ring", "allgather"]))
def test_needed_rows_are_those_that_queries_of_another_rank_see(case: Case, ranks: int, exchange: str) -> None:
    starts = Shards.even(case.tokens, ranks).starts
    owner = [rank for rank in range(ranks) for _ in range(starts[rank], starts[rank + 1])]
    expected = Counter[tuple[int, int, int]]()
    for branch, (width, rate) in enumerate(case.pattern.branches):
        for head in case.pattern.heads(branch, case.kv_heads):
            offset = case.pattern.offset(branch, head, case.kv_heads)
            rows = [token for token in range(case.tokens) if token % width % rate == offset]
            for key in rows:
                users = {
                    owner[query]
                    for query in rows
                    if query // width == key // width and (query >= key or not case.is_causal)
                }
                for user in users - {owner[key]}:
                    expected[owner[key], user, branch] += 1
    found = {(one.source, one.target, one.branch): one.rows for one in of(case, ranks, exchange).needed}
    assert found == dict(expected)


@given(cases(most_tokens=60), st.integers(1, 7))
def test_who_sends_in_each_exchange(case: Case, ranks: int) -> None:
    allgather = of(case, ranks, "allgather")
    assert allgather.sent == allgather.needed
    ring = of(case, ranks, "ring")
    assert ring.needed == allgather.needed
    alltoall = of(case, ranks, "alltoall")
    assert alltoall.sent == alltoall.needed


@given(cases(most_tokens=60), st.integers(1, 7))
def test_a_branch_is_local_when_no_border_cuts_its_segments(case: Case, ranks: int) -> None:
    found = of(case, ranks, "ring")
    shards = [range(*some) for some in itertools.pairwise(found.shards.starts)]
    for branch, width in enumerate(case.pattern.segment_lengths):
        segments = [range(at, min(at + width, case.tokens)) for at in range(0, case.tokens, width)]
        cut = sum(sum(any(x in shard for x in segment) for shard in shards) > 1 for segment in segments)
        assert (found.cut[branch], found.segments[branch]) == (cut, len(segments))
        if not cut:
            assert all(one.branch != branch for one in found.sent)


def test_beyond_so_many_ranks_sums_are_left() -> None:
    case = Case(DilatedPattern.longnet([64, 4096], [1, 8]), 4096, 4, 1, False)
    listed, summed = of(case, MOST_RANKS, "ring"), of(case, MOST_RANKS + 1, "ring")
    assert listed.is_listed
    assert listed.sent
    assert not summed.is_listed
    assert summed.sent == summed.needed == ()
    assert sum(rank.bytes_received for rank in summed.of_rank) > 0
    assert summed.cut[1] == 1


def test_auto_is_the_plans_choice() -> None:
    pattern = DilatedPattern.longnet([64, 512], [1, 8])
    view = View.of(pattern, 512, 8, ranks=8, exchange="auto", head_dim=16, dtype=torch.float32)
    assert view.travel is not None
    assert view.travel.is_auto
    assert view.travel.exchange == plan_cost(pattern, 512, 8, num_heads=8, head_dim=16, dtype=torch.float32).best


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_long_sequence_on_many_ranks(exchange: str) -> None:
    pattern = DilatedPattern.longnet([2048, 2**20, 2**30], [1, 2**9, 2**19])
    view = View.of(pattern, 10**9, 8, ranks=MOST_RANKS, exchange=exchange)
    assert view.travel is not None
    total = sum(one.bytes for one in view.travel.sent)
    assert total == sum(rank.bytes_received for rank in view.travel.of_rank) > 0
