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
from dilated_attention.bench.pace import Progress
from dilated_attention.bench.probes import ceilings
from dilated_attention.bench.regress import EXPECTED
from dilated_attention.bench.results import DIRECTIONS, FIGURES, Record, far_off, milliseconds
from dilated_attention.bench.run import Check, Expected, Measure, Timing, interleave
from dilated_attention.bench.setting import BOTH, Implementation, Setting

FAR, FAILED = "wrong at full length", "failed"
# what an implementation may end with without ending the run: torch's errors are RuntimeErrors
ERRORS = (RuntimeError, ValueError, TypeError)
SLOW_MS = {"cuda": 100.0, "cpu": 1000.0}  # from here on once may be enough, as long calls vary little
ROUNDS = 3  # at least: fewer have no quartiles
UNKNOWN = "unknown"  # of a record that is not finished
Key = tuple[str, str]


class Comparison:
    """Adds checks and measurements to the results, and knows what was checked and how fast things were."""

    def __init__(self, results: Record, progress: Progress, seconds: float, limit_ms: float) -> None:
        """``seconds``: of timing per setting, shared by all. What would take longer than ``limit_ms`` is skipped."""
        self.results, self.progress, self.seconds, self.limit_ms = results, progress, seconds, limit_ms
        self._expected: dict[Any, Expected] = {}
        self._checks: dict[Any, Check | str] = {}  # a str is why there is none
        self._speed: dict[Any, float] = {}  # milliseconds per FLOP, of the latest setting

    def run(
        self, suite: str, which: Sequence[Implementation], setting: Setting, directions: Sequence[str] = DIRECTIONS
    ) -> None:
        self.ceiling(setting.device, setting.dtype)
        records = {(one.name, way): _record(suite, one, setting, way) for one in which for way in directions}
        measures: dict[Key, Measure] = {}
        try:
            for one in which:
                mine = {way: records[one.name, way] for way in directions}
                self.progress.step(f"{setting.tokens:,} tokens: checking {one.name}")
                for way, measure in self._prepare(one, setting, mine).items():
                    measures[one.name, way] = measure
            self.progress.step(f"{setting.tokens:,} tokens: timing")
            self._time(measures, records, setting)
        finally:  # also of a run that is interrupted: what is known, and nothing of what was still to come
            known = [record for record in records.values() if record["status"] != UNKNOWN]
            self.results["measurements"].extend(known)
        self._expected.clear()
        runners.release(sorted({one.ranks for one in which} - {1}))

    def ceiling(self, device: torch.device, dtype: torch.dtype) -> Record:
        """What the machine can do at most, measured once for each dtype."""
        known: list[Record] = self.results["ceilings"]
        if all(f"torch.{one['dtype']}" != str(dtype) for one in known):
            known.append(ceilings(device, dtype))
        return next(one for one in known if f"torch.{one['dtype']}" == str(dtype))

    # --- before the clock ---------------------------------------------------------------------------------------

    def _prepare(self, one: Implementation, setting: Setting, records: dict[str, Record]) -> dict[str, Measure]:
        """Fill in what is known without a clock; the directions that are to be timed."""
        why_not, checks = one.why_not(setting), self.results["checks"]
        if why_not is not None:
            return _end(records, "skipped", why_not)
        known = len(checks)
        try:
            return self._checked(one, setting, records)
        finally:
            if len(checks) > known:
                self.progress.say(f"{one.name}: {checks[-1]['verdict']}")

    def _checked(self, one: Implementation, setting: Setting, records: dict[str, Record]) -> dict[str, Measure]:
        check = self.check(one, setting)
        if isinstance(check, str):
            return _failed(records, check)
        if not check.right("out"):
            return _end(records, "wrong", _errors(check))
        ways = {way: record for way, record in records.items() if self._may_run(record, check)}
        try:
            prepared = runners.prepare(one, setting, list(ways)) if ways else runners.Prepared({}, {}, None)
        except ERRORS as error:
            return _failed(ways, _first_line(error))
        for way, peak in prepared.peaks.items():
            ways[way]["peak_bytes"] = peak
        rows = prepared.rows
        if rows is None or rows["right"]:
            return prepared.measures
        why = f"rows at full length are off by {rows['worst']:.1e}, allowed {rows['limit']:.0e}"
        if rows["empty_not_zero"]:
            why = f"{rows['empty_not_zero']} rows that see no key are not 0 at full length"
        self.judge(one.identity(), setting.dtype_name, setting.causal, check, FAR, why)
        return _end(ways, "wrong", why)

    def _may_run(self, record: Record, check: Check) -> bool:
        if record["direction"] == BOTH and not check.right():
            return bool(_end({BOTH: record}, "wrong", _errors(check)))
        expected = self._speed.get(_speed_key(record), 0.0) * record["flops"]
        if expected > self.limit_ms:
            why = f"{EXPECTED} {expected / 1000:.0f} s, more than the {self.limit_ms / 1000:.0f} s allowed"
            return bool(_end({record["direction"]: record}, "skipped", why))
        return True

    def check(self, one: Implementation, setting: Setting) -> Check | str:
        """Out and gradients against the oracle in every setting for checks; of each the worst. A str: it failed."""
        known: list[Check] = []
        for small in setting.checks():
            if (one.name, small) not in self._checks:
                try:
                    self._checks[one.name, small] = self._checked_at(one, small)
                except ERRORS as error:
                    self._checks[one.name, small] = _first_line(error)
            check = self._checks[one.name, small]
            self.judge(one.identity(), setting.dtype_name, setting.causal, check)
            if isinstance(check, str):
                return check
            known.append(check)
        return functools.reduce(Check.worse, known)

    def _checked_at(self, one: Implementation, small: Setting) -> Check:
        whole = (one.whole or one.build)(small)
        if (small, whole.exact) not in self._expected:
            self._expected[small, whole.exact] = Expected.of(whole.exact, whole.inputs, whole.dout, whole.parameters)
        return self._expected[small, whole.exact].compare(runners.results_of(one, small))

    def judge(
        self, who: Record, dtype: str, causal: bool, check: Check | str, verdict: str = "", why: str = ""
    ) -> None:
        """The verdict as a record; one for each dtype, causal or not, of the worst that was found."""
        what, checks = {**who, "dtype": dtype, "causal": causal}, self.results["checks"]
        record = next((known for known in checks if what.items() <= known.items()), None)
        if record is None:
            record = {**what, "verdict": "", "errors": {}, "limits": {}, "why": ""}
            checks.append(record)
        if record["verdict"] in (FAR, FAILED):
            return
        if isinstance(check, str):
            record |= {"verdict": FAILED, "why": check}
            return
        if record["errors"]:
            check = check.worse(Check(record["errors"], record["limits"]))
        record |= {**check.as_dict(), "why": why}
        record["verdict"] = verdict or check.verdict

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
            mine = [record for key, record in records.items() if key[0] == name and record["ms"]]
            times = [f"{one['direction'].replace('_', ' + ')} {milliseconds(one['ms'])} ms" for one in mine]
            if times:
                self.progress.say(f"{setting.tokens:,} tokens, {name}: {', '.join(times)}")

    def _timed(self, setting: Setting, record: Record, timing: Timing) -> None:
        seconds, ceiling = timing.median / 1000, self.ceiling(setting.device, setting.dtype)
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
    flops, count = one.least_work(setting, way)
    sizes = {name: getattr(setting, name) for name in ("samples", "tokens", "heads", "head_dim")}
    lengths, rates = setting.segments(one.rule)
    return {
        "suite": suite, **one.identity(), **sizes, "lengths": list(lengths), "rates": list(rates),
        "suggested": not setting.lengths, "dtype": setting.dtype_name, "causal": setting.causal, "direction": way,
        "status": UNKNOWN, "why": "", "ms": None, **dict.fromkeys(FIGURES), "flops": flops, "bytes": count,
    }  # fmt: skip


def _guarded(measure: Measure, record: Record) -> Sequence[float]:
    """A call that fails while it is timed is out, and the others go on."""
    if record["status"] == UNKNOWN:
        try:
            return measure()
        except ERRORS as error:
            _failed({record["direction"]: record}, _first_line(error))
    return [math.inf]  # so that it is asked no more


def _failed(records: dict[str, Record], error: str) -> dict[str, Measure]:
    return _end(records, "out of memory" if runners.ran_out(error) else "wrong", error)


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
