"""What all kernels share: finding a program's rows in the table, walking through runs, masks and dropout.

Legend: positions count tokens from the start of a period; R rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

SECTION = tl.constexpr(14)  # integers of a `table.Section`, the first of which is its first program; the others:
START, LENGTH, PERIODS, BEGIN, END, HEAD, HEADS, FIRST_TILE, TILES, APART, VARIANT, BRANCH, WIDTH = (
    tl.constexpr(field) for field in range(1, 14)
)
LANES = tl.constexpr(128)  # as of `table`
TILE = tl.constexpr(7)  # of a tile, the first of which are its first token, step and end; the others:
FIRST_RUN, PLAIN, EDGES_MET, EDGE_RUN = (tl.constexpr(field) for field in range(3, 7))  # tiles met, by runs
RUN = tl.constexpr(5)  # of `tiling.Run`, the count as the bits of its log2
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# numbers of the length that 16 divides or does not: kernels are not compiled anew for that. (The strides of rows change
# with it too, but are multiples of 16 for all common head dims, and long accesses need to know.)
ANY_LENGTH = ("padding_sample", "lse_sample", "dlse_sample", "stats_sample", "stats_head")


@triton.jit
def find_section(index, sections, SECTIONS: tl.constexpr):
    """Where the section of a program is written, and the variants after the last section."""
    if SECTIONS == 0:  # sequences are packed: any number of sections
        padded, number = tl.load(sections).to(tl.int32), tl.load(sections + 1).to(tl.int32)
        before = 0
        for lane in range(0, padded, LANES):
            firsts = tl.load(sections + 4 + lane + tl.arange(0, LANES))
            before += tl.sum((firsts <= index).to(tl.int32), 0)
        records = sections + 4 + padded
        return records + (before - 1) * SECTION, records + number * SECTION
    record = sections
    for section in tl.static_range(1, SECTIONS):
        here = sections + section * SECTION
        record = tl.where(index >= tl.load(here), here, record)
    return record, sections + SECTIONS * SECTION


@triton.jit
def task(sections, group, SECTIONS: tl.constexpr):
    """This program's section, tile, head, first token of the period and sample; ``group`` heads to a kv head."""
    index = tl.program_id(0)
    record, variants = find_section(index, sections, SECTIONS)
    index -= tl.load(record).to(tl.int32)
    periods, tiles = tl.load(record + PERIODS).to(tl.int32), tl.load(record + TILES).to(tl.int32)
    heads = tl.load(record + HEADS).to(tl.int32) * group
    tile, index = index % tiles, index // tiles
    head, index = index % heads, index // heads
    variant = tl.load(variants + tl.load(record + VARIANT) + head // group)  # which offset a head has
    tile = tl.load(record + FIRST_TILE) + variant * tl.load(record + APART) + tile
    head += tl.load(record + HEAD).to(tl.int32) * group
    start = tl.load(record + START).to(tl.int64) + (index % periods) * tl.load(record + LENGTH).to(tl.int64)
    return record, tile, head.to(tl.int64), start, (index // periods).to(tl.int64)


@triton.jit
def row_steps(count: tl.constexpr, step):
    """step * (0, 1, ..., count - 1)."""
    return tl.arange(0, count) * step


@triton.jit
def fill_gaps(first, stride, base, step, stop, value, BM: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Write ``value`` to the rows between those of a tile, up to ``stop``; ``first`` points to the tile's first row."""
    offset = base % step
    position = base + row_steps(BM, step)
    columns = tl.arange(0, COLUMNS)
    for phase in range(
        0, tl.minimum(step, stop)
    ):  # of one branch, whose segment ends at stop: a rate may be far larger
        shift = phase - offset
        pointers = first + shift.to(tl.int64) * stride + (row_steps(BM, step) * stride)[:, None] + columns[None, :]
        filling = tl.full((BM, COLUMNS), value, first.dtype.element_ty)
        between = (position + shift < stop) & (phase != offset)
        tl.store(pointers, filling, mask=between[:, None] & (columns < D)[None, :])


@triton.jit
def load_run(entry):
    """base, step, stop, tiles and log2 of the count of a run."""
    bias = tl.load(entry + 4).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), bias


@triton.jit
def next_tile(
    entry, base, step, stop, left, bias, base_, step_, stop_, left_, bias_, size: tl.constexpr, SINGLE: tl.constexpr
):
    """The tile after this one, of the same run or the next one (whose numbers end in _), and the run after that.

    There is no branch, and what is loaded here is used one tile later: nothing waits.
    """
    base += size * step
    if not SINGLE:
        left -= 1
        over = left == 0
        base, step, stop = tl.where(over, base_, base), tl.where(over, step_, step), tl.where(over, stop_, stop)
        left, bias = tl.where(over, left_, left), tl.where(over, bias_, bias)
        entry += tl.where(over, RUN, 0)
        base_, step_, stop_, left_, bias_ = load_run(entry + RUN)
    return entry, base, step, stop, left, bias, base_, step_, stop_, left_, bias_


@triton.jit
def seen(q_position, position, valid, CAUSAL: tl.constexpr):
    """(BM, BN) or (1, BN): which keys a query sees."""
    pairs = valid[None, :]
    if CAUSAL:  # even where all are valid: in this form, and no other tried, the compiler keeps no mask in registers
        pairs = pairs & (q_position[:, None] >= position[None, :])
    return pairs


@triton.jit
def mix(word):
    """The avalanche of `dropout.mix`, on unsigned 32-bit words."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def row_words(seed, branch, sample, head, position):
    """The two words of each row, as `dropout.row_words` makes them."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    spread: tl.constexpr = 0x9E3779B1
    for index in tl.static_range(3):
        number = branch if index == 0 else (sample if index == 1 else head)
        step = number.to(tl.uint32) * spread
        low, high = mix(low ^ step), mix(high + step)
    step = position.to(tl.uint32) * spread
    return mix(low ^ step), mix(high + step)


@triton.jit
def kept(low, high, key, threshold):
    """Whether each pair is kept; low and high of the queries and the keys' positions broadcast against one another."""
    spread: tl.constexpr = 0x9E3779B1
    return mix(mix((key.to(tl.uint32) * spread) ^ low) + high) >= threshold
