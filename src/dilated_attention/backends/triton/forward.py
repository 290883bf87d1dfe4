"""The forward kernel: one program for each tile of queries, one softmax over all the runs of keys that it meets.

Legend: q (BM, D), k, v (BN, D) in parts, as of `rows`; scores (BM, BN) in powers of two; m, mass (BM) the running
maximum and sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    ANY_LENGTH,
    BEGIN,
    BRANCH,
    EDGE_RUN,
    EDGES_MET,
    END,
    FIRST_RUN,
    LN2,
    LOG2E,
    PLAIN,
    RUN,
    TILE,
    WIDTH,
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
def walk(
    acc, m, mass, q, q_position, low, high, K, V, padding, entry, tiles, start, scale, threshold, factor,
    k_stride, v_stride, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, SINGLE: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Take in ``tiles`` tiles of keys, run after run."""
    base, step, stop, left, bias = load_run(entry)
    base_, step_, stop_, left_, bias_ = load_run(entry + RUN)
    for _ in range(tiles):
        steps = row_steps(BN, step)
        position = base + steps
        valid = position < stop
        if PADDING:
            valid = valid & (tl.load(padding + position, mask=valid, other=1) == 0)
        k = load_rows(K + base.to(tl.int64) * k_stride, steps, k_stride, valid, D, BD, BE, MASKED, ALIGNED)
        scores = products(q, k, PRECISION)
        if MASKED or CAUSAL:
            scores = tl.where(seen(q_position, position, valid, CAUSAL), scores, float("-inf"))
        if SHIFTED:
            weights = tl.math.exp2(scores * scale + (bias - m)[:, None])
            mass += tl.sum(weights, 1)
            m = tl.where(mass >= 0.0, m, 0.0)  # m as it is, in the layout of the sums: saves a conversion a tile
        else:
            top = tl.maximum(m, tl.max(scores, 1) * scale + bias)
            safe = tl.where(top == float("-inf"), 0.0, top)  # no score but -inf yet: exp2(-inf - 0) = 0, not NaN
            weights = tl.math.exp2(scores * scale + (bias - safe)[:, None])
            rescale = tl.math.exp2(m - safe)
            mass = mass * rescale + tl.sum(weights, 1)
            acc = scaled(acc, rescale[:, None])
            m = top
        if DROPOUT:
            keep = kept(low[:, None], high[:, None], (start + position)[None, :], threshold)
            weights = tl.where(keep, weights * factor, 0.0)
        v = load_rows(V + base.to(tl.int64) * v_stride, steps, v_stride, valid, D, BD, BE, MASKED, ALIGNED)
        acc = add_sums(acc, weights, v, PRECISION)
        entry, base, step, stop, left, bias, base_, step_, stop_, left_, bias_ = next_tile(
            entry, base, step, stop, left, bias, base_, step_, stop_, left_, bias_, BN, SINGLE
        )
    return acc, m, mass


