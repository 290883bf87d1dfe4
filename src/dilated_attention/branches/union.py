"""Branches together: which pairs of a branch count where a key counts once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from dilated_attention.branches.base import Branch, Rect

Part = tuple[Rect, tuple[Branch, ...]]  # pairs of a branch, less those that the others show

AT_ONCE = 1 << 22  # pairs that are looked at one by one


def parts_of(
    branch: Branch, earlier: Sequence[Branch], head: int, queries: range, n: int, is_causal: bool
) -> Iterator[Part]:
    """The pairs of a branch that no earlier one shows: cut away where that leaves rectangles, else named."""
    for rect in branch.rects(head, queries, n, is_causal):
        parts, but = [rect], []
        # the last first: of nested segments the largest, for smaller ones show nothing of what it leaves
        for other in () if rect.is_empty else reversed(earlier):
            rests = [other.without(part, head, n) for part in parts]
            if any(rest is None for rest in rests):
                but.append(other)
            else:
                parts = [part for rest in rests for part in rest or ()]
        yield from ((part, tuple(but)) for part in parts)


def moved_to(branch: Branch, others: Iterable[Branch], queries: range, n: int) -> tuple[int, int]:
    """How many tokens earlier queries have the same parts, 0 if none do, and in a sequence of how many tokens."""
    reach = branch.reach(queries)
    if reach is None or reach.stop > n:
        return 0, n
    firsts, periods = zip(*(one.repeats() for one in (branch, *others)), strict=True)
    period = math.lcm(*periods)
    shift = max(0, reach.start - max(firsts)) // period * period if period else 0
    return shift, reach.stop - shift


def count_pairs(parts: Iterable[Part], head: int) -> int:
    """How many pairs these are."""
    total = 0
    for rect, but in parts:
        total += 0 if but else rect.pairs()
        for one in rect.singles() if but and not rect.is_empty else ():
            start, step, count = one.queries
            keys = one.keys.start + one.keys.step * torch.arange(one.keys.length)
            rows = max(1, AT_ONCE // len(keys))
            for first in range(0, count, rows):
                query = (start + step * torch.arange(first, min(count, first + rows))).unsqueeze(1)
                seen = torch.ones(len(query), len(keys), dtype=torch.bool)
                if one.low is not None:
                    seen &= keys - query >= one.low
                if one.high is not None:
                    seen &= keys - query <= one.high
                for other in but:
                    seen &= ~other.sees(head, query, keys)
                total += int(seen.sum())
    return total
