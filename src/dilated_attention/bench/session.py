"""One run of some suites: what is known so far, kept in the shape that is written to results.json.

A suite is a list of steps. Each step compares implementations in one setting, or adds rows to a table. After each step
the results are saved, so that a run that dies loses one step at most.

Legend: times in milliseconds, memory in bytes beyond the inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilated_attention.bench import machine, probes
from dilated_attention.bench.compare import Comparison
from dilated_attention.bench.conclude import conclusions
from dilated_attention.bench.pace import Lines
from dilated_attention.bench.results import SCHEMA, Record
from dilated_attention.bench.run import Call, Check, Timing, time_calls
from dilated_attention.bench.setting import Implementation, Setting
from dilated_attention.pattern import DilatedPattern
from dilated_attention.units import GIB

Key = TypeVar("Key")
Row = Sequence[Any]
Step = Callable[[], None]
Segments = tuple[tuple[int, ...], tuple[int, ...]]
PATTERNS: tuple[Segments, Segments] = (((1024, 2048, 4096), (1, 2, 4)), ((2048, 4096, 8192), (1, 2, 4)))
SUGGESTED: Segments = ((), ())  # what `DilatedPattern.suggest` gives
LONG = DilatedPattern.longnet([2048 << i for i in range(5)], [1 << i for i in range(5)])


def new_table(suite: str, title: str, note: str, columns: Sequence[str]) -> Record:
    return {"suite": suite, "title": title, "note": note, "columns": [*columns], "rows": []}


class Session(Comparison):
    """The settings of a run and its results so far."""

    def __init__(
        self,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        *,
        watch: Lines | None = None,
        seconds: float | None = None,
        commit: str | None = None,
    ) -> None:
        self.device, self.dtypes, self.on_cuda = device, tuple(dtypes), device.type == "cuda"
        self.load = machine.Load()
        lists = ("suites", "checks", "measurements", "tables", "claims", "recommendations")
        results: Record = {
            "schema": SCHEMA,
            "machine": machine.describe(device, commit),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "complete": False,
            "seconds": 0.0,
            "answer": "",
            **{part: [] for part in lists},
        }
        default, limit_ms = (2.0, 2000.0) if self.on_cuda else (3.0, 4000.0)
        super().__init__(results, watch or Lines(), default if seconds is None else seconds, limit_ms)

    @property
    def options(self) -> dict[str, Any]:
        return {"dtype": self.dtypes[0], "device": self.device}

    def setting(self, tokens: int, segments: Segments = SUGGESTED, **more: Any) -> Setting:
        return Setting(tokens, *segments, **{**self.options, **more})

    # --- steps --------------------------------------------------------------------------------------------------

    def comparing(self, suite: str, which: Sequence[Implementation], setting: Setting) -> Step:
        return partial(self.compare, suite, which, setting)

    def adding(self, table: Record, text: str, rows: Callable[..., Iterable[Row]], *args: Any) -> Step:
        """The step that adds the rows of a function to a table, each as soon as it is known."""

        def run() -> None:
            self.watch.step(text, self.share)
            for row in rows(*args):
                if not table["rows"]:
                    self.results["tables"].append(table)
                table["rows"].append([*row])

        return run

    # --- what steps need ----------------------------------------------------------------------------------------

    def judge_own(self, name: str, error: float, limit: float, causal: bool, rule: str = "longnet") -> bool:
        """Note how far off something of a suite's own is, and whether that is right; of several errors the worst."""
        who = {"implementation": name, "kind": "function", "ours": True, "rule": rule, "ranks": 1}
        check = Check({"out": error}, {"out": limit})
        self.judge(who, self.setting(1, causal=causal), check)
        return check.right()

    def rows_are_right(
        self, name: str, out: Tensor, qkv: Sequence[Tensor], pattern: DilatedPattern, causal: bool, **rows: Any
    ) -> tuple[bool, float]:
        """Of rows drawn at random, or of those given: whether they are, and the largest error."""
        worst, limit = probes.check_rows(out, qkv, pattern, causal, **rows)
        return self.judge_own(name, worst, limit, causal, pattern.rule), worst

    def time(self, calls: Mapping[Key, Call], seconds: float = 1.0, warmups: int = 2) -> dict[Key, Timing]:
        """For small tables: these calls in turn."""
        return time_calls(calls, self.device, seconds=seconds, warmups=warmups)

    def median(self, call: Call, seconds: float = 0.5, warmups: int = 2) -> float:
        return self.time({"": call}, seconds, warmups)[""].median

    def peak(self, call: Call, before: float = 0) -> float:
        """In GiB, with what was there before."""
        return (probes.peak_bytes(call, self.device) + before) / GIB

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self, suites: Mapping[str, Sequence[Step]], save: Callable[[Record], None]) -> Record:
        began, count = time.monotonic(), sum(map(len, suites.values()))

        def keep() -> None:
            self.results["seconds"] = time.monotonic() - began
            self.results["machine"] |= self.load.note()
            self.results |= conclusions(self.results)
            save(self.results)

        try:
            for name, steps in suites.items():
                self.results["suites"].append(name)
                for step in steps:
                    step()
                    self.share += 1 / count
                    keep()
            self.results["complete"] = True
        finally:  # an interrupted run keeps what it has
            keep()
        return self.results
