"""Sequences of mixed lengths, packed in one row, beside one sequence that has as many pairs of tokens.

Rows of the shortest and of the longest sequence are checked against float64 before anything is timed.

Legend: q, k, v, dout (1, T, H, D) for T tokens of all sequences.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dilated_attention.bench.session import LONG, Row, Session, Step
from dilated_attention.bench.setting import BOTH, FORWARD, Setting, Subject, forget_inputs
from dilated_attention.functional import dilated_attention
from dilated_attention.models import slide_pattern

SUITE, COUNT = "packed", 64
LENGTHS = {"cuda": (1_000, 30_000), "cpu": (10, 300)}  # of the shortest and of the longest sequence, nearly
COLUMNS = ["what", "rows", "tokens", "forward ms", "forward + backward ms", "error"]
RATES = LONG.dilation_rates
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # the rule, and of the setting
    "slides": ("torchscale", {"segments": (slide_pattern().segment_lengths, RATES), "heads": 16, "head_dim": 48}),
    "documents": ("longnet", {"segments": (LONG.segment_lengths, RATES), "heads": 12, "causal": True}),
}


def steps(session: Session) -> list[Step]:
    least, most = LENGTHS[session.device.type]
    lengths = torch.randint(least, most, (COUNT,), generator=torch.Generator().manual_seed(0)).tolist()
    shapes = {what: (rule, session.setting(sum(lengths), **given)) for what, (rule, given) in SHAPES.items()}
    note = "; ".join(f"{what}: {rule}, {setting}" for what, (rule, setting) in shapes.items())
    sizes = f"Sequences of {min(lengths):,} to {max(lengths):,} tokens."
    found = {f"{COUNT} {what} in one row": partial(rows, session, what, *shapes[what], lengths) for what in shapes}
    return session.table(SUITE, "Packed sequences", f"{note}. {sizes}", COLUMNS, found)


def rows(session: Session, what: str, rule: str, setting: Setting, lengths: list[int]) -> Iterator[Row]:
    def pairs(tokens: int) -> int:
        return setting.pattern(rule).pairs(tokens, setting.heads, is_causal=setting.causal)

    # the length of the shortest sequence that has at least as many pairs
    alike = bisect.bisect_left(range(sum(lengths)), sum(map(pairs, lengths)), key=pairs)
    for name, sizes in (("packed", lengths), ("one with as many pairs", [alike])):
        yield [what, name, sum(sizes), *measure(session, replace(setting, tokens=sum(sizes)), rule, [*sizes])]
        forget_inputs()


def measure(session: Session, setting: Setting, rule: str, lengths: list[int]) -> list[Any]:
    pattern, qkv, packing = setting.pattern(rule), setting.qkv(), [0, *itertools.accumulate(lengths)]
    attention = partial(dilated_attention, pattern=pattern, is_causal=setting.causal, cu_seqlens=packing)
    subject = Subject(attention, attention, pattern, qkv, setting.dout())
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
