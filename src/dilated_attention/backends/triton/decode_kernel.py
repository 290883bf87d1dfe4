"""The decoding kernels: which key tiles a program has, one softmax over them, and the splits put together.

Legend: q (BM, BD), k, v (BN, BD), scores (BM, BN) in powers of two; top, sums (BM) the running maximum and
sum. Positions and counts are 64-bit. RECTS: an `EndlessRect` whose fields hold a number for each rectangle; AT: which
rectangle.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, float32, int64

from dilated_attention.backends.triton.tiles import LN2, LOG2E, NOTHING, row_at, select, with_zero_keys, zero_keys


@triton.jit
def head_offset(head, RECTS: constexpr, AT: constexpr):
    """Whether the head has the rectangle, and how many tokens later."""
    has = (head >= RECTS.head[AT]) & (head < RECTS.stop[AT])
    return has, head // RECTS.neighbours[AT] % RECTS.turn[AT]


@triton.jit
def met(asked, RECTS: constexpr, AT: constexpr, BN: constexpr, CAUSAL: constexpr):
    """What queries meet of a rectangle: in the first repeat where they are, its first query and key, and the tokens of
    each up to the last; and how many key tiles a repeat has, and all of them.

    ``asked``: the queries' positions from low to high, their head, and the number of tokens.
    """
    low, high, head, tokens = asked
    STEP: constexpr = RECTS.key_step[AT]
    LAST: constexpr = RECTS.repeats[AT] - 1
    PERIOD: constexpr = RECTS.period[AT]
    has, offset = head_offset(head, RECTS, AT)
    query, query_span = RECTS.query[AT] + offset, RECTS.query_span[AT] - offset
    key, span = RECTS.key[AT] + offset, RECTS.key_span[AT] - offset
    # the first query of the rectangle at or after low: in this repeat, or else in the next
    shift = tl.maximum(low - query, 0)
    if LAST == 0:
        shift = low * 0
    else:
        shift = tl.minimum(shift // PERIOD, LAST) * PERIOD
    first = tl.cdiv(tl.maximum(low - query - shift, 0), RECTS.query_step[AT]) * RECTS.query_step[AT]
    if LAST == 0:
        has = has & (first < query_span) & (query + first < high)
    else:
        first = tl.where(first < query_span, shift + first, shift + PERIOD)
        shift = first // PERIOD * PERIOD
        has = has & (shift // PERIOD <= LAST) & (query + first < high)
    query, key = query + shift, key + shift
    stop = high if CAUSAL else tokens
    repeats = low * 0  # after the first, up to the last query's
    if LAST == 0:  # several repeats are limited by a mask alone
        stop = tl.minimum(stop, high + RECTS.high[AT])
        skipped = tl.cdiv(tl.maximum(low + RECTS.low[AT] - key, 0), STEP) * STEP
        key, span = key + skipped, tl.maximum(span - skipped, 0)
    else:
        repeats = tl.minimum((high - 1 - query) // PERIOD, LAST - shift // PERIOD)
    stop = tl.minimum(span, stop - key - repeats * PERIOD)
    tiles = tl.cdiv(span, STEP * BN)
    count = repeats * tiles + tl.cdiv(tl.maximum(stop, 0), STEP * BN)
    return query, query_span, key, span, tiles, tl.where(has, count, 0)


@triton.jit
def find_tile(number, asked, RECTS: constexpr, BN: constexpr, CAUSAL: constexpr, ONE: constexpr):
    """Of all tiles the one with this number: its branch; its first key, their step and where they end; the first
    query of that repeat, their step and span; and the limits."""
    zero = asked[0] * 0
    before, tile = zero, (zero, zero, zero + 1, zero, zero, zero, zero, zero, zero + 1, zero, zero, zero)
    for i in tl.static_range(len(RECTS.branch)):
        query, query_span, key, span, tiles, count = met(asked, RECTS, i, BN, CAUSAL)
        this = (
            key, span, tiles, RECTS.key_step[i], number - before, RECTS.branch[i], RECTS.period[i],
            query, RECTS.query_step[i], query_span, RECTS.low[i], RECTS.high[i],
        )  # fmt: skip
        tile = select((number >= before) & (number < before + count), this, tile)
        before += count
    key, span, tiles, step, index, branch, period, query, query_step, query_span, low, high = tile
    if not ONE:
        later = index // tiles * period
        key, query, index = key + later, query + later, index % tiles
    return branch, (key + index * BN * step, step, key + span), (query, query_step, query_span), low, high


@triton.jit
def sees(query, key, head, RECTS: constexpr, AT: constexpr):
    """Whether queries see keys in a rectangle; both are positions, which are broadcast."""
    PERIOD: constexpr = RECTS.period[AT]
    has, offset = head_offset(head, RECTS, AT)
    query_at, key_at = query - (RECTS.query[AT] + offset), key - (RECTS.key[AT] + offset)
    repeat = tl.maximum(query_at, 0) // PERIOD
    has = has & (query_at >= 0) & (repeat < RECTS.repeats[AT])
    query_at, key_at = query_at - repeat * PERIOD, key_at - repeat * PERIOD
    has = has & (query_at < RECTS.query_span[AT] - offset) & (query_at % RECTS.query_step[AT] == 0)
    has = has & (key_at >= 0) & (key_at < RECTS.key_span[AT] - offset)
    if RECTS.key_step[AT] > 1:
        has = has & (key_at % RECTS.key_step[AT] == 0)
    return has & (key - query >= RECTS.low[AT]) & (key - query <= RECTS.high[AT])


@triton.jit
def is_new(query, key, head, branch, RECTS: constexpr):
    """Whether no earlier branch than this one shows the keys to the queries."""
    new = (key >= 0) & (query >= 0)
    for i in tl.static_range(len(RECTS.branch)):
        if RECTS.branch[i] < RECTS.branch[-1]:
            is_earlier = RECTS.branch[i] < branch
            new = new & ~(is_earlier & sees(query, key, head, RECTS, i))
    return new


@triton.jit
def zeros_of_rect(position, end, head, RECTS: constexpr, AT: constexpr):
    """How many zero keys each row attends to in a segment: a sample ends at ``end``, and its last segment is filled."""
    has, offset = head_offset(head, RECTS, AT)
    WIDTH: constexpr = RECTS.period[AT]
    segment = position // WIDTH * WIDTH
    meets = has & ((position - segment) % RECTS.key_step[AT] == offset)
    return tl.where(meets, zero_keys(segment, end, end, WIDTH, RECTS.key_step[AT], offset), 0)


@triton.jit
def rows_at(X, strides, sample, token, head, column):
    """Pointers to rows of X (B, N, H, D)."""
    return row_at(X, strides, sample, token, head)[:, None] + column * strides[3]


@triton.jit(do_not_specialize=["first", "tokens", "splits", "padding_sample"])  # they change from step to step
def decode_kernel(
    Q, K, V, Padding, Positions, Ends, Out, Lse,
    first, queries, tokens, splits, kv_heads, first_head, scale, positions_step,
    padding_sample, padding_token, q_strides, k_strides, v_strides,
    RECTS: constexpr, GROUP: constexpr, D: constexpr, BD: constexpr, BM: constexpr, BN: constexpr,
    SPLIT: constexpr, ONE: constexpr, CAUSAL: constexpr, LIMITED: constexpr, ONCE: constexpr, ZEROS: constexpr,
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
    asked = low, high, head, tokens
    total = tokens * 0
    for i in tl.static_range(len(RECTS.branch)):
        total += met(asked, RECTS, i, BN, CAUSAL)[5]
    share = (total + splits - 1) // splits
    asking = position[:, None]
    if ONE:
        asking = tl.zeros((1, 1), int64) + start

    top = tl.full((BM,), NOTHING, float32)
    sums = tl.zeros((BM,), float32)
    acc = tl.zeros((BM, BD), float32)
    for number in range(split * share, tl.minimum((split + 1) * share, total)):
        branch, keys, queries_seen, least, most = find_tile(number, asked, RECTS, BN, CAUSAL, ONE)
        at = keys[0] + tl.arange(0, BN) * keys[1]
        seen = at < tl.minimum(keys[2], high if CAUSAL else tokens)
        if Padding is not None:
            ignored = tl.load(Padding + sample * padding_sample + at * padding_token, mask=seen, other=1)
            seen = seen & (ignored == 0)
        # what is not seen may be anything, NaN too: it is not loaded, and its scores are selected
        loaded = seen[:, None] & in_row
        k = tl.load(rows_at(K, k_strides, sample, at, kv_head, column), mask=loaded, other=0.0).to(q.dtype)
        v = tl.load(rows_at(V, v_strides, sample, at, kv_head, column), mask=loaded, other=0.0).to(q.dtype)
        takes_part = inside  # a single query meets no tile of a rectangle that it is not in
        if not ONE:
            mine = position - queries_seen[0]
            takes_part = inside & (mine >= 0) & (mine < queries_seen[2]) & (mine % queries_seen[1] == 0)
        visible = takes_part[:, None] & seen[None, :]
        if CAUSAL:
            visible = visible & (position[:, None] >= at[None, :])
        if LIMITED:
            apart = at[None, :] - position[:, None]
            visible = visible & (apart >= least) & (apart <= most)
        if ONCE:
            visible = visible & is_new(asking, at[None, :], head, branch, RECTS)
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
        for i in tl.static_range(len(RECTS.branch)):
            count += zeros_of_rect(position, end, head, RECTS, i)
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
