"""The forward kernel: one program for each tile of queries, one softmax over all the runs of keys that it meets.

Legend: q (BM, D), k, v (BN, D) in parts, as of `rows`; scores (BM, BN) in powers of two; m, mass (BM) the running
maximum and sum; state: acc, m and mass.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, float32, int64

from dilated_attention.backends.triton.rows import (
    add_sums,
    load_rows,
    not_finite,
    products,
    row_products,
    scaled,
    store_rows,
    zeros,
)
from dilated_attention.backends.triton.tiles import (
    BEGIN,
    BRANCH,
    END,
    LN2,
    LOG2E,
    NOTHING,
    NUMBERS,
    WIDTH,
    band_of,
    fill_gaps,
    first_run,
    kept,
    key_rows,
    next_tile,
    own_rows,
    row_at,
    row_words,
    seen,
    task,
    with_zero_keys,
    zero_keys,
)


@triton.jit
def walk(state, q, q_position, words, keys, met, numbers, C: constexpr, EDGE: constexpr, SHIFTED: constexpr):
    """Take in the tiles of keys that this tile meets, run after run. EDGE: those to be masked, else the whole ones."""
    acc, m, mass = state
    K, V, k_stride, v_stride, padding, start, band = keys
    scale, threshold, factor = numbers
    MASKED: constexpr = C.PADDING or (EDGE and C.RAGGED)
    CAUSAL: constexpr = EDGE and C.CAUSAL
    BAND: constexpr = EDGE and C.BAND
    tiles, entry, run, after = first_run(met, EDGE)
    for _ in range(tiles):
        steps, position, valid, first = key_rows(run, padding, C)
        k = load_rows(K + first * k_stride, steps, k_stride, valid, C, MASKED)
        scores = products(q, k, C)
        if MASKED or CAUSAL or BAND:
            scores = tl.where(seen(q_position, position, valid, band, CAUSAL, BAND), scores, NOTHING)
        if SHIFTED:
            weights = tl.exp2(scores * scale + (run[4] - m)[:, None])
            mass += tl.sum(weights, 1)
            m = tl.where(mass >= 0.0, m, 0.0)  # m as it is, in the layout of the sums: saves a conversion a tile
        else:
            top = tl.maximum(m, tl.max(scores, 1) * scale + run[4])
            safe = tl.where(top == NOTHING, 0.0, top)  # no score but -inf yet: exp2(-inf - 0) = 0, not NaN
            weights = tl.exp2(scores * scale + (run[4] - safe)[:, None])
            rescale = tl.exp2(m - safe)
            mass = mass * rescale + tl.sum(weights, 1)
            acc = scaled(acc, rescale[:, None])
            m = top
        if C.DROPOUT:
            keep = kept(words[0][:, None], words[1][:, None], (start + position)[None, :], threshold)
            weights = tl.where(keep, weights * factor, 0.0)
        v = load_rows(V + first * v_stride, steps, v_stride, valid, C, MASKED)
        acc = add_sums(acc, weights, v, C)
        entry, run, after = next_tile(entry, run, after, C.BN, C.SINGLE and not EDGE)
    return acc, m, mass


@triton.jit
def found_before(OUT, LSE, steps, heads, valid, C: constexpr):
    """The state to begin with: what earlier launches found is one more key."""
    BM: constexpr = C.BM
    acc = zeros(BM, C.BD, C.BE)
    m = tl.full((BM,), NOTHING, float32)
    mass = tl.zeros((BM,), float32)
    if C.AGAIN:
        m = tl.load(LSE + steps * heads, mask=valid, other=NOTHING) * LOG2E
        mass = tl.where(m == NOTHING, 0.0, 1.0)
        acc = scaled(load_rows(OUT, steps, heads * C.D, valid, C, True), 1.0)
    return acc, m, mass


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    Q, K, V, OUT, LSE, PADDING_MASK, ENDS, SEED, sections, tiles, runs, q_strides, k_strides, v_strides,
    tokens, heads, group, first_head, scale, plain_scale, threshold, factor, C: constexpr,
):  # fmt: skip
    """OUT, LSE and PADDING_MASK are contiguous."""
    record, tile, head, start, sample = task(sections, tiles, group, C)
    own, steps, q_position, valid, first = own_rows(tile, C.BM)
    if own[0] >= own[2] and not C.FILLS:  # a head whose offset has fewer rows here
        return
    kv_head = head // group
    here = start + first
    row = (sample * tokens + here) * heads + head
    OUT += row * C.D
    LSE += row
    K = row_at(K, k_strides, sample, start, kv_head)
    V = row_at(V, v_strides, sample, start, kv_head)
    q = load_rows(row_at(Q, q_strides, sample, here, head), steps, q_strides[1], valid, C, True)
    words = q_position, q_position
    if C.DROPOUT:
        draw = tl.load(SEED), tl.load(record + BRANCH), sample, head + first_head * group
        words = row_words(draw, start + q_position)
    keys = K, V, k_strides[1], v_strides[1], PADDING_MASK + (sample * tokens + start), start, band_of(record, C)
    met, numbers = (runs, tile), (scale, threshold, factor)
    state = found_before(OUT, LSE, steps, heads, valid, C)
    PASSES: constexpr = C.PASSES
    sound = False
    if C.SHIFTED:
        # No running maximum: the weights are relative to that of the row's own key. They overflow only where another
        # score is 2^100 times as heavy; then, and only then, the tile starts over with the maximum.
        acc, before, mass = state
        m = row_products(q, load_rows(K + first * k_strides[1], steps, k_strides[1], valid, C, True)) * scale
        if C.AGAIN:
            mass = tl.exp2(before - m)
            acc = scaled(acc, mass[:, None])
        state = acc, m, mass
        for number in tl.static_range(PASSES):  # the whole tiles, then those to be masked
            state = walk(state, q, q_position, words, keys, met, numbers, C, number == 1, True)
        too_much = tl.where(state[2] < 1.2e30, 0, 1) | not_finite(state[0])
        sound = tl.max(too_much, 0) == 0
        if not sound:
            state = found_before(OUT, LSE, steps, heads, valid, C)
    if not sound:
        for number in tl.static_range(PASSES):
            state = walk(state, q, q_position, words, keys, met, numbers, C, number == 1, False)
    acc, m, mass = state
    if C.ZEROS:
        begin, end = tl.load(record + BEGIN).to(int64), tl.load(record + END).to(int64)
        width = tl.load(record + WIDTH).to(int64)
        if C.PADDING:
            end = tl.load(ENDS + sample)
        m, rescale, added = with_zero_keys(m, zero_keys(start, end, end - begin, width, own[1], own[0] % own[1]))
        acc, mass = scaled(acc, rescale[:, None]), mass * rescale + added
    total = tl.where(mass == 0.0, 1.0, mass)  # a row without keys: out 0, lse -inf
    store_rows(OUT, steps, heads * C.D, valid, scaled(acc, (1.0 / total)[:, None]), C, False)
    if C.FILLS:
        fill_gaps(OUT, heads * C.D, own, 0.0, C.BM, C.D, C.COLUMNS)
        fill_gaps(LSE, heads, own, NOTHING, C.BM, 1, 1)
    lse = tl.where(mass == 0.0, NOTHING, (m + tl.log2(total)) * LN2)
    tl.store(LSE + steps * heads, lse, mask=valid)
