"""One run of some suites: implementations are checked, their memory is measured, and those that are right are timed.

A suite is a list of steps: one compares implementations in a setting, or adds rows to a table. After each step the
results are saved, so that a run that dies loses one step at most.

Legend: times in milliseconds, memory in bytes beyond the inputs; a key is (implementation, direction).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilated_attention.bench import machine, probes, runners
from dilated_attention.bench.conclude import conclusions
from dilated_attention.bench.pace import log
from dilated_attention.bench.regress import EXPECTED
from dilated_attention.bench.results import DIRECTIONS, SCHEMA, Record, far_off, first_line, in_words
from dilated_attention.bench.run import Call, Check, Expected, Measure, Timing, interleave, time_calls
from dilated_attention.bench.setting import BOTH, Implementation, Setting
from dilated_attention.pattern import DilatedPattern
from dilated_attention.units import GIB

Key = TypeVar("Key")
Row = Sequence[Any]
Rows = Callable[[], Iterable[Row]]
Step = Callable[[], None]
Save = Callable[[Record], None]
Segments = tuple[tuple[int, ...], tuple[int, ...]]
PATTERNS: tuple[Segments, Segments] = (((1024, 2048, 4096), (1, 2, 4)), ((2048, 4096, 8192), (1, 2, 4)))
SUGGESTED: Segments = ((), ())  # what `DilatedPattern.suggest` gives
LONG = DilatedPattern.longnet([2048 << i for i in range(5)], [1 << i for i in range(5)])
FAR, FAILED = "wrong at full length", "failed"
# what an implementation may end with without ending the run: torch's errors are RuntimeErrors
ERRORS = (RuntimeError, ValueError, TypeError)
ROUNDS = 3  # at least: fewer have no quartiles
PATIENT_MS = {"suggested": 30_000.0}  # what a call may take at most in these suites


class Session:
    """The settings of a run and its results so far. It knows what was checked, and how fast things were."""

    def __init__(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, watch: Callable[..., None] = log,
        seconds: float | None = None, commit: str | None = None,
    ) -> None:  # fmt: skip
        """``seconds``: of timing per setting, shared by all. What would take longer than ``limit_ms`` is skipped."""
        self.device, self.dtypes, self.on_cuda = device, tuple(dtypes), device.type == "cuda"
        self.options: dict[str, Any] = {"dtype": dtypes[0], "device": device}
        self.watch, self.load = watch, machine.Load()
        default, self.limit_ms = (2.0, 2000.0) if self.on_cuda else (3.0, 4000.0)
        self.seconds = default if seconds is None else seconds
        self.share = 0.0  # of the run that is done
        self.results: Record = {
            "schema": SCHEMA, "machine": {**machine.describe(device, commit), **self.load.note()},
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes], "complete": False, "seconds": 0.0,
            "suites": [], "checks": [], "measurements": [], "tables": [],
            "answer": "", "claims": [], "recommendations": [],
        }  # fmt: skip
        self._expected: dict[Any, Expected] = {}
        self._checks: dict[Any, Check] = {}
        self._speed: dict[Any, float] = {}  # milliseconds per FLOP, of the latest setting

    def setting(self, tokens: int, segments: Segments = SUGGESTED, **more: Any) -> Setting:
        return Setting(tokens, *segments, **{**self.options, **more})

    def run(self, suites: Mapping[str, Sequence[Step]], save: Save) -> Record:
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

    def table(self, suite: str, title: str, note: str, columns: Sequence[str], rows: Sequence[Rows]) -> list[Step]:
        """For each of ``rows`` a step that adds its rows to the table, each as soon as it is known."""
        table: Record = {"suite": suite, "title": title, "note": note, "columns": [*columns], "rows": []}

        def add(number: int) -> None:
            self.watch(f"{title}, part {number + 1} of {len(rows)}", self.share)
            for row in rows[number]():
                if not table["rows"]:
                    self.results["tables"].append(table)
                table["rows"].append([*row])

        return [partial(add, number) for number in range(len(rows))]

    def rows_are_right(
        self, name: str, out: Tensor, qkv: Sequence[Tensor], pattern: DilatedPattern, causal: bool, **rows: Any
    ) -> tuple[bool, float]:
        """Whether rows of a suite's own are, drawn at random or given, which is noted; and the largest error."""
        error, limit = probes.check_rows(out, qkv, pattern, causal, **rows)
        who = {"implementation": name, "kind": "function", "ours": True, "rule": pattern.rule, "ranks": 1}
        self._judge(who, self.setting(1, causal=causal), Check({"out": error}, {"out": limit}))
        return error <= limit, error

    def time(self, calls: Mapping[Key, Call], seconds: float = 1.0, warmups: int = 2) -> dict[Key, Timing]:
        return time_calls(calls, self.device, seconds=seconds, warmups=warmups)

    def median(self, call: Call, seconds: float = 0.5, warmups: int = 2) -> float:
        return self.time({"": call}, seconds, warmups)[""].median

    def peak(self, call: Call, before: float = 0) -> float:
        """In GiB, with what was there before."""
        return (probes.peak_bytes(call, self.device) + before) / GIB

    def compare(self, suite: str, which: Sequence[Implementation], setting: Setting) -> None:
        records = {(one.name, way): _record(suite, one, setting, way) for one in which for way in DIRECTIONS}
        measures: dict[tuple[str, str], Measure] = {}
        for one in which:
            self.watch(f"{setting.tokens:,} tokens: checking {one.name}", self.share)
            mine = {way: records[one.name, way] for way in DIRECTIONS}
            try:
                for way, measure in self._prepare(one, setting, mine).items():
                    measures[one.name, way] = partial(_guarded, measure, mine[way])
            except ERRORS as error:
                _fail(mine.values(), error)
        self.watch(f"{setting.tokens:,} tokens: timing", self.share)
        # from so long a call on once may be enough, as long calls vary little
        slow_ms = 100.0 if setting.on_cuda else 1000.0
        for key, timing in interleave(measures, seconds=self.seconds, least=ROUNDS, slow_ms=slow_ms).items():
            record = records[key]
            if not record["status"]:
                record |= {"status": "measured", "ms": timing._asdict()}
                self._speed[_speed_key(record)] = timing.median / record["flops"]
        for one in which:
            told = ", ".join(f"{DIRECTIONS[way]} {in_words(records[one.name, way], ' ms')}" for way in DIRECTIONS)
            self.watch(f"{setting.tokens:,} tokens, {one.name}: {told}")
        self.results["measurements"] += records.values()
        self._expected.clear()
        runners.release({one.ranks for one in which})

    def _prepare(self, one: Implementation, setting: Setting, records: dict[str, Record]) -> dict[str, Measure]:
        """Fill in what is known without a clock; what is left to be timed, by direction."""
        if (why_not := one.why_not(setting)) is not None:
            return _end(records.values(), "skipped", why_not)
        check = self.check(one, setting)
        for way, record in records.items():
            most = PATIENT_MS.get(record["suite"], self.limit_ms)
            wanted = () if way == BOTH else ("out",)
            if not check.right(*wanted):
                _end([record], "wrong", ", ".join(far_off(check.errors, check.limits)))
            elif (ms := self._speed.get(_speed_key(record), 0.0) * record["flops"]) > most:
                _end([record], "skipped", f"{EXPECTED} {ms / 1000:.0f} s, more than the {most / 1000:.0f} s allowed")
        left = {way: record for way, record in records.items() if not record["status"]}
        if not left:
            return {}
        measures, peaks, why = runners.prepare(one, setting, list(left))
        for way, peak in peaks.items():
            left[way]["peak_bytes"] = peak
        if why:
            self._judge(one.identity(), setting, check, FAR, why)
            return _end(left.values(), "wrong", why)
        return measures

    def check(self, one: Implementation, setting: Setting) -> Check:
        """Out and gradients against the oracle in every setting for checks; of each the worst."""
        try:
            check = functools.reduce(Check.worse, (self._at(one, small) for small in setting.checks()))
        except ERRORS as error:
            self._judge(one.identity(), setting, None, FAILED, first_line(error))
            raise
        self._judge(one.identity(), setting, check)
        return check

    def _at(self, one: Implementation, small: Setting) -> Check:
        if (one.name, small) not in self._checks:
            whole = (one.whole or one.build)(small)
            key = (small, whole.exact)
            if key not in self._expected:
                self._expected[key] = Expected.of(whole.exact, whole.inputs, whole.dout, **whole.parameters)
            self._checks[one.name, small] = self._expected[key].compare(runners.results_of(one, small))
        return self._checks[one.name, small]

    def _judge(self, who: Record, where: Setting, check: Check | None, verdict: str = "", why: str = "") -> None:
        """The verdict as a record; one for each dtype, causal or not, of the worst that was found."""
        what, checks = {**who, "dtype": where.dtype_name, "causal": where.causal}, self.results["checks"]
        record = next((one for one in checks if what.items() <= one.items()), None)
        if record is None:
            record = {**what, "verdict": "", "errors": {}, "limits": {}, "why": ""}
            checks.append(record)
        if record["verdict"] in (FAR, FAILED):
            return
        if check is not None:
            check = check.worse(Check(record["errors"], record["limits"]))
            record |= {**check._asdict(), "verdict": check.verdict}
        record |= {"verdict": verdict or record["verdict"], "why": why}


