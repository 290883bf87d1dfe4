"""Branches together: how many pairs of a branch count where a key counts once, and where the same pairs come again."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from dilated_attention.branches.base import FOREVER, Branch, Rect, Rows

Part = tuple[Rect, tuple[Branch, ...]]  # pairs of a branch, less those that the others show

AT_ONCE = 1 << 22  # pairs that are looked at one by one


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
        low, high = (-FOREVER if rect.low is None else rect.low), (FOREVER if rect.high is None else rect.high)
        for one in rect.singles() if but and not rect.is_empty else ():
            keys, rows = _positions(one.keys), max(1, AT_ONCE // one.keys.length)
            for first in range(0, one.queries.length, rows):
                query = _positions(one.queries.part(first, first + rows)).unsqueeze(1)
                seen = (keys - query >= low) & (keys - query <= high)
                for other in but:
                    seen &= ~other.sees(head, query, keys)
                total += int(seen.sum())
    return total


def _positions(rows: Rows) -> torch.Tensor:
    return torch.arange(rows.start, rows.last + 1, rows.step)
