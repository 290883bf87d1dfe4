"""Rectangles with bands, cut for kernels that know none; and blocks whose keys lie elsewhere: pair by pair."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

import dilated_attention as da
from dilated_attention import bands
from dilated_attention.blocks import Block, View
from dilated_attention.branches import KINDS
from dilated_attention.branches.base import FOREVER, Rect
from dilated_attention.call import Call
from dilated_attention.pattern import Counts
from dilated_attention.plan import away
from dilated_attention.reference import key_counts
from tests.test_branches import drawn


def pairs(block: Block, rows: torch.Tensor, keys: torch.Tensor, packed: View) -> Counter[tuple[int, int]]:
    """How often the block shows each pair of entries."""
    mine, theirs = block.queries.of(rows)[..., 0], block.keys.within(packed).of(keys)[..., 0]
    distance = torch.arange(theirs.shape[1]) - torch.arange(mine.shape[1])[:, None]
    shown = torch.ones_like(distance, dtype=torch.bool)
    if block.low is not None:
        shown &= distance >= block.low
    if block.high is not None:
        shown &= distance <= block.high
    for branch in block.but:
        at, key = (x.positions(torch.device("cpu"))[0, :, 0] - block.origin for x in (block.queries, block.keys))
        shown &= ~branch.sees(block.queries.head, at[:, None], key)
    grid = torch.broadcast_tensors(mine[:, :, None], theirs[:, None], shown[None, :, :, None])
    return Counter(zip(*(x[grid[2]].tolist() for x in grid[:2]), strict=True))


def pairs_of(rect: Rect) -> Counter[tuple[int, int]]:
    return Counter(
        (query, key)
        for one in rect.singles()
        for query, key in itertools.product(one.queries, one.keys)
        if rect.low <= key - query <= rect.high
    )


def draw_rect(draw: random.Random) -> Rect:
    step, repeats = draw.randint(1, 2), draw.randint(1, 3)
    queries, keys = (range(at, at + step * draw.randint(1, 20), step) for at in (5, 7))
    low, high = sorted(draw.randint(-22 * step, 22 * step) for _ in range(2))
    rect = Rect(queries, keys, repeats=repeats, period=48 if repeats > 1 else 0)
    return rect.between(draw.choice([-FOREVER, low]), draw.choice([FOREVER, high]))


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_parts_of_a_band(seed: int, is_masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(bands, "LEAST", draw.randint(1, 3))
    monkeypatch.setattr(bands, "MASKED", draw.randint(3, 8))
    for _ in range(10):
        rect = draw_rect(draw)
        found: Counter[tuple[int, int]] = Counter()
        for part in filter(Rect.pairs, bands.without_bands(rect, is_masked)):
            rows, keys, limits = len(part.queries), len(part.keys), part.in_rows()
            known = not is_masked and (limits == (None, None) or (limits == (None, 0) and rows == keys))
            assert known or max(rows, keys) <= bands.MASKED
            found += pairs_of(part)
        assert found == pairs_of(rect), rect


@pytest.mark.parametrize("counts", ["once", "sum"])
@pytest.mark.parametrize("seed", range(60))
def test_keys_that_lie_elsewhere(seed: int, counts: Counts) -> None:
    """Every pair of the call's queries with the keys of another place, each as often as the oracle counts it."""
    draw = random.Random(seed)
    n, heads, samples = draw.randint(8, 40), draw.randint(1, 4), draw.randint(1, 2)
    pattern = da.Pattern([drawn(draw.choice([*KINDS]), n, draw) for _ in range(draw.randint(1, 3))], counts=counts)
    borders = sorted(draw.sample(range(n + 1), 4))
    ends = (0, draw.randint(1, n), n) if draw.random() < 0.3 else ()
    call = Call(
        pattern, is_causal=draw.random() < 0.5, samples=samples, heads=heads, kv_heads=heads, total=n,
        start=borders[0], queries=borders[1] - borders[0], key_start=borders[0], keys=borders[1] - borders[0],
        cu_seqlens=tuple(sorted(set(ends))), in_parts=True,
    )  # fmt: skip
    first, count = borders[2], borders[3] - borders[2]
    rows, keys = (torch.arange(samples * x * heads).view(samples, x, heads, 1) for x in (call.queries, count))
    found: Counter[tuple[int, int]] = Counter()
    for part in away(call, first, count):
        packed = part.rows.of(keys).contiguous()
        for block in part.blocks:
            found += pairs(block, rows, packed, part.rows)
    each, _ = key_counts(pattern, n, heads, None, call.is_causal, 1, torch.ones(0).int(), call.cu_seqlens or None)
    shown = each.sum((0, 1))[:, call.start : call.start + call.queries, first : first + count]
    wanted: Counter[tuple[int, int]] = Counter()
    for sample, (head, query, key) in itertools.product(range(samples), shown.nonzero().tolist()):
        wanted[int(rows[sample, query, head]), int(keys[sample, key, head])] += int(shown[head, query, key])
    assert found == wanted


@pytest.mark.parametrize(
    ("branches", "queries", "keys", "heads"),
    [
        ([da.Prefix(1), da.Window(8, 1), da.Dilated(10), da.Dilated(42, 5)], (10, 49), (6, 10), 6),
        ([da.Prefix(5), da.Window(7, 4), da.Dilated(12, 2), da.Dilated(30, 4)], (19, 47), (7, 19), 5),
    ],
)
def test_a_row_of_a_head_travels_once(
    branches: list[da.branches.Branch], queries: tuple[int, int], keys: tuple[int, int], heads: int
) -> None:
    """Heads of a branch are in views of several kinds here, as windows cut off parts of some."""
    call = Call(
        da.Pattern(branches), samples=1, heads=heads, kv_heads=heads, total=60, start=queries[0],
        queries=queries[1] - queries[0], in_parts=True,
    )  # fmt: skip
    rows = torch.arange((keys[1] - keys[0]) * heads).view(1, -1, heads, 1)
    sent = [
        (part.blocks[0].branch, row)
        for part in away(call, keys[0], keys[1] - keys[0])
        for row in part.rows.of(rows).flatten().tolist()
    ]
    assert len(sent) == len(set(sent))
