"""Where shards cut a sequence, and whole segments shared by the ranks that hold them, against sets of positions."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given

from dilated_attention import DilatedPattern
from dilated_attention.blocks import View
from dilated_attention.call import Call
from dilated_attention.ring.alltoall import Bundle, bundles_of, deal
from dilated_attention.ring.shards import Shards
from tests.cases import Case
from tests.drawn import drawn, few


def test_even_shards_are_those_of_tensor_split() -> None:
    for tokens, ranks in itertools.product([0, 1, 5, 7, 1000], [1, 3, 8, 64]):
        expected = tuple(len(part) for part in torch.arange(tokens).tensor_split(ranks))
        assert Shards.even(tokens, ranks) == Shards.of(expected)


def test_where_a_sequence_is_cut() -> None:
    shards = Shards.of((4, 0, 6, 3), (0, 5, 13))
    assert shards.cut(5, 13) == (range(2, 4), (0, 5, 8))
    assert shards.cut(2, 9) == (range(3), (0, 2, 2, 7))
    assert [shards.sequence(token) for token in (4, 5, 12)] == [(0, 5), (5, 13), (5, 13)]


@pytest.mark.parametrize("heads", [1, 2, 5, 8, 12, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 12])
def test_shares_are_even_and_complete(heads: int, ranks: int) -> None:
    call = Call(DilatedPattern.longnet([64], [1]), samples=1, heads=heads, kv_heads=heads)
    rows, targets = deal(call, 0, tuple(range(ranks + 1)))
    assert rows.tolist() == [[1] * ranks] * heads
    assert sorted(targets) == list(range(heads))
    counts = [list(targets.values()).count(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


# --- whole segments -------------------------------------------------------------------------------------------------


def rows_on_ranks(case: Case) -> dict[tuple[int, int, int], dict[int, list[int]]]:
    """By (branch, segment start, head): the rows that each rank has, by brute force over all tokens."""
    pattern, (_, heads) = case.the_pattern(), case.head_counts()
    owner = [rank for rank, length in enumerate(case.lengths()) for _ in range(length)]
    found: dict[tuple[int, int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for branch, (width, rate) in enumerate(pattern.branches):
        for head in pattern.heads(branch, heads):
            offset = pattern.offset(branch, head, heads)
            for token, rank in enumerate(owner):
                if token % width % rate == offset:
                    found[branch, token - token % width, head][rank].append(token)
    return found


def tokens_of(view: View, index: int, start: int) -> list[int]:
    """Of the index-th head of a view, in the sequence."""
    assert view.start == start
    first = view.token + index * view.token_step
    return [first + row * view.row_step for row in range(view.rows)]


@few(200)
@given(drawn())
def test_every_head_of_a_shared_segment_is_computed_by_one_rank(case: Case) -> None:
    shards, (heads, kv_heads) = Shards.of(case.lengths()), case.head_counts()
    call = Call(
        case.the_pattern(), case.is_causal, samples=case.samples, heads=heads, kv_heads=kv_heads, total=case.tokens
    )
    shared = {key: ranks for key, ranks in rows_on_ranks(case).items() if len(ranks) > 1}
    by_rank = [bundles_of(call, shards, rank) for rank in range(case.ranks)]
    seen: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    every: dict[tuple[int, int, range], Bundle] = {}
    for rank, bundles in enumerate(by_rank):
        for bundle in bundles:
            block, numbers = bundle.block, bundle.block.queries.numbers
            assert every.setdefault((block.branch, block.origin, numbers), bundle) == bundle
            for index, head in enumerate(numbers):
                key = block.branch, block.origin, head
                seen[key].add(rank)
                rows = {x: tokens_of(view, index, shards.starts[x]) for x, view in bundle.members.items()}
                assert rows == shared[key]
                assert tokens_of(block.queries, index, block.origin) == [token for x in rows for token in rows[x]]
    assert {key: {*ranks} for key, ranks in shared.items()} == seen
    dealt: dict[tuple[int, int, tuple[int, ...]], Counter[int]] = {}
    for bundle in every.values():
        group = bundle.block.branch, bundle.block.origin, tuple(bundle.members)
        dealt.setdefault(group, Counter(dict.fromkeys(bundle.members, 0)))[bundle.target] += bundle.block.heads
    assert all(max(some.values()) - min(some.values()) <= 1 for some in dealt.values()), "as even as can be"
