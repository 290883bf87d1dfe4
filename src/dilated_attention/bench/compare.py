"""The comparison in one setting: all implementations checked, their memory measured, and those that are right timed.

Legend: results is the dict that becomes results.json; a key is (implementation, direction).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dilated_attention.bench import runners
from dilated_attention.bench.pace import Pace
from dilated_attention.bench.regress import EXPECTED
from dilated_attention.bench.results import DIRECTIONS, far_off
from dilated_attention.bench.run import Check, Expected, Measure, Timing, interleave
from dilated_attention.bench.runners import OutOfMemory, ran_out
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.subject import BOTH, Implementation, least_work
from dilated_attention.units import measured_text

FAR, FAILED = "wrong at full length", "failed"
# what an implementation may end with without ending the run: torch's errors are RuntimeErrors
ERRORS = (RuntimeError, ValueError, TypeError)
SLOW_MS = {"cuda": 100.0, "cpu": 1000.0}  # from here on once may be enough, as long calls vary little
ROUNDS = 3  # at least: fewer have no quartiles
UNKNOWN = "unknown"  # of a record that is not finished
Key = tuple[str, str]
Record = dict[str, Any]
# For the plan: seconds and FLOPs of a check, seconds more for each rank and for a compiler, and a typical rate
CHECK, CHECK_FLOPS, PER_RANK, COMPILE = 0.2, 2e10, 0.4, 6.0
OF_MATMUL = 0.6  # of the rate of a matrix product


class Comparison:
    """Adds checks and measurements to the results, and knows what was checked and how fast things were."""

    def __init__(self, results: Record, pace: Pace, seconds: float, limit_ms: float) -> None:
        """``seconds``: of timing per setting, shared by all. What would take longer than ``limit_ms`` is skipped."""
        self.results, self.pace, self.seconds, self.limit_ms = results, pace, seconds, limit_ms
        self._expected: dict[Any, Expected] = {}
        self._checks: dict[Any, Check | str] = {}  # a str is why there is none
        self._speed: dict[Any, float] = {}  # milliseconds per FLOP, of the latest setting
        self._told: set[tuple[str, str, bool]] = set()  # whose verdict was said

    def run(
        self, suite: str, which: Sequence[Implementation], setting: Setting, directions: Sequence[str] = DIRECTIONS
    ) -> None:
        here = [one for one in which if one.why_not(setting) is None]
        records = {(one.name, way): _record(suite, one, setting, way) for one in which for way in directions}
        measures: dict[Key, Measure] = {}
        try:
            for one in which:
                mine = {way: records[one.name, way] for way in directions}
                why_not = one.why_not(setting)
                if why_not is not None:
                    _end(mine, "skipped", why_not)
                    continue
                before, _ = self.planned(one, setting)
                self.pace.step(f"{setting.tokens:,} tokens: checking {one.name}", before)
                for way, measure in self._prepare(one, setting, mine).items():
                    measures[one.name, way] = measure
                self._tell_verdict(one, setting)
            self.pace.step(f"{setting.tokens:,} tokens: timing", sum(self.planned(one, setting)[1] for one in here))
            self._time(measures, records, setting)
        finally:  # also of a run that is interrupted: what is known, and nothing of what was still to come
            known = [record for record in records.values() if record["status"] != UNKNOWN]
            self.results["measurements"].extend(known)
        self._expected.clear()
        runners.release(setting.device, sorted({one.ranks for one in here} - {1}))

    def planned(self, one: Implementation, setting: Setting) -> tuple[float, float]:
        """(before the clock starts, under the clock): seconds, from counts of work and the rate of a matrix product."""
        if one.why_not(setting) is not None:
            return 0.0, 0.0
        rate = OF_MATMUL * 1e12 * float(self.results["ceilings"][0]["matmul_tflops"])
        calls = [least_work(one, setting, way)[0] / rate for way in DIRECTIONS]
        calls = [seconds for seconds in calls if 1000 * seconds <= self.limit_ms]
        slow = SLOW_MS.get(setting.device.type, SLOW_MS["cpu"]) / 1000
        clocked = sum(seconds if seconds > slow else ROUNDS * seconds for seconds in calls)
        before = CHECK + CHECK_FLOPS / rate + 2 * sum(calls)
        if one.ranks > 1:
            before += PER_RANK * one.ranks
        if "compiled" in one.name:
            before += COMPILE
        return before, max(clocked, self.seconds / 10)

    # --- before the clock ---------------------------------------------------------------------------------------

    def _prepare(self, one: Implementation, setting: Setting, records: dict[str, Record]) -> dict[str, Measure]:
        """Fill in what is known without a clock; the directions that are to be timed."""
        check = self.check(one, setting)
        if isinstance(check, str):
            return _end(records, "out of memory" if ran_out(check) else "wrong", check)
        if not check.right("out"):
            return _end(records, "wrong", _errors(check))
        ways = {way: x for way, x in records.items() if self._may_run(x, check)}
        if not ways:
            return {}
        try:
            prepared = runners.prepare(one, setting, list(ways))
        except ERRORS as error:
            return _failed(ways, error)
        for way, peak in prepared.peaks.items():
            ways[way]["peak_bytes"] = peak
        rows = prepared.rows
        if rows is None or rows["right"]:
            return prepared.measures
        why = f"rows at full length are off by {rows['worst']:.1e}, allowed {rows['limit']}"
        if rows["empty_not_zero"]:
            why = f"{rows['empty_not_zero']} rows that see no key are not 0 at full length"
        self._judge(one, setting, FAR, why)
        return _end(ways, "wrong", why)

    def _may_run(self, record: Record, check: Check) -> bool:
        way = record["direction"]
        if way == BOTH and not check.right():
            return bool(_end({way: record}, "wrong", _errors(check)))
        expected = self._speed.get(_speed_key(record), 0.0) * record["flops"]
        if expected > self.limit_ms:
            why = f"{EXPECTED} {expected / 1000:.0f} s, more than the {self.limit_ms / 1000:.0f} s allowed"
            return bool(_end({way: record}, "skipped", why))
        return True

    def check(self, one: Implementation, setting: Setting) -> Check | str:
        """Out and gradients against the oracle in every setting for checks; of each the worst is kept."""
        for small in setting.checks():
            if (one.name, small) not in self._checks:
                try:
                    self._checks[one.name, small] = self._checked_at(one, small)
                except ERRORS as error:
                    self._checks[one.name, small] = _first_line(error)
        self._judge(one, setting)
        return self._found(one, setting)

    def _found(self, one: Implementation, setting: Setting) -> Check | str:
        known = [self._checks[one.name, small] for small in setting.checks()]
        failed = [check for check in known if isinstance(check, str)]
        return failed[0] if failed else functools.reduce(Check.worse, [x for x in known if isinstance(x, Check)])

    def _checked_at(self, one: Implementation, small: Setting) -> Check:
        whole = (one.whole or one.build)(small)
        if (small, whole.exact) not in self._expected:
            self._expected[small, whole.exact] = Expected.of(whole.exact, whole.inputs, whole.dout, whole.parameters)
        return self._expected[small, whole.exact].compare(runners.results_of(one, small))

    def _judge(self, one: Implementation, setting: Setting, verdict: str | None = None, why: str = "") -> None:
        """The verdict as a record; one for each dtype, causal or not, of the worst that was found."""
        check, record = self._found(one, setting), self._verdict(one, setting)
        if record["verdict"] in (FAR, FAILED):
            return
        if isinstance(check, str):
            record |= {"verdict": FAILED, "why": check}
            return
        if record["errors"]:
            check = check.worse(Check(record["errors"], record["limits"]))
        record |= {**check.as_dict(), "verdict": verdict or check.verdict, "why": why}

    def _verdict(self, one: Implementation, setting: Setting) -> Record:
        """The record of its check in this dtype, causal or not."""
        what = {**_identity(one), "dtype": setting.dtype_name, "causal": setting.causal}
        checks: list[Record] = self.results["checks"]
        found = next((record for record in checks if what.items() <= record.items()), None)
        if found is None:
            found = {**what, "verdict": "", "errors": {}, "limits": {}, "why": ""}
            checks.append(found)
        return found

    def _tell_verdict(self, one: Implementation, setting: Setting) -> None:
        """When it is first known."""
        known = (one.name, setting.dtype_name, setting.causal)
        if known not in self._told:
            self._told.add(known)
            self.pace.say(f"{one.name}: {self._verdict(one, setting)['verdict']}")

    # --- the clock ----------------------------------------------------------------------------------------------

    def _time(self, measures: dict[Key, Measure], records: dict[Key, Record], setting: Setting) -> None:
        spent: dict[Key, list[float]] = {}
        guarded = {key: partial(_guarded, measure, records[key]) for key, measure in measures.items()}
        slow_ms = SLOW_MS.get(setting.device.type, SLOW_MS["cpu"])
        try:
            interleave(guarded, seconds=self.seconds, least=ROUNDS, slow_ms=slow_ms, spent=spent)
        finally:
            for key, had in spent.items():
                if had and records[key]["status"] == UNKNOWN:
                    self._timed(setting, records[key], Timing.of(had))
        for name in dict.fromkeys(name for name, _ in measures):
            times = [_time_text(records[key]) for key in records if key[0] == name and records[key]["ms"]]
            if times:
                self.pace.say(f"{setting.tokens:,} tokens, {name}: {', '.join(times)}")

    def _timed(self, setting: Setting, record: Record, timing: Timing) -> None:
        seconds = timing.median / 1000
        ceiling = next(x for x in self.results["ceilings"] if x["dtype"] == setting.dtype_name)
        tflops, speed = record["flops"] / seconds / 1e12, record["bytes"] / seconds / 1e9
        record |= {
            "status": "measured",
            "ms": timing.as_dict(),
            "tokens_per_s": setting.samples * setting.tokens / seconds,
            "tflops": tflops,
            "of_matmul": tflops / ceiling["matmul_tflops"],
            "gb_per_s": speed,
            "of_copy": speed / ceiling["copy_gb_per_s"],
        }
        self._speed[_speed_key(record)] = timing.median / record["flops"]


def _record(suite: str, one: Implementation, setting: Setting, way: str) -> Record:
    flops, count = least_work(one, setting, way)
    sizes = {name: getattr(setting, name) for name in ("samples", "tokens", "heads", "head_dim")}
    return {
        "suite": suite, **_identity(one), **sizes, "lengths": list(setting.lengths), "rates": list(setting.rates),
        "dtype": setting.dtype_name, "causal": setting.causal, "direction": way,
        "status": UNKNOWN, "why": "", "ms": None, "tokens_per_s": None, "flops": flops, "bytes": count,
        "tflops": None, "of_matmul": None, "gb_per_s": None, "of_copy": None, "peak_bytes": None,
    }  # fmt: skip


def _time_text(record: Record) -> str:
    ms = record["ms"]
    median = measured_text(ms["median"], ms["lower"], ms["upper"])
    return f"{record['direction'].replace('_', ' + ')} {median} ms"


def _guarded(measure: Measure, record: Record) -> Sequence[float]:
    """A call that fails while it is timed is out, and the others go on."""
    if record["status"] == UNKNOWN:
        try:
            return measure()
        except ERRORS as error:
            _failed({record["direction"]: record}, error)
    return [math.inf]  # so that it is asked no more


def _failed(records: dict[str, Record], error: BaseException) -> dict[str, Measure]:
    short = isinstance(error, OutOfMemory | torch.OutOfMemoryError) or ran_out(str(error))
    return _end(records, "out of memory" if short else "wrong", _first_line(error))


def _identity(one: Implementation) -> Record:
    return {"implementation": one.name, "kind": one.kind, "ours": one.ours, "rule": one.rule, "ranks": one.ranks}


def _speed_key(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("implementation", "direction", "dtype", "causal"))


def _end(records: dict[str, Record], status: str, why: str) -> dict[str, Measure]:
    """Nothing more is measured of these; of what is wrong no figure is kept."""
    for record in records.values():
        record |= {"status": status, "why": why}
        if status == "wrong":
            record["peak_bytes"] = None
    return {}


def _errors(check: Check) -> str:
    return ", ".join(far_off(check.errors, check.limits))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
