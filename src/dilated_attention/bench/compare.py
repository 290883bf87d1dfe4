"""The comparison in one setting: all implementations checked, their memory measured, and those that are right timed.

Legend: results is the dict that becomes results.json; a key is (implementation, direction).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from dilated_attention.bench import runners
from dilated_attention.bench.pace import Lines
from dilated_attention.bench.regress import EXPECTED
from dilated_attention.bench.results import DIRECTIONS, Record, far_off, milliseconds
from dilated_attention.bench.run import Check, Expected, Measure, interleave
from dilated_attention.bench.setting import BOTH, Implementation, Setting

FAR, FAILED = "wrong at full length", "failed"
# what an implementation may end with without ending the run: torch's errors are RuntimeErrors
ERRORS = (RuntimeError, ValueError, TypeError)
SLOW_MS = {"cuda": 100.0, "cpu": 1000.0}  # from here on once may be enough, as long calls vary little
ROUNDS = 3  # at least: fewer have no quartiles
Key = tuple[str, str]


class Comparison:
    """Adds checks and measurements to the results, and knows what was checked and how fast things were."""

    def __init__(self, results: Record, watch: Lines, seconds: float, limit_ms: float) -> None:
        """``seconds``: of timing per setting, shared by all. What would take longer than ``limit_ms`` is skipped."""
        self.results, self.watch, self.seconds, self.limit_ms = results, watch, seconds, limit_ms
        self.share = 0.0  # of the run that is done
        self._expected: dict[Any, Expected] = {}
        self._checks: dict[Any, Check] = {}
        self._speed: dict[Any, float] = {}  # milliseconds per FLOP, of the latest setting

    def compare(self, suite: str, which: Sequence[Implementation], setting: Setting) -> None:
        records = {(one.name, way): _record(suite, one, setting, way) for one in which for way in DIRECTIONS}
        measures: dict[Key, Measure] = {}
        for one in which:
            self.watch.step(f"{setting.tokens:,} tokens: checking {one.name}", self.share)
            found = self._prepare(one, setting, {way: records[one.name, way] for way in DIRECTIONS})
            measures |= {(one.name, way): measure for way, measure in found.items()}
        self.watch.step(f"{setting.tokens:,} tokens: timing", self.share)
        self._time(measures, records, SLOW_MS.get(setting.device.type, SLOW_MS["cpu"]))
        for one in which:
            told = [f"{way.replace('_', ' + ')} {_told(records[one.name, way])}" for way in DIRECTIONS]
            self.watch.say(f"{setting.tokens:,} tokens, {one.name}: {', '.join(told)}")
        self.results["measurements"] += records.values()
        self._expected.clear()
        runners.release(sorted({one.ranks for one in which} - {1}))

    # --- before the clock ---------------------------------------------------------------------------------------

    def _prepare(self, one: Implementation, setting: Setting, records: dict[str, Record]) -> dict[str, Measure]:
        """Fill in what is known without a clock; what is left to be timed, by direction."""
        if (why_not := one.why_not(setting)) is not None:
            return _end(records.values(), "skipped", why_not)
        check = self.check(one, setting)
        if isinstance(check, str):
            return _failed(records.values(), check)
        for way, record in records.items():
            expected = self._speed.get(_speed_key(record), 0.0) * record["flops"]
            wanted = () if way == BOTH else ("out",)
            if not check.right(*wanted):
                _end([record], "wrong", ", ".join(far_off(check.errors, check.limits)))
            elif expected > self.limit_ms:
                why = f"{EXPECTED} {expected / 1000:.0f} s, more than the {self.limit_ms / 1000:.0f} s allowed"
                _end([record], "skipped", why)
        left = {way: record for way, record in records.items() if not record["status"]}
        if not left:
            return {}
        try:
            measures, peaks, why = runners.prepare(one, setting, list(left))
        except ERRORS as error:
            return _failed(left.values(), _first_line(error))
        for way, peak in peaks.items():
            left[way]["peak_bytes"] = peak
        if why:
            self.judge(one.identity(), setting, check, FAR, why)
            return _end(left.values(), "wrong", why)
        return measures

    def check(self, one: Implementation, setting: Setting) -> Check | str:
        """Out and gradients against the oracle in every setting for checks; of each the worst. A str: it failed."""
        try:
            check: Check | str = functools.reduce(Check.worse, (self._at(one, small) for small in setting.checks()))
        except ERRORS as error:
            check = _first_line(error)
        self.judge(one.identity(), setting, check)
        return check

    def _at(self, one: Implementation, small: Setting) -> Check:
        if (one.name, small) not in self._checks:
            whole = (one.whole or one.build)(small)
            key = (small, whole.exact)
            if key not in self._expected:
                self._expected[key] = Expected.of(whole.exact, whole.inputs, whole.dout, whole.parameters)
            self._checks[one.name, small] = self._expected[key].compare(runners.results_of(one, small))
        return self._checks[one.name, small]

    def judge(self, who: Record, where: Setting, check: Check | str, verdict: str = "", why: str = "") -> None:
        """The verdict as a record; one for each dtype, causal or not, of the worst that was found."""
        what, checks = {**who, "dtype": where.dtype_name, "causal": where.causal}, self.results["checks"]
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
        record |= {**check._asdict(), "why": why, "verdict": verdict or check.verdict}

    # --- the clock ----------------------------------------------------------------------------------------------

    def _time(self, measures: dict[Key, Measure], records: dict[Key, Record], slow_ms: float) -> None:
        guarded = {key: partial(_guarded, measure, records[key]) for key, measure in measures.items()}
        timings = interleave(guarded, seconds=self.seconds, least=ROUNDS, slow_ms=slow_ms)
        for key, timing in timings.items():
            record = records[key]
            if not record["status"]:
                record |= {"status": "measured", "ms": timing._asdict()}
                self._speed[_speed_key(record)] = timing.median / record["flops"]


def _record(suite: str, one: Implementation, setting: Setting, way: str) -> Record:
    """Its status is known later."""
    sizes = {name: getattr(setting, name) for name in ("samples", "tokens", "heads", "head_dim")}
    lengths, rates = setting.segments(one.rule)
    return {
        "suite": suite, **one.identity(), **sizes, "lengths": list(lengths), "rates": list(rates),
        "suggested": not setting.lengths, "dtype": setting.dtype_name, "causal": setting.causal, "direction": way,
        "status": "", "why": "", "ms": None, "peak_bytes": None, "flops": setting.flops(one.rule, way),
    }  # fmt: skip


def _told(record: Record) -> str:
    return f"{milliseconds(record['ms'])} ms" if record["ms"] else str(record["status"])


def _guarded(measure: Measure, record: Record) -> Sequence[float]:
    """A call that fails while it is timed is out, and the others go on."""
    if not record["status"]:
        try:
            return measure()
        except ERRORS as error:
            _failed([record], _first_line(error))
    return [math.inf]  # so that it is asked no more


def _speed_key(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("implementation", "direction", "dtype", "causal"))


def _failed(records: Iterable[Record], error: str) -> dict[str, Measure]:
    return _end(records, "out of memory" if runners.ran_out(error) else "wrong", error)


def _end(records: Iterable[Record], status: str, why: str) -> dict[str, Measure]:
    """Nothing more is measured of these; of what is wrong no figure is kept."""
    for record in records:
        record |= {"status": status, "why": why}
        if status == "wrong":
            record["peak_bytes"] = None
    return {}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
