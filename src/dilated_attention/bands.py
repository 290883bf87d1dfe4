"""Rectangles of which a band counts, as rectangles that kernels without bands can compute."""

from __future__ import annotations

from collections.abc import Iterator

from dilated_attention.branches.base import Rect

MASKED = 1 << 10  # rows of the largest rectangle that is masked
LEAST = 1 << 6  # rows of a tile: with fewer, calls cost more than the pairs that they leave out


def without_bands(rect: Rect, is_masked: bool) -> Iterator[Rect]:
    """The same pairs in rectangles of which all count, or a triangle as kernels know it; what is left is masked. Some
    may be empty. ``is_masked``: in all parts some pairs may not count."""
    rows, keys, (low, high) = len(rect.queries), len(rect.keys), rect.in_rows()
    if not rect.pairs() or (max(rows, keys) <= MASKED and (is_masked or low is not None)):
        yield rect
    elif is_masked or (low is not None and high is None):  # in halves, until a mask is small
        half = (-(-rows // 2), keys) if rows >= keys else (rows, -(-keys // 2))
        for first in range(0, rows, half[0]):
            for key in range(0, keys, half[1]):
                yield from without_bands(rect.part(first, first + half[0], key, key + half[1]), is_masked)
    elif high is None or (low is None and high == 0 and rows == keys):
        yield rect
    elif low is None:
        yield from _below(rect, high)
    else:  # tiles as long as the band is wide have one slanted side: a triangle as kernels know it, or a mask
        side = max(LEAST, -(-(high - low) // -(-(high - low) // MASKED)) if high > low else 0)
        for at in range(high, low - side, -side):  # keys of tile m: from m * side + at on
            yield from _tiles(rect, side, at)


def _below(rect: Rect, high: int) -> Iterator[Rect]:
    """No lower limit: keys that all see, a square with its triangle, and queries that see all keys."""
    rows, keys = len(rect.queries), len(rect.keys)
    first, left = max(0, -high), min(keys, max(0, high))
    side = min(rows - first, keys - left)
    yield rect.part(first, first + side, 0, left)
    yield rect.part(first, first + side, left, left + side)
    yield rect.part(first + side, rows, 0, keys)


def _tiles(rect: Rect, side: int, at: int) -> Iterator[Rect]:
    """Those that are whole as one that is repeated, and those at the borders."""
    rows, keys = len(rect.queries), len(rect.keys)
    whole = range(max(0, -(at // side)), min(rows // side, (keys - at) // side))

    def tile(of: Rect, m: int) -> Rect:
        return of.part(m * side, (m + 1) * side, m * side + at, (m + 1) * side + at)

    if len(whole) < rect.repeats:
        whole = range(0)
    for single in rect.singles() if whole else ():
        yield tile(single, whole.start)._replace(repeats=len(whole), period=side * rect.queries.step)
    yield from (tile(rect, m) for m in range(-(-rows // side)) if m not in whole)