@triton.jit
def walk_all(
    acc, m, mass, q, q_position, low, high, K, V, padding, entry, plain, edge_entry, edge, start, scale, threshold,
    factor, k_stride, v_stride, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, SINGLE: tl.constexpr, EDGES: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The whole tiles, then those to be masked."""
    acc, m, mass = walk(
        acc, m, mass, q, q_position, low, high, K, V, padding, entry, plain, start, scale, threshold, factor,
        k_stride, v_stride, D, BD, BE, BN, PADDING, False, PADDING, DROPOUT, SINGLE, PRECISION, ALIGNED, SHIFTED,
    )  # fmt: skip
    if EDGES:
        acc, m, mass = walk(
            acc, m, mass, q, q_position, low, high, K, V, padding, edge_entry, edge, start, scale, threshold,
            factor, k_stride, v_stride, D, BD, BE, BN, RAGGED or PADDING, CAUSAL, PADDING, DROPOUT, False, PRECISION,
            ALIGNED, SHIFTED,
        )  # fmt: skip
    return acc, m, mass


@triton.jit
def found_before(
    OUT, LSE, steps, out_token, lse_token, valid, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, CONTINUE: tl.constexpr,
):  # fmt: skip
    """acc, m and mass to begin with: what earlier launches found is one more key."""
    acc = zeros(BM, BD, BE)
    m = tl.full((BM,), float("-inf"), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    if CONTINUE:
        m = tl.load(LSE + steps * lse_token, mask=valid, other=float("-inf")) * LOG2E
        mass = tl.where(m == float("-inf"), 0.0, 1.0)
        acc = scaled(load_rows(OUT, steps, out_token, valid, D, BD, BE, True, False), 1.0)
    return acc, m, mass


@triton.jit
def add_zero_keys(acc, m, mass, ENDS, sample, record, start, base, step, PADDING: tl.constexpr):
    """The zero keys that torchscale appends to a sample's last segment: score 0, value 0."""
    begin, end = tl.load(record + BEGIN).to(tl.int64), tl.load(record + END).to(tl.int64)
    width = tl.load(record + WIDTH).to(tl.int64)
    if PADDING:
        end = tl.load(ENDS + sample)
    real = tl.minimum(end - start, width)
    present = tl.maximum((real - base % step + step - 1) // step, 0)
    zeros = tl.where(real > 0, (tl.minimum(width, end - begin) + step - 1) // step - present, 0).to(tl.float32)
    top = tl.where(zeros > 0, tl.maximum(m, 0.0), m)
    safe = tl.where(top == float("-inf"), 0.0, top)
    rescale = tl.math.exp2(m - safe)
    return scaled(acc, rescale[:, None]), top, mass * rescale + zeros * tl.math.exp2(-safe)


@triton.jit(do_not_specialize=ANY_LENGTH)
def forward_kernel(
    Q, K, V, OUT, LSE, PADDING_MASK, ENDS, SEED, sections, tiles, runs,
    q_sample, q_token, q_head, k_sample, k_token, k_head, v_sample, v_token, v_head,
    out_sample, out_token, out_head, lse_sample, lse_token, lse_head, padding_sample,
    scale, group, first_head, threshold, factor,
    SECTIONS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, ZEROS: tl.constexpr,
    CONTINUE: tl.constexpr, SINGLE: tl.constexpr, EDGES: tl.constexpr,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr, FILLS: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    record, index, head, start, sample = task(sections, group, SECTIONS)
    kv_head = head // group
    tile = tiles + index * TILE
    base, step, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if base >= stop and not FILLS:  # a head whose offset has fewer rows here
        return
    steps = row_steps(BM, step)
    q_position = base + steps
    valid = q_position < stop
    Q += sample * q_sample + head * q_head + (start + base) * q_token
    K += sample * k_sample + kv_head * k_head + start * k_token
    V += sample * v_sample + kv_head * v_head + start * v_token
    OUT += sample * out_sample + head * out_head + (start + base) * out_token
    LSE += sample * lse_sample + head * lse_head + (start + base) * lse_token
    entry, edge_entry = runs + tl.load(tile + FIRST_RUN) * RUN, runs + tl.load(tile + EDGE_RUN) * RUN
    plain, edge = tl.load(tile + PLAIN), tl.load(tile + EDGES_MET)
    q = load_rows(Q, steps, q_token, valid, D, BD, BE, True, ALIGNED)
    acc, m, mass = found_before(OUT, LSE, steps, out_token, lse_token, valid, D, BD, BE, BM, CONTINUE)
    low, high = q_position, q_position
    if PADDING:
        PADDING_MASK += sample * padding_sample + start
    if DROPOUT:
        position = start + q_position
        low, high = row_words(tl.load(SEED), tl.load(record + BRANCH), sample, head + first_head * group, position)
    sound = False
    if SHIFTED:
        # No running maximum: the weights are relative to that of the row's own key. They overflow only where another
        # score is 2^100 times as heavy; then, and only then, the tile starts over with the maximum.
        own = load_rows(K + base.to(tl.int64) * k_token, steps, k_token, valid, D, BD, BE, True, ALIGNED)
        before = m
        m = row_products(q, own) * scale
        if CONTINUE:
            mass = tl.math.exp2(before - m)
            acc = scaled(acc, mass[:, None])
        acc, m, mass = walk_all(
            acc, m, mass, q, q_position, low, high, K, V, PADDING_MASK, entry, plain, edge_entry, edge,
            start, scale, threshold, factor, k_token, v_token, D, BD, BE, BN, CAUSAL, PADDING, DROPOUT,
            SINGLE, EDGES, RAGGED, PRECISION, ALIGNED, True,
        )  # fmt: skip
        too_much = tl.where(mass < 1.2e30, 0, 1) | not_finite(acc)
        sound = tl.max(too_much, 0) == 0
        if not sound:
            acc, m, mass = found_before(OUT, LSE, steps, out_token, lse_token, valid, D, BD, BE, BM, CONTINUE)
    if not sound:
        acc, m, mass = walk_all(
            acc, m, mass, q, q_position, low, high, K, V, PADDING_MASK, entry, plain, edge_entry, edge,
            start, scale, threshold, factor, k_token, v_token, D, BD, BE, BN, CAUSAL, PADDING, DROPOUT,
            SINGLE, EDGES, RAGGED, PRECISION, ALIGNED, False,
        )  # fmt: skip
    if ZEROS:
        acc, m, mass = add_zero_keys(acc, m, mass, ENDS, sample, record, start, base, step, PADDING)
    total = tl.where(mass == 0.0, 1.0, mass)  # a row without keys: out 0, lse -inf
    store_rows(OUT, steps, out_token, valid, scaled(acc, (1.0 / total)[:, None]), D, False)
    if FILLS:
        fill_gaps(OUT, out_token, base, step, stop, 0.0, BM, D, BD if BE == 0 else 2 * BD)
        fill_gaps(LSE, lse_token, base, step, stop, float("-inf"), BM, 1, 1)
    lse = tl.where(mass == 0.0, float("-inf"), (m + tl.math.log2(total)) * LN2)
    tl.store(LSE + steps * lse_token, lse, mask=valid)
