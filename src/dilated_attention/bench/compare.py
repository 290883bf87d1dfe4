"""The comparison: every implementation checked, those that are right timed in turn, all of them listed.

Legend: times in milliseconds; "x" is the time of dense SDPA divided by the time of the implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.bench import probes
from dilated_attention.bench.cases import DENSE, Implementation, Setting, Subject
from dilated_attention.bench.run import Attention, Call, Check, Expected, Timing, forward, forward_backward, time_calls

Say = Callable[[str], None]
Known = dict[tuple[Setting, Attention], Expected]
PARTS = FORWARD, BOTH = "forward", "forward_backward"
FAR = "wrong at full length"


@dataclass(frozen=True)
class Result:
    """One line of the table. Without a check that holds there are no times."""

    name: str
    ours: bool
    check: Check
    rows: dict[str, Any] | None = None  # single rows at full length, where they can be checked
    forward: Timing | None = None
    forward_backward: Timing | None = None

    @property
    def verdict(self) -> str:
        if self.rows is not None and not self.rows["right"]:
            return FAR
        return self.check.verdict

    def as_dict(self, setting: Setting, dense: Result | None) -> dict[str, Any]:
        record = {"implementation": self.name, "ours": self.ours, **self.check.as_dict(), "verdict": self.verdict}
        record["rows"] = self.rows
        for part in PARTS:
            timing, yardstick = getattr(self, part), getattr(dense, part, None)
            record[part] = None if timing is None else timing.as_dict()
            record[f"{part}_x_dense"] = ratio(yardstick, timing)
        record["tokens_per_s"] = tokens_per_second(self, setting)
        return record


def ratio(dense: Timing | None, timing: Timing | None) -> float | None:
    return None if dense is None or timing is None else dense.median / timing.median


def tokens_per_second(result: Result, setting: Setting) -> float | None:
    """Of forward and backward together, as in training."""
    timing = result.forward_backward
    return None if timing is None else setting.samples * setting.tokens / timing.median * 1000


def compare(
    implementations: Sequence[Implementation], setting: Setting, *, seconds: float, say: Say = lambda message: None
) -> list[Result]:
    """Check all, then time those that are right: wrong gradients get no backward time, a wrong out no time at all.

    A call slower than its share of ``seconds`` is measured once; the yardstick three times, as all depends on it.
    """
    results: dict[str, Result] = {}
    calls: dict[tuple[str, str], Call] = {}
    known: Known = {}
    for one in implementations:
        say(f"checking {one.name}")
        result = Result(one.name, one.ours, check(one, setting, known))
        if result.check.right("out"):
            subject = one.build(setting)
            result = replace(result, rows=_rows(subject))
            if one.timed and result.verdict != FAR:
                calls |= {(one.name, part): call for part, call in _calls(subject, result.check.right()).items()}
        results[one.name] = result
    timings = time_calls(
        calls,
        setting.device,
        seconds=seconds,
        least={(DENSE, part): 3 for part in PARTS},
        warmups=3 if setting.device.type == "cuda" else 0,  # on a CPU `_rows` and `_calls` were the warm-up
        tick=lambda key: say(f"timing {key[0]}, {key[1].replace('_', ' + ')}"),
    )
    return [
        replace(r, forward=timings.get((r.name, FORWARD)), forward_backward=timings.get((r.name, BOTH)))
        for r in results.values()
    ]


def check(implementation: Implementation, setting: Setting, known: Known) -> Check:
    """Out and gradients against the oracle in every setting for checks; of each the worst is kept.

    ``known`` keeps what the oracle said, for the next implementation of the same function.
    """
    found = []
    for small in setting.checks():
        subject = implementation.build(small)
        if (small, subject.exact) not in known:
            known[small, subject.exact] = Expected.of(subject.exact, subject.inputs, subject.dout(), subject.parameters)
        found.append(known[small, subject.exact].check(subject.attention, subject.parameters))
    return functools.reduce(Check.worse, found)


@torch.no_grad()
def _rows(subject: Subject) -> dict[str, Any] | None:
    """Single rows at full length, the one thing there that needs no quadratic oracle."""
    out = subject.attention(*subject.inputs)
    return None if subject.pattern is None else probes.check_rows(out, subject.inputs, subject.pattern, False)


def _calls(subject: Subject, gradients_right: bool) -> dict[str, Call]:
    calls = {FORWARD: forward(subject.attention, subject.inputs)}
    if gradients_right:
        calls[BOTH] = forward_backward(subject.attention, subject.inputs, subject.dout(), subject.parameters.values())
        if subject.compiled:  # what torch.compile makes of a forward that will be differentiated is other code
            subject.attention(*(x.detach().requires_grad_() for x in subject.inputs))
    return calls
