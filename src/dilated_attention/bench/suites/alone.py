"""Suites of our attention alone: one-token steps, a stream longer than memory, many sequences in one row.

decode: sixteen steps in a row at the end of a long context, because heads take part in other branches from one position
to the next; kernels are timed with nothing in the GPU's cache, where a replayed graph may find keys and values.
stream: one chunk again and again, a billion tokens on CUDA; before, a short one in chunks that no segment divides.
packed: sequences of mixed lengths, beside one sequence that has as many pairs of tokens.

All are checked against float64 first, in some rows. Legend: q, k, v, out (1, N, H, D); a chunk is q, k, v.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import timer

from dilated_attention.bench import baselines, probes
from dilated_attention.bench.run import FLUSH_BYTES, Call, graphed, synchronise
from dilated_attention.bench.session import LONG, Row, Session, Step
from dilated_attention.bench.setting import BOTH, FORWARD, Setting, Subject
from dilated_attention.functional import dilated_attention
from dilated_attention.models import slide_pattern
from dilated_attention.streaming.chunks import stream
from dilated_attention.testing import make_qkv
from dilated_attention.units import GIB

HEADS, DIM, PATTERN = 12, 64, LONG


def note(session: Session) -> str:
    return f"{HEADS} heads of {DIM}, {PATTERN}, {session.results['dtypes'][0]}."


STEP_NAME = "one-token step"
CONTEXT = {"cuda": 1 << 20, "cpu": 1 << 16}
STEPS = 16  # the largest rate: after so many steps everything repeats
REPEATS = 5


def decode(session: Session) -> list[Step]:
    tokens = CONTEXT[session.device.type]
    columns = ["position", "keys of all heads", "error", "kernels µs", "replayed graph µs"]
    calls = [partial(of_calls, session, tokens)]
    about = f"{tokens:,} tokens, {note(session)}"
    return [
        *session.table("decode", "One-token steps", about, columns, [partial(of_steps, session, tokens)]),
        *session.table("decode", "A one-token call from Python", about, ["way", "µs", "lower", "upper"], calls),
    ]


def cache(session: Session, tokens: int) -> tuple[Tensor, ...]:
    """Keys and values, and a query that is the same at every position."""
    _, k, v = make_qkv(1, tokens, HEADS, DIM, **session.options)
    q = make_qkv(1, 1, HEADS, DIM, seed=1, **session.options)[0]
    return q.expand(-1, tokens, -1, -1), k, v


def step(qkv: tuple[Tensor, ...], position: int, backend: Any = "auto") -> Call:
    q, k, v = qkv
    at = torch.full((1,), position, device=q.device)
    options: dict[str, Any] = {"is_causal": True, "query_offset": at, "backend": backend}
    return partial(dilated_attention, q[:, :1], k, v, PATTERN, **options)


@torch.no_grad()
def of_steps(session: Session, tokens: int) -> Iterator[Row]:
    """The first one that is wrong ends it, without a time."""
    qkv = cache(session, tokens)
    shape: dict[str, Any] = {"num_tokens": tokens, "num_heads": HEADS, "is_causal": True}
    for position in range(tokens - STEPS, tokens):
        call, rows = step(qkv, position), [(head, position) for head in range(HEADS)]
        keys = sum(len(PATTERN.keys(position, head, **shape)) for head, _ in rows)
        is_right, worst = session.rows_are_right(STEP_NAME, call(), qkv, PATTERN, True, rows=rows)
        if not is_right:
            yield [position, keys, worst, None, None]
            return
        found = []
        for _ in range(REPEATS):
            if session.on_cuda:
                torch.empty(FLUSH_BYTES, dtype=torch.int8, device=session.device).zero_()
                torch.cuda.synchronize()
            found.append(1000 * sum(ms for *_, ms in probes.kernel_times(call, session.device)))
        graph = 1000 * session.median(graphed(call), 0.1) if session.on_cuda else None
        yield [position, keys, worst, statistics.median(found), graph]


@torch.no_grad()
def of_calls(session: Session, tokens: int) -> Iterator[Row]:
    """At the last position, if all steps were right."""
    q, k, v = qkv = cache(session, tokens)
    ways: dict[str, Call] = {
        "auto": step(qkv, tokens - 1),
        "sdpa": step(qkv, tokens - 1, "sdpa"),
        "dense SDPA": partial(baselines.dense, q[:, :1], k, v),  # to all keys: another operation
    }
    if all(x["verdict"] == "exact" for x in session.results["checks"] if x["implementation"] == STEP_NAME):
        for name, timing in session.time(ways).items():
            yield [name, *(1000 * ms for ms in timing[:3])]


SIZES = {"cuda": (1 << 30, 1 << 20), "cpu": (1 << 16, 1 << 15)}  # tokens, and those of a chunk: all segments divide it
CHECKED = 4  # chunks of which rows are checked


def streams(session: Session) -> list[Step]:
    columns = ["tokens", "chunk", "causal", "s", "million tokens/s", "TFLOP/s", "peak GiB", "rows checked", "error"]
    rows, about = [partial(of_stream, session, x) for x in (False, True)], "A row that is wrong has no time."
    return session.table("stream", "A stream of chunks", f"{note(session)} {about}", columns, rows)


@torch.no_grad()
def of_stream(session: Session, causal: bool) -> Iterator[Row]:
    small = session.setting(1, heads=HEADS, causal=causal).checks()[0]
    odd, (qkv, _) = small.pattern("longnet"), small.inputs()
    chunks = zip(*(torch.split(x, 100, dim=1) for x in qkv), strict=True)
    if not session.rows_are_right("stream", torch.cat([*stream(chunks, odd, is_causal=causal)], 1), qkv, odd, causal)[
        0
    ]:
        return
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
    yield [tokens, size, "yes" if causal else "no", *figures, len(checked) * probes.ROWS, errors]


COUNT = 64
LENGTHS = {"cuda": (1_000, 30_000), "cpu": (10, 300)}  # of the shortest and of the longest sequence, nearly
RATES = LONG.dilation_rates
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # the rule, and of the setting
    "slides": ("torchscale", {"segments": (slide_pattern().segment_lengths, RATES), "heads": 16, "head_dim": 48}),
    "documents": ("longnet", {"segments": (LONG.segment_lengths, RATES), "heads": 12, "causal": True}),
}


def packed(session: Session) -> list[Step]:
    least, most = LENGTHS[session.device.type]
    lengths = torch.randint(least, most, (COUNT,), generator=torch.Generator().manual_seed(0)).tolist()
    shapes = {what: (rule, session.setting(sum(lengths), **given)) for what, (rule, given) in SHAPES.items()}
    about = "; ".join(f"{what}: {rule}, {setting}" for what, (rule, setting) in shapes.items())
    sizes = f"Sequences of {min(lengths):,} to {max(lengths):,} tokens."
    columns = ["what", "rows", "tokens", "forward ms", "forward + backward ms", "error"]
    found = [partial(of_packed, session, what, *shapes[what], lengths) for what in shapes]
    return session.table("packed", "Packed sequences", f"{about}. {sizes}", columns, found)


def of_packed(session: Session, what: str, rule: str, setting: Setting, lengths: list[int]) -> Iterator[Row]:
    def pairs(tokens: int) -> int:
        return setting.pattern(rule).pairs(tokens, setting.heads, is_causal=setting.causal)

    # the length of the shortest sequence that has at least as many pairs
    alike = bisect.bisect_left(range(sum(lengths)), sum(map(pairs, lengths)), key=pairs)
    for name, sizes in (("packed", lengths), ("one with as many pairs", [alike])):
        yield [what, name, sum(sizes), *measure_packed(session, replace(setting, tokens=sum(sizes)), rule, [*sizes])]
        Setting.inputs.cache_clear()


def measure_packed(session: Session, setting: Setting, rule: str, lengths: list[int]) -> list[Any]:
    """Rows of the shortest and of the longest sequence are checked."""
    pattern, (qkv, dout), packing = setting.pattern(rule), setting.inputs(), [0, *itertools.accumulate(lengths)]
    attention = partial(dilated_attention, pattern=pattern, is_causal=setting.causal, cu_seqlens=packing)
    subject = Subject(attention, attention, pattern, qkv, dout)
    calls = {way: subject.call(way) for way in (FORWARD, BOTH)}
    found = [
        session.rows_are_right(f"packed sequences, {rule}", out, alone, pattern, setting.causal)
        for out, *alone in zip(*(x.split(lengths, dim=1) for x in (calls[FORWARD](), *qkv)), strict=True)
        if out.shape[1] in (min(lengths), max(lengths))
    ]
    worst = max(error for _, error in found)
    if not all(is_right for is_right, _ in found):
        return [None, None, worst]
    return [*(timing.median for timing in session.time(calls).values()), worst]
