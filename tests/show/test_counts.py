"""Every count of a picture against the pattern's own definition, pair by pair."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dilated_attention as da
from dilated_attention import DilatedPattern, Pattern
from dilated_attention.branches import KINDS
from dilated_attention.pattern import RULES
from dilated_attention.show.counts import edges
from dilated_attention.show.view import Plot
from tests.test_branches import drawn


@st.composite
def views(draw: st.DrawFn) -> Plot:
    """Every rule and kind; lengths and rates that divide nothing, or are longer than the sequence."""
    tokens, kv_heads, group = draw(st.integers(1, 40)), draw(st.integers(1, 5)), draw(st.integers(1, 2))
    count = draw(st.integers(1, min(3, kv_heads)))
    if draw(st.booleans()):
        branch = st.tuples(st.integers(1, 45), st.integers(1, 9))
        branches = draw(st.lists(branch, min_size=count, max_size=count))
        pattern: Pattern = DilatedPattern(draw(st.sampled_from(RULES)), *zip(*branches, strict=True))
    else:
        pick = random.Random(draw(st.integers(0, 2**32)))
        listed = [drawn(pick.choice([*KINDS]), tokens, pick) for _ in range(count)]
        listed[-1] = dataclasses.replace(listed[-1], heads=pick.choice([None, [0], [kv_heads - 1, 0]]))
        pattern = Pattern(listed, counts=pick.choice(["once", "sum"]))
    start = draw(st.integers(0, tokens - 1))
    window = start, draw(st.integers(start + 1, tokens))
    more = {"kv_heads": kv_heads, "is_causal": draw(st.booleans()), "cells": draw(st.integers(1, 40))}
    return Plot(pattern, tokens, kv_heads * group, window=window, **more)


def seen_in(view: Plot, head: int) -> Tensor:
    """(branches, queries, keys): by the definitions alone."""
    kv_heads, token = view.kv_heads or view.heads, torch.arange(view.tokens)
    kv_head = head * kv_heads // view.heads
    found = torch.zeros(len(view.branches), view.tokens, view.tokens, dtype=torch.bool)
    for index, branch in enumerate(view.pattern.branches_for(kv_heads)):
        if kv_head in branch.members:
            found[index] = branch.sees(kv_head, token[:, None], token)
    return found.tril() if view.is_causal else found


@given(views(), st.data())
def test_every_cell_has_the_pairs_that_the_branches_show(view: Plot, data: st.DataObject) -> None:
    assert sorted(head for picture in view.pictures for head in picture.heads) == [*range(view.heads)]
    picture = data.draw(st.sampled_from(view.pictures))
    seen = seen_in(view, data.draw(st.sampled_from(picture.heads))).double()
    for (i, queries), (j, keys) in itertools.product(enumerate(itertools.pairwise(view.edges)), repeat=2):
        found = seen[:, slice(*queries), slice(*keys)].mean((1, 2))
        assert picture.share[i, j].item() == pytest.approx(found.max().item(), rel=1e-12)
        assert picture.times[i, j].item() == pytest.approx(found.sum().item(), rel=1e-12)
        assert picture.branch[i, j] == next((x for x, share in enumerate(found) if share), -1), "the first"


@given(views())
def test_what_a_query_sees_and_which_rows_are_covered(view: Plot) -> None:
    """As the facts tell it, and the pattern itself."""
    pattern, heads = view.pattern, {"num_heads": view.heads, "num_kv_heads": view.kv_heads}
    covered = pattern.coverage(view.tokens, **heads, is_causal=view.is_causal)
    query = view.tokens // 2
    for kind in Plot(pattern, view.tokens, view.heads, view.kv_heads, view.is_causal).kinds:
        seen = seen_in(view, kind[0])
        assert torch.equal(covered[:, kind[0]], seen.any(0).any(1))
        asked = Plot(pattern, view.tokens, view.heads, view.kv_heads, view.is_causal, kind[0], query)
        *_, said = asked.facts()
        for name, keys in zip(view.branch_names, seen[:, query], strict=True):
            some = keys.nonzero().flatten().tolist()
            listed = [*some[:6], "…", some[-1]] if len(some) > 8 else some
            told = f" {len(some)} key{'s' * (len(some) > 1)} in {name} ({' '.join(map(str, listed))})"
            assert (told in said) if some else f"in {name} (" not in said or view.branch_names.count(name) > 1


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
    view = Plot(pattern, tokens, 8)
    (picture,) = view.pictures
    assert len(view.edges) <= 130
    assert torch.all((picture.share > 0) & (picture.share <= 1))
    assert picture.share[0, 1] == 2.0**-40, "one row in 2**20, queries and keys"
    assert picture.branch[0].tolist() == [0] + [2] * (len(view.edges) - 2)


@pytest.mark.parametrize("tokens", [10**9, 2**48])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_kind_of_any_length(tokens: int, is_causal: bool) -> None:
    pattern = Pattern(
        [da.Global([0, tokens // 2]), da.Prefix(4), da.Window(1023), da.Window(64, rate=8), da.Strided(2**20),
         da.Strided(64, length=2**20), da.Dilated(100, 3, 1), da.Dilated(tokens - 7, 2**20, 5),
         da.Blocks.bigbird(tokens // 512, num_tokens=tokens)]
    )  # fmt: skip
    view = Plot(pattern, tokens, 8, is_causal=is_causal, head=5)
    pairs = [Pattern([x]).pairs(tokens, 1, is_causal=is_causal) for x in pattern.listed]
    (picture,) = view.pictures
    area = torch.tensor(view.edges).diff().double()
    assert (picture.times * area * area[:, None]).sum().item() == pytest.approx(sum(pairs), rel=1e-9)


def test_heads_that_look_the_same_are_one_picture() -> None:
    pattern = DilatedPattern.longnet([16, 64], [1, 4])
    for view, heads in (
        (Plot(pattern, 64, 8), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (Plot(pattern, 1024, 8), [[0, 4, 1, 5, 2, 6, 3, 7]]),
        (Plot(pattern, 64, 8, head=6), [[2, 6]]),
    ):
        assert [picture.heads for picture in view.pictures] == heads
