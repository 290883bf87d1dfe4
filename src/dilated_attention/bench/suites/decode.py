"""One token more at the end of a long context: kernels alone, a CUDA graph, and a call from Python.

Sixteen steps in a row, because heads take part in other branches from one position to the next. Each is checked against
float64 first. Kernels are timed with nothing in the GPU's cache; a replayed graph may find keys and values there.

Legend: q, out (1, 1, H, D); k, v (1, N, H, D); times in microseconds.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dilated_attention.bench import baselines, probes
from dilated_attention.bench.run import FLUSH_BYTES, Call, graphed
from dilated_attention.bench.session import LONG, Row, Session, Step, new_table
from dilated_attention.functional import dilated_attention
from dilated_attention.testing import make_qkv

SUITE, HEADS, DIM, PATTERN = "decode", 12, 64, LONG
TOKENS = {"cuda": 1 << 20, "cpu": 1 << 16}
STEPS = 16  # the largest rate: after so many steps everything repeats
REPEATS = 5


def steps(session: Session) -> list[Step]:
    tokens = TOKENS[session.device.type]
    note = f"{tokens:,} tokens, {HEADS} heads of {DIM}, {PATTERN}, {session.results['dtypes'][0]}."
    columns = ["position", "keys of all heads", "error", "kernels µs", "replayed graph µs"]
    table = new_table(SUITE, "One-token steps", note, columns)
    calls = new_table(SUITE, "A one-token call from Python", note, ["way", "µs", "lower", "upper"])
    one_token = OneToken(session, tokens)
    return [
        session.adding(table, "one-token steps", one_token.steps),
        session.adding(calls, "calls from Python", one_token.calls),
    ]


class OneToken:
    """A step at position ``at`` of a cache."""

    def __init__(self, session: Session, tokens: int) -> None:
        self.session, self.tokens, self.is_right = session, tokens, True

    @functools.cached_property
    def at(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self.session.device)

    @functools.cached_property
    def qkv(self) -> tuple[Tensor, ...]:
        """The cache, and a query that is the same at every position."""
        _, k, v = make_qkv(1, self.tokens, HEADS, DIM, **self.session.options)
        q = make_qkv(1, 1, HEADS, DIM, seed=1, **self.session.options)[0]
        return q.expand(-1, self.tokens, -1, -1), k, v

    def dilated(self, backend: Any = "auto") -> Tensor:
        q, k, v = self.qkv
        return dilated_attention(q[:, :1], k, v, PATTERN, is_causal=True, query_offset=self.at, backend=backend)

    @torch.no_grad()
    def steps(self) -> Iterator[Row]:
        """The first one that is wrong ends it, without a time."""
        for position in range(self.tokens - STEPS, self.tokens):
            rows = [(head, position) for head in range(HEADS)]
            shape: dict[str, Any] = {"num_tokens": self.tokens, "num_heads": HEADS, "is_causal": True}
            keys = sum(len(PATTERN.keys(position, head, **shape)) for head, _ in rows)
            self.at.fill_(position)
            given = self.dilated(), self.qkv, PATTERN, True
            self.is_right, worst = self.session.rows_are_right("one-token step", *given, rows=rows)
            if not self.is_right:
                yield [position, keys, worst, None, None]
                return
            kernels = statistics.median(self.kernel_us() for _ in range(REPEATS))
            graph = 1000 * self.session.median(graphed(self.dilated), 0.1) if self.session.on_cuda else None
            yield [position, keys, worst, kernels, graph]

    @torch.no_grad()
    def calls(self) -> Iterator[Row]:
        q, k, v = self.qkv
        ways: dict[str, Call] = {
            "auto": self.dilated,
            "sdpa": lambda: self.dilated("sdpa"),
            "dense SDPA": lambda: baselines.dense(q[:, :1], k, v),  # to all keys: another operation
        }
        for name, timing in self.session.time(ways).items() if self.is_right else ():
            yield [name, *(1000 * ms for ms in timing[:3])]

    def kernel_us(self) -> float:
        if self.session.on_cuda:
            torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.session.device).zero_()
            torch.cuda.synchronize()
        return 1000 * sum(ms for *_, ms in probes.kernel_times(self.dilated, self.session.device))
