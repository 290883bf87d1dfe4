"""Decoding in one launch: few query rows, and only those rows of key and value that they see.

A program has a tile of query rows of one sample and key/value head, and a share (a split) of the key tiles that these
rows meet. Which tiles those are is arithmetic on the queries' positions, done on the device: the host never waits for a
position, and a captured CUDA graph follows them. A second small launch puts the splits together, in a fixed order.

Legend: q, out (B, n, H, D); k, v (B, N, Hk, D); lse (B, n, H); padding (B, N), True = ignore; group = H // Hk;
a query tile has BM rows (query by query, each with its group), a key tile BN; BD = D rounded up to a power of two.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from dilated_attention.backends.problem import Inputs, Pair
from dilated_attention.backends.triton.decode_kernel import combine_kernel, decode_kernel
from dilated_attention.backends.triton.endless import ENDLESS, EndlessRect, endless
from dilated_attention.call import Call, sample_ends

PROGRAMS_PER_PROCESSOR = 8  # wanted: each has a short chain of loads, and many of them hide one another's latency


class DecodeConfig(NamedTuple):
    """The sizes of tiles, how often keys are split, and how a program is compiled."""

    rows: int
    keys: int
    splits: int
    warps: int = 4
    stages: int = 2


def forward(call: Call, inputs: Inputs, config: DecodeConfig | None = None) -> Pair:
    """(out, lse). k and v may have another dtype than q."""
    padding, positions = inputs.padding, inputs.positions
    q, k, v = inputs.q.resolve_neg(), inputs.k.resolve_neg(), inputs.v.resolve_neg()
    samples, queries, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, lse
    group = call.q_per_kv
    c = configure(call) if config is None else config
    rects = endless(call.pattern, call.model_heads)
    ends = sample_ends(padding) if call.adds_zeros and padding is not None else None
    tiles = triton.cdiv(group * queries, c.rows)
    parts, part_lse = out, lse
    if c.splits > 1:
        parts = torch.empty((*q.shape[:3], c.splits, dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(parts.shape[:4], dtype=torch.float32, device=q.device)
    start, step = (call.start, 0) if positions is None else (0, positions.stride(0))
    mask, mask_strides = (None, (0, 0)) if padding is None else (padding.view(torch.uint8), padding.stride())
    block_dim = max(16, triton.next_power_of_2(dim))
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        decode_kernel[(tiles * call.kv_heads * samples, c.splits)](
            q, k, v, mask, positions, ends, parts, part_lse,
            start, queries, call.keys, c.splits, call.kv_heads, call.first_head, call.scale, step,
            *mask_strides, q.stride(), k.stride(), v.stride(),
            RECTS=EndlessRect._make(zip(*rects, strict=True)), GROUP=group, D=dim, BD=block_dim, BM=c.rows, BN=c.keys,
            SPLIT=c.splits > 1, ONE=queries == 1, CAUSAL=call.is_causal, ZEROS=call.adds_zeros,
            LIMITED=any((rect.low, rect.high) != (-ENDLESS, ENDLESS) for rect in rects),
            ONCE=call.pattern.counts == "once", num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip
        if c.splits > 1:
            combine_kernel[(samples * queries * heads,)](
                parts, part_lse, out, lse, c.splits, D=dim, BD=block_dim, BS=max(16, 8192 // block_dim), num_warps=4
            )
    return out, lse


@functools.lru_cache(maxsize=1024)
def configure(call: Call) -> DecodeConfig:
    """Key tiles of at most 16 KiB, split so far that all processors have work, but not beyond single tiles."""
    block_dim = max(16, triton.next_power_of_2(call.head_dim))
    wanted_rows = call.q_per_kv * call.queries
    most = 64 if block_dim <= 128 else 32  # more would not fit into the shared memory of every GPU
    rows = max(16, min(most, triton.next_power_of_2(wanted_rows)))
    keys = max(16, min(128, (1 << 14) // (block_dim * call.dtype.itemsize)))
    programs = triton.cdiv(wanted_rows, rows) * call.kv_heads * call.samples
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * _processors(call.device), programs)
    tiles = []  # of each rectangle, that a head can meet at most
    for rect in endless(call.pattern, call.model_heads):
        seen = -(-min(rect.key_span, call.keys, rect.high - rect.low + call.queries) // rect.key_step)
        repeats = min(-(-(call.queries - 1) // rect.period) + 1, -(-call.keys // rect.period))
        tiles.append((rect, repeats * -(-seen // keys)))
    heads = {rect.head for rect, _ in tiles}
    most_tiles = max(sum(n for rect, n in tiles if rect.head <= head < rect.stop) for head in heads)
    return DecodeConfig(rows, keys, max(1, min(wanted, most_tiles)), warps=8 if rows * block_dim > 4096 else 4)


@functools.cache
def _processors(device: torch.device) -> int:
    """One in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
