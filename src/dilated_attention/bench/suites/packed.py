"""Sequences of mixed lengths, packed in one row, beside one sequence that has as many pairs of tokens.

Rows of the shortest and of the longest sequence are checked against float64 before anything is timed. A packing that
was not met before must be prepared once: the first call with it is timed apart.

Legend: q, k, v, dout (1, T, H, D) for T tokens of all sequences.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import timer

from dilated_attention.bench import probes
from dilated_attention.bench.run import Call, forward, forward_backward
from dilated_attention.bench.session import Session, Step
from dilated_attention.functional import dilated_attention
from dilated_attention.models.presets import slide_pattern
from dilated_attention.pattern import DilatedPattern
from dilated_attention.testing import make_qkv

SUITE, COUNT = "packed", 64
LENGTHS = {"cuda": (1_000, 30_000), "cpu": (10, 300)}  # of the shortest and of the longest sequence, nearly
NEW = 9  # packings that were not met before
TITLE = "Packed sequences"
COLUMNS = ["what", "rows", "tokens", "forward ms", "forward + backward ms", "new packing ms", "error"]


class Shape(NamedTuple):
    pattern: DilatedPattern
    heads: int
    dim: int
    is_causal: bool


SHAPES = {
    "slides": Shape(slide_pattern(262144, 256), 16, 48, False),
    "documents": Shape(DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]), 12, 64, True),
}


def steps(session: Session) -> list[Step]:
    return [Step(table, 80.0 if session.on_cuda else 10.0)]


def table(session: Session) -> None:
    least, most = LENGTHS[session.device.type]
    lengths = torch.randint(least, most, (COUNT,), generator=torch.Generator().manual_seed(0)).tolist()
    note = (
        f"{COUNT} sequences of {min(lengths):,} to {max(lengths):,} tokens. New packing: what its first forward takes "
    )
    told = (f"{name}: {x.heads} heads of {x.dim}, {x.pattern}" for name, x in SHAPES.items())
    note += f"longer. {'; '.join(told)}."
    rows: list[list[Any]] = []
    for what, shape in SHAPES.items():
        session.pace.step(f"{COUNT} {what} in one row", 40.0)
        for name, sizes in (("packed", lengths), ("one with as many pairs", [alike(shape, lengths)])):
            rows.append([what, name, sum(sizes), *measure(session, shape, sizes)])
            session.table(SUITE, TITLE, note, COLUMNS, rows)


def alike(shape: Shape, lengths: list[int]) -> int:
    """The length of the shortest sequence that has at least as many pairs."""

    def pairs(tokens: int) -> int:
        return shape.pattern.pairs(tokens, shape.heads, is_causal=shape.is_causal)

    wanted, low, high = sum(map(pairs, lengths)), 0, sum(lengths)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pairs(middle) >= wanted else (middle + 1, high)
    return low


def measure(session: Session, shape: Shape, given: list[int]) -> list[Any]:
    lengths, device = list(given), session.device
    options: dict[str, Any] = {"dtype": session.dtypes[0], "device": device}
    qkv = make_qkv(1, sum(lengths), shape.heads, shape.dim, **options)
    dout, *_ = make_qkv(1, sum(lengths), shape.heads, shape.dim, seed=1, **options)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packing = [0, *itertools.accumulate(lengths)]
        return dilated_attention(q, k, v, shape.pattern, is_causal=shape.is_causal, cu_seqlens=packing)

    call, worst = forward(attention, qkv), 0.0
    for out, *alone in zip(*(x.split(lengths, dim=1) for x in (call(), *qkv)), strict=True):
        if out.shape[1] in (min(lengths), max(lengths)):
            check = probes.check_rows(out, tuple(alone), shape.pattern, shape.is_causal)
            worst = max(worst, check["worst"])
    if not session.judge("packed sequences", worst, check["limit"], shape.is_causal):
        return [None, None, None, worst]
    calls: dict[str, Call] = {"forward": call, "both": forward_backward(attention, qkv, dout)}
    times = [timing.median for timing in session.time(calls).values()]
    more = []
    for _ in lengths[1 : 1 + NEW]:
        lengths.append(lengths.pop(0))
        first, again = (seconds(call, device) for _ in range(2))
        more.append(1000 * (first - again))
    return [*times, statistics.median(more) if more else None, worst]


def seconds(call: Call, device: torch.device) -> float:
    start = timer()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return timer() - start
