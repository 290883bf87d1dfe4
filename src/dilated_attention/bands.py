"""Blocks whose queries see a band of their keys, as blocks that kernels without bands can compute."""

from __future__ import annotations

from collections.abc import Iterator

from dilated_attention.blocks import Block

MASKED = 1 << 10  # rows of the largest block that is masked
LEAST = 1 << 6  # rows of a tile: with fewer, calls cost more than the pairs that they leave out


def without_bands(block: Block) -> Iterator[Block]:
    """The same pairs in blocks of which all count, or a triangle as kernels know it; what is left is masked."""
    if not block.has_mask:
        yield block
        return
    rows, keys = block.queries.rows, block.keys.rows
    block = block.inside(0, rows, 0, keys)
    low, high = block.low, block.high
    if block.is_empty:
        return
    if not block.has_mask:
        yield block
    elif block.but and block.heads * block.batch > 1:  # masks of heads and segments may differ
        for one in block.cut(heads=1, batch=1):
            yield from without_bands(one)
    elif low is None and high is not None and not block.but:
        yield from _below(block, high)
    elif max(rows, keys) <= MASKED:
        yield block
    elif low is not None and high is not None and not block.but:
        # tiles as long as the band is wide have one slanted side: a triangle as kernels know it, or a mask
        side = max(LEAST, -(-(high - low) // -(-(high - low) // MASKED)) if high > low else 0)
        for at in range(high, low - side, -side):  # keys of tile m: from m * side + at on
            yield from _tiles(block, side, at)
    else:  # in halves, until a mask is small: parts of which all count need none
        half = (-(-rows // 2), keys) if rows >= keys else (rows, -(-keys // 2))
        for first in range(0, rows, half[0]):
            for key in range(0, keys, half[1]):
                yield from without_bands(block.inside(first, first + half[0], key, key + half[1]))


def _below(block: Block, high: int) -> Iterator[Block]:
    """No lower limit: keys that all see, a square with its triangle, and queries that see all keys."""
    rows, keys = block.queries.rows, block.keys.rows
    first, left = max(0, -high), min(keys, max(0, high))
    side = min(rows - first, keys - left)
    parts = (first, first + side, 0, left), (first, first + side, left, left + side), (first + side, rows, 0, keys)
    for part in (block.inside(*part) for part in parts):
        if not part.is_empty:
            yield part


def _tiles(block: Block, side: int, at: int) -> Iterator[Block]:
    """Those that are whole as one batch where strides allow it, and those at the borders."""
    rows, keys = block.queries.rows, block.keys.rows
    first, last = max(0, -(at // side)), min(rows // side, (keys - at) // side)
    if first < last and block.batch > 1 and last - first >= block.batch:
        for one in block.cut(batch=1):
            yield from _tiles(one, side, at)
        return

    def tile(m: int) -> Block:
        return block.inside(m * side, (m + 1) * side, m * side + at, (m + 1) * side + at)

    whole = [tile(m) for m in range(first, last if block.batch > 1 else min(last, first + 1))]
    if block.batch == 1 and whole:
        queries, keys_ = (
            x._replace(segments=last - first, segment_step=side * x.row_step) for x in (whole[0].queries, whole[0].keys)
        )
        whole = [whole[0]._replace(queries=queries, keys=keys_)]
    yield from whole
    end = -(-rows // side)
    for m in [*range(min(first, end)), *range(max(first, last), end)]:
        if not tile(m).is_empty:
            yield tile(m)
