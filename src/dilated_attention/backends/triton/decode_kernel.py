"""The decoding kernels: which key tiles a program has, one softmax over them, and the splits put together.

Legend: q (BM, BD), k, v (BN, BD), scores (BM, BN) in powers of two; top, sums (BM) the running maximum and
sum. Positions and counts are 64-bit. RECTS holds the numbers of each rectangle, as of `endless.EndlessRect`; AT: where
those of one begin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, float32, int64

from dilated_attention.backends.triton.endless import ENDLESS as ENDLESS_TOKENS
from dilated_attention.backends.triton.tiles import LN2, LOG2E, NOTHING, row_at, with_zero_keys, zero_keys

ENDLESS, NUMBERS = constexpr(ENDLESS_TOKENS), constexpr(15)  # numbers of a rectangle, in the order of `EndlessRect`
(
    BRANCH, HEAD, HEAD_STOP, NEIGHBOURS, TURN, PERIOD, REPEATS, QUERY, QUERY_STEP, QUERY_SPAN, KEY, KEY_STEP, KEY_SPAN,
    LOW, HIGH,
) = (constexpr(field) for field in range(15))  # fmt: skip


@triton.jit
def head_offset(head, RECTS: constexpr, AT: constexpr):
    """Whether the head has the rectangle that AT begins, and how many tokens later."""
    has = (head >= RECTS[AT + HEAD]) & (head < RECTS[AT + HEAD_STOP])
    return has, head // RECTS[AT + NEIGHBOURS] % RECTS[AT + TURN]


@triton.jit
def met(asked, RECTS: constexpr, AT: constexpr, BN: constexpr, CAUSAL: constexpr):
    """What queries meet of a rectangle: in the first repeat where they are, its first query, the first key and the
    tokens from it to the last; and how many key tiles a repeat has, and all of them.

    ``asked``: the queries' positions from low to high, their head, and the number of tokens.
    """
    low, high, head, tokens = asked
    STEP: constexpr = RECTS[AT + KEY_STEP]
    LAST: constexpr = RECTS[AT + REPEATS] - 1
    has, offset = head_offset(head, RECTS, AT)
    query, key, span = RECTS[AT + QUERY] + offset, RECTS[AT + KEY] + offset, RECTS[AT + KEY_SPAN] - offset
    query_span = RECTS[AT + QUERY_SPAN] - offset
    # the first query of the rectangle at or after low: in this repeat, or else in the next
    shift = tl.maximum(low - query, 0)
    if LAST == 0:
        shift = low * 0
    else:
        shift = tl.minimum(shift // RECTS[AT + PERIOD], LAST) * RECTS[AT + PERIOD]
    first = tl.cdiv(tl.maximum(low - query - shift, 0), RECTS[AT + QUERY_STEP]) * RECTS[AT + QUERY_STEP]
    if LAST == 0:
        has = has & (first < query_span) & (query + first < high)
    else:
        first = tl.where(first < query_span, shift + first, shift + RECTS[AT + PERIOD])
        shift = first // RECTS[AT + PERIOD] * RECTS[AT + PERIOD]
        has = has & (shift // RECTS[AT + PERIOD] <= LAST) & (query + first < high)
    query, key = query + shift, key + shift
    stop = high if CAUSAL else tokens
    repeats = low * 0  # after the first, up to the last query's
    if LAST == 0:  # several repeats are limited by a mask alone
        stop = tl.minimum(stop, high + RECTS[AT + HIGH])
        skipped = tl.cdiv(tl.maximum(low + RECTS[AT + LOW] - key, 0), STEP) * STEP
        key, span = key + skipped, tl.maximum(span - skipped, 0)
    else:
        repeats = tl.minimum((high - 1 - query) // RECTS[AT + PERIOD], LAST - shift // RECTS[AT + PERIOD])
    stop = tl.minimum(span, stop - key - repeats * RECTS[AT + PERIOD])
    tiles = tl.cdiv(span, STEP * BN)
    count = repeats * tiles + tl.cdiv(tl.maximum(stop, 0), STEP * BN)
    return query, key, span, tiles, tl.where(has, count, 0)


@triton.jit
def find_tile(
    number, asked, RECTS: constexpr, COUNT: constexpr, BN: constexpr, CAUSAL: constexpr, LIMITED: constexpr,
    ONE: constexpr,
):  # fmt: skip
    """Of all tiles the one with this number: its branch; its first key, their step and where they end; the first
    query of that repeat, their step and span; and the limits."""
    zero = asked[0] * 0
    before, branch, key, step, span, tiles, period, index = zero, zero, zero, zero, zero, zero + 1, zero, zero
    query, query_step, query_span, low, high = zero, zero + 1, zero, zero, zero
    for i in tl.static_range(COUNT):
        this = met(asked, RECTS, NUMBERS * i, BN, CAUSAL)
        found = (number >= before) & (number < before + this[4])
        key, span, tiles = (
            tl.where(found, this[1], key),
            tl.where(found, this[2], span),
            tl.where(found, this[3], tiles),
        )
        step, index = tl.where(found, RECTS[NUMBERS * i + KEY_STEP], step), tl.where(found, number - before, index)
        branch = tl.where(found, RECTS[NUMBERS * i + BRANCH], branch)
        if not ONE:
            _, offset = head_offset(asked[2], RECTS, NUMBERS * i)
            period, query = tl.where(found, RECTS[NUMBERS * i + PERIOD], period), tl.where(found, this[0], query)
            query_step = tl.where(found, RECTS[NUMBERS * i + QUERY_STEP], query_step)
            query_span = tl.where(found, RECTS[NUMBERS * i + QUERY_SPAN] - offset, query_span)
        if LIMITED:
            low, high = tl.where(found, RECTS[NUMBERS * i + LOW], low), tl.where(found, RECTS[NUMBERS * i + HIGH], high)
        before += this[4]
    if not ONE:
        later = index // tiles * period
        key, query, index = key + later, query + later, index % tiles
    return branch, (key + index * BN * step, step, key + span), (query, query_step, query_span), low, high


@triton.jit
def sees(query, key, head, RECTS: constexpr, AT: constexpr):
    """Whether queries see keys in a rectangle; both are positions, which are broadcast."""
    has, offset = head_offset(head, RECTS, AT)
    query_at, key_at = query - (RECTS[AT + QUERY] + offset), key - (RECTS[AT + KEY] + offset)
    repeat = tl.maximum(query_at, 0) // RECTS[AT + PERIOD]
    has = has & (query_at >= 0) & (repeat < RECTS[AT + REPEATS])
    query_at, key_at = query_at - repeat * RECTS[AT + PERIOD], key_at - repeat * RECTS[AT + PERIOD]
    has = has & (query_at < RECTS[AT + QUERY_SPAN] - offset) & (query_at % RECTS[AT + QUERY_STEP] == 0)
    has = has & (key_at >= 0) & (key_at < RECTS[AT + KEY_SPAN] - offset)
    if RECTS[AT + KEY_STEP] > 1:
        has = has & (key_at % RECTS[AT + KEY_STEP] == 0)
    return has & (key - query >= RECTS[AT + LOW]) & (key - query <= RECTS[AT + HIGH])


@triton.jit
def is_new(query, key, head, branch, RECTS: constexpr, COUNT: constexpr):
    """Whether no earlier branch than this one shows the keys to the queries."""
    new = (key >= 0) & (query >= 0)
    for i in tl.static_range(COUNT):
        if RECTS[NUMBERS * i + BRANCH] < RECTS[NUMBERS * (COUNT - 1) + BRANCH]:
            is_earlier = RECTS[NUMBERS * i + BRANCH] < branch
            new = new & ~(is_earlier & sees(query, key, head, RECTS, NUMBERS * i))
    return new


@triton.jit
def zeros_of_rect(position, end, head, RECTS: constexpr, AT: constexpr):
    """How many zero keys each row attends to in a segment: a sample ends at ``end``, and its last segment is filled."""
    has, offset = head_offset(head, RECTS, AT)
    WIDTH: constexpr = RECTS[AT + PERIOD]
    segment = position // WIDTH * WIDTH
    meets = has & ((position - segment) % RECTS[AT + KEY_STEP] == offset)
    return tl.where(meets, zero_keys(segment, end, end, WIDTH, RECTS[AT + KEY_STEP], offset), 0)


@triton.jit
def rows_at(X, strides, sample, token, head, column):
    """Pointers to rows of X (B, N, H, D)."""
    return row_at(X, strides, sample, token, head)[:, None] + column * strides[3]


@triton.jit(do_not_specialize=["first", "tokens", "splits", "padding_sample"])  # they change from step to step
def decode_kernel(
    Q, K, V, Padding, Positions, Ends, Out, Lse,
    first, queries, tokens, splits, kv_heads, first_head, scale, positions_step,
    padding_sample, padding_token, q_strides, k_strides, v_strides,
    RECTS: constexpr, COUNT: constexpr, GROUP: constexpr, D: constexpr, BD: constexpr, BM: constexpr,
    BN: constexpr, SPLIT: constexpr, ONE: constexpr, CAUSAL: constexpr, LIMITED: constexpr, ONCE: constexpr,
    ZEROS: constexpr,
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
    for i in tl.static_range(COUNT):
        total += met(asked, RECTS, NUMBERS * i, BN, CAUSAL)[4]
    share = (total + splits - 1) // splits
    asking = position[:, None]
    if ONE:
        asking = tl.zeros((1, 1), int64) + start

    top = tl.full((BM,), NOTHING, float32)
    sums = tl.zeros((BM,), float32)
    acc = tl.zeros((BM, BD), float32)
    for number in range(split * share, tl.minimum((split + 1) * share, total)):
        branch, keys, queries_seen, least, most = find_tile(number, asked, RECTS, COUNT, BN, CAUSAL, LIMITED, ONE)
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
            visible = visible & is_new(asking, at[None, :], head, branch, RECTS, COUNT)
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
        for i in tl.static_range(COUNT):
            count += zeros_of_rect(position, end, head, RECTS, NUMBERS * i)
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
