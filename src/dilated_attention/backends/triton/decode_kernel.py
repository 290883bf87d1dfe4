"""The decoding kernels: which key tiles a program has, one softmax over them, and the splits put together.

Legend: q (BM, BD), k, v (BN, BD), scores (BM, BN) in powers of two; top, sums (BM) the running maximum and
sum. Positions and counts are 64-bit. PATTERN holds the six numbers of each `pattern.Branch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention.backends.triton.tiles import LN2, LOG2E, row_at


@triton.jit
def head_offset(head, PATTERN: tl.constexpr, AT: tl.constexpr):
    """Whether the head runs the branch whose numbers begin at AT, and the head's offset in it."""
    runs = (head >= PATTERN[AT + 2]) & (head < PATTERN[AT + 3])
    return runs, (head // PATTERN[AT + 4] + PATTERN[AT + 5]) % PATTERN[AT + 1]  # as `Branch.offset`


@triton.jit
def tiles_of_branch(
    low, high, head, tokens, PATTERN: tl.constexpr, AT: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """What queries at [low, high) meet in a branch: its first segment, the offset, tiles a segment, tiles in all."""
    WIDTH: tl.constexpr = PATTERN[AT]
    RATE: tl.constexpr = PATTERN[AT + 1]
    runs, offset = head_offset(head, PATTERN, AT)
    segment = low // WIDTH * WIDTH
    last = (high - 1) // WIDTH * WIDTH
    each = ((WIDTH - offset + RATE - 1) // RATE + BN - 1) // BN
    stop = tl.minimum(last + WIDTH, tokens)
    if CAUSAL:
        stop = high
    rows = (tl.maximum(stop - last - offset, 0) + RATE - 1) // RATE  # of the last segment
    count = (last - segment) // WIDTH * each + (rows + BN - 1) // BN
    # the first row of the head's offset at or after low: in this segment, or else in the next
    row = low - segment
    row += (offset + RATE - row % RATE) % RATE
    row = tl.where(row < WIDTH, row, WIDTH + offset)
    meets = runs & (segment + row < high)
    return segment, offset, each, tl.where(meets, count, 0)


@triton.jit
def find_tile(
    number, low, high, head, tokens, PATTERN: tl.constexpr, BRANCHES: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Of all tiles the one with this number: its segment, width, rate and offset, and the first of its rows."""
    before = low * 0
    segment, width, rate, offset, each, index = before, before, before, before, before + 1, before
    for i in tl.static_range(BRANCHES):
        this_segment, this_offset, this_each, count = tiles_of_branch(
            low, high, head, tokens, PATTERN, 6 * i, BN, CAUSAL
        )  # fmt: skip
        found = (number >= before) & (number < before + count)
        segment, offset = tl.where(found, this_segment, segment), tl.where(found, this_offset, offset)
        width, rate = tl.where(found, PATTERN[6 * i], width), tl.where(found, PATTERN[6 * i + 1], rate)
        each, index = tl.where(found, this_each, each), tl.where(found, number - before, index)
        before += count
    return segment + index // each * width, width, rate, offset, index % each * BN


@triton.jit
def zeros_of_branch(position, end, head, PATTERN: tl.constexpr, AT: tl.constexpr):
    """How many zero keys each row attends to in a branch: a sample ends at ``end``, and its last segment is filled."""
    WIDTH: tl.constexpr = PATTERN[AT]
    RATE: tl.constexpr = PATTERN[AT + 1]
    runs, offset = head_offset(head, PATTERN, AT)
    segment = position // WIDTH * WIDTH
    real = tl.minimum(tl.maximum(end - segment, 0), WIDTH)
    filled = (tl.minimum(end, WIDTH) + RATE - 1) // RATE - (tl.maximum(real - offset, 0) + RATE - 1) // RATE
    meets = runs & ((position - segment) % RATE == offset) & (real > 0)
    return tl.where(meets, filled, 0)


@triton.jit
def rows_at(X, strides, sample, token, head, column):
    """Pointers to rows of X (B, N, H, D)."""
    return row_at(X, strides, sample, token, head)[:, None] + column[None, :] * strides[3]


@triton.jit
def rescaled(acc, top, sums, new_top):
    """The softmax so far with another maximum; a row that has seen nothing has sum 0: exp2(-inf - 0), never NaN."""
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    factor = tl.exp2(top - safe)
    return acc * factor[:, None], sums * factor, safe


@triton.jit(do_not_specialize=["first", "tokens", "splits", "padding_sample"])  # they change from step to step
def decode_kernel(
    Q, K, V, Padding, Positions, Ends, Out, Lse,
    first, queries, tokens, splits, kv_heads, first_head, scale, positions_step,
    padding_sample, padding_token, q_strides, k_strides, v_strides,
    PATTERN: tl.constexpr, BRANCHES: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, ONE: tl.constexpr, CAUSAL: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    # --- this program's rows: queries of one sample and key/value head, each with its group
    tiles = (queries * GROUP + BM - 1) // BM
    tile, split = tl.program_id(0) % tiles, tl.program_id(1)
    kv_head = (tl.program_id(0) // tiles % kv_heads).to(tl.int64)
    sample = (tl.program_id(0) // tiles // kv_heads).to(tl.int64)
    start = first.to(tl.int64)
    if Positions is not None:
        start += tl.load(Positions + sample * positions_step)
    tokens = tokens.to(tl.int64)
    row = tile * BM + tl.arange(0, BM)
    query, query_head = row // GROUP, kv_head * GROUP + row % GROUP
    position = start + query
    here = query < queries
    inside = here & (position >= 0) & (position < tokens)
    column = tl.arange(0, BD).to(tl.int64)
    own = rows_at(Q, q_strides, sample, query.to(tl.int64), query_head, column)
    q = tl.load(own, mask=here[:, None] & (column < D)[None, :], other=0.0)

    # --- its share of the key tiles that these rows meet
    head = kv_head + first_head
    low = tl.maximum(start + tile * BM // GROUP, 0)
    high = tl.minimum(start + tl.minimum((tile * BM + BM - 1) // GROUP + 1, queries), tokens)
    total = tokens * 0
    for i in tl.static_range(BRANCHES):
        total += tiles_of_branch(low, high, head, tokens, PATTERN, 6 * i, BN, CAUSAL)[3]
    share = (total + splits - 1) // splits

    top = tl.full((BM,), float("-inf"), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    for number in range(split * share, tl.minimum((split + 1) * share, total)):
        segment, width, rate, offset, first_row = find_tile(
            number, low, high, head, tokens, PATTERN, BRANCHES, BN, CAUSAL
        )  # fmt: skip
        at = segment + offset + (first_row + tl.arange(0, BN)) * rate
        stop = tl.minimum(segment + width, tokens)
        if CAUSAL:
            stop = tl.minimum(stop, high)
        seen = at < stop
        if Padding is not None:
            ignored = tl.load(Padding + sample * padding_sample + at * padding_token, mask=seen, other=1)
            seen = seen & (ignored == 0)
        # what is not seen may be anything, NaN too: it is not loaded, and its scores are selected
        loaded = seen[:, None] & (column < D)[None, :]
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
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        new_acc, sums, safe = rescaled(acc, top, sums, new_top)
        weights = tl.exp2(scores - safe[:, None])
        sums += tl.sum(weights, 1)
        new_acc = tl.dot(weights.to(v.dtype), v, new_acc, input_precision="ieee")
        acc = tl.where(takes_part[:, None], new_acc, acc)  # for the others it may be 0 * NaN
        top = new_top

    if ZEROS and split == 0:
        end = tokens
        if Ends is not None:
            end = tl.load(Ends + sample)
        count = position * 0
        for i in tl.static_range(BRANCHES):
            count += zeros_of_branch(position, end, head, PATTERN, 6 * i)
        zeros = tl.where(inside, count, 0).to(tl.float32)
        new_top = tl.where(zeros > 0, tl.maximum(top, 0.0), top)
        acc, sums, safe = rescaled(acc, top, sums, new_top)
        sums += tl.where(zeros > 0, zeros * tl.exp2(-safe), 0.0)
        top = new_top

    some = sums != 0
    sums = tl.where(some, sums, 1.0)
    place = ((sample * queries + query) * (kv_heads * GROUP) + query_head) * splits + split
    tl.store(Lse + place, tl.where(some, (top + tl.log2(sums)) * LN2, float("-inf")), mask=here)
    if SPLIT:
        here = here & some  # an empty part is known by its lse
    out = (acc / sums[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + place[:, None] * D + column[None, :], out, mask=here[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(Parts, PartLse, Out, Lse, splits, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr):
    """The parts of one row put together: Parts (rows, splits, D), PartLse (rows, splits), Out (rows, D), Lse (rows)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    top, total = float("-inf"), 0.0
    acc = tl.zeros((BD,), tl.float32)
    for first in range(0, splits, BS):
        part = first + tl.arange(0, BS)
        lse = tl.load(PartLse + row * splits + part, mask=part < splits, other=float("-inf"))
        written = (lse != float("-inf"))[:, None] & (column < D)[None, :]
        out = tl.load(Parts + (row * splits + part)[:, None] * D + column[None, :], mask=written, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale, weight = tl.exp2((top - safe) * LOG2E), tl.exp2((lse - safe) * LOG2E)
        total = total * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * out, 0)
        top = new_top
    some = total != 0
    total = tl.where(some, total, 1.0)
    tl.store(Out + row * D + column, (acc / total).to(Out.dtype.element_ty), mask=column < D)
    tl.store(Lse + row, tl.where(some, top + tl.log2(total) * LN2, float("-inf")))
