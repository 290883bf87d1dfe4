"""The backward kernels: one for dq, which also makes the rows' statistics, then one for dk and dv. No atomics.

Both recompute the weights from the merged lse, so each run of a row's keys gives its exact share of the gradients.

Legend: q, dout (BM, D), k, v (BN, D) in parts, as of `rows`; scores (BM, BN), transposed (BN, BM) for dk and dv; stats
(B, H, N, 2): lse in powers of two, and the slope, the sum of dout * out less dlse.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from dilated_attention.backends.triton.rows import (
    add_sums,
    load_rows,
    products,
    row_products,
    scaled,
    store_rows,
    zeros,
)
from dilated_attention.backends.triton.tiles import (
    BRANCH,
    LOG2E,
    NOTHING,
    NUMBERS,
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
    seen,
    task,
)


@triton.jit
def walk_keys(dq, q, dout, lse, slope, q_position, words, keys, met, numbers, C: constexpr, EDGE: constexpr):
    """Add what the keys that this tile meets send to dq. EDGE: tiles to be masked, else the whole ones."""
    K, V, k_stride, v_stride, padding, start, band = keys
    scale, threshold, factor = numbers
    MASKED: constexpr = C.PADDING or (EDGE and C.RAGGED)
    CAUSAL: constexpr = EDGE and C.CAUSAL
    BAND: constexpr = EDGE and C.BAND
    tiles, entry, run, after = first_run(met, EDGE)
    for _ in range(tiles):
        steps, position, valid, first = key_rows(run, padding, C)
        k = load_rows(K + first * k_stride, steps, k_stride, valid, C, MASKED)
        v = load_rows(V + first * v_stride, steps, v_stride, valid, C, MASKED)
        weights = tl.exp2(products(q, k, C) * scale + (run[4] - lse)[:, None])
        if MASKED or CAUSAL or BAND:
            weights = tl.where(seen(q_position, position, valid, band, CAUSAL, BAND), weights, 0.0)
        dweights = products(dout, v, C)
        if C.DROPOUT:
            keep = kept(words[0][:, None], words[1][:, None], (start + position)[None, :], threshold)
            dweights = tl.where(keep, dweights * factor, 0.0)
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
    kv_head = head // group
    here = start + first
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
    met, numbers = (runs, tile), (scale, threshold, factor)
    dq = zeros(C.BM, C.BD, C.BE)
    PASSES: constexpr = C.PASSES
    for number in tl.static_range(PASSES):
        dq = walk_keys(dq, q, dout, lse, slope, q_position, words, keys, met, numbers, C, number == 1)
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
