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
from dilated_attention.bench.pace import Lines, Progress, Quiet
from dilated_attention.bench.results import DIRECTIONS, SCHEMA, Record
from dilated_attention.bench.run import Call, Check, Timing, time_calls
from dilated_attention.bench.setting import Implementation, Setting
from dilated_attention.pattern import DilatedPattern

Key = TypeVar("Key")
Row = Sequence[Any]
Segments = tuple[tuple[int, ...], tuple[int, ...]]
PATTERNS: tuple[Segments, Segments] = (((1024, 2048, 4096), (1, 2, 4)), ((2048, 4096, 8192), (1, 2, 4)))
SUGGESTED: Segments = ((), ())  # what `DilatedPattern.suggest` gives


class Step(NamedTuple):
    """One part of a suite, and how many steps it tells of."""

    run: Callable[[], None]
    parts: int = 1


class Table(NamedTuple):
    suite: str
    title: str
    note: str
    columns: Sequence[str]


class Session:
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
        self.progress, self.load = Progress(watch or Quiet()), machine.Load()
        lists = ("ceilings", "checks", "measurements", "tables", "claims", "recommendations")
        self.results: Record = {
            "schema": SCHEMA,
            "machine": machine.describe(device, commit),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "planned": [],  # suites
            "suites": [],  # those begun
            "complete": False,
            "seconds": 0.0,
            "answer": "",
            **{part: [] for part in lists},
        }
        default, limit_ms = (2.0, 2000.0) if self.on_cuda else (3.0, 4000.0)
        self.comparison = Comparison(self.results, self.progress, default if seconds is None else seconds, limit_ms)

    @property
    def options(self) -> dict[str, Any]:
        """Of tensors, in the main dtype."""
        return {"dtype": self.dtypes[0], "device": self.device}

    def setting(self, tokens: int, segments: Segments = SUGGESTED, **more: Any) -> Setting:
        return Setting(tokens, *segments, self.device, **{"dtype": self.dtypes[0], **more})

    # --- steps --------------------------------------------------------------------------------------------------

    def comparing(
        self, suite: str, which: Sequence[Implementation], setting: Setting, directions: Sequence[str] = DIRECTIONS
    ) -> Step:
        """The step that checks and times all these in one setting."""
        return Step(partial(self.comparison.run, suite, which, setting, directions), len(which) + 1)

    def adding(self, table: Table, text: str, rows: Callable[[], Iterable[Row]]) -> Step:
        """The step that adds rows to a table, each as soon as it is known."""

        def run() -> None:
            self.progress.step(text)
            for row in rows():
                self.add(table, row)

        return Step(run)

    def add(self, table: Table, row: Row) -> None:
        """The table appears with its first row."""
        known = self.results["tables"]
        found = next((x for x in known if (x["suite"], x["title"]) == (table.suite, table.title)), None)
        if found is None:
            found = {**table._asdict(), "columns": list(table.columns), "rows": []}
            known.append(found)
        found["rows"].append(list(row))

    # --- what steps need ----------------------------------------------------------------------------------------

    def is_exact(self, name: str, setting: Setting) -> bool:
        """Whether what a table is about to time matches the oracle, gradients included."""
        check = self.comparison.check(named(name)[0], setting)
        return not isinstance(check, str) and check.right()

    def judge(self, name: str, error: float, limit: float, causal: bool, rule: str = "longnet") -> bool:
        """Note how far off something of a suite's own is, and whether that is right; of several errors the worst."""
        who = {"implementation": name, "kind": "function", "ours": True, "rule": rule, "ranks": 1}
        check = Check({"out": error}, {"out": limit})
        self.comparison.judge(who, self.results["dtypes"][0], causal, check)
        return check.right()

    def rows_are_right(
        self, name: str, out: Tensor, qkv: tuple[Tensor, ...], pattern: DilatedPattern, causal: bool
    ) -> tuple[bool, float]:
        """Of rows drawn at random: whether they are, and the largest error."""
        found = probes.check_rows(out, qkv, pattern, causal)
        is_right = self.judge(name, found["worst"], found["limit"], causal, pattern.rule)
        return is_right and not found["empty_not_zero"], found["worst"]

    def time(self, calls: Mapping[Key, Call], seconds: float = 1.0, warmups: int = 2) -> dict[Key, Timing]:
        """For small tables: these calls in turn."""
        return time_calls(calls, self.device, seconds=seconds, warmups=warmups)

    # --- the run ------------------------------------------------------------------------------------------------

    def run(self, suites: Mapping[str, Sequence[Step]], save: Callable[[Record], None]) -> Record:
        began = time.monotonic()
        self.results["planned"] = list(suites)
        self.progress.total = sum(step.parts for steps in suites.values() for step in steps)

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
