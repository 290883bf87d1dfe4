"""One token more at the end of a long context: kernels alone, a CUDA graph, and a call from Python.

Sixteen steps in a row, because heads take part in other branches from one position to the next. Each is checked against
float64 first. Kernels are timed with nothing in the GPU's cache; a replayed graph may find keys and values there.

Legend: q, out (1, 1, H, D); k, v (1, N, H, D); times in microseconds.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from dilated_attention.bench import baselines, probes
from dilated_attention.bench.run import FLUSH_BYTES, Call
from dilated_attention.bench.session import Session, Step
from dilated_attention.bench.suites.kernels import graphed
from dilated_attention.functional import dilated_attention
from dilated_attention.pattern import DilatedPattern
from dilated_attention.testing import make_qkv

SUITE, HEADS, DIM = "decode", 12, 64
LENGTHS, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
TOKENS = {"cuda": 1 << 20, "cpu": 1 << 16}
STEPS = 16  # the largest rate: after so many steps everything repeats
REPEATS = 5


def steps(session: Session) -> list[Step]:
    return [Step(table, 30.0)]


@torch.no_grad()
def table(session: Session) -> None:
    session.pace.step("one-token steps", 30.0)
    step = OneToken(session, TOKENS[session.device.type])
    note = f"{step.tokens:,} tokens, {HEADS} heads of {DIM}, {step.pattern}, {session.results['dtypes'][0]}."
    rows = []
    for position in range(step.tokens - STEPS, step.tokens):
        rows.append(step.measure(position))
        columns = ["position", "keys of all heads", "error", "kernels µs", "replayed graph µs"]
        session.table(SUITE, "One-token steps", note, columns, rows)
        if rows[-1][3] is None:  # wrong: nothing else is timed
            session.pace.say(f"one-token step at {position:,}: wrong, off by {rows[-1][2]:.1e}")
            return
    median, slowest = (f(row[3] for row in rows) for f in (statistics.median, max))
    session.pace.say(f"kernels of a one-token step: {median:.1f} µs, the slowest of {STEPS} {slowest:.1f} µs")
    ways: dict[str, Call] = {"auto": step.dilated, "sdpa": lambda: step.dilated("sdpa"), "dense SDPA": step.dense}
    called = [[name, *(1000 * ms for ms in (x.median, x.lower, x.upper))] for name, x in session.time(ways).items()]
    session.table(SUITE, "A one-token call from Python", note, ["way", "µs", "lower", "upper"], called)


class OneToken:
    """A step at position ``at`` of a cache."""

    def __init__(self, session: Session, tokens: int) -> None:
        self.session, self.device, self.tokens = session, session.device, tokens
        self.pattern = DilatedPattern.longnet(LENGTHS, RATES)
        options: dict[str, Any] = {"dtype": session.dtypes[0], "device": session.device}
        _, self.k, self.v = make_qkv(1, tokens, HEADS, DIM, **options)
        self.q = make_qkv(1, 1, HEADS, DIM, seed=1, **options)[0]
        self.at = torch.zeros(1, dtype=torch.int64, device=session.device)

    def dilated(self, backend: Any = "auto") -> Tensor:
        options: dict[str, Any] = {"is_causal": True, "query_offset": self.at, "backend": backend}
        out: Tensor = dilated_attention(self.q, self.k, self.v, self.pattern, **options)
        return out

    def dense(self) -> Tensor:
        """To all keys: another operation."""
        return baselines.dense(self.q, self.k, self.v)

    def measure(self, position: int) -> list[Any]:
        self.at.fill_(position)
        found, qkv = self.dilated(), (self.q.expand(-1, self.tokens, -1, -1), self.k, self.v)
        shape: dict[str, Any] = {"num_tokens": self.tokens, "num_heads": HEADS, "is_causal": True}
        keys = sum(len(self.pattern.keys(position, head, **shape)) for head in range(HEADS))
        exact = [probes.exact_row(qkv, self.pattern, position, head, True) for head in range(HEADS)]
        worst = max(probes.row_error(found[0, 0, head], row) for head, row in enumerate(exact) if row is not None)
        if not self.session.judge("one-token step", worst, probes.row_limit(found), causal=True):
            return [position, keys, worst, None, None]
        return [position, keys, worst, statistics.median(self.kernel_us() for _ in range(REPEATS)), self.graph_us()]

    def kernel_us(self) -> float:
        if self.device.type == "cuda":
            torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device).zero_()
            torch.cuda.synchronize()
        return 1000 * sum(ms for *_, ms in probes.kernel_times(self.dilated, self.device))

    def graph_us(self) -> float | None:
        if self.device.type != "cuda":
            return None
        return 1000 * self.session.time({"": graphed(self.dilated)}, 0.1)[""].median