def _record(suite: str, one: Implementation, setting: Setting, way: str) -> Record:
    """Its status is known later."""
    sizes = {name: getattr(setting, name) for name in ("samples", "tokens", "heads", "head_dim")}
    lengths, rates = setting.segments(one.rule)
    return {
        "suite": suite, **one.identity(), **sizes, "lengths": list(lengths), "rates": list(rates),
        "suggested": not setting.lengths, "dtype": setting.dtype_name, "causal": setting.causal, "direction": way,
        "status": "", "why": "", "ms": None, "peak_bytes": None, "flops": setting.flops(one.rule, way),
    }  # fmt: skip


def _guarded(measure: Measure, record: Record) -> Sequence[float]:
    """A call that fails while it is timed is out, and the others go on."""
    try:
        return [math.inf] if record["status"] else measure()
    except ERRORS as error:
        _fail([record], error)
    return [math.inf]  # so that it is asked no more


def _speed_key(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("implementation", "direction", "dtype", "causal"))


def _fail(records: Iterable[Record], error: Exception) -> None:
    """Of those that have not ended in another way."""
    why = first_line(error)
    _end((x for x in records if not x["status"]), "out of memory" if runners.ran_out(error) else "wrong", why)


def _end(records: Iterable[Record], status: str, why: str) -> dict[str, Measure]:
    """Nothing more is measured of these, and no figure is kept."""
    for record in records:
        record |= {"status": status, "why": why, "peak_bytes": None}
    return {}
