"""Receptive fields against a walk over the pattern's lists of keys."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.show import View, reach
from dilated_attention.show.coverage import Covering
from dilated_attention.show.reach import LAYERS, LONGEST_STRETCH, Reach

from .views import Case, cases, long_view


def walked(case: Case, query: int) -> list[set[int]]:
    """The tokens reached after layers 1, 2, ..., up to where they stay the same."""
    sees = [{key for head in range(case.heads) for key in case.keys(token, head)} for token in range(case.tokens)]
    layers: list[set[int]] = []
    reached = {query}
    while True:
        after = reached.union(*(sees[token] for token in reached))
        if layers and after == reached:
            return layers
        layers.append(after)
        reached = after


def check(found: Reach, expected: list[set[int]], edges: tuple[int, ...]) -> None:
    assert [layer.count for layer in found.layers] == [len(some) for some in expected]
    for layer, some in zip(found.layers, expected, strict=True):
        assert (layer.first, layer.last) == (min(some), max(some))
        assert layer.cells == tuple(sum(a <= x < b for x in some) for a, b in itertools.pairwise(edges))


@given(cases(), st.data())
def test_every_layer_reaches_what_a_walk_does(case: Case, data: st.DataObject) -> None:
    query = data.draw(st.integers(0, case.tokens - 1))
    view = case.view(query=query, cells=data.draw(st.integers(1, 9)))
    expected = walked(case, query)
    check(view.reach, expected[:LAYERS], view.edges)
    assert view.reach.is_all == (len(expected) <= LAYERS)
    if view.reach.is_all:
        assert view.reach.bound == (min(expected[-1]), max(expected[-1]))


@given(cases(), st.data())
def test_the_first_layer_from_keys_is_the_same(case: Case, data: st.DataObject) -> None:
    """What is done where a walk would be too long, done where it is not."""
    query = data.draw(st.integers(0, case.tokens - 1))
    view = case.view(cells=4)
    branches = [
        Covering(*branch, frozenset(kind.offsets[i] for kind in view.kinds) - {None})  # type: ignore[arg-type]
        for i, branch in enumerate(case.pattern.branches)
    ]
    found = reach._from_keys(query, case.tokens, branches, case.is_causal, view.edges)
    check(Reach(query, tuple(found), False, (0, 0)), walked(case, query)[:1], view.edges)


def test_a_causal_query_hears_of_nothing_later() -> None:
    case = Case(DilatedPattern.longnet([4, 6], [1, 2]), 24, 2, 1, True)
    found = case.view(query=11).reach
    assert all(layer.last == 11 for layer in found.layers)
    assert found.layers[-1].first == 0


def test_without_a_query_the_middle_and_when_causal_the_last() -> None:
    pattern = DilatedPattern.longnet([4], [1])
    assert View.of(pattern, 9, 1).reach.query == 4
    assert View.of(pattern, 9, 1, is_causal=True).reach.query == 8


def test_growth_that_goes_on_is_followed_for_so_many_layers() -> None:
    found = View.of(DilatedPattern.longnet([1000, 1001], [1, 1]), 10**9, 1, query=5 * 10**8, cells=8).reach
    assert len(found.layers) == LAYERS
    assert not found.is_all
    assert found.bound == (0, 10**9 - 1)
    counts = [layer.count for layer in found.layers]
    assert counts == sorted(set(counts))


def test_a_short_field_in_a_long_sequence_is_exact() -> None:
    """A later half of the tokens of the same segments: the field is the same, moved."""
    pattern = DilatedPattern.longnet([64, 256], [1, 8])
    short = View.of(pattern, 1024, 4, query=700).reach
    long = View.of(pattern, 10**9, 4, query=700 + 1024 * 10**5).reach
    assert [layer.count for layer in long.layers] == [layer.count for layer in short.layers]
    assert [layer.first - 1024 * 10**5 for layer in long.layers] == [layer.first for layer in short.layers]
    assert long.is_all
    assert short.is_all


def test_where_the_field_is_too_long_the_first_layer_is_counted_alone() -> None:
    view = long_view(query=12_345)
    assert len(view.reach.layers) == 1
    assert not view.reach.is_all
    assert view.reach.bound == (0, 10**9 - 1)
    seen = {key for kind in view.kinds for some in kind.keys for key in some}
    assert view.reach.layers[0].count == len(seen)


def test_a_long_segment_without_gaps_is_counted_without_a_list() -> None:
    width = 8 * LONGEST_STRETCH
    view = View.of(DilatedPattern.longnet([width, 1024], [1, 4]), 10**9, 4, query=width + 5)
    (layer,) = view.reach.layers
    assert (layer.count, layer.first, layer.last) == (width, width, 2 * width - 1)
    assert sum(layer.cells) == width
    assert view.reach.is_all


def test_too_many_keys_are_not_counted_at_all() -> None:
    view = View.of(DilatedPattern.longnet([10**9], [2]), 10**9, 1, query=0)
    assert view.reach.layers == ()
    assert not view.reach.is_all
    assert view.reach.bound == (0, 10**9 - 1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_layers_are_followed_as_long_as_they_cannot_leave_what_is_marked(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "LONGEST_STRETCH", 40)
    case = Case(DilatedPattern.longnet([6, 10, 4], [1, 2, 3]), 200, 3, 1, is_causal)
    found = case.view(query=103, cells=5)
    expected = walked(case, 103)
    assert 1 < len(found.reach.layers) < len(expected)
    check(found.reach, expected[: len(found.reach.layers)], found.edges)
    assert not found.reach.is_all
