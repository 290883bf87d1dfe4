"""One run of some suites: what is known so far, kept in the shape that is written to results.json.

A suite is a list of steps. Each step compares implementations in one setting, or adds rows to a table. After each step
the results are saved, so that a run that dies loses one step at most.

Legend: times in milliseconds, memory in bytes beyond the inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dilated_attention.bench import machine, probes
from dilated_attention.bench.compare import Comparison
from dilated_attention.bench.conclude import conclusions
from dilated_attention.bench.implementations import named
from dilated_attention.bench.pace import Lines, Quiet
from dilated_attention.bench.results import SCHEMA, Record
from dilated_attention.bench.run import Call, Check, Timing, time_calls
from dilated_attention.bench.setting import Implementation, Setting
from dilated_attention.pattern import DilatedPattern
from dilated_attention.units import GIB

Key = TypeVar("Key")
Row = Sequence[Any]
Segments = tuple[tuple[int, ...], tuple[int, ...]]
PATTERNS: tuple[Segments, Segments] = (((1024, 2048, 4096), (1, 2, 4)), ((2048, 4096, 8192), (1, 2, 4)))
SUGGESTED: Segments = ((), ())  # what `DilatedPattern.suggest` gives
LONG = DilatedPattern.longnet([2048 << i for i in range(5)], [1 << i for i in range(5)])


class Step(NamedTuple):
    """One part of a suite, and how many steps it tells of."""

    run: Callable[[], None]
    parts: int = 1


class Table(NamedTuple):
    suite: str
    title: str
    note: str
    columns: Sequence[str]


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
        lists = ("planned", "suites", "ceilings", "checks", "measurements", "tables", "claims", "recommendations")
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
        super().__init__(results, watch or Quiet(), default if seconds is None else seconds, limit_ms)

    @property
    def options(self) -> dict[str, Any]:
        """Of tensors, in the main dtype."""
        return {"dtype": self.dtypes[0], "device": self.device}

    def setting(self, tokens: int, segments: Segments = SUGGESTED, **more: Any) -> Setting:
        return Setting(tokens, *segments, **{**self.options, **more})

    # --- steps --------------------------------------------------------------------------------------------------

    def comparing(self, suite: str, which: Sequence[Implementation], setting: Setting) -> Step:
        """The step that checks and times all these in one setting."""
        return Step(partial(self.compare, suite, which, setting), len(which) + 1)

    def adding(self, table: Table, text: str, rows: Callable[..., Iterable[Row]], *args: Any) -> Step:
        """The step that adds the rows that a function gives to a table, each as soon as it is known."""

        def run() -> None:
            self.step(text)
            for row in rows(*args):
                self.add(table, row)

        return Step(run)

    def add(self, table: Table, row: Row) -> None:
        """The table appears with its first row."""
        known = self.results["tables"]
        if all((x["suite"], x["title"]) != table[:2] for x in known):
            known.append({**table._asdict(), "rows": []})
        next(x["rows"] for x in known if (x["suite"], x["title"]) == table[:2]).append(list(row))

    # --- what steps need ----------------------------------------------------------------------------------------

    def is_exact(self, name: str, setting: Setting) -> bool:
        """Whether what a table is about to time matches the oracle, gradients included."""
        check = self.check(named(name)[0], setting)
        return not isinstance(check, str) and check.right()

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
        found = probes.check_rows(out, qkv, pattern, causal, **rows)
        self.judge_own(name, found.worst, found.limit, causal, pattern.rule)
        return not found.wrong, found.worst

    def time(self, calls: Mapping[Key, Call], seconds: float = 1.0, warmups: int = 2) -> dict[Key, Timing]:
        """For small tables: these calls in turn."""
        return time_calls(calls, self.device, seconds=seconds, warmups=warmups)

    def median(self, call: Call, seconds: float = 0.5, warmups: int = 2) -> float:
        """The milliseconds of one call alone."""
        return self.time({"": call}, seconds, warmups)[""].median

    def peak(self, call: Call, before: float = 0) -> float:
        """In GiB, with what was there before."""
        return (probes.peak_bytes(call, self.device) + before) / GIB

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self, suites: Mapping[str, Sequence[Step]], save: Callable[[Record], None]) -> Record:
        began = time.monotonic()
        self.results["planned"] = list(suites)
        self.total = sum(step.parts for steps in suites.values() for step in steps)

        def keep() -> None:
            self.results["seconds"] = time.monotonic() - began
            self.results["machine"] |= self.load.note()
            self.results |= conclusions(self.results)
            save(self.results)

        try:
            for name, steps in suites.items():
                self.results["suites"].append(name)
                for step in steps:
                    step.run()
                    keep()
            self.results["complete"] = True
        finally:  # an interrupted run keeps what it has
            keep()
        return self.results
