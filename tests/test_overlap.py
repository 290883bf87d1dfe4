"""How many pairs a union has: exact, and in time that does not grow with the sequence."""

from __future__ import annotations

import random

import pytest
import torch

import dilated_attention as da
from dilated_attention import functional
from dilated_attention.branches import Blocks, Branch, Dilated, Global, Strided, Window, overlap
from dilated_attention.branches.base import Rect
from dilated_attention.ring import counts
from tests.test_branches import drawn as branch

HEADS = 3
UNIONS: dict[str, list[Branch]] = {
    "windows of several rates": [Window(63, rate=3), Window(500, 0, rate=16), Dilated(48, 2)],
    "nested, and out of step": [Dilated(4096, 8), Dilated(2048, 4, 1), Strided(7, 3, 96)],
    "of all keys": [Strided(64), Strided(7, 4), Global([5, 1_000_001]), Dilated(24, 5)],
    "small segments in large ones": [Dilated(1_000_000, 16), Dilated(12, 3, 0)],
    "blocks": [
        Blocks.random(64, 3, 1, num_tokens=4096),
        Blocks.random(128, 2, 2, num_tokens=4096),
        Strided(7),
        Global([9, 300]),
        Dilated(512, 4),
    ],
}


def as_counted_one_by_one(pattern: da.Pattern, n: int, is_causal: bool) -> int:
    query, key = torch.arange(n)[:, None], torch.arange(n)
    total = 0
    for head in range(HEADS):
        seen = torch.zeros(n, n, dtype=torch.bool)
        for one in pattern.branches_for(HEADS):
            seen |= one.sees(head, query, key)
        total += int((seen & (key <= query) if is_causal else seen).sum())
    return total


@pytest.mark.parametrize("seed", range(150))
def test_drawn_unions_have_as_many_pairs_as_their_definitions_show(seed: int) -> None:
    pick = random.Random(seed)
    n = pick.choice((pick.randint(1, 40), pick.randint(40, 200)))
    kinds = pick.choices(
        ("dilated", "dilated", "window", "strided", "global", "blocks", "prefix"), k=pick.randint(2, 5)
    )
    pattern, is_causal = da.Pattern([branch(kind, n, pick) for kind in kinds]), pick.random() < 0.5
    want = as_counted_one_by_one(pattern, n, is_causal)
    assert pattern.pairs(n, HEADS, is_causal=is_causal) == want
    cost = da.plan_cost(pattern, n, 1, num_heads=HEADS, head_dim=1, is_causal=is_causal)
    assert cost.exchanges["ring"].forward.flops == 4 * want


@pytest.mark.parametrize("name", UNIONS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_billion_tokens_take_few_steps(name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    class Counted(Rect):
        def between(self, *limits: int) -> Rect:
            nonlocal made
            made += 1
            return Rect(*self).between(*limits)

    monkeypatch.setattr(overlap, "Rect", Counted)
    assert 0 < da.Pattern(UNIONS[name]).pairs(10**9, HEADS, is_causal=is_causal) < HEADS * 10**18
    assert 0 < made < 20_000  # large segments are looked at one by one


def test_pairs_of_near_branches_grow_by_the_period() -> None:
    pattern, period = da.Pattern([Dilated(12, 5), Window(9, rate=2), Strided(7, 3, 20), Dilated(30, 4)]), 60
    once, twice, far = (pattern.pairs(n, HEADS) for n in (10 * period, 11 * period, 16_000_000 * period))
    assert once == as_counted_one_by_one(pattern, 10 * period, False)
    assert far == once + (twice - once) * 15_999_990


def test_what_takes_too_long_to_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = da.Pattern([Dilated(101, 3), Dilated(103, 2), Window(50, rate=7)])
    monkeypatch.setattr(overlap, "MOST_STEPS", 1000)
    with pytest.raises(
        ValueError, match=r"^the branches overlap in more than .* which are not counted: use fewer blocks"
    ):
        pattern.pairs(2**20, 4)
    with pytest.raises(ValueError, match=r"^the branches overlap"):
        da.plan_cost(pattern, 2**20, 8, num_heads=4, head_dim=64)
    assert pattern.coverage(2**20, 4).all()


def test_a_call_counts_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does `explain` make the blocks of a union, which may be millions."""
    pattern = da.Pattern([Strided(64), Strided(7), Dilated(101, 3), Window(50, rate=7)])
    monkeypatch.setattr(overlap, "MOST_STEPS", 0)
    call = da.call.Call(pattern, samples=1, heads=4, kv_heads=4, head_dim=8)
    assert counts.count(call, counts.Shards.even(4096, 4), pairs_too=False)
    monkeypatch.setattr(functional, "plan", None)
    x = torch.empty(1, 1, 4, 8).expand(1, 2**20, 4, 8)
    assert da.explain(x, x, x, pattern).backend in {"sdpa", "eager"}
