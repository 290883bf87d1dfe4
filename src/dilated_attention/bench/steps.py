"""One run of some suites: what is known so far, kept in the shape that is written to results.json.

A suite is a list of steps. Each step holds implementations against the oracle, measures memory and times those that are
right, or fills a table. After each step the results are saved, so that a run that dies loses one step at most.

Legend: times in milliseconds, memory in bytes beyond the inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dilated_attention.bench import machine
from dilated_attention.bench.claims import conclusions
from dilated_attention.bench.compare import Comparison, Progress
from dilated_attention.bench.probes import ceilings
from dilated_attention.bench.results import DIRECTIONS, SCHEMA
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.subject import Implementation


class Watch(Progress, Protocol):
    """Whoever shows how far a run is."""

    def begin(self, total: int) -> None:
        """So many steps are planned."""


class Quiet:
    """Nobody looks."""

    def begin(self, total: int) -> None:
        pass

    def step(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass


@dataclass(frozen=True)
class Step:
    """``size`` is how often it tells the watch; ``run`` does it."""

    text: str
    size: int
    run: Callable[[Session], None]


class Session:
    """The settings of a run and its results so far."""

    def __init__(
        self,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        *,
        watch: Watch | None = None,
        seconds: float | None = None,
        limit_ms: float | None = None,
        commit: str | None = None,
        before: dict[str, Any] | None = None,
    ) -> None:
        """``before``: the results of a run that was interrupted, which goes on here."""
        self.device, self.dtypes = device, tuple(dtypes)
        self.seconds = seconds if seconds is not None else 2.0 if device.type == "cuda" else 6.0
        self.watch = Quiet() if watch is None else watch
        self.limit_ms = limit_ms if limit_ms is not None else 2000.0 if device.type == "cuda" else 4000.0
        found = machine.describe(device, commit)
        self.results = _nothing(found) if before is None else continued(before, found, before["planned"], dtypes)
        self.results["dtypes"] = _names(self.dtypes)
        self.comparison = Comparison(self.results, self.watch, self.limit_ms)

    @property
    def dtype(self) -> torch.dtype:
        return self.dtypes[0]

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def setting(self, tokens: int, pattern: tuple[tuple[int, ...], tuple[int, ...]], **more: Any) -> Setting:
        options = {"dtype": self.dtype, **more}
        return Setting(tokens, *pattern, self.device, **options)

    def compare(
        self,
        suite: str,
        implementations: Sequence[Implementation],
        setting: Setting,
        directions: Sequence[str] = DIRECTIONS,
        *,
        timed: bool = True,
    ) -> None:
        """Check, memory and times of all these in one setting."""
        if all(known["dtype"] != setting.dtype_name for known in self.results["ceilings"]):
            self.results["ceilings"].append(ceilings(self.device, setting.dtype))
        seconds = self.seconds if timed else None
        step = self.results["steps_done"].get(suite, 0)
        self.comparison.run(suite, implementations, setting, directions, seconds=seconds, step=step)

    def table(self, suite: str, title: str, note: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        found = {
            "suite": suite,
            "title": title,
            "note": note,
            "columns": list(columns),
            "rows": [list(r) for r in rows],
        }
        self.results["tables"].append(found)

    def conclude(self) -> None:
        """What follows from the measurements so far."""
        self.results |= conclusions(self.results)

    def run(self, suites: dict[str, list[Step]], save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """All steps but those that the run which goes on here has done already."""
        self.results["planned"] = list(suites)
        began, done = time.monotonic() - self.results["seconds"], self.results["steps_done"]
        left = {name: steps[done.get(name, 0) :] for name, steps in suites.items()}
        self.watch.begin(sum(step.size for steps in left.values() for step in steps))
        try:
            for name, steps in left.items():
                if name not in self.results["suites"]:
                    self.results["suites"].append(name)
                for step in steps:
                    step.run(self)
                    done[name] = done.get(name, 0) + 1
                    self.results["seconds"] = time.monotonic() - began
                    self.conclude()
                    save(self.results)
            self.results["complete"] = True
        finally:  # an interrupted run keeps what it has
            self.results["seconds"] = time.monotonic() - began
            self.conclude()
            save(self.results)
        return self.results


def _names(dtypes: Sequence[torch.dtype]) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def _nothing(found: dict[str, Any]) -> dict[str, Any]:
    """The results of a run that has just begun, on the machine found."""
    return {
        "schema": SCHEMA,
        "machine": found,
        "dtypes": [],
        "planned": [],  # suites
        "suites": [],  # those begun
        "steps_done": {},  # by suite: how many, for a run that goes on later
        "complete": False,
        "seconds": 0.0,
        "answer": "",
        **{part: [] for part in ("ceilings", "checks", "measurements", "tables", "claims")},
        **{part: [] for part in ("recommendations", "matrix")},
    }


def continued(
    before: dict[str, Any], found: dict[str, Any], suites: Sequence[str], dtypes: Sequence[torch.dtype]
) -> dict[str, Any]:
    """The results so far, less what was measured of the step in which they end; when and by what they go on is kept."""
    if before.get("schema") != SCHEMA or "planned" not in before:
        raise ValueError("these results cannot be gone on with: run it again from the start")
    if before["complete"]:
        raise ValueError("this run is complete: there is nothing to go on with")
    for name, now in (("planned", list(suites)), ("dtypes", _names(dtypes))):  # they number the steps
        if before[name] != now:
            raise ValueError(f"the run began with {', '.join(before[name])}, and now it is {', '.join(now)}")
    for name in ("device", "threads", "versions"):
        if before["machine"][name] != found[name]:
            raise ValueError(f"the run began with {name} {before['machine'][name]}, and here is {found[name]}")
    again = {name: found[name] for name in ("date", "command", "commit", "dirty", "load")}
    where = {**before["machine"], "continued": [*before["machine"].get("continued", []), again]}
    kept = [x for x in before["measurements"] if x["step"] < before["steps_done"].get(x["suite"], 0)]
    return {**before, "machine": where, "measurements": kept}


def compare_step(
    suite: str, implementations: Sequence[Implementation], setting: Setting, *ways: str, timed: bool = True
) -> Step:
    directions = ways or DIRECTIONS
    return Step(
        str(setting),
        2 * len(implementations),
        lambda session: session.compare(suite, implementations, setting, directions, timed=timed),
    )
