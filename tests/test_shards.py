"""Shards, and the shared_segments over their borders, against sets of positions made by brute force."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.ring.shards import Heads, Shards, crosses, shared_segments
from tests.cases import Case
from tests.drawn import drawn, few, shards_of, shared_segments_of


def tokens_of(shards: Shards, rank: int) -> set[int]:
    return set(range(shards.starts[rank], shards.starts[rank + 1]))


# --- shards -----------------------------------------------------------------------------------------------------


def test_even_shards_are_those_of_tensor_split() -> None:
    for tokens, ranks in itertools.product([0, 1, 5, 7, 1000], [1, 3, 8, 64]):
        expected = tuple(len(part) for part in torch.arange(tokens).tensor_split(ranks))
        assert Shards.even(tokens, ranks) == Shards.of(expected)


# --- shared segments ------------------------------------------------------------------------------------------------


def rows_on_ranks(
    pattern: DilatedPattern, shards: Shards, heads: Heads
) -> dict[tuple[int, int, int], dict[int, set[int]]]:
    """By (branch, segment start, head): the rows that each rank has, by brute force over all tokens."""
    owner = {token: rank for rank in range(shards.ranks) for token in tokens_of(shards, rank)}
    found: dict[tuple[int, int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for branch, (width, rate) in enumerate(pattern.branches):
        for head in range(heads.first, heads.first + heads.held):
            if head not in pattern.heads(branch, heads.total):
                continue
            offset = pattern.offset(branch, head, heads.total)
            for token, rank in owner.items():
                if token % width % rate == offset:
                    found[branch, token - token % width, head - heads.first][rank].add(token)
    return found


SMALL = Case(
    "shards", 0, "longnet", False, "own", 35, own_pattern=DilatedPattern.longnet([40], [3]), own_heads=(5, 5), ranks=6,
    own_lengths=(1, 1, 1, 30, 0, 2),
)  # fmt: skip


@few(200)
@given(drawn(), st.integers(0, 7))
@example(SMALL, 0)
def test_channels_are_the_segments_with_rows_on_several_ranks(case: Case, elsewhere: int) -> None:
    pattern, shards, (_, total) = case.the_pattern(), shards_of(case), case.head_counts()
    first = elsewhere % total  # the heads before it are another process's
    heads = Heads(first, total - first, total)
    expected = rows_on_ranks(pattern, shards, heads)
    for rank in range(shards.ranks):
        seen = set()
        for shared in shared_segments(pattern, shards, heads, rank):
            width, rate = pattern.branches[shared.branch]
            assert (shared.dilation, shared.start % width) == (rate, 0)
            assert shared.stop == min(shared.start + width, shards.tokens)
            assert shared.members == tuple(sorted(shared.members))
            assert len(shared.members) > 1
            for head, offset in shared.heads:
                assert offset == pattern.offset(shared.branch, head + first, total)
                there = expected[shared.branch, shared.start, head]
                assert shared.members == tuple(sorted(there))
                for member, rows in there.items():
                    piece = shared.piece(member)
                    assert shared.rows(offset, piece) == len(rows)
                    assert shared.first_row(offset, piece) == min(rows)
                seen.add((shared.branch, shared.start, head))
        assert seen == {key for key, there in expected.items() if rank in there and len(there) > 1}


@few(200)
@given(drawn())
def test_every_rank_knows_whether_a_segment_crosses_a_border(case: Case) -> None:
    pattern, shards = case.the_pattern(), shards_of(case)
    cut = any(
        len([rank for rank in range(case.ranks) if set(range(start, start + width)) & tokens_of(shards, rank)]) > 1
        for width in pattern.segment_lengths
        for start in range(0, shards.tokens, width)
    )
    assert crosses(pattern, shards) == cut
    assert cut or not any(shared_segments_of(case, rank) for rank in range(case.ranks))
