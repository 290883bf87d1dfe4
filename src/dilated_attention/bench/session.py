"""One run of some suites: what is known so far, kept in the shape that is written to results.json.

A suite is a list of steps. Each step compares implementations in one setting, or fills a table. After each step the
results are saved, so that a run that dies loses one step at most.

Legend: times in milliseconds, memory in bytes beyond the inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dilated_attention.bench import machine
from dilated_attention.bench.claims import conclusions
from dilated_attention.bench.compare import Comparison
from dilated_attention.bench.implementations import named
from dilated_attention.bench.pace import Pace, Quiet, Watch
from dilated_attention.bench.probes import ceilings
from dilated_attention.bench.results import DIRECTIONS, SCHEMA
from dilated_attention.bench.run import Call, Check, Timing, time_calls
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.subject import Implementation

Key = TypeVar("Key")
PATTERNS = (((1024, 2048, 4096), (1, 2, 4)), ((2048, 4096, 8192), (1, 2, 4)))  # lengths and rates of the reports


@dataclass(frozen=True)
class Step:
    """One part of a suite, and about how many seconds it takes."""

    run: Callable[[Session], None]
    seconds: float = 5.0


class Session:
    """The settings of a run and its results so far."""

    def __init__(
        self,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        *,
        watch: Watch | None = None,
        seconds: float | None = None,
        commit: str | None = None,
    ) -> None:
        self.device, self.dtypes, self.on_cuda = device, tuple(dtypes), device.type == "cuda"
        self.pace, self.load = Pace(watch or Quiet()), machine.Load()
        lists = ("ceilings", "checks", "measurements", "tables", "claims", "recommendations", "matrix")
        self.results: dict[str, Any] = {
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
        self.comparison = Comparison(self.results, self.pace, default if seconds is None else seconds, limit_ms)

    def setting(self, tokens: int, pattern: tuple[tuple[int, ...], tuple[int, ...]], **more: Any) -> Setting:
        return Setting(tokens, *pattern, self.device, **{"dtype": self.dtypes[0], **more})

    def comparing(
        self, suite: str, which: Sequence[Implementation], setting: Setting, directions: Sequence[str] = DIRECTIONS
    ) -> Step:
        """The step that checks and times all these in one setting."""
        self.measure_ceilings(setting.dtype)
        seconds = sum(sum(self.comparison.planned(one, setting)) for one in which)
        return Step(lambda session: session.comparison.run(suite, which, setting, directions), seconds)

    def measure_ceilings(self, dtype: torch.dtype) -> None:
        """What the machine can do at most, once for each dtype."""
        if all(f"torch.{known['dtype']}" != str(dtype) for known in self.results["ceilings"]):
            self.results["ceilings"].append(ceilings(self.device, dtype))

    def is_exact(self, name: str, setting: Setting) -> bool:
        """Whether what a table is about to time matches the oracle, gradients included."""
        check = self.comparison.check(named(name)[0], setting)
        return not isinstance(check, str) and check.right()

    def judge(self, name: str, error: float, limit: float, causal: bool, rule: str = "longnet") -> bool:
        """Note how far off something of a suite's own is, and whether that is right; of several errors the worst."""
        checks = self.results["checks"]
        known = next((x for x in checks if (x["implementation"], x["causal"]) == (name, causal)), None)
        check = Check({"out": error}, {"out": limit})
        if known is None:
            kind = {"kind": "function", "ours": True, "rule": rule, "ranks": 1, "dtype": self.results["dtypes"][0]}
            checks.append({"implementation": name, **kind, "causal": causal, **check.as_dict(), "why": ""})
        else:
            known |= check.worse(Check(known["errors"], known["limits"])).as_dict()
        return check.right()

    def time(self, calls: Mapping[Key, Call], seconds: float = 1.0, warmups: int = 2) -> dict[Key, Timing]:
        """For small tables: these calls in turn."""
        return time_calls(calls, self.device, seconds=seconds, warmups=warmups)

    def table(self, suite: str, title: str, note: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add a table; one of the same suite and title is replaced, so that a table can grow step by step."""
        kept = [table for table in self.results["tables"] if (table["suite"], table["title"]) != (suite, title)]
        made = {"suite": suite, "title": title, "note": note, "columns": list(columns), "rows": list(map(list, rows))}
        self.results["tables"] = [*kept, made]

    def rows_of(self, suite: str, title: str) -> list[list[Any]]:
        """The rows that a table has so far."""
        found = (
            table["rows"] for table in self.results["tables"] if (table["suite"], table["title"]) == (suite, title)
        )
        return [*next(found, [])]

    def run(self, suites: Mapping[str, Sequence[Step]], save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        began = time.monotonic()
        self.results["planned"] = list(suites)
        self.pace.begin(sum(step.seconds for steps in suites.values() for step in steps))

        def keep() -> None:
            self.results["seconds"] = time.monotonic() - began
            self.results["machine"] |= self.load.note()
            self.results |= conclusions(self.results)
            save(self.results)

        try:
            for name, steps in suites.items():
                self.results["suites"].append(name)
                for step in steps:
                    step.run(self)
                    keep()
            self.results["complete"] = True
        finally:  # an interrupted run keeps what it has
            keep()
        return self.results
