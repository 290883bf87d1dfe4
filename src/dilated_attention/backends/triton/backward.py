"""The backward kernels: one for dq, which also makes the rows' statistics, then one for dk and dv. No atomics.

Both recompute the weights from the merged lse, so each run of a row's keys gives its exact share of the gradients.

Legend: q, dout (BM, D), k, v (BN, D) in parts, as of `rows`; scores (BM, BN), transposed (BN, BM) for dk and dv; stats
(B, H, N, 2): lse in powers of two, and the slope, the sum of dout * out less dlse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention.backends.triton.rows import (
    add_sums,
    load_rows,
    only,
    products,
    row_products,
    scaled,
    store_rows,
    zeros,
)
from dilated_attention.backends.triton.tiles import (
    ANY_LENGTH,
    BRANCH,
    EDGE_RUN,
    EDGES_MET,
    FIRST_RUN,
    LOG2E,
    PLAIN,
    RUN,
    TILE,
    fill_gaps,
    kept,
    load_run,
    next_tile,
    row_steps,
    row_words,
    seen,
    task,
)


@triton.jit
def walk_keys(
    dq, q, dout, lse, slope, q_position, low, high, K, V, padding, entry, tiles, start, scale, threshold,
    factor, k_stride, v_stride, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, SINGLE: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    base, step, stop, left, bias = load_run(entry)
    base_, step_, stop_, left_, bias_ = load_run(entry + RUN)
    for _ in range(tiles):
        steps = row_steps(BN, step)
        position = base + steps
        valid = position < stop
        if PADDING:
            valid = valid & (tl.load(padding + position, mask=valid, other=1) == 0)
        k = load_rows(K + base.to(tl.int64) * k_stride, steps, k_stride, valid, D, BD, BE, MASKED, ALIGNED)
        v = load_rows(V + base.to(tl.int64) * v_stride, steps, v_stride, valid, D, BD, BE, MASKED, ALIGNED)
        scores = products(q, k, PRECISION)
        weights = tl.math.exp2(scores * scale + (bias - lse)[:, None])
        if MASKED or CAUSAL:
            weights = tl.where(seen(q_position, position, valid, CAUSAL), weights, 0.0)
        dweights = products(dout, v, PRECISION)
        if DROPOUT:
            keep = kept(low[:, None], high[:, None], (start + position)[None, :], threshold)
            dweights = tl.where(keep, dweights * factor, 0.0)
        dscores = weights * (dweights - slope[:, None])
        dq = add_sums(dq, dscores, k, PRECISION)
        entry, base, step, stop, left, bias, base_, step_, stop_, left_, bias_ = next_tile(
            entry, base, step, stop, left, bias, base_, step_, stop_, left_, bias_, BN, SINGLE
        )
    return dq


@triton.jit(do_not_specialize=ANY_LENGTH)
def dq_kernel(
    Q, K, V, OUT, LSE, DOUT, DLSE, DQ, STATS, PADDING_MASK, SEED, sections, tiles, runs,
    q_sample, q_token, q_head, k_sample, k_token, k_head, v_sample, v_token, v_head,
    out_sample, out_token, out_head, lse_sample, lse_token, lse_head, dout_sample, dout_token, dout_head,
    dlse_sample, dlse_token, dlse_head, dq_sample, dq_token, dq_head, stats_sample, stats_head, padding_sample,
    scale, group, first_head, threshold, factor, plain_scale,
    SECTIONS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, HAS_DLSE: tl.constexpr, ADD: tl.constexpr,
    SINGLE: tl.constexpr, EDGES: tl.constexpr, RAGGED: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr, FILLS: tl.constexpr,
):  # fmt: skip
    record, index, head, start, sample = task(sections, group, SECTIONS)
    kv_head = head // group
    tile = tiles + index * TILE
    base, step, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if base >= stop and not FILLS:
        return
    steps = row_steps(BM, step)
    q_position = base + steps
    valid = q_position < stop
    here = start + base
    K += sample * k_sample + kv_head * k_head + start * k_token
    V += sample * v_sample + kv_head * v_head + start * v_token
    Q += sample * q_sample + head * q_head + here * q_token
    OUT += sample * out_sample + head * out_head + here * out_token
    DOUT += sample * dout_sample + head * dout_head + here * dout_token
    LSE += sample * lse_sample + head * lse_head + here * lse_token
    STATS += sample * stats_sample + head * stats_head + here * 2
    lse = tl.load(LSE + steps * lse_token, mask=valid, other=float("-inf")) * LOG2E
    empty = lse == float("-inf")  # a row without keys sends nothing back, not even NaN
    lse = tl.where(empty, float("inf"), lse)
    q = load_rows(Q, steps, q_token, valid, D, BD, BE, True, ALIGNED)
    out = load_rows(OUT, steps, out_token, valid, D, BD, BE, True, ALIGNED)
    dout = load_rows(DOUT, steps, dout_token, valid & ~empty, D, BD, BE, True, ALIGNED)
    slope = row_products(dout, out)
    if HAS_DLSE:
        DLSE += sample * dlse_sample + head * dlse_head + here * dlse_token
        slope -= tl.where(empty, 0.0, tl.load(DLSE + steps * dlse_token, mask=valid, other=0.0))
    tl.store(STATS + steps * 2, lse, mask=valid)
    tl.store(STATS + steps * 2 + 1, slope, mask=valid)
    low, high = q_position, q_position
    if PADDING:
        PADDING_MASK += sample * padding_sample + start
    if DROPOUT:
        position = start + q_position
        low, high = row_words(tl.load(SEED), tl.load(record + BRANCH), sample, head + first_head * group, position)
    dq = zeros(BM, BD, BE)
    dq = walk_keys(
        dq, q, dout, lse, slope, q_position, low, high, K, V, PADDING_MASK, runs + tl.load(tile + FIRST_RUN) * RUN,
        tl.load(tile + PLAIN), start, scale, threshold, factor, k_token, v_token, D, BD, BE, BN, PADDING,
        False, PADDING, DROPOUT, SINGLE, PRECISION, ALIGNED,
    )  # fmt: skip
    if EDGES:
        dq = walk_keys(
            dq, q, dout, lse, slope, q_position, low, high, K, V, PADDING_MASK, runs + tl.load(tile + EDGE_RUN) * RUN,
            tl.load(tile + EDGES_MET), start, scale, threshold, factor, k_token, v_token, D, BD, BE, BN,
            RAGGED or PADDING, CAUSAL, PADDING, DROPOUT, False, PRECISION, ALIGNED,
        )  # fmt: skip
    DQ += sample * dq_sample + head * dq_head + here * dq_token
    store_rows(DQ, steps, dq_token, valid, scaled(dq, plain_scale), D, ADD)
    if FILLS:
        fill_gaps(DQ, dq_token, base, step, stop, 0.0, BM, D, BD if BE == 0 else 2 * BD)


@triton.jit
def walk_queries(
    dk, dv, k, v, k_position, ignored, seed, branch, sample, head, Q, DOUT, STATS, entry, tiles, start, scale,
    threshold, factor, q_stride, dout_stride, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, SINGLE: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    base, step, stop, left, bias = load_run(entry)
    base_, step_, stop_, left_, bias_ = load_run(entry + RUN)
    for _ in range(tiles):
        steps = row_steps(BM, step)
        position = base + steps
        valid = position < stop
        q = load_rows(Q + base.to(tl.int64) * q_stride, steps, q_stride, valid, D, BD, BE, MASKED, ALIGNED)
        dout = load_rows(DOUT + base.to(tl.int64) * dout_stride, steps, dout_stride, valid, D, BD, BE, MASKED, ALIGNED)
        # both numbers of a row in one load: as two short loads every thread would read all rows
        pointers = STATS + base.to(tl.int64) * 2 + (steps * 2)[:, None] + tl.arange(0, 2)[None, :]
        if MASKED:
            lse, slope = tl.split(tl.load(pointers, mask=valid[:, None], other=float("inf")))
            slope = tl.where(valid, slope, 0.0)
        else:
            lse, slope = tl.split(tl.load(pointers))
        if PADDING:  # only with padding a row in a block can be without keys
            dout = only(dout, (lse != float("inf"))[:, None])
        scores = products(k, q, PRECISION)
        weights = tl.math.exp2(scores * scale + (bias - lse)[None, :])
        if CAUSAL:
            weights = tl.where(position[None, :] >= k_position[:, None], weights, 0.0)
        if PADDING:
            weights = tl.where(ignored[:, None], 0.0, weights)
        dweights = products(v, dout, PRECISION)
        kept_weights = weights
        if DROPOUT:
            low, high = row_words(seed, branch, sample, head, start + position)
            keep = kept(low[None, :], high[None, :], (start + k_position)[:, None], threshold)
            dweights = tl.where(keep, dweights * factor, 0.0)
            kept_weights = tl.where(keep, weights * factor, 0.0)
        dv = add_sums(dv, kept_weights, dout, PRECISION)
        dscores = weights * (dweights - slope[None, :])
        dk = add_sums(dk, dscores, q, PRECISION)
        entry, base, step, stop, left, bias, base_, step_, stop_, left_, bias_ = next_tile(
            entry, base, step, stop, left, bias, base_, step_, stop_, left_, bias_, BM, SINGLE
        )
    return dk, dv


@triton.jit(do_not_specialize=ANY_LENGTH)
def dkdv_kernel(
    Q, K, V, DOUT, STATS, DK, DV, PADDING_MASK, SEED, sections, tiles, runs,
    q_sample, q_token, q_head, k_sample, k_token, k_head, v_sample, v_token, v_head,
    dout_sample, dout_token, dout_head, dk_sample, dk_token, dk_head, dv_sample, dv_token, dv_head,
    stats_sample, stats_head, padding_sample,
    scale, group, first_head, threshold, factor, plain_scale,
    SECTIONS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, ADD: tl.constexpr,
    SINGLE: tl.constexpr, EDGES: tl.constexpr, RAGGED: tl.constexpr, GROUPED: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr, FILLS: tl.constexpr,
):  # fmt: skip
    record, index, kv_head, start, sample = task(sections, 1, SECTIONS)
    tile = tiles + index * TILE
    base, step, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if base >= stop and not FILLS:
        return
    steps = row_steps(BN, step)
    k_position = base + steps
    valid = k_position < stop
    here = start + base
    ignored = valid
    if PADDING:
        PADDING_MASK += sample * padding_sample + start
        ignored = tl.load(PADDING_MASK + k_position, mask=valid, other=1) != 0
        loaded = valid & (ignored == 0)
    else:
        loaded = valid
    k = load_rows(
        K + sample * k_sample + kv_head * k_head + here * k_token, steps, k_token, loaded, D, BD, BE, True, ALIGNED
    )
    v = load_rows(
        V + sample * v_sample + kv_head * v_head + here * v_token, steps, v_token, loaded, D, BD, BE, True, ALIGNED
    )
    branch = tl.load(record + BRANCH)
    seed = branch
    if DROPOUT:
        seed = tl.load(SEED)
    dk = zeros(BN, BD, BE)
    dv = zeros(BN, BD, BE)
    heads = 1
    if GROUPED:
        heads = group
    for member in range(heads):
        head = kv_head * heads + member
        Qh = Q + sample * q_sample + head * q_head + start * q_token
        DOUTh = DOUT + sample * dout_sample + head * dout_head + start * dout_token
        STATSh = STATS + sample * stats_sample + head * stats_head + start * 2
        dk, dv = walk_queries(
            dk, dv, k, v, k_position, ignored, seed, branch, sample, head + first_head * heads, Qh, DOUTh, STATSh,
            runs + tl.load(tile + FIRST_RUN) * RUN, tl.load(tile + PLAIN), start, scale, threshold,
            factor, q_token, dout_token, D, BD, BE, BM, False, False, PADDING, DROPOUT, SINGLE, PRECISION, ALIGNED,
        )  # fmt: skip
        if EDGES:
            dk, dv = walk_queries(
                dk, dv, k, v, k_position, ignored, seed, branch, sample, head + first_head * heads, Qh, DOUTh, STATSh,
                runs + tl.load(tile + EDGE_RUN) * RUN, tl.load(tile + EDGES_MET), start, scale,
                threshold, factor, q_token, dout_token, D, BD, BE, BM, RAGGED, CAUSAL, PADDING, DROPOUT, False,
                PRECISION, ALIGNED,
            )  # fmt: skip
    DK += sample * dk_sample + kv_head * dk_head + here * dk_token
    DV += sample * dv_sample + kv_head * dv_head + here * dv_token
    store_rows(DK, steps, dk_token, valid, scaled(dk, plain_scale), D, ADD)
    store_rows(DV, steps, dv_token, valid, dv, D, ADD)
    if FILLS:
        fill_gaps(DK, dk_token, base, step, stop, 0.0, BN, D, BD if BE == 0 else 2 * BD)
        fill_gaps(DV, dv_token, base, step, stop, 0.0, BN, D, BD if BE == 0 else 2 * BD)
