"""One token more at the end of a long context: kernels alone, a CUDA graph, and a call from Python.

Sixteen steps in a row, because heads take part in other branches from one position to the next. Each is checked against
float64 first. Kernels are timed with nothing in the GPU's cache; a replayed graph may find keys and values there.

Legend: q, out (1, 1, H, D); k, v (1, N, H, D); times in microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention.bench import baselines, probes
from dilated_attention.bench.run import FLUSH_BYTES, Call, graphed
from dilated_attention.bench.session import LONG, Row, Session, Step
from dilated_attention.functional import dilated_attention
from dilated_attention.testing import make_qkv

SUITE, NAME, HEADS, DIM, PATTERN = "decode", "one-token step", 12, 64, LONG
TOKENS = {"cuda": 1 << 20, "cpu": 1 << 16}
STEPS = 16  # the largest rate: after so many steps everything repeats
REPEATS = 5


def steps(session: Session) -> list[Step]:
    tokens = TOKENS[session.device.type]
    note = f"{tokens:,} tokens, {HEADS} heads of {DIM}, {PATTERN}, {session.results['dtypes'][0]}."
    columns = ["position", "keys of all heads", "error", "kernels µs", "replayed graph µs"]
    rows = {"one-token steps": partial(of_steps, session, tokens)}
    calls = {"calls from Python": partial(of_calls, session, tokens)}
    return [
        *session.table(SUITE, "One-token steps", note, columns, rows),
        *session.table(SUITE, "A one-token call from Python", note, ["way", "µs", "lower", "upper"], calls),
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
        is_right, worst = session.rows_are_right(NAME, call(), qkv, PATTERN, True, rows=rows)
        if not is_right:
            yield [position, keys, worst, None, None]
            return
        kernels = statistics.median(kernel_us(session, call) for _ in range(REPEATS))
        graph = 1000 * session.median(graphed(call), 0.1) if session.on_cuda else None
        yield [position, keys, worst, kernels, graph]


@torch.no_grad()
def of_calls(session: Session, tokens: int) -> Iterator[Row]:
    """At the last position, if all steps were right."""
    q, k, v = qkv = cache(session, tokens)
    ways: dict[str, Call] = {
        "auto": step(qkv, tokens - 1),
        "sdpa": step(qkv, tokens - 1, "sdpa"),
        "dense SDPA": partial(baselines.dense, q[:, :1], k, v),  # to all keys: another operation
    }
    if all(check["verdict"] == "exact" for check in session.results["checks"] if check["implementation"] == NAME):
        for name, timing in session.time(ways).items():
            yield [name, *(1000 * ms for ms in timing[:3])]


def kernel_us(session: Session, call: Call) -> float:
    if session.on_cuda:
        torch.empty(FLUSH_BYTES, dtype=torch.int8, device=session.device).zero_()
        torch.cuda.synchronize()
    return 1000 * sum(ms for *_, ms in probes.kernel_times(call, session.device))
