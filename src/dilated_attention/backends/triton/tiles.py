"""What all kernels share: finding a program's rows in the table, walking through runs, masks and dropout.

Legend: positions count tokens from the start of a period; R rows of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
# numbers that kernels are not compiled anew for, as they change from call to call
NUMBERS = ["tokens", "heads", "first_head", "scale", "plain_scale", "threshold", "factor"]


class Constants(NamedTuple):
    """What a kernel is compiled for; what a kernel does not use is None."""

    SECTIONS: Any  # of the table; 0: sequences are packed, and the table says how many
    D: Any
    BD: Any  # columns of the first part of a row, as of `rows`
    BE: Any  # and of the second
    BM: Any  # queries of a tile
    BN: Any  # keys of a tile
    CAUSAL: Any
    PADDING: Any
    DROPOUT: Any
    SINGLE: Any  # whether all whole tiles that a program meets are one run
    PASSES: Any  # 2: some tiles are to be masked, after the whole ones; 1: none
    RAGGED: Any  # whether some of them have rows too many
    PRECISION: Any  # of products in float32
    ALIGNED: Any  # whether all rows begin at multiples of 16 bytes
    AGAIN: Any  # whether results join those of earlier launches
    FILLS: Any  # whether rows between those of a tile are written too (nests of one branch only)
    ZEROS: Any = None  # forward: whether zero keys are appended
    SHIFTED: Any = None  # forward: whether it does without a running maximum, where it can
    HAS_DLSE: Any = None  # dq
    GROUPED: Any = None  # dkdv: whether a key/value head has several query heads


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
def task(sections, tiles, group, SECTIONS: tl.constexpr):
    """This program's section, tile, head, first token of the period and sample; ``group`` heads to a kv head."""
    index = tl.program_id(0)
    record, variants = find_section(index, sections, SECTIONS)
    index -= tl.load(record).to(tl.int32)
    periods, many = tl.load(record + PERIODS).to(tl.int32), tl.load(record + TILES).to(tl.int32)
    heads = tl.load(record + HEADS).to(tl.int32) * group
    tile, index = index % many, index // many
    head, index = index % heads, index // heads
    variant = tl.load(variants + tl.load(record + VARIANT) + head // group)  # which offset a head has
    tile = tl.load(record + FIRST_TILE) + variant * tl.load(record + APART) + tile
    head += tl.load(record + HEAD).to(tl.int32) * group
    start = tl.load(record + START).to(tl.int64) + (index % periods) * tl.load(record + LENGTH).to(tl.int64)
    return record, tiles + tile * TILE, head.to(tl.int64), start, (index // periods).to(tl.int64)


@triton.jit
def row_at(X, strides, sample, token, head):
    """Pointer to a row of X (B, N, H, D)."""
    return X + (sample * strides[0] + token * strides[1] + head * strides[2])


@triton.jit
def row_steps(count: tl.constexpr, step):
    """step * (0, 1, ..., count - 1)."""
    return tl.arange(0, count) * step


@triton.jit
def own_rows(tile, size: tl.constexpr):
    """Of a tile: base, step and stop, the steps from its first row, the rows' positions, and which are there."""
    base, step, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    steps = row_steps(size, step)
    return base, step, stop, steps, base + steps, base + steps < stop


@triton.jit
def fill_gaps(first, stride, base, step, stop, value, BM: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Write ``value`` to the rows between those of a tile, up to ``stop``; ``first`` points to the tile's first row."""
    offset = base % step
    position = base + row_steps(BM, step)
    columns = tl.arange(0, COLUMNS)
    # of one branch, whose segment ends at stop: a rate may be far larger
    for phase in range(0, tl.minimum(step, stop)):
        shift = phase - offset
        pointers = first + shift.to(tl.int64) * stride + (row_steps(BM, step) * stride)[:, None] + columns[None, :]
        filling = tl.full((BM, COLUMNS), value, first.dtype.element_ty)
        reached = position + shift
        between = (reached < stop) & (reached != position)  # no scalar: Triton 3.9's interpreter takes it for a number
        tl.store(pointers, filling, mask=between[:, None] & (columns < D)[None, :])


@triton.jit
def load_run(entry):
    """base, step, stop, tiles and log2 of the count of a run."""
    bias = tl.load(entry + 4).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), bias


@triton.jit
def first_run(runs, tile, EDGE: tl.constexpr):
    """How many tiles a tile meets, where their first run is written, that run and the one after it.

    EDGE: those to be masked, else the whole ones.
    """
    entry = runs + tl.load(tile + (EDGE_RUN if EDGE else FIRST_RUN)) * RUN
    return tl.load(tile + (EDGES_MET if EDGE else PLAIN)), entry, load_run(entry), load_run(entry + RUN)


@triton.jit
def next_tile(entry, run, after, size: tl.constexpr, SINGLE: tl.constexpr):
    """The tile after this one, of the same run or the next one, and the run after that.

    There is no branch, and what is loaded here is used one tile later: nothing waits.
    """
    base, step, stop, left, bias = run
    base += size * step
    if not SINGLE:
        left -= 1
        over = left == 0
        base, step, stop = (
            tl.where(over, after[0], base),
            tl.where(over, after[1], step),
            tl.where(over, after[2], stop),
        )
        left, bias = tl.where(over, after[3], left), tl.where(over, after[4], bias)
        entry += tl.where(over, RUN, 0)
        after = load_run(entry + RUN)
    return entry, (base, step, stop, left, bias), after


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
