"""The comparison in one setting: all implementations checked, their memory measured, and those that are right timed.

Legend: results is the dict that becomes results.json; a key is (implementation, direction).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from dilated_attention.bench import memory, over_ranks, runners
from dilated_attention.bench.memory import OutOfMemory, ran_out
from dilated_attention.bench.regress import EXPECTED
from dilated_attention.bench.results import DIRECTIONS
from dilated_attention.bench.run import Check, Expected, Measure, Timing, interleave
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.subject import BOTH, Implementation, least_work

FAR, FAILED = "wrong at full length", "failed"
# what an implementation may end with without ending the run: torch's errors are RuntimeErrors
ERRORS = (RuntimeError, ValueError, TypeError)
SLOW_MS = {"cuda": 100.0}  # from here on once may be enough, as long calls vary little there
SLOW_MS_ELSEWHERE = 1000.0
ONCE = 20  # a call that is run once, for its memory, may take this much longer than one that is timed
Key = tuple[str, str]
UNKNOWN = "unknown"  # of a record that is not finished


class Progress(Protocol):
    def step(self, text: str) -> None:
        """This is being done now."""

    def say(self, text: str) -> None:
        """Something that is to stay readable."""


class Comparison:
    """Adds checks and measurements to the results, and knows what was checked and how fast things were."""

    def __init__(self, results: dict[str, Any], progress: Progress, limit_ms: float) -> None:
        self.results, self.progress, self.limit_ms = results, progress, limit_ms
        self._expected: dict[Any, Expected] = {}
        self._checks: dict[Any, Check | str] = {}  # a str is why there is none
        self._pace: dict[Any, float] = {}  # milliseconds per FLOP, of the latest setting
        self._told: set[tuple[str, str, bool]] = set()  # whose verdict was said
        for record in results["measurements"]:  # of a run that goes on
            if record["ms"] is not None:
                self._pace[_pace_key(record)] = record["ms"]["median"] / record["flops"]

    def run(
        self,
        suite: str,
        implementations: Sequence[Implementation],
        setting: Setting,
        directions: Sequence[str],
        *,
        seconds: float | None,
        step: int = 0,
    ) -> None:
        """``seconds``: of timing, shared by all; None: only memory is measured. ``step``: its number in the suite."""
        records: dict[Key, dict[str, Any]] = {}
        measures: dict[Key, Measure] = {}
        try:
            for one in implementations:
                self.progress.step(f"{setting}: checking {one.name}")
                found = {way: self._record(suite, step, one, setting, way) for way in directions}
                records |= {(one.name, way): record for way, record in found.items()}
                for way, measure in self._prepare(one, setting, found, timed=seconds is not None).items():
                    measures[one.name, way] = measure
                self._tell_verdict(one, setting, found)
            self._time(measures, records, implementations, setting, seconds or 0.0)
        finally:  # also of a run that is interrupted: what is known, and nothing of what was still to come
            known = [record for record in records.values() if record["status"] != UNKNOWN]
            self.results["measurements"].extend(known)
        self._expected.clear()
        runners.release(setting.device, sorted({one.ranks for one in implementations} - {1}))

    # --- before the clock ---------------------------------------------------------------------------------------

    def _prepare(
        self, one: Implementation, setting: Setting, records: dict[str, dict[str, Any]], *, timed: bool
    ) -> dict[str, Measure]:
        """Fill in what is known without a clock; the directions that are to be timed."""
        why_not = one.why_not(setting)
        if why_not is not None:
            return _end(records, "skipped", why_not)
        check = self.check(one, setting)
        if isinstance(check, str):
            return _end(records, "out of memory" if ran_out(check) else "wrong", check)
        if not check.right("out"):
            return _end(records, "wrong", _errors(check))
        limit = self.limit_ms * (1 if timed else ONCE)
        ways = {way: x for way, x in records.items() if self._may_run(x, check, limit)}
        if not ways:
            return {}
        try:
            for way, peak in memory.peaks(one.build, setting, list(ways), one.ranks).items():
                ways[way]["peak_bytes"] = peak
            if not timed or not one.timed:
                return _end(ways, "measured", "") if not timed else _end(ways, "skipped", "it is checked, not timed")
            measures, rows = runners.prepare(one, setting, list(ways))
        except ERRORS as error:
            return _failed(ways, error)
        if rows is not None and not rows["right"]:
            why = f"rows at full length are off by {rows['worst']:.1e}, allowed {rows['limit']}"
            if rows["empty_not_zero"]:
                why = f"{rows['empty_not_zero']} rows that see no key are not 0 at full length"
            self._judge(one, setting, FAR, why)
            return _end(ways, "wrong", why)
        return measures

    def _may_run(self, record: dict[str, Any], check: Check, limit: float) -> bool:
        way = record["direction"]
        if way == BOTH and not check.right():
            return bool(_end({way: record}, "wrong", _errors(check)))
        expected = self._pace.get(_pace_key(record), 0.0) * record["flops"]
        if expected > limit:
            why = f"{EXPECTED} {expected / 1000:.0f} s, more than the {limit / 1000:.0f} s allowed"
            return bool(_end({way: record}, "skipped", why))
        return True

    def check(self, one: Implementation, setting: Setting) -> Check | str:
        """Out and gradients against the oracle in every setting for checks; of each the worst is kept."""
        for small in setting.checks():
            if (one.name, small) not in self._checks:
                try:
                    self._checks[one.name, small] = self._held(one, small)
                except ERRORS as error:
                    self._checks[one.name, small] = _first_line(error)
        found = self._found(one, setting)
        self._judge(one, setting)
        return found

    def _found(self, one: Implementation, setting: Setting) -> Check | str:
        known = [self._checks[one.name, small] for small in setting.checks()]
        failed = [check for check in known if isinstance(check, str)]
        return failed[0] if failed else functools.reduce(Check.worse, [x for x in known if isinstance(x, Check)])

    def _held(self, one: Implementation, small: Setting) -> Check:
        whole = one.build(small) if one.ranks == 1 else over_ranks.alone(one.name, small)
        if (small, whole.exact) not in self._expected:
            self._expected[small, whole.exact] = Expected.of(whole.exact, whole.inputs, whole.dout, whole.parameters)
        return self._expected[small, whole.exact].compare(runners.results_of(one, small))

    def _judge(self, one: Implementation, setting: Setting, verdict: str | None = None, why: str = "") -> None:
        """The verdict as a record; one for each dtype, causal or not, of the worst that was found."""
        check, before = self._found(one, setting), self._checked(one, setting)
        if before is None:
            nothing = {"verdict": "", "errors": {}, "limits": {}, "why": ""}
            self.results["checks"].append({**_checked_as(one, setting), **nothing})
            before = self.results["checks"][-1]
        elif before["verdict"] in (FAR, FAILED):
            return
        if isinstance(check, str):
            before |= {"verdict": FAILED, "why": check}
            return
        if before["errors"]:
            check = check.worse(Check(_numbers(before["errors"]), _numbers(before["limits"])))
        before |= {**check.as_dict(), "verdict": verdict or check.verdict, "why": why}

    # --- the clock ----------------------------------------------------------------------------------------------

    def _time(
        self,
        measures: dict[Key, Measure],
        records: dict[Key, dict[str, Any]],
        implementations: Sequence[Implementation],
        setting: Setting,
        seconds: float,
    ) -> None:
        by_name = {one.name: one for one in implementations}
        begun: set[str] = set()

        def tick(key: Key) -> None:
            if key[0] not in begun:
                begun.add(key[0])
                self.progress.step(f"{setting}: timing {key[0]}")

        spent: dict[Key, list[float]] = {}
        guarded = {key: partial(_guarded, measure, records[key]) for key, measure in measures.items()}
        try:
            slow_ms = SLOW_MS.get(setting.device.type, SLOW_MS_ELSEWHERE)
            interleave(guarded, seconds=seconds, slow_ms=slow_ms, tick=tick, spent=spent)
        finally:
            for key, had in spent.items():
                if had and records[key]["status"] == UNKNOWN:
                    self._timed(setting, records[key], Timing.of(had))
        for name in by_name.keys() - begun:  # those that are not timed have had their turn too
            self.progress.step(f"{setting}: {name} is not timed")
        for name in by_name:
            times = [f"{way.replace('_', ' + ')} {records[name, way]['ms']['median']:,.3g} ms"
                     for way in DIRECTIONS if (records.get((name, way)) or {}).get("ms")]  # fmt: skip
            if times:
                self.progress.say(f"{setting.tokens:,} tokens, {name}: {', '.join(times)}")

    def _tell_verdict(self, one: Implementation, setting: Setting, records: dict[str, dict[str, Any]]) -> None:
        """When it is first known. What cannot run here is not told: it is in the results."""
        known = (one.name, setting.dtype_name, setting.causal)
        check = self._checked(one, setting)
        if check is None or known in self._told or all(x["status"] == "skipped" for x in records.values()):
            return
        self._told.add(known)
        self.progress.say(f"{one.name}: {check['verdict']}")

    def _checked(self, one: Implementation, setting: Setting) -> dict[str, Any] | None:
        """The record of its check in this dtype, causal or not."""
        what = _checked_as(one, setting).items()
        return next((x for x in self.results["checks"] if what <= x.items()), None)

    def _timed(self, setting: Setting, record: dict[str, Any], timing: Timing) -> None:
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
        self._pace[_pace_key(record)] = timing.median / record["flops"]

    def _record(self, suite: str, step: int, one: Implementation, setting: Setting, way: str) -> dict[str, Any]:
        flops, count = least_work(one, setting, way)
        sizes = {name: getattr(setting, name) for name in ("samples", "tokens", "heads", "head_dim")}
        return {
            "suite": suite, "step": step, **_identity(one), **sizes,
            "lengths": list(setting.lengths), "rates": list(setting.rates),
            "dtype": setting.dtype_name, "causal": setting.causal, "direction": way,
            "status": UNKNOWN, "why": "", "ms": None, "tokens_per_s": None, "flops": flops, "bytes": count,
            "tflops": None, "of_matmul": None, "gb_per_s": None, "of_copy": None, "peak_bytes": None,
        }  # fmt: skip


def _guarded(measure: Measure, record: dict[str, Any]) -> Sequence[float]:
    """A call that fails while it is timed is out, and the others go on."""
    if record["status"] != UNKNOWN:
        return [math.inf]
    try:
        return measure()
    except ERRORS as error:
        _failed({record["direction"]: record}, error)
        return [math.inf]  # so that it is asked no more


def _failed(records: dict[str, dict[str, Any]], error: BaseException) -> dict[str, Measure]:
    short = isinstance(error, OutOfMemory | torch.OutOfMemoryError) or ran_out(str(error))
    return _end(records, "out of memory" if short else "wrong", _first_line(error))


def _identity(one: Implementation) -> dict[str, Any]:
    return {"implementation": one.name, "kind": one.kind, "ours": one.ours, "rule": one.rule, "ranks": one.ranks}


def _checked_as(one: Implementation, setting: Setting) -> dict[str, Any]:
    return {**_identity(one), "dtype": setting.dtype_name, "causal": setting.causal}


def _pace_key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("implementation", "direction", "dtype", "causal"))


def _end(records: dict[str, dict[str, Any]], status: str, why: str) -> dict[str, Measure]:
    """Nothing more is measured of these; of what is wrong no figure is kept."""
    for record in records.values():
        record |= {"status": status, "why": why}
        if status == "wrong":
            record["peak_bytes"] = None
    return {}


def _errors(check: Check) -> str:
    wrong = {name: error for name, error in check.errors.items() if not error <= check.limits[name]}
    return ", ".join(f"{name} off by {error:.1e}, allowed {check.limits[name]:.1e}" for name, error in wrong.items())


def _numbers(found: dict[str, Any]) -> dict[str, float]:
    """As JSON has them, which knows no infinity."""
    return {name: float(number) for name, number in found.items()}


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
