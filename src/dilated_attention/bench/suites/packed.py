"""Sequences of mixed lengths, packed in one row, beside one sequence that has as many pairs of tokens.

Rows of the shortest and of the longest sequence are checked against float64 before anything is timed. A packing that
was not met before must be prepared once: the first call with it is timed apart.

Legend: q, k, v, dout (1, T, H, D) for T tokens of all sequences.
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

from dilated_attention.bench.run import Call, cpu_milliseconds, forward, forward_backward
from dilated_attention.bench.session import Row, Session, Step, Table
from dilated_attention.bench.setting import Setting, forget_inputs
from dilated_attention.functional import dilated_attention
from dilated_attention.models import slide_pattern

SUITE, COUNT = "packed", 64
LENGTHS = {"cuda": (1_000, 30_000), "cpu": (10, 300)}  # of the shortest and of the longest sequence, nearly
NEW = 9  # packings that were not met before
TITLE = "Packed sequences"
COLUMNS = ["what", "rows", "tokens", "forward ms", "forward + backward ms", "new packing ms", "error"]


RATES = (1, 2, 4, 8, 16)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # the rule, and of the setting
    "slides": ("torchscale", {"segments": (slide_pattern().segment_lengths, RATES), "heads": 16, "head_dim": 48}),
    "documents": ("longnet", {"segments": (tuple(2048 * r for r in RATES), RATES), "heads": 12, "causal": True}),
}


def steps(session: Session) -> list[Step]:
    least, most = LENGTHS[session.device.type]
    lengths = torch.randint(least, most, (COUNT,), generator=torch.Generator().manual_seed(0)).tolist()
    shapes = {what: (rule, session.setting(sum(lengths), **given)) for what, (rule, given) in SHAPES.items()}
    note = "; ".join(f"{what}: {rule}, {setting}" for what, (rule, setting) in shapes.items())
    note += (
        f". Sequences of {min(lengths):,} to {max(lengths):,} tokens. New packing: what its first forward takes more."
    )
    table = Table(SUITE, TITLE, note, COLUMNS)
    return [
        session.adding(table, f"{COUNT} {what} in one row", partial(rows, session, what, rule, setting, lengths))
        for what, (rule, setting) in shapes.items()
    ]


def rows(session: Session, what: str, rule: str, setting: Setting, lengths: list[int]) -> Iterator[Row]:
    for name, sizes in (("packed", lengths), ("one with as many pairs", [alike(setting, rule, lengths)])):
        yield [what, name, sum(sizes), *measure(session, replace(setting, tokens=sum(sizes)), rule, sizes)]
        forget_inputs()


def alike(setting: Setting, rule: str, lengths: list[int]) -> int:
    """The length of the shortest sequence that has at least as many pairs."""

    def pairs(tokens: int) -> int:
        return setting.pattern(rule).pairs(tokens, setting.heads, is_causal=setting.causal)

    return bisect.bisect_left(range(sum(lengths)), sum(map(pairs, lengths)), key=pairs)


def measure(session: Session, setting: Setting, rule: str, given: list[int]) -> list[Any]:
    lengths, pattern, qkv = list(given), setting.pattern(rule), setting.qkv()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packing = [0, *itertools.accumulate(lengths)]
        return dilated_attention(q, k, v, pattern, is_causal=setting.causal, cu_seqlens=packing)

    call, errors, are_right = forward(attention, qkv), [0.0], True
    for out, *alone in zip(*(x.split(lengths, dim=1) for x in (call(), *qkv)), strict=True):
        if out.shape[1] in (min(lengths), max(lengths)):
            name = f"packed sequences, {rule}"
            is_right, error = session.rows_are_right(name, out, tuple(alone), pattern, setting.causal)
            errors, are_right = [*errors, error], are_right and is_right
    if not are_right:
        return [None, None, None, max(errors)]
    calls: dict[str, Call] = {"forward": call, "both": forward_backward(attention, qkv, setting.dout())}
    times = [timing.median for timing in session.time(calls).values()]
    more = []
    for _ in lengths[1 : 1 + NEW]:
        lengths.append(lengths.pop(0))
        first, again = (cpu_milliseconds(call, session.device) for _ in range(2))
        more.append(first - again)
    return [*times, statistics.median(more) if more else None, max(errors)]
