"""The decoding kernels: which key tiles a program has, one softmax over them, and the splits put together.

Legend: q (BM, BD), k, v (BN, BD), scores (BM, BN) in powers of two; top, sums (BM) the running maximum and
sum. Positions and counts are 64-bit. PATTERN holds the six numbers of each branch, as of `decode.numbers_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, float32, int64

from dilated_attention.backends.triton.tiles import LN2, LOG2E, NOTHING, row_at, with_zero_keys, zero_keys


@triton.jit
def head_offset(head, PATTERN: constexpr, AT: constexpr):
    """Whether the head runs the branch whose numbers begin at AT, and the head's offset in it."""
    runs = (head >= PATTERN[AT + 2]) & (head < PATTERN[AT + 3])
    return runs, (head // PATTERN[AT + 4] + PATTERN[AT + 5]) % PATTERN[AT + 1]  # as `Dilated.offset_of`


@triton.jit
def tiles_of_branch(rows, PATTERN: constexpr, AT: constexpr, BN: constexpr, CAUSAL: constexpr):
    """What queries meet in a branch: the first segment, the offset, tiles a segment, tiles in all.

    ``rows``: the queries' positions from low to high, their head, and the number of tokens.
    """
    low, high, head, stop = rows
    WIDTH: constexpr = PATTERN[AT]
    RATE: constexpr = PATTERN[AT + 1]
    runs, offset = head_offset(head, PATTERN, AT)
    segment = low // WIDTH * WIDTH
    last = (high - 1) // WIDTH * WIDTH
    each = tl.cdiv(tl.cdiv(WIDTH - offset, RATE), BN)
    stop = high if CAUSAL else tl.minimum(last + WIDTH, stop)
    keys = tl.cdiv(tl.maximum(stop - last - offset, 0), RATE)  # of the last segment
    count = (last - segment) // WIDTH * each + tl.cdiv(keys, BN)
    # the first row of the head's offset at or after low: in this segment, or else in the next
    row = low - segment
    row += (offset + RATE - row % RATE) % RATE
    row = tl.where(row < WIDTH, row, WIDTH + offset)
    return segment, offset, each, tl.where(runs & (segment + row < high), count, 0)


@triton.jit
def find_tile(number, rows, PATTERN: constexpr, BRANCHES: constexpr, BN: constexpr, CAUSAL: constexpr):
    """Of all tiles the one with this number: its segment, width, rate and offset, and the first of its rows."""
    before = rows[0] * 0
    segment, width, rate, offset, each, index = before, before, before, before, before + 1, before
    for i in tl.static_range(BRANCHES):
        this = tiles_of_branch(rows, PATTERN, 6 * i, BN, CAUSAL)
        found = (number >= before) & (number < before + this[3])
        segment, offset = tl.where(found, this[0], segment), tl.where(found, this[1], offset)
        width, rate = tl.where(found, PATTERN[6 * i], width), tl.where(found, PATTERN[6 * i + 1], rate)
        each, index = tl.where(found, this[2], each), tl.where(found, number - before, index)
        before += this[3]
    return segment + index // each * width, width, rate, offset, index % each * BN


@triton.jit
def zeros_of_branch(position, end, head, PATTERN: constexpr, AT: constexpr):
    """How many zero keys each row attends to in a branch: a sample ends at ``end``, and its last segment is filled."""
    runs, offset = head_offset(head, PATTERN, AT)
    segment = position // PATTERN[AT] * PATTERN[AT]
    meets = runs & ((position - segment) % PATTERN[AT + 1] == offset)
    return tl.where(meets, zero_keys(segment, end, end, PATTERN[AT], PATTERN[AT + 1], offset), 0)


@triton.jit
def rows_at(X, strides, sample, token, head, column):
    """Pointers to rows of X (B, N, H, D)."""
    return row_at(X, strides, sample, token, head)[:, None] + column * strides[3]


@triton.jit(do_not_specialize=["first", "tokens", "splits", "padding_sample"])  # they change from step to step
def decode_kernel(
    Q, K, V, Padding, Positions, Ends, Out, Lse,
    first, queries, tokens, splits, kv_heads, first_head, scale, positions_step,
    padding_sample, padding_token, q_strides, k_strides, v_strides,
    PATTERN: constexpr, BRANCHES: constexpr, GROUP: constexpr, D: constexpr, BD: constexpr,
    BM: constexpr, BN: constexpr, SPLIT: constexpr, ONE: constexpr, CAUSAL: constexpr, ZEROS: constexpr,
):  # fmt: skip
    # --- this program's rows: queries of one sample and key/value head, each with its group
    tiles = tl.cdiv(queries * GROUP, BM)
    tile, split = tl.program_id(0) % tiles, tl.program_id(1)
    kv_head = (tl.program_id(0) // tiles % kv_heads).to(int64)
    sample = (tl.program_id(0) // tiles // kv_heads).to(int64)
    start = first.to(int64)
    if Positions is not None:
        start += tl.load(Positions + sample * positions_step)
    tokens = tokens.to(int64)
    row = tile * BM + tl.arange(0, BM)
    query, query_head = row // GROUP, kv_head * GROUP + row % GROUP
    position = start + query
    here = query < queries
    inside = here & (position >= 0) & (position < tokens)
    column = tl.arange(0, BD).to(int64)[None, :]
    in_row = column < D
    own = rows_at(Q, q_strides, sample, query.to(int64), query_head, column)
    q = tl.load(own, mask=here[:, None] & in_row, other=0.0)

    # --- its share of the key tiles that these rows meet
    head = kv_head + first_head
    low = tl.maximum(start + tile * BM // GROUP, 0)
    high = tl.minimum(start + tl.minimum((tile * BM + BM - 1) // GROUP + 1, queries), tokens)
    rows = low, high, head, tokens
    total = tokens * 0
    for i in tl.static_range(BRANCHES):
        total += tiles_of_branch(rows, PATTERN, 6 * i, BN, CAUSAL)[3]
    share = (total + splits - 1) // splits

    top = tl.full((BM,), NOTHING, float32)
    sums = tl.zeros((BM,), float32)
    acc = tl.zeros((BM, BD), float32)
    for number in range(split * share, tl.minimum((split + 1) * share, total)):
        segment, width, rate, offset, first_row = find_tile(number, rows, PATTERN, BRANCHES, BN, CAUSAL)
        at = segment + offset + (first_row + tl.arange(0, BN)) * rate
        stop = tl.minimum(segment + width, high if CAUSAL else tokens)
        seen = at < stop
        if Padding is not None:
            ignored = tl.load(Padding + sample * padding_sample + at * padding_token, mask=seen, other=1)
            seen = seen & (ignored == 0)
        # what is not seen may be anything, NaN too: it is not loaded, and its scores are selected
        loaded = seen[:, None] & in_row
        k = tl.load(rows_at(K, k_strides, sample, at, kv_head, column), mask=loaded, other=0.0).to(q.dtype)
        v = tl.load(rows_at(V, v_strides, sample, at, kv_head, column), mask=loaded, other=0.0).to(q.dtype)
        takes_part = inside  # a single query meets no tile of a branch that it is not in
        if not ONE:
            mine = position - segment
            takes_part = inside & (mine >= 0) & (mine < width) & (mine % rate == offset)
        visible = takes_part[:, None] & seen[None, :]
        if CAUSAL:
            visible = visible & (position[:, None] >= at[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        scores = tl.where(visible, scores, NOTHING)
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == NOTHING, 0.0, new_top)  # seen nothing yet: exp2(-inf - 0) = 0, never NaN
        rescale, weights = tl.exp2(top - safe), tl.exp2(scores - safe[:, None])
        sums = sums * rescale + tl.sum(weights, 1)
        new_acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        acc = tl.where(takes_part[:, None], new_acc, acc)  # for the others it may be 0 * NaN
        top = new_top

    if ZEROS and split == 0:
        end = tokens
        if Ends is not None:
            end = tl.load(Ends + sample)
        count = position * 0
        for i in tl.static_range(BRANCHES):
            count += zeros_of_branch(position, end, head, PATTERN, 6 * i)
        top, rescale, added = with_zero_keys(top, tl.where(inside, count, 0))
        acc, sums = acc * rescale[:, None], sums * rescale + added

    some = sums != 0
    sums = tl.where(some, sums, 1.0)
    place = ((sample * queries + query) * (kv_heads * GROUP) + query_head) * splits + split
    tl.store(Lse + place, tl.where(some, (top + tl.log2(sums)) * LN2, NOTHING), mask=here)
    if SPLIT:
        here = here & some  # an empty part is known by its lse
    out = (acc / sums[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + place[:, None] * D + column, out, mask=here[:, None] & in_row)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(Parts, PartLse, Out, Lse, splits, D: constexpr, BD: constexpr, BS: constexpr):
    """The parts of one row put together: Parts (rows, splits, D), PartLse (rows, splits), Out (rows, D), Lse (rows)."""
    row = tl.program_id(0).to(int64)
    column = tl.arange(0, BD)
    top, total = float("-inf"), 0.0
    acc = tl.zeros((BD,), float32)
    for first in range(0, splits, BS):
        part = first + tl.arange(0, BS)
        lse = tl.load(PartLse + row * splits + part, mask=part < splits, other=NOTHING)
        written = (lse != NOTHING)[:, None] & (column < D)[None, :]
        out = tl.load(Parts + (row * splits + part)[:, None] * D + column[None, :], mask=written, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(new_top == NOTHING, 0.0, new_top)
        rescale, weight = tl.exp2((top - safe) * LOG2E), tl.exp2((lse - safe) * LOG2E)
        total = total * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * out, 0)
        top = new_top
    some = total != 0
    total = tl.where(some, total, 1.0)
    tl.store(Out + row * D + column, (acc / total).to(Out.dtype.element_ty), mask=column < D)
    tl.store(Lse + row, tl.where(some, top + tl.log2(total) * LN2, NOTHING))
