"""What all kernels share: finding a program's rows in the table, walking through runs, masks and dropout.

Legend: positions count tokens from the start of a period; R rows of a tile.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from triton.language import constexpr, float32, int32, int64, uint32

SECTION, TILE, RUN = constexpr(16), constexpr(7), constexpr(5)  # integers of a `table.Section`, of a tile and a run
# of a section after its first program
START, LENGTH, PERIODS, BEGIN, END, HEAD, HEADS, FIRST_TILE, TILES, APART, VARIANT, BRANCH, WIDTH, LOW, HIGH = (
    constexpr(field) for field in range(1, 16)
)
# of a tile after its base, step and stop: the tiles that it meets, by runs
FIRST_RUN, PLAIN, EDGES_MET, EDGE_RUN = (constexpr(field) for field in range(3, 7))
LANES = constexpr(128)  # as of `table`
LOG2E = constexpr(1.4426950408889634)
LN2 = constexpr(0.6931471805599453)
NOTHING = constexpr(float("-inf"))  # the lse of no key, or the score of one that is not seen
SPREAD = constexpr(0x9E3779B1)  # as of `dropout`
# numbers that kernels are not compiled anew for, as they change from call to call
NUMBERS = ["tokens", "heads", "first_head", "scale", "plain_scale", "threshold", "factor"]


# What kernels are compiled for: the numbers and flags that they know as C.
Constants = namedtuple(
    "Constants",
    (
        "SECTIONS",  # of the table; 0: sequences are packed, and the table says how many
        "D", "COLUMNS", "BD", "BE",  # of a row: numbers, columns in one part, and in the two of `rows`
        "BM", "BN",  # queries of a tile, and keys
        "CAUSAL", "PADDING", "DROPOUT",
        "BAND",  # whether a section has limits for the position met less that of a program's own row
        "BARE",  # dkdv: whether a query of a block may be without keys
        "SINGLE",  # whether all whole tiles that a program meets are one run
        "PASSES",  # 2: some tiles are to be masked, after the whole ones; 1: none
        "RAGGED",  # whether some of them have rows too many
        "PRECISION",  # of products in float32
        "ALIGNED",  # whether all rows begin at multiples of 16 bytes
        "AGAIN",  # whether results join those of earlier launches
        "FILLS",  # whether rows between those of a tile are written too (nests of one branch only)
        "ZEROS",  # forward: whether zero keys are appended
        "SHIFTED",  # forward: whether it does without a running maximum, where it can
        "HAS_DLSE",  # dq
        "GROUPED",  # dkdv: whether a key/value head has several query heads
    ),
)  # fmt: skip


@triton.jit
def find_section(index, sections, SECTIONS: constexpr):
    """Where the section of a program is written, and the variants after the last section."""
    if SECTIONS == 0:  # sequences are packed: any number of sections
        padded, number = tl.load(sections).to(int32), tl.load(sections + 1).to(int32)
        before = 0
        for lane in range(0, padded, LANES):
            firsts = tl.load(sections + 4 + lane + tl.arange(0, LANES))
            before += tl.sum((firsts <= index).to(int32), 0)
        records = sections + 4 + padded
        return records + (before - 1) * SECTION, records + number * SECTION
    record = sections
    for section in tl.static_range(1, SECTIONS):
        here = sections + section * SECTION
        record = tl.where(index >= tl.load(here), here, record)
    return record, sections + SECTIONS * SECTION


@triton.jit
def task(sections, tiles, group, C: constexpr):
    """This program's section, tile, head, first token of the period and sample; ``group`` heads to a kv head."""
    index = tl.program_id(0)
    record, variants = find_section(index, sections, C.SECTIONS)
    index -= tl.load(record).to(int32)
    periods, many = tl.load(record + PERIODS).to(int32), tl.load(record + TILES).to(int32)
    heads = tl.load(record + HEADS).to(int32) * group
    tile, index = index % many, index // many
    head, index = index % heads, index // heads
    variant = tl.load(variants + tl.load(record + VARIANT) + head // group)  # which offset a head has
    tile = tl.load(record + FIRST_TILE) + variant * tl.load(record + APART) + tile
    head += tl.load(record + HEAD).to(int32) * group
    start = tl.load(record + START).to(int64) + (index % periods) * tl.load(record + LENGTH).to(int64)
    return record, tiles + tile * TILE, head.to(int64), start, (index // periods).to(int64)


@triton.jit
def row_at(X, strides, sample, token, head):
    """Pointer to a row of X (B, N, H, D)."""
    return X + (sample * strides[0] + token * strides[1] + head * strides[2])


@triton.jit
def rows_of(run, SIZE: constexpr):
    """Of the base, step and stop of a run or tile: the steps from the first row, positions, which rows are there, and
    the first row in 64 bits."""
    steps = tl.arange(0, SIZE) * run[1]
    position = run[0] + steps
    return steps, position, position < run[2], run[0].to(int64)


@triton.jit
def own_rows(tile, SIZE: constexpr):
    """Of a tile: its base, step and stop, then as `rows_of`."""
    own = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    steps, position, valid, first = rows_of(own, SIZE)
    return own, steps, position, valid, first


@triton.jit
def key_rows(run, padding, C: constexpr):
    """As `rows_of`, of keys: those that padding ignores are not there."""
    steps, position, valid, first = rows_of(run, C.BN)
    if C.PADDING:
        valid = valid & (tl.load(padding + position, mask=valid, other=1) == 0)
    return steps, position, valid, first


@triton.jit
def fill_gaps(first, stride, own, value, SIZE: constexpr, D: constexpr, COLUMNS: constexpr):
    """Write ``value`` to the rows between those of a tile, up to its stop; ``first`` points to the tile's first row."""
    base, step, stop = own
    offset = base % step
    steps, columns = tl.arange(0, SIZE) * step, tl.arange(0, COLUMNS)
    position = base + steps
    # of one branch, whose segment ends at stop: a rate may be far larger
    for phase in range(0, tl.minimum(step, stop)):
        shift = phase - offset
        pointers = first + shift.to(int64) * stride + (steps * stride)[:, None] + columns[None, :]
        filling = tl.full((SIZE, COLUMNS), value, first.dtype.element_ty)
        reached = position + shift
        between = (reached < stop) & (reached != position)  # no scalar: Triton 3.9's interpreter takes it for a number
        tl.store(pointers, filling, mask=between[:, None] & (columns < D)[None, :])


@triton.jit
def load_run(entry):
    """base, step, stop, tiles and log2 of the count of a run."""
    bias = tl.load(entry + 4).to(int32).to(float32, bitcast=True)
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), bias


@triton.jit
def first_run(met, EDGE: constexpr):
    """How many tiles a tile meets, where their first run is written, that run and the one after it.

    ``met``: all runs, and the tile. EDGE: tiles to be masked, else the whole ones.
    """
    runs, tile = met
    entry = runs + tl.load(tile + (EDGE_RUN if EDGE else FIRST_RUN)) * RUN
    return tl.load(tile + (EDGES_MET if EDGE else PLAIN)), entry, load_run(entry), load_run(entry + RUN)


@triton.jit
def select(condition, these, others):
    """The numbers of these, or else of the others."""
    chosen = ()
    for i in tl.static_range(len(these)):
        chosen += (tl.where(condition, these[i], others[i]),)
    return chosen


@triton.jit
def next_tile(entry, run, after, SIZE: constexpr, SINGLE: constexpr):
    """The tile after this one, of the same run or the next one, and the run after that.

    There is no branch, and what is loaded here is used one tile later: nothing waits.
    """
    base, step, stop, left, bias = run
    run = base + SIZE * step, step, stop, left, bias
    if not SINGLE:
        run = run[0], step, stop, left - 1, bias
        over = run[3] == 0
        run = select(over, after, run)
        entry += tl.where(over, RUN, 0)
        after = load_run(entry + RUN)
    return entry, run, after


@triton.jit
def band_of(record, C: constexpr):
    """The limits of a section."""
    low, high = 0, 0
    if C.BAND:
        low, high = tl.load(record + LOW).to(int32), tl.load(record + HIGH).to(int32)
    return low, high


@triton.jit
def in_band(own, met, band):
    """Which rows meet which, by their positions, which are broadcast."""
    return (met - own >= band[0]) & (met - own <= band[1])


@triton.jit
def zero_keys(start, end, tokens, width, rate, offset):
    """How many zero keys a head has in the segment from ``start`` on, of a sample that ends at ``end``: as many as fill
    it up to the rows of a whole segment, or of all ``tokens`` if they are fewer; none where it has no token."""
    real = tl.minimum(end - start, width)
    present = tl.maximum(tl.cdiv(real - offset, rate), 0)
    return tl.where(real > 0, tl.cdiv(tl.minimum(width, tokens), rate) - present, 0)


@triton.jit
def with_zero_keys(top, count):
    """A softmax that also has ``count`` keys of score 0: its maximum, the factor of what it had, and what they add."""
    new = tl.where(count > 0, tl.maximum(top, 0.0), top)
    safe = tl.where(new == NOTHING, 0.0, new)
    return new, tl.exp2(top - safe), tl.where(count > 0, count.to(float32) * tl.exp2(-safe), 0.0)


@triton.jit
def mix(word):
    """The avalanche of `dropout.mix`, on unsigned 32-bit words."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def row_words(draw, position):
    """The two words of each row, as `dropout.row_words` makes them; ``draw``: seed, branch, sample and head."""
    low, high = (draw[0] & 0xFFFFFFFF).to(uint32), ((draw[0] >> 32) & 0xFFFFFFFF).to(uint32)
    for index in tl.static_range(1, 5):
        number = position if index == 4 else draw[index]
        step = number.to(uint32) * SPREAD
        low, high = mix(low ^ step), mix(high + step)
    return low, high


@triton.jit
def kept(low, high, key, threshold):
    """Whether each pair is kept: the words of queries and the positions of keys broadcast against one another."""
    return mix(mix((key.to(uint32) * SPREAD) ^ low) + high) >= threshold
