"""What branches leave of a rectangle, as rectangles or as a count. Time grows with the rectangles of the branches, not
with the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dilated_attention.branches.base import Branch, Rect, inside

Remainder = tuple[Rect, tuple[Branch, ...]]  # pairs of a branch, less those that the others show

MOST_STEPS = 2**17  # of a count: about ten seconds
TOO_MANY = (
    f"the branches overlap in more than {MOST_STEPS:,} ways, which are not counted: use fewer blocks, or lengths and "
    "rates of which one divides the other"
)


def cut(rect: Rect, others: Sequence[Branch], head: int) -> Iterator[Remainder]:
    """The pairs that others do not show. Those who leave rectangles are cut away, and the rest come with them."""
    parts, but = [rect], []
    # the last first: of nested segments the largest, for smaller ones show nothing of what it leaves
    for other in () if rect.is_empty else reversed(others):
        rests = [other.without(part, head) for part in parts]
        if None in rests:
            but.append(other)
        else:
            parts = [part for rest in rests for part in rest or () if not part.is_empty]
    return ((part, tuple(but)) for part in parts)


def count_left(rect: Rect, others: Sequence[Branch], head: int, n: int, steps: Iterator[int]) -> int:
    """How many pairs others do not show: all, less those that the first of them shows, less those that only the second
    shows, and so on. What a branch shows of a rectangle is rectangles, even where what it leaves is not."""
    if next(steps) >= MOST_STEPS:
        raise ValueError(TOO_MANY)
    total = 0
    for part, but in cut(rect, others, head):
        total += part.pairs()
        for index, other in enumerate(but):
            for shown in other.near(part, head, n):
                total -= sum([count_left(both, but[:index], head, n, steps) for both in common(part, shown)])
    return total


def common(one: Rect, other: Rect) -> Iterator[Rect]:
    """The pairs of both; some rectangles may be empty."""
    if one.repeats < other.repeats:
        one, other = other, one
    if one.is_empty or other.is_empty or max(one.least, other.least) > min(one.most, other.most):
        return
    if one.repeats == 1:
        yield _of_singles(one, other, 1, 0)
        return
    again = math.lcm(one.period, other.period) // one.period  # after so many repeats both lie as before
    every = math.lcm(*(rows.step for rows in other[:2] if len(rows) > 1))
    every //= math.gcd(every, one.period)
    if other.repeats > 1 and other.repeats * (every + 2) > min(again, one.repeats):
        yield from _of_repeats(one, other)
        return
    # the other is a lattice in a box: what is repeated inside of the box meets it alike whenever it is in step with it
    for box in other.singles():
        if 1 < len(box.keys) < min(every, one.repeats):  # a few columns that are far apart
            for at in range(len(box.keys)):
                yield from common(one, box.part(0, len(box.queries), at, at + 1))
            continue
        for part in one.with_keys(box.keys[0], box.keys[-1] + 1):
            for turned in part.turned().with_keys(box.queries[0], box.queries[-1] + 1):
                for at in range(min(every, turned.repeats)):
                    times = -((at - turned.repeats) // every)
                    yield _of_singles(turned.turned().some(at, at + 1), box, times, every * one.period)


def _of_repeats(one: Rect, other: Rect) -> Iterator[Rect]:
    """After so many repeats of each, both lie to one another as before."""
    period = math.lcm(one.period, other.period)
    every, each = period // one.period, period // other.period
    pairs = {(i, j) for j in range(min(other.repeats, every + each)) for i in _near(other, j, one)}
    if other.repeats > every + each:
        pairs |= {(i, j) for i in range(every) for j in _near(one, i, other)}
    for i, j in pairs:
        if i < every or j < each:
            times = 1 + min((one.repeats - 1 - i) // every, (other.repeats - 1 - j) // each)
            yield _of_singles(one.some(i, i + 1), other.some(j, j + 1), times, period)


def _near(one: Rect, index: int, other: Rect) -> range:
    """The repeats of the other among whose queries those of one's may be."""
    first, last = (row + index * one.period for row in (one.queries[0], one.queries[-1]))
    some = -((other.queries[-1] - first) // other.period), (last - other.queries[0]) // other.period + 1
    return range(max(0, some[0]), min(other.repeats, some[1]))


def _of_singles(one: Rect, other: Rect, repeats: int, period: int) -> Rect:
    queries, keys = _in_both(one.queries, other.queries), _in_both(one.keys, other.keys)
    times = (repeats, period) if repeats > 1 else (1, 0)
    return Rect(queries, keys, one.low, one.high, *times).between(other.low, other.high)


def _in_both(one: range, other: range) -> range:
    divisor = math.gcd(one.step, other.step)
    steps, rest = divmod(other.start - one.start, divisor)
    if rest:
        return range(0)
    every = other.step // divisor
    first = one.start + one.step * (steps * pow(one.step // divisor, -1, every) % every)
    return inside(range(first, min(one.stop, other.stop), one.step * every), other.start, other.stop)
