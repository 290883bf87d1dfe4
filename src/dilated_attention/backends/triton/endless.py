"""A pattern as rectangles of an endless sequence, as numbers: decoding computes from them what a position meets.

A row of numbers says: in each period, from ``query`` on, every ``query_step``-th of ``query_span`` tokens sees every
``key_step``-th of ``key_span`` tokens from ``key`` on, if low <= key - query <= high. Nothing depends on the length.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from dilated_attention.branches import Branch, Dilated
from dilated_attention.branches.base import grouped
from dilated_attention.pattern import MAX_BRANCHES, Pattern

ENDLESS = 2**52  # tokens: a period, a span or a limit that never ends
MOST = MAX_BRANCHES  # rectangles: kernels are compiled for each


class EndlessRect(NamedTuple):
    """A rectangle of some heads, which follow one another."""

    branch: int
    head: int
    stop: int
    neighbours: int  # both starts are head // neighbours % turn tokens later, and the spans so much shorter
    turn: int
    period: int
    repeats: int
    query: int
    query_step: int
    query_span: int
    key: int
    key_step: int
    key_span: int
    low: int
    high: int


@functools.lru_cache(maxsize=256)
def endless(pattern: Pattern, kv_heads: int) -> tuple[EndlessRect, ...]:
    """Those of all branches; of a branch with too many as many as show it."""
    found: list[EndlessRect] = []
    for index, branch in enumerate(pattern.branches_for(kv_heads)):
        found += itertools.islice(_of_branch(index, branch), MOST + 1)
    return tuple(found)


def _of_branch(index: int, branch: Branch) -> Iterator[EndlessRect]:
    neighbours = turn = 1
    if isinstance(branch, Dilated) and branch.offset == "head":
        neighbours, turn = branch.neighbours, branch.rate
    for heads in grouped(branch.members, lambda head: 0 if turn > 1 else branch.offset_of(head)).values():
        for rect in branch.rects(0 if turn > 1 else heads[0], range(ENDLESS), ENDLESS, False):
            if rect.is_empty or rect.queries.start > ENDLESS // 2:  # the end of what is endless
                continue
            period, repeats = (rect.period, rect.repeats) if rect.period else (ENDLESS, 1)
            # heads take turns within a period: the rows of each end with it
            numbers = [(x.start, x.step, period if turn > 1 else x[-1] - x.start + 1) for x in rect[:2]]
            low, high = max(rect.low, -ENDLESS), min(rect.high, ENDLESS)
            for first, stop in stretches(heads):
                yield EndlessRect(
                    index, first, stop, neighbours, turn, period, repeats, *numbers[0], *numbers[1], low, high
                )


def stretches(heads: list[int]) -> Iterator[tuple[int, int]]:
    """Rising numbers as stretches of neighbours: the first of each, and the one after its last."""
    for _, some in itertools.groupby(enumerate(heads), lambda pair: pair[1] - pair[0]):
        numbers = [head for _, head in some]
        yield numbers[0], numbers[-1] + 1


def too_many(pattern: Pattern, kv_heads: int) -> str:
    """Why decoding cannot take the pattern; "" if it can."""
    if len(endless(pattern, kv_heads)) <= MOST:
        return ""
    kinds = ", ".join(dict.fromkeys(branch.kind for branch in pattern.branches_for(kv_heads)))
    return f"its decoding takes up to {MOST} rectangles of rows, and the branches ({kinds}) have more"
