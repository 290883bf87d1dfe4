"""Every count of a picture against the pattern's own definition, pair by pair."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention import DilatedPattern
from dilated_attention.pattern import RULES
from dilated_attention.show import View
from dilated_attention.show.counts import edges


@st.composite
def views(draw: st.DrawFn) -> View:
    """Every rule; lengths and rates that divide nothing, or are longer than the sequence."""
    tokens, kv_heads, group = draw(st.integers(1, 40)), draw(st.integers(1, 5)), draw(st.integers(1, 2))
    count = draw(st.integers(1, min(3, kv_heads)))
    branch = st.tuples(st.integers(1, 45), st.integers(1, 9))
    branches = draw(st.lists(branch, min_size=count, max_size=count))
    pattern = DilatedPattern(draw(st.sampled_from(RULES)), *zip(*branches, strict=True))
    start = draw(st.integers(0, tokens - 1))
    window = start, draw(st.integers(start + 1, tokens))
    more = {"kv_heads": kv_heads, "is_causal": draw(st.booleans()), "cells": draw(st.integers(1, 40))}
    return View(pattern, tokens, kv_heads * group, window=window, **more)


def seen_in_branch(view: View, branch: int, head: int) -> list[tuple[int, int]]:
    """Queries and keys by the words of pattern.py: same segment, and both at the head's offset."""
    kv_heads, (width, rate) = view.kv_heads or view.heads, view.pattern.branches[branch]
    kv_head = head * kv_heads // view.heads
    if kv_head not in view.pattern.heads(branch, kv_heads):
        return []
    offset = view.pattern.offset(branch, kv_head, kv_heads)
    rows = [token for token in range(view.tokens) if token % width % rate == offset]
    return [(q, k) for q in rows for k in rows if q // width == k // width and (k <= q or not view.is_causal)]


@given(views(), st.data())
def test_every_cell_has_the_pairs_that_the_pattern_lists(view: View, data: st.DataObject) -> None:
    assert sorted(head for picture in view.pictures for head in picture.heads) == [*range(view.heads)]
    picture = data.draw(st.sampled_from(view.pictures))
    head = data.draw(st.sampled_from(picture.heads))
    seen = [seen_in_branch(view, branch, head) for branch in range(len(view.pattern.branches))]
    stretches = [range(*pair) for pair in itertools.pairwise(view.edges)]
    for (i, queries), (j, keys) in itertools.product(enumerate(stretches), repeat=2):
        found = [sum(q in queries and k in keys for q, k in pairs) for pairs in seen]
        assert picture.share[i, j].item() == pytest.approx(max(found) / len(queries) / len(keys), rel=1e-12)
        if max(found):
            assert picture.branch[i, j] == found.index(max(found)), "the first of the densest"


@pytest.mark.parametrize(
    ("tokens", "most", "numbers", "off"),
    [
        (64, 48, (16, 64, 1, 4), 0),  # a third of 64 would be out of step with the rate
        (2**16, 64, (2048, 16384, 1, 8, 64), 0),
        (2**20, 128, (2048, 2**20, 1, 512), 0),
        (10**9, 64, [2**i for i in range(30)], 0),
        (96_000, 128, (3000, 24_000, 1, 8), 0),
        (1500, 32, (750, 3, 5), 0),
        # what no cell divides is nearly in step
        *((2**13, most, numbers, 1 / 16) for most in (48, 64, 128)
          for numbers in ((2048, 4096, 1, 2, 4, 6, 12), (1010, 4004, 3, 7), (1000, 4096, 1, 3), (4096, 1, 7))),
    ],
)  # fmt: skip
def test_cells_are_in_step(tokens: int, most: int, numbers: tuple[int, ...], off: float) -> None:
    cuts = edges(0, tokens, most, numbers)
    size = cuts[1]
    assert (cuts[0], cuts[-1]) == (0, tokens)
    assert most / 4 - 1 <= len(cuts) - 1 <= most
    assert {b - a for a, b in itertools.pairwise(cuts[:-1])} == {size}
    assert all(size % x == 0 or x % size == 0 or min(size, x) <= off * max(size, x) for x in numbers)


def test_cells_of_a_window_begin_where_segments_do() -> None:
    cuts = edges(1000, 5096, 64, (64, 1024, 1, 4))
    assert (*cuts[:3], cuts[-1]) == (1000, 1024, 1088, 5096)
    assert edges(3, 7, 4, (4,)) == (3, 4, 5, 6, 7), "few tokens are drawn one by one"


@pytest.mark.parametrize("tokens", [10**9, 2**48])
def test_no_length_is_too_long(tokens: int) -> None:
    """Squares of these overflow 64-bit integers, and nothing may have as many entries as there are tokens."""
    pattern = DilatedPattern.longnet([2048, 2**20, tokens], [1, 512, 2**20])
    view = View(pattern, tokens, 8)
    (picture,) = view.pictures
    assert len(view.edges) <= 130
    assert torch.all((picture.share > 0) & (picture.share <= 1))
    assert picture.share[0, 1] == 2.0**-40, "one row in 2**20, queries and keys"
    assert picture.branch[0].tolist() == [0] + [2] * (len(view.edges) - 2)


def test_heads_that_look_the_same_are_one_picture() -> None:
    pattern = DilatedPattern.longnet([16, 64], [1, 4])
    for view, heads in (
        (View(pattern, 64, 8), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (View(pattern, 1024, 8), [[0, 4, 1, 5, 2, 6, 3, 7]]),
        (View(pattern, 64, 8, head=6), [[2, 6]]),
    ):
        assert [picture.heads for picture in view.pictures] == heads
