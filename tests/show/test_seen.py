"""Every count of a view against the pattern's own list of keys, pair by pair."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.show import View
from dilated_attention.show.cells import edges

from .views import Case, cases, long_view


def counted(case: Case, head: int, row: range, column: range) -> list[int]:
    """How many of the pairs of a cell 0, 1, 2, ... branches show."""
    found = [0] * (len(case.pattern.branches) + 1)
    for query in row:
        keys = case.keys(query, head)
        for key in column:
            found[keys.count(key)] += 1
    return found


@given(cases(), st.integers(1, 12), st.data())
def test_every_cell_holds_the_pairs_that_the_pattern_lists(case: Case, cells: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, case.tokens - 1))
    stop = data.draw(st.integers(start + 1, case.tokens))
    view = case.view(window=(start, stop), cells=cells)
    stretches = [range(*some) for some in itertools.pairwise(view.edges)]
    assert (view.edges[0], view.edges[-1]) == (start, stop)
    assert len(stretches) <= cells
    for kind in view.kinds:
        head = data.draw(st.sampled_from(kind.heads))
        for (i, row), (j, column) in itertools.product(enumerate(stretches), repeat=2):
            there = counted(case, head, row, column)
            pairs = kind.pairs(i, j)
            assert sum(pairs) == sum(times * many for times, many in enumerate(there))
            most = max((times for times, many in enumerate(there) if many), default=0)
            at_work = sum(one > 0 for one in pairs)
            assert kind.counts()[i][j] == at_work >= most
            if len(row) == len(column) == 1:
                assert at_work == most


@given(cases())
def test_single_pairs_are_shown_as_often_as_their_key_counts(case: Case) -> None:
    view = case.view()
    assert view.cell_size == 1
    for kind in view.kinds:
        for head in kind.heads:
            for query, row in enumerate(kind.counts()):
                keys = case.keys(query, head)
                assert row == [keys.count(key) for key in range(case.tokens)]


@given(cases(), st.integers(1, 9), st.integers(1, 5))
def test_merged_cells_unite_what_they_hold(case: Case, cells: int, merged: int) -> None:
    for kind in case.view(cells=cells).kinds:
        fine, coarse = kind.masks(), kind.masks(merged)
        assert len(coarse) == -(-len(fine) // merged)
        expected = [[0] * len(coarse) for _ in coarse]
        for i, j in itertools.product(range(len(fine)), repeat=2):
            expected[i // merged][j // merged] |= fine[i][j]
        assert coarse == expected


@given(cases())
def test_every_head_is_of_one_kind_and_kinds_differ(case: Case) -> None:
    view = case.view()
    assert sorted(head for kind in view.kinds for head in kind.heads) == list(range(case.heads))
    assert len({kind.offsets for kind in view.kinds}) == len(view.kinds)


@given(cases(), st.data())
def test_the_keys_of_a_query(case: Case, data: st.DataObject) -> None:
    query = data.draw(st.integers(0, case.tokens - 1))
    for kind in case.view(query=query).kinds:
        for head in kind.heads:
            assert tuple(sorted(key for some in kind.keys for key in some)) == case.keys(query, head)
            assert kind.zero_keys == case.pattern.zero_keys(
                query, head, num_tokens=case.tokens, num_heads=case.heads, num_kv_heads=case.kv_heads,
                is_causal=case.is_causal,
            )  # fmt: skip


@given(cases(), st.data())
def test_zero_keys_are_those_of_every_row(case: Case, data: st.DataObject) -> None:
    query = data.draw(st.integers(0, case.tokens - 1))
    for kind in case.view(query=query).kinds:
        zeros = {one.branch: one for one in kind.zeros}
        told = 0
        for branch, some in enumerate(kind.keys):
            width = min(case.pattern.segment_lengths[branch], case.tokens)
            if some and branch in zeros:
                is_last = query // width * width + width > case.tokens
                told += zeros[branch].last if is_last else zeros[branch].whole
                assert not is_last or zeros[branch].last_length == case.tokens % width
        assert told == kind.zero_keys


# --- long sequences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [10**6, 10**9 + 7, 2**48])
def test_the_cells_of_long_sequences_add_up_to_all_pairs(tokens: int, is_causal: bool) -> None:
    pattern = DilatedPattern.torchscale([1000, 65536, 10**8 + 1, 2**48], [1, 7, 100, 2**17])
    view = View.of(pattern, tokens, 8, kv_heads=4, is_causal=is_causal)
    size = len(view.edges) - 1
    total = sum(
        len(kind.heads) * sum(sum(kind.pairs(*cell)) for cell in itertools.product(range(size), repeat=2))
        for kind in view.kinds
    )
    assert total == pattern.pairs(tokens, 8, num_kv_heads=4, is_causal=is_causal)


def test_a_window_of_a_long_sequence_shows_single_pairs() -> None:
    view = long_view(window=(10**8, 10**8 + 50))
    pattern, kind = view.pattern, view.kinds[3]
    for query, row in enumerate(kind.counts(), 10**8):
        first = query - query % 2048
        near = set(range(first, first + 2048))  # of the branch without gaps: the others are looked at by their steps
        for key, count in enumerate(row, 10**8):
            branches = [
                query // w == key // w and query % w % r == key % w % r == 3 % r for w, r in pattern.branches
            ]  # fmt: skip
            assert count == sum(branches)
            assert bool(count) >= (key in near)


def test_cells_are_in_step_with_segments_and_rates() -> None:
    assert edges(0, 10**6, 64, [2048, 4096]) == (*range(0, 10**6, 16384), 10**6)
    assert edges(0, 8192, 64, [2048, 4096]) == (*range(0, 8192, 128), 8192)
    assert len(edges(0, 8193, 64, [2048])) - 1 == 33  # 256 tokens per cell: 129 would be out of step
    assert edges(0, 64, 24, [16, 64, 1, 4]) == (*range(0, 64, 4), 64)  # in step with the rate, too
    assert edges(3, 8, 64, [2048]) == (3, 4, 5, 6, 7, 8)


@given(st.integers(0, 50), st.integers(1, 300), st.integers(1, 20), st.lists(st.integers(1, 99), min_size=1))
def test_edges_cut_evenly(start: int, length: int, cells: int, lengths: list[int]) -> None:
    found = edges(start, start + length, cells, lengths)
    sizes = [b - a for a, b in itertools.pairwise(found)]
    assert 1 <= len(sizes) <= cells
    assert len(set(sizes[:-1])) <= 1
    assert 0 < sizes[-1] <= sizes[0]
    assert sum(sizes) == length


# --- what is asked ------------------------------------------------------------------------------------------------

PATTERN = DilatedPattern.longnet([4, 8], [1, 2])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"query": 8}, "no query 8 among 8 tokens: count from 0 to 7"),
        ({"query": -1}, "no query -1"),
        ({"head": 4}, "no head 4 among 4: count from 0 to 3"),
        ({"window": (5, 5)}, r"window is \[5, 5\)"),
        ({"window": (0, 9)}, r"window is \[0, 9\)"),
        ({"cells": 0}, "cells must be 1 or more, got 0"),
        ({"ranks": 0}, "ranks must be 1 or more, got 0"),
        ({"kv_heads": 3}, "cannot be shared evenly"),
        ({"ranks": 2, "exchange": "star"}, "unknown exchange 'star': use one of ring, allgather, alltoall or auto"),
    ],
)
def test_what_cannot_be_shown_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        View.of(PATTERN, 8, 4, **wrong)  # type: ignore[arg-type]


def test_one_head_can_be_asked_for() -> None:
    view = View.of(PATTERN, 8, 4, head=3)
    assert [kind.heads for kind in view.kinds] == [(0, 2), (1, 3)]
    assert [kind.heads for kind in view.shown] == [(1, 3)]


def test_the_query_lies_in_a_stretch_or_outside_the_window() -> None:
    assert View.of(PATTERN, 80, 4, query=79, cells=10).query_stretch == 9
    assert View.of(PATTERN, 80, 4, query=79, window=(16, 80), cells=4).query_stretch == 3
    assert View.of(PATTERN, 80, 4, query=9, window=(16, 80)).query_stretch is None
    assert View.of(PATTERN, 80, 4).query_stretch is None


def test_heads_that_look_the_same_are_one_picture() -> None:
    single, coarse = View.of(PATTERN, 16, 4), View.of(PATTERN, 16, 4, cells=4)
    assert [heads for heads, _ in single.pictures()] == [[0, 2], [1, 3]]
    assert [heads for heads, _ in coarse.pictures()] == [[0, 1, 2, 3]]
    assert [heads for heads, _ in single.pictures(merged=4)] == [[0, 1, 2, 3]]
