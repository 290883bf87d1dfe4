"""pattern -> the fewest launches: which branches share a table of tiles, and which heads a launch.

Pure integers. Legend: heads are key/value heads.
"""

from __future__ import annotations

import functools

from dilated_attention._shards import Heads
from dilated_attention.backends.triton.tiling import Course, Courses, are_nested
from dilated_attention.pattern import DilatedPattern

MOST_TILES = 1 << 16  # of one period: a longer one would take long to write down


@functools.lru_cache(maxsize=256)
def launches(pattern: DilatedPattern, heads: Heads, alone: bool) -> tuple[Courses, ...]:
    """The fewest launches; later ones take in what earlier ones found.

    ``alone``: every branch needs a table of its own (dropout draws for each branch anew).
    """
    courses = []
    for group in _groups(pattern, alone):
        placed = heads.of_branch(pattern, group[-1])  # a nested branch's offset is that of the last, modulo its rate
        if placed:
            widths, rates = (tuple(numbers) for numbers in zip(*(pattern.branches[i] for i in group), strict=True))
            courses.append(Course(group[0], widths, rates, placed[0][0], tuple(offset for _, offset in placed)))
    if pattern.rule == "head_groups":  # different heads: all at once
        return (tuple(courses),)
    return tuple((course,) for course in courses)


def _groups(pattern: DilatedPattern, alone: bool) -> list[list[int]]:
    """Branches that go into one table each: those of the longnet rule that are nested; densest first."""
    order = sorted(range(len(pattern.branches)), key=lambda i: (pattern.dilation_rates[i], pattern.segment_lengths[i]))
    groups: list[list[int]] = []
    for branch in order:
        widths, rates = zip(*(pattern.branches[i] for i in [*(groups[-1] if groups else []), branch]), strict=True)
        joins = bool(groups) and not alone and pattern.rule == "longnet" and are_nested(widths, rates)
        if joins and widths[-1] // widths[0] * rates[-1] <= MOST_TILES:
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return groups


@functools.lru_cache(maxsize=256)
def is_nested(pattern: DilatedPattern) -> bool:
    """Whether some pairs of the pattern are computed once for several branches."""
    return any(len(group) > 1 for group in _groups(pattern, alone=False))
