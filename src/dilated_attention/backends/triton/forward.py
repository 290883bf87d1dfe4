"""The forward kernel: one program for each tile of queries, one softmax over all the runs of keys that it meets.

Legend: q (BM, D), k, v (BN, D) in parts, as of `rows`; scores (BM, BN) in powers of two; m, mass (BM) the running
maximum and sum; state: acc, m and mass.
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
    BEGIN,
    BRANCH,
    END,
    LN2,
    LOG2E,
    NUMBERS,
    WIDTH,
    fill_gaps,
    first_run,
    kept,
    next_tile,
    own_rows,
    row_at,
    row_steps,
    row_words,
    seen,
    task,
)


@triton.jit
def walk(
    state, q, q_position, words, keys, padding, runs, tile, start, scale, threshold, factor, C: tl.constexpr,
    EDGE: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Take in the tiles of keys that this tile meets, run after run. EDGE: those to be masked, else the whole ones."""
    acc, m, mass = state
    K, V, k_stride, v_stride = keys
    MASKED: tl.constexpr = C.PADDING or (EDGE and C.RAGGED)
    CAUSAL: tl.constexpr = EDGE and C.CAUSAL
    tiles, entry, run, after = first_run(runs, tile, EDGE)
    for _ in range(tiles):
        base, step, stop, _, bias = run
        steps = row_steps(C.BN, step)
        position = base + steps
        valid = position < stop
        if C.PADDING:
            valid = valid & (tl.load(padding + position, mask=valid, other=1) == 0)
        k = load_rows(K + base.to(tl.int64) * k_stride, steps, k_stride, valid, C, MASKED)
        scores = products(q, k, C)
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
        if C.DROPOUT:
            keep = kept(words[0][:, None], words[1][:, None], (start + position)[None, :], threshold)
            weights = tl.where(keep, weights * factor, 0.0)
        v = load_rows(V + base.to(tl.int64) * v_stride, steps, v_stride, valid, C, MASKED)
        acc = add_sums(acc, weights, v, C)
        entry, run, after = next_tile(entry, run, after, C.BN, C.SINGLE and not EDGE)
    return acc, m, mass


@triton.jit
def walk_all(
    state, q, q_position, words, keys, padding, runs, tile, start, scale, threshold, factor, C: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """The whole tiles, then those to be masked."""
    PASSES: tl.constexpr = C.PASSES
    for number in tl.static_range(PASSES):
        state = walk(
            state, q, q_position, words, keys, padding, runs, tile, start, scale, threshold, factor, C, number == 1,
            SHIFTED,
        )  # fmt: skip
    return state


@triton.jit
def found_before(OUT, LSE, steps, heads, valid, C: tl.constexpr):
    """The state to begin with: what earlier launches found is one more key."""
    BM: tl.constexpr = C.BM
    acc = zeros(BM, C.BD, C.BE)
    m = tl.full((BM,), float("-inf"), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    if C.AGAIN:
        m = tl.load(LSE + steps * heads, mask=valid, other=float("-inf")) * LOG2E
        mass = tl.where(m == float("-inf"), 0.0, 1.0)
        acc = scaled(load_rows(OUT, steps, heads * C.D, valid, C, True), 1.0)
    return acc, m, mass


@triton.jit
def add_zero_keys(state, ENDS, sample, record, start, base, step, PADDING: tl.constexpr):
    """The zero keys that torchscale appends to a sample's last segment: score 0, value 0."""
    acc, m, mass = state
    begin, end = tl.load(record + BEGIN).to(tl.int64), tl.load(record + END).to(tl.int64)
    width = tl.load(record + WIDTH).to(tl.int64)
    if PADDING:
        end = tl.load(ENDS + sample)
    real = tl.minimum(end - start, width)
    present = tl.maximum((real - base % step + step - 1) // step, 0)
    count = tl.where(real > 0, (tl.minimum(width, end - begin) + step - 1) // step - present, 0).to(tl.float32)
    top = tl.where(count > 0, tl.maximum(m, 0.0), m)
    safe = tl.where(top == float("-inf"), 0.0, top)
    rescale = tl.math.exp2(m - safe)
    return scaled(acc, rescale[:, None]), top, mass * rescale + count * tl.math.exp2(-safe)


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    Q, K, V, OUT, LSE, PADDING_MASK, ENDS, SEED, sections, tiles, runs, q_strides, k_strides, v_strides,
    tokens, heads, group, first_head, scale, plain_scale, threshold, factor, C: tl.constexpr,
):  # fmt: skip
    """OUT, LSE and PADDING_MASK are contiguous."""
    record, tile, head, start, sample = task(sections, tiles, group, C.SECTIONS)
    base, step, stop, steps, q_position, valid = own_rows(tile, C.BM)
    if base >= stop and not C.FILLS:  # a head whose offset has fewer rows here
        return
    kv_head = head // group
    here = start + base
    row = (sample * tokens + here) * heads + head
    OUT += row * C.D
    LSE += row
    K = row_at(K, k_strides, sample, start, kv_head)
    V = row_at(V, v_strides, sample, start, kv_head)
    PADDING_MASK += sample * tokens + start
    q = load_rows(row_at(Q, q_strides, sample, here, head), steps, q_strides[1], valid, C, True)
    state = found_before(OUT, LSE, steps, heads, valid, C)
    words = q_position, q_position
    if C.DROPOUT:
        position = start + q_position
        words = row_words(tl.load(SEED), tl.load(record + BRANCH), sample, head + first_head * group, position)
    keys = K, V, k_strides[1], v_strides[1]
    sound = False
    if C.SHIFTED:
        # No running maximum: the weights are relative to that of the row's own key. They overflow only where another
        # score is 2^100 times as heavy; then, and only then, the tile starts over with the maximum.
        acc, before, mass = state
        own = load_rows(K + base.to(tl.int64) * k_strides[1], steps, k_strides[1], valid, C, True)
        m = row_products(q, own) * scale
        if C.AGAIN:
            mass = tl.math.exp2(before - m)
            acc = scaled(acc, mass[:, None])
        state = walk_all(
            (acc, m, mass), q, q_position, words, keys, PADDING_MASK, runs, tile, start, scale, threshold, factor, C,
            True,
        )  # fmt: skip
        too_much = tl.where(state[2] < 1.2e30, 0, 1) | not_finite(state[0])
        sound = tl.max(too_much, 0) == 0
        if not sound:
            state = found_before(OUT, LSE, steps, heads, valid, C)
    if not sound:
        state = walk_all(
            state, q, q_position, words, keys, PADDING_MASK, runs, tile, start, scale, threshold, factor, C, False
        )
    if C.ZEROS:
        state = add_zero_keys(state, ENDS, sample, record, start, base, step, C.PADDING)
    acc, m, mass = state
    total = tl.where(mass == 0.0, 1.0, mass)  # a row without keys: out 0, lse -inf
    store_rows(OUT, steps, heads * C.D, valid, scaled(acc, (1.0 / total)[:, None]), C.D, False)
    if C.FILLS:
        fill_gaps(OUT, heads * C.D, base, step, stop, 0.0, C.BM, C.D, C.BD if C.BE == 0 else 2 * C.BD)
        fill_gaps(LSE, heads, base, step, stop, float("-inf"), C.BM, 1, 1)
    lse = tl.where(mass == 0.0, float("-inf"), (m + tl.math.log2(total)) * LN2)
    tl.store(LSE + steps * heads, lse, mask=valid)
