"""Shards, and the channels over their borders, against sets of positions made by brute force."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.pattern import RULES
from dilated_attention.ring.shards import Channel, Heads, Shards, channels, crosses

FEW = settings(deadline=None, derandomize=True, database=None, max_examples=200)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[DilatedPattern, Shards, int]:
    """Pattern, shards and the number of key/value heads; numbers follow evenly from a seed."""
    pick = random.Random(draw(st.integers(0, 2**32 - 1)))
    rule, branches = pick.choice(RULES), pick.randint(1, 3)
    pattern = DilatedPattern(
        rule, tuple(pick.randint(1, 60) for _ in range(branches)), tuple(pick.randint(1, 9) for _ in range(branches))
    )
    lengths = tuple(pick.choice((0, 1, 2, pick.randint(0, 30))) for _ in range(pick.randint(1, 8)))
    return pattern, Shards.of(lengths), pick.randint(branches if rule == "head_groups" else 1, 8)


def tokens_of(shards: Shards, rank: int) -> set[int]:
    return set(range(shards.starts[rank], shards.starts[rank + 1]))


# --- shards -----------------------------------------------------------------------------------------------------


def test_lengths_in_starts_out() -> None:
    shards = Shards.of((3, 0, 5))
    assert shards.starts == (0, 3, 3, 8)
    assert (shards.ranks, shards.tokens) == (3, 8)
    assert Shards.of(()).tokens == 0
    assert len({shards, Shards.of((3, 0, 5))}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("tokens", [0, 1, 5, 7, 64, 1000])
def test_even_shards_are_those_of_tensor_split(tokens: int, ranks: int) -> None:
    expected = tuple(len(part) for part in torch.arange(tokens).tensor_split(ranks))
    assert Shards.even(tokens, ranks) == Shards.of(expected)


@FEW
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 30), st.integers(0, 30))
def test_pieces_and_holders(lengths: list[int], start: int, stop: int) -> None:
    shards = Shards.of(tuple(lengths))
    stop = min(stop, shards.tokens)
    held = []
    for rank in range(shards.ranks):
        first, last = shards.piece(rank, start, stop)
        assert first <= last
        assert set(range(first, last)) == tokens_of(shards, rank) & set(range(start, stop))
        held += [rank] if first < last else []
    holders = shards.holders(start, stop)
    assert list(holders) == (list(range(held[0], held[-1] + 1)) if held else [])


# --- heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("total", [3, 5, 8])
def test_heads_of_several_processes_are_those_of_one(rule: str, total: int) -> None:
    pattern = DilatedPattern(rule, (8, 16, 32), (1, 3, 4))
    for branch, cut in itertools.product(range(3), range(total + 1)):
        parts = [Heads(0, cut, total), Heads(cut, total - cut, total)]
        found = [(part.first + head, offset) for part in parts for head, offset in part.of_branch(pattern, branch)]
        assert found == Heads(0, total, total).of_branch(pattern, branch)
        assert found == [(head, pattern.offset(branch, head, total)) for head in pattern.heads(branch, total)]
        assert all(0 <= head < part.held for part in parts for head, _ in part.of_branch(pattern, branch))


# --- channels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dilation", [1, 2, 3, 7])
@pytest.mark.parametrize(("start", "stop"), [(0, 20), (20, 33), (7, 8)])
def test_rows_of_a_piece(start: int, stop: int, dilation: int) -> None:
    for offset in range(dilation):
        channel = Channel(0, start, stop, dilation, ((0, offset), (3, offset)), (0, 1))
        for first, last in itertools.combinations_with_replacement(range(start, stop + 1), 2):
            rows = [token for token in range(first, last) if (token - start) % dilation == offset]
            assert channel.rows(offset, (first, last)) == len(rows)
            if rows:
                assert channel.first_row(offset, (first, last)) == rows[0]
        shards = Shards.of((start + (stop - start) // 2, stop))
        for rank in (0, 1):
            piece = channel.piece(shards, rank)
            assert set(range(*piece)) == tokens_of(shards, rank) & set(range(start, stop))
            assert channel.packed_rows(shards, rank) == 2 * channel.rows(offset, piece)


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


@FEW
@given(layouts(), st.integers(0, 7))
@example((DilatedPattern.longnet([40], [3]), Shards.of((1, 1, 1, 30, 0, 2)), 5), 0)
def test_channels_are_the_segments_with_rows_on_several_ranks(
    case: tuple[DilatedPattern, Shards, int], elsewhere: int
) -> None:
    pattern, shards, total = case
    first = elsewhere % total  # the heads before it are another process's
    heads = Heads(first, total - first, total)
    expected = rows_on_ranks(pattern, shards, heads)
    for rank in range(shards.ranks):
        seen = set()
        for channel in channels(pattern, shards, heads, rank):
            width, rate = pattern.branches[channel.branch]
            assert (channel.dilation, channel.start % width) == (rate, 0)
            assert channel.stop == min(channel.start + width, shards.tokens)
            assert channel.members == tuple(sorted(channel.members))
            assert len(channel.members) > 1
            for head, offset in channel.heads:
                assert offset == pattern.offset(channel.branch, head + first, total)
                there = expected[channel.branch, channel.start, head]
                assert channel.members == tuple(sorted(there))
                for member, rows in there.items():
                    piece = channel.piece(shards, member)
                    assert channel.rows(offset, piece) == len(rows)
                    assert channel.first_row(offset, piece) == min(rows)
                seen.add((channel.branch, channel.start, head))
        assert seen == {key for key, there in expected.items() if rank in there and len(there) > 1}


@FEW
@given(layouts())
def test_members_have_the_same_channels_in_the_same_order(case: tuple[DilatedPattern, Shards, int]) -> None:
    pattern, shards, total = case
    heads = Heads(0, total, total)
    of = {rank: channels(pattern, shards, heads, rank) for rank in range(shards.ranks)}
    for one, other in itertools.combinations(range(shards.ranks), 2):
        shared = [[x for x in of[rank] if {one, other} <= set(x.members)] for rank in (one, other)]
        assert shared[0] == shared[1]
    assert all(rank in channel.members for rank, some in of.items() for channel in some)


@FEW
@given(layouts())
def test_crosses_says_whether_some_segment_lies_on_two_ranks(case: tuple[DilatedPattern, Shards, int]) -> None:
    pattern, shards, total = case
    cut = any(
        len([rank for rank in range(shards.ranks) if set(range(start, start + width)) & tokens_of(shards, rank)]) > 1
        for width in pattern.segment_lengths
        for start in range(0, shards.tokens, width)
    )
    assert crosses(pattern, shards) == cut
    found = any(channels(pattern, shards, Heads(0, total, total), rank) for rank in range(shards.ranks))
    assert cut or not found


def test_crosses_examples() -> None:
    pattern = DilatedPattern.longnet([8, 16], [1, 2])
    assert not crosses(pattern, Shards.of((16, 32, 0, 5)))
    assert not crosses(pattern, Shards.of((0, 0, 77)))
    assert crosses(pattern, Shards.of((8, 8)))
    assert crosses(pattern, Shards.of((16, 1, 15)))
    assert not crosses(DilatedPattern.longnet([100], [1]), Shards.of((40, 0)))


def test_heads_whose_rows_lie_on_other_ranks_are_other_channels() -> None:
    """Of one segment of 7 tokens, 2 + 3 + 2, heads 0 to 4 take part with tokens 0 4, 1 5, 2 6, 3, and again 0 4."""
    pattern, shards, heads = DilatedPattern.longnet([7], [4]), Shards.of((2, 3, 2)), Heads(0, 5, 5)
    zero, one, two = (((0, 0), (4, 0)), (0, 1)), (((1, 1),), (0, 2)), (((2, 2),), (1, 2))
    for rank, expected in enumerate(([zero, one], [zero, two], [one, two])):
        found = channels(pattern, shards, heads, rank)
        assert [(channel.heads, channel.members) for channel in found] == expected


def test_an_empty_shard_has_no_channels() -> None:
    assert channels(DilatedPattern.longnet([8], [1]), Shards.of((3, 0, 5)), Heads(0, 2, 2), 1) == ()
    assert len(channels(DilatedPattern.longnet([8], [1]), Shards.of((3, 0, 5)), Heads(0, 2, 2), 2)) == 1
