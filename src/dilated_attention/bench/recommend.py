"""Which implementation to use for what, computed from the measurements, and the answer in two sentences.

A use case compares what computes the same thing. Two are equally fast if their quartiles overlap. What is wrong has no
times, so it can win nothing. The other names of one function are left out.

Legend: a record is one entry of results["measurements"].
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dilated_attention.bench.results import far_off
from dilated_attention.bench.series import folded
from dilated_attention.bench.subject import BOTH, FORWARD
from dilated_attention.units import number_text

Record = dict[str, Any]
Results = dict[str, Any]
OURS, DENSE = ("head_groups, auto", "head_groups, sdpa"), "dense SDPA"  # the second where results have no first
FEWEST = 3  # lengths count at which at least so many were measured; quartiles need as many repeats
SUITES = ("quick", "scaling", "ring")  # the others look at a few implementations only
ONCE, OFTEN = 0.05, 0.01  # how far a time may be off that was measured less often than that, or more
KEY = ("suite", "tokens", "samples", "heads", "head_dim", "lengths", "rates", "dtype")


@dataclass(frozen=True)
class UseCase:
    """``fits`` picks the records; ``longest`` or shortest length; ``figure`` is what the least of is best."""

    name: str
    fits: Callable[[Record], bool]
    longest: bool = True
    figure: str = "ms"


def _where(*kinds: str, begins: str = "", causal: bool = False, **wanted: Any) -> Callable[[Record], bool]:
    """Whether a record is of one of these kinds, has such a name, and has these values."""
    wanted["causal"] = causal
    return lambda record: (
        record["kind"] in kinds
        and record["implementation"].startswith(begins)
        and all(record[name] == value for name, value in wanted.items())
    )


def _alone(rule: str, direction: str, causal: bool = False) -> Callable[[Record], bool]:
    """Attention on one device."""
    return _where("function", "module", "baseline", rule=rule, direction=direction, causal=causal, ranks=1)


USE_CASES = (
    UseCase("training on long sequences", _alone("head_groups", BOTH)),
    UseCase("training on short sequences", _alone("head_groups", BOTH), longest=False),
    UseCase("inference on long sequences", _alone("head_groups", FORWARD)),
    UseCase("causal training", _alone("head_groups", BOTH, causal=True)),
    UseCase("least memory in training", _alone("head_groups", BOTH), figure="peak_bytes"),
    UseCase("every head in every branch, as in the LongNet paper", _alone("longnet", BOTH)),
    UseCase("weights of released LongNet models", _alone("torchscale", FORWARD)),
    UseCase("a layer with projections", _where("multihead", ours=True, direction=BOTH)),
    UseCase(
        "one sequence over 4 processes of this machine",
        _where("ring", begins="RingDilatedAttention", ranks=4, direction=BOTH),
    ),
)


def recommend(results: Results) -> dict[str, Any]:
    """recommendations (one per use case), matrix (one entry per implementation) and answer, for results.json."""
    records = folded(results["measurements"])
    found = [(case, _ranking(case, records)) for case in USE_CASES]
    ranked = [(case, ranking) for case, ranking in found if len(ranking) > 1]
    return {
        "recommendations": [_recommendation(case, ranking, records) for case, ranking in ranked],
        "matrix": _matrix(results, ranked),
        "answer": answer(results),
    }


# --- use cases --------------------------------------------------------------------------------------------------


def _ranking(case: UseCase, measurements: Sequence[Record]) -> list[Record]:
    """The records of the setting that this case looks at, best first; one for each implementation."""
    groups: dict[tuple[str, ...], dict[str, Record]] = defaultdict(dict)
    for record in measurements:
        known = record["status"] == "measured" and record[case.figure] is not None
        if known and record["suite"] in SUITES and case.fits(record):
            groups[tuple(str(record[name]) for name in KEY)].setdefault(record["implementation"], record)
    if not groups:
        return []
    most = max(len(group) for group in groups.values())
    fewest = min(most, FEWEST) if case.longest else most / 2  # at a short length most of them were measured
    full = [list(group.values()) for group in groups.values() if len(group) >= fewest]
    sign = 1 if case.longest else -1
    group = max(full, key=lambda group: (sign * group[0]["tokens"], len(group)))
    return sorted(group, key=lambda record: _figure(case, record))


def _figure(case: UseCase, record: Record) -> float:
    found = record[case.figure]
    return float(found["median"] if case.figure == "ms" else found)


def _tied(case: UseCase, best: Record, other: Record) -> bool:
    if case.figure == "ms":
        return spread(other)[0] <= spread(best)[1]
    return _figure(case, other) <= 1.02 * _figure(case, best)


def spread(record: Record) -> tuple[float, float]:
    """The quartiles, and at least what a time may be off by; that is more where it was measured once or twice."""
    timing = record["ms"]
    off = ONCE if timing["repeats"] < FEWEST else OFTEN
    return min(timing["lower"], (1 - off) * timing["median"]), max(timing["upper"], (1 + off) * timing["median"])


def _recommendation(case: UseCase, ranking: list[Record], measured: list[Record]) -> dict[str, Any]:
    level = [record for record in ranking if _tied(case, ranking[0], record)]
    best = min(level, key=measured.index)  # of those that are level the plainest, which stands first
    behind = next((record for record in ranking if record not in level), None)
    value = _figure(case, best)
    return {
        "use_case": f"{case.name} ({best['tokens']:,} tokens, {best['dtype']})",
        "best": best["implementation"],
        "value": f"{number_text(value)} ms" if case.figure == "ms" else f"{value / 2**20:,.0f} MiB beyond the inputs",
        "runner_up": None if behind is None else behind["implementation"],
        "factor": None if behind is None else _figure(case, behind) / value,
        "ties": [record["implementation"] for record in level if record is not best],
    }


# --- implementations --------------------------------------------------------------------------------------------


def _matrix(results: Results, ranked: list[tuple[UseCase, list[Record]]]) -> list[dict[str, Any]]:
    """What each implementation is best for, and how far behind the best it is where it is compared."""
    best_for: dict[str, list[str]] = defaultdict(list)
    behind: dict[str, list[float]] = defaultdict(list)
    for case, ranking in ranked:
        for record in ranking:
            if _tied(case, ranking[0], record):
                best_for[record["implementation"]].append(case.name)
            if case.figure == "ms":
                behind[record["implementation"]].append(_figure(case, record) / _figure(case, ranking[0]))
    worst: dict[str, Record] = {}
    for check in results["checks"]:
        name = check["implementation"]
        if name not in worst or worst[name]["verdict"] == "exact":
            worst[name] = check
    return [
        {
            "implementation": name,
            "ours": check["ours"],
            "verdict": check["verdict"],
            "best_for": best_for[name],
            "slower": statistics.median(behind[name]) if behind[name] else None,
            "note": _note(check),
        }
        for name, check in worst.items()
    ]


def _note(check: Record) -> str:
    if check["verdict"] == "exact" or check["why"]:
        return str(check["why"])
    wrong = far_off(check["errors"], check["limits"])
    return ", ".join(text.partition(", allowed")[0] for text in wrong[:3])


# --- the answer -------------------------------------------------------------------------------------------------


def answer(results: Results) -> str:
    """Two sentences: how fast the library is in training; how many implementations are right."""
    if not results["checks"]:
        return "Nothing was checked, so nothing was timed. Run a suite to get an answer."
    return f"{_speed(results['measurements'])} {_right(results['checks'])}"


def _speed(measurements: Sequence[Record]) -> str:
    """Training under the rule head_groups, beside dense attention and the best other exact implementation."""
    groups: dict[tuple[str, ...], dict[str, Record]] = defaultdict(dict)
    for record in measurements:
        wanted = record["suite"] in SUITES and record["direction"] == BOTH and not record["causal"]
        if wanted and record["samples"] == 1 and record["status"] == "measured" and record["ms"]:
            groups[tuple(str(record[name]) for name in KEY)].setdefault(record["implementation"], record)
    known = {record["implementation"] for record in measurements}
    name = next((name for name in OURS if name in known), OURS[0])
    dense: dict[int, tuple[Record, Record]] = {}
    others: dict[int, tuple[Record, Record]] = {}
    for found in (found for found in groups.values() if name in found):
        mine, tokens = found[name], found[name]["tokens"]
        if DENSE in found:
            dense.setdefault(tokens, (mine, found[DENSE]))
        same = [x for x in found.values() if not x["ours"] and (x["rule"], x["kind"]) == ("head_groups", "baseline")]
        if same:
            others.setdefault(tokens, (mine, min(same, key=lambda x: float(x["ms"]["median"]))))
    if not dense:
        return "The speed of this library beside dense attention was not measured in this run."
    beside = _compared(*dense[max(dense)])
    said = f"In training, this library is {beside} dense attention (a different operation) at {max(dense):,} tokens"
    if others:
        said += f", and {_compared(*others[max(others)])} the best exact alternative at {max(others):,}"
    slower = [tokens for tokens, (mine, other) in dense.items() if spread(other)[1] < spread(mine)[0]]
    return said + (f". At {max(slower):,} tokens dense attention is faster." if slower else ".")


def _compared(mine: Record, other: Record) -> str:
    """How fast ours is beside another; where quartiles overlap neither is faster."""
    (low, high), (other_low, other_high) = spread(mine), spread(other)
    if low <= other_high and other_low <= high:
        return "about as fast as"
    factor = other["ms"]["median"] / mine["ms"]["median"]
    return f"{number_text(factor)}× as fast as" if factor >= 1 else f"{number_text(1 / factor)}× slower than"


def _right(checks: Sequence[Record]) -> str:
    ours = {check["implementation"]: check["ours"] for check in checks}
    wrong = {check["implementation"] for check in checks if check["verdict"] != "exact"}
    mine = sorted(name for name in wrong if ours[name])
    said = f"{len(ours) - len(wrong)} of {len(ours)} implementations match the float64 oracle"
    if not wrong:
        only_outputs = any(set(check["errors"]) == {"out"} for check in checks)
        return f"{said} in their outputs." if only_outputs else f"{said}, gradients included."
    return (
        f"{said}; wrong ones of this library: {', '.join(mine)}."
        if mine
        else f"{said}; the others are not of this library."
    )
