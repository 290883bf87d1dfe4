"""The kernels of attention: forward, one for dq, which also makes the rows' statistics, and one for dk and dv.

A program has a tile of queries, or of keys in the last kernel, and walks through the runs of rows that it meets. The
backward kernels recompute the weights from the merged lse, so each run of a row's keys gives its exact share of the
gradients. There are no atomics.

Legend: q, dout (BM, D), k, v (BN, D) in parts, as of `rows`; scores (BM, BN) in powers of two, transposed (BN, BM) for
dk and dv; m, mass (BM) the running maximum and sum; state: acc, m and mass; stats (B, H, N, 2): lse in powers of two,
and the slope, the sum of dout * out less dlse.
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
    in_band,
    kept,
    key_rows,
    next_tile,
    own_rows,
    row_at,
    row_words,
    rows_of,
    task,
    with_zero_keys,
    zero_keys,
)


@triton.jit
def masked(x, blank, q_position, position, valid, band, C: constexpr, EDGE: constexpr):
    """x (BM, BN), blank where a query does not see a key."""
    if C.PADDING or (EDGE and (C.RAGGED or C.BAND or C.CAUSAL)):
        pairs = valid[None, :]
        if EDGE and C.BAND:
            pairs = pairs & in_band(q_position[:, None], position[None, :], band)
        if EDGE and C.CAUSAL:  # even where all are valid: in this form alone the compiler keeps no mask in registers
            pairs = pairs & (q_position[:, None] >= position[None, :])
        x = tl.where(pairs, x, blank)
    return x


@triton.jit
def dropped(x, drop, key):
    """x (BM, BN) after dropout; ``drop``: the words of the queries, the threshold and the factor."""
    words, threshold, factor = drop
    return tl.where(kept(words[0][:, None], words[1][:, None], key[None, :], threshold), x * factor, 0.0)


@triton.jit
def walk(state, q, q_position, drop, keys, met, scale, C: constexpr, EDGE: constexpr, SHIFTED: constexpr):
    """Take in the tiles of keys that this tile meets, run after run. EDGE: those to be masked, else the whole ones."""
    acc, m, mass = state
    K, V, k_stride, v_stride, padding, start, band = keys
    MASKED: constexpr = C.PADDING or (EDGE and C.RAGGED)
    tiles, entry, run, after = first_run(met, EDGE)
    for _ in range(tiles):
        steps, position, valid, first = key_rows(run, padding, C)
        k = load_rows(K + first * k_stride, steps, k_stride, valid, C, MASKED)
        scores = masked(products(q, k, C), NOTHING, q_position, position, valid, band, C, EDGE)
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
            weights = dropped(weights, drop, start + position)
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
    kv_head, here = head // group, start + first
    row = (sample * tokens + here) * heads + head
    OUT, LSE = OUT + row * C.D, LSE + row
    K = row_at(K, k_strides, sample, start, kv_head)
    V = row_at(V, v_strides, sample, start, kv_head)
    q = load_rows(row_at(Q, q_strides, sample, here, head), steps, q_strides[1], valid, C, True)
    words = q_position, q_position
    if C.DROPOUT:
        draw = tl.load(SEED), tl.load(record + BRANCH), sample, head + first_head * group
        words = row_words(draw, start + q_position)
    keys = K, V, k_strides[1], v_strides[1], PADDING_MASK + (sample * tokens + start), start, band_of(record, C)
    met, drop = (runs, tile), (words, threshold, factor)
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
            state = walk(state, q, q_position, drop, keys, met, scale, C, number == 1, True)
        too_much = tl.where(state[2] < 1.2e30, 0, 1) | not_finite(state[0])
        sound = tl.max(too_much, 0) == 0
        if not sound:
            state = found_before(OUT, LSE, steps, heads, valid, C)
    if not sound:
        for number in tl.static_range(PASSES):
            state = walk(state, q, q_position, drop, keys, met, scale, C, number == 1, False)
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


@triton.jit
def walk_keys(dq, q, dout, lse, slope, q_position, drop, keys, met, scale, C: constexpr, EDGE: constexpr):
    """Add what the keys that this tile meets send to dq. EDGE: tiles to be masked, else the whole ones."""
    K, V, k_stride, v_stride, padding, start, band = keys
    MASKED: constexpr = C.PADDING or (EDGE and C.RAGGED)
    tiles, entry, run, after = first_run(met, EDGE)
    for _ in range(tiles):
        steps, position, valid, first = key_rows(run, padding, C)
        k = load_rows(K + first * k_stride, steps, k_stride, valid, C, MASKED)
        v = load_rows(V + first * v_stride, steps, v_stride, valid, C, MASKED)
        weights = tl.exp2(products(q, k, C) * scale + (run[4] - lse)[:, None])
        weights = masked(weights, 0.0, q_position, position, valid, band, C, EDGE)
        dweights = products(dout, v, C)
        if C.DROPOUT:
            dweights = dropped(dweights, drop, start + position)
        dq = add_sums(dq, weights * (dweights - slope[:, None]), k, C)
        entry, run, after = next_tile(entry, run, after, C.BN, C.SINGLE and not EDGE)
    return dq


@triton.jit(do_not_specialize=NUMBERS)
def dq_kernel(
    Q, K, V, DOUT, OUT, LSE, DLSE, DQ, STATS, PADDING_MASK, SEED, sections, tiles, runs,
    q_strides, k_strides, v_strides, dout_strides,
    tokens, heads, group, first_head, scale, plain_scale, threshold, factor, C: constexpr,
):  # fmt: skip
    """OUT, LSE, DLSE, DQ, STATS and PADDING_MASK are contiguous."""
    record, tile, head, start, sample = task(sections, tiles, group, C)
    own, steps, q_position, valid, first = own_rows(tile, C.BM)
    if own[0] >= own[2] and not C.FILLS:
        return
    kv_head, here = head // group, start + first
    row = (sample * tokens + here) * heads + head
    stats = STATS + ((sample * heads + head) * tokens + here) * 2 + steps * 2
    lse = tl.load(LSE + row + steps * heads, mask=valid, other=NOTHING) * LOG2E
    empty = lse == NOTHING  # a row without keys sends nothing back, not even NaN
    lse = tl.where(empty, float("inf"), lse)
    q = load_rows(row_at(Q, q_strides, sample, here, head), steps, q_strides[1], valid, C, True)
    out = load_rows(OUT + row * C.D, steps, heads * C.D, valid, C, True)
    dout_rows = row_at(DOUT, dout_strides, sample, here, head)
    dout = load_rows(dout_rows, steps, dout_strides[1], valid & ~empty, C, True)
    slope = row_products(dout, out)
    if C.HAS_DLSE:
        slope -= tl.where(empty, 0.0, tl.load(DLSE + row + steps * heads, mask=valid, other=0.0))
    tl.store(stats, lse, mask=valid)
    tl.store(stats + 1, slope, mask=valid)
    words = q_position, q_position
    if C.DROPOUT:
        draw = tl.load(SEED), tl.load(record + BRANCH), sample, head + first_head * group
        words = row_words(draw, start + q_position)
    K, V = row_at(K, k_strides, sample, start, kv_head), row_at(V, v_strides, sample, start, kv_head)
    keys = K, V, k_strides[1], v_strides[1], PADDING_MASK + sample * tokens + start, start, band_of(record, C)
    met, drop = (runs, tile), (words, threshold, factor)
    dq = zeros(C.BM, C.BD, C.BE)
    PASSES: constexpr = C.PASSES
    for number in tl.static_range(PASSES):
        dq = walk_keys(dq, q, dout, lse, slope, q_position, drop, keys, met, scale, C, number == 1)
    DQ += row * C.D
    store_rows(DQ, steps, heads * C.D, valid, scaled(dq, plain_scale), C, C.AGAIN)
    if C.FILLS:
        fill_gaps(DQ, heads * C.D, own, 0.0, C.BM, C.D, C.COLUMNS)


@triton.jit
def walk_queries(dk, dv, k, v, k_position, ignored, queries, draw, met, numbers, C: constexpr, EDGE: constexpr):
    """Add what the queries that this tile meets send to dk and dv. EDGE: tiles to be masked, else the whole ones."""
    Q, DOUT, STATS, q_stride, dout_stride, start, band = queries
    scale, threshold, factor = numbers
    MASKED: constexpr = EDGE and C.RAGGED
    tiles, entry, run, after = first_run(met, EDGE)
    for _ in range(tiles):
        steps, position, valid, first = rows_of(run, C.BM)
        q = load_rows(Q + first * q_stride, steps, q_stride, valid, C, MASKED)
        dout = load_rows(DOUT + first * dout_stride, steps, dout_stride, valid, C, MASKED)
        # both numbers of a row in one load: as two short loads every thread would read all rows
        pointers = STATS + first * 2 + (steps * 2)[:, None] + tl.arange(0, 2)[None, :]
        if MASKED:
            lse, slope = tl.split(tl.load(pointers, mask=valid[:, None], other=float("inf")))
            slope = tl.where(valid, slope, 0.0)
        else:
            lse, slope = tl.split(tl.load(pointers))
        if C.BARE:
            dout = [tl.where((lse != float("inf"))[:, None], part, 0.0) for part in dout]
        weights = tl.exp2(products(k, q, C) * scale + (run[4] - lse)[None, :])
        if EDGE and C.CAUSAL:
            weights = tl.where(position[None, :] >= k_position[:, None], weights, 0.0)
        if EDGE and C.BAND:
            weights = tl.where(in_band(k_position[:, None], position[None, :], band), weights, 0.0)
        if C.PADDING:
            weights = tl.where(ignored[:, None], 0.0, weights)
        dweights = products(v, dout, C)
        kept_weights = weights
        if C.DROPOUT:
            low, high = row_words(draw, start + position)
            keep = kept(low[None, :], high[None, :], (start + k_position)[:, None], threshold)
            dweights = tl.where(keep, dweights * factor, 0.0)
            kept_weights = tl.where(keep, weights * factor, 0.0)
        dv = add_sums(dv, kept_weights, dout, C)
        dk = add_sums(dk, weights * (dweights - slope[None, :]), q, C)
        entry, run, after = next_tile(entry, run, after, C.BM, C.SINGLE and not EDGE)
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS)
def dkdv_kernel(
    Q, K, V, DOUT, STATS, DK, DV, PADDING_MASK, SEED, sections, tiles, runs,
    q_strides, k_strides, v_strides, dout_strides,
    tokens, heads, group, first_head, scale, plain_scale, threshold, factor, C: constexpr,
):  # fmt: skip
    """STATS, DK, DV and PADDING_MASK are contiguous."""
    record, tile, kv_head, start, sample = task(sections, tiles, 1, C)
    own, steps, k_position, valid, first = own_rows(tile, C.BN)
    if own[0] >= own[2] and not C.FILLS:
        return
    here = start + first
    ignored, loaded = valid, valid
    if C.PADDING:
        ignored = tl.load(PADDING_MASK + sample * tokens + start + k_position, mask=valid, other=1) != 0
        loaded = valid & (ignored == 0)
    k = load_rows(row_at(K, k_strides, sample, here, kv_head), steps, k_strides[1], loaded, C, True)
    v = load_rows(row_at(V, v_strides, sample, here, kv_head), steps, v_strides[1], loaded, C, True)
    branch = tl.load(record + BRANCH)
    seed = branch
    if C.DROPOUT:
        seed = tl.load(SEED)
    dk, dv = zeros(C.BN, C.BD, C.BE), zeros(C.BN, C.BD, C.BE)
    met, numbers = (runs, tile), (scale, threshold, factor)
    PASSES: constexpr = C.PASSES
    members = 1
    if C.GROUPED:
        members = group
    for member in range(members):
        head = kv_head * members + member
        queries = (
            row_at(Q, q_strides, sample, start, head), row_at(DOUT, dout_strides, sample, start, head),
            STATS + ((sample * heads + head) * tokens + start) * 2, q_strides[1], dout_strides[1], start,
            band_of(record, C),
        )  # fmt: skip
        draw = seed, branch, sample, head + first_head * members
        for number in tl.static_range(PASSES):
            dk, dv = walk_queries(dk, dv, k, v, k_position, ignored, queries, draw, met, numbers, C, number == 1)
    kv_heads = heads // group
    row = ((sample * tokens + here) * kv_heads + kv_head) * C.D
    DK += row
    DV += row
    row_size = kv_heads * C.D
    store_rows(DK, steps, row_size, valid, scaled(dk, plain_scale), C, C.AGAIN)
    store_rows(DV, steps, row_size, valid, dv, C, C.AGAIN)
    if C.FILLS:
        fill_gaps(DK, row_size, own, 0.0, C.BN, C.D, C.COLUMNS)
        fill_gaps(DV, row_size, own, 0.0, C.BN, C.D, C.COLUMNS)
