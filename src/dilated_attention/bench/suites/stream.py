"""A sequence longer than memory: a billion tokens on CUDA, chunk after chunk, causal and not.

It is one chunk again and again; checks are not timed. Before that, a short stream in odd chunks is checked against the
oracle. Rows of some chunks are checked, too.

Legend: a chunk is q, k, v, each (1, n, H, D).
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch.utils.benchmark import timer

from dilated_attention.bench import probes
from dilated_attention.bench.run import Expected, oracle, synchronise
from dilated_attention.bench.session import LONG, Row, Session, Step
from dilated_attention.streaming import stream
from dilated_attention.testing import make_qkv
from dilated_attention.units import GIB

SUITE, HEADS, DIM, PATTERN = "stream", 12, 64, LONG
SIZES = {"cuda": (1 << 30, 1 << 20), "cpu": (1 << 16, 1 << 15)}  # tokens, and those of a chunk: all segments divide it
CHECKED = 4  # chunks of which rows are checked: 32 rows each
TITLE = "A stream of chunks"
COLUMNS = ["tokens", "chunk", "causal", "s", "million tokens/s", "TFLOP/s", "peak GiB", "rows checked", "largest error"]


def steps(session: Session) -> list[Step]:
    note = f"{HEADS} heads of {DIM}, {PATTERN}, {session.results['dtypes'][0]}. A row that is wrong has no time."
    rows = {f"{TITLE}{', causal' * causal}": partial(measured, session, causal) for causal in (False, True)}
    return session.table(SUITE, TITLE, note, COLUMNS, rows)


def is_exact(session: Session, causal: bool) -> bool:
    """Chunks of 100 tokens, which no segment divides, against the oracle on the whole."""
    small = session.setting(1, heads=HEADS, causal=causal).checks()[0]
    odd, qkv = small.pattern("longnet"), small.qkv()
    with torch.no_grad():
        chunks = zip(*(torch.split(x, 100, dim=1) for x in qkv), strict=True)
        found = torch.cat(list(stream(chunks, odd, is_causal=causal)), dim=1)
    check = Expected.of(oracle(odd, causal), qkv, small.dout()).compare({"out": found})
    return session.judge_own("stream", check.errors["out"], check.limits["out"], causal)


def measured(session: Session, causal: bool) -> list[Row]:
    return [measure(session, causal)] if is_exact(session, causal) else []


@torch.no_grad()
def measure(session: Session, causal: bool) -> Row:
    (tokens, size), device, spent, found = SIZES[session.device.type], session.device, 0.0, []
    count = tokens // size
    checked = {index * (count - 1) // (CHECKED - 1) for index in range(CHECKED)}  # the first and the last among them
    chunk = make_qkv(1, size, HEADS, DIM, **session.options)
    list(stream([chunk], PATTERN, is_causal=causal))  # kernels are compiled and chosen once
    if session.on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    outputs = stream(itertools.repeat(chunk, count), PATTERN, is_causal=causal)
    for index in range(count):
        start = timer()
        out = next(outputs)
        synchronise(device)
        spent += timer() - start
        if index in checked:  # a chunk begins where all segments do, so its rows see no other chunk
            found.append(session.rows_are_right("stream", out, chunk, PATTERN, causal))
        del out  # it would be there while the next one is computed
    flops = PATTERN.flops(tokens, HEADS, DIM, is_causal=causal)
    peak = torch.cuda.max_memory_allocated(device) / GIB if session.on_cuda else None
    is_right, errors = all(right for right, _ in found), max(error for _, error in found)
    figures = [spent, tokens / spent / 1e6, flops / spent / 1e12, peak] if is_right else [None] * 4
    return [tokens, size, "yes" if causal else "no", *figures, len(checked) * probes.ROWS, errors]
