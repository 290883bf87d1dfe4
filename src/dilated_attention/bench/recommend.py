"""Which implementation to use for what, computed from the measurements, and the answer in two sentences.

A use case compares what computes the same thing; a tie is whoever's quartiles reach the best one's. Wrong
implementations have no times, and so can win nothing.

Legend: a record is one entry of results["measurements"].
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dilated_attention.bench.subject import BOTH, FORWARD

Record = dict[str, Any]
Results = dict[str, Any]
OURS, DENSE = ("head_groups, auto", "head_groups, sdpa"), "dense SDPA"  # the second where results have no first
FEWEST = 3  # lengths count at which at least so many were measured
SUITES = ("quick", "scaling", "ring")  # the others look at a few implementations only
ONCE, OFTEN = 0.05, 0.01  # how far a time may be off that was measured less often than that, or more
WIDE = ("function", "module", "baseline")


@dataclass(frozen=True)
class UseCase:
    """``fits`` picks the records; ``longest`` or shortest length; ``figure`` is what the least of is best."""

    name: str
    fits: Callable[[Record], bool]
    longest: bool = True
    figure: str = "ms"


def _one_device(record: Record, rule: str, direction: str, *, causal: bool = False) -> bool:
    attends = record["kind"] in WIDE and record["ranks"] == 1
    return bool(attends and record["rule"] == rule and record["direction"] == direction and record["causal"] == causal)


def _projecting(record: Record, direction: str) -> bool:
    dilated = record["kind"] == "multihead" and record["rule"] != "dense" and not record["causal"]
    return bool(dilated and record["direction"] == direction)


def _over(record: Record, ranks: int) -> bool:
    attends = (
        record["kind"] == "ring" and record["rule"] == "head_groups" and "Multihead" not in record["implementation"]
    )
    alone = "RingAdvanced" not in record["implementation"]
    return bool(attends and alone and record["ranks"] == ranks and record["direction"] == BOTH
                and not record["causal"])  # fmt: skip


USE_CASES = (
    UseCase("inference on short sequences", lambda x: _one_device(x, "head_groups", FORWARD), longest=False),
    UseCase("inference on long sequences", lambda x: _one_device(x, "head_groups", FORWARD)),
    UseCase("training on short sequences", lambda x: _one_device(x, "head_groups", BOTH), longest=False),
    UseCase("training on long sequences", lambda x: _one_device(x, "head_groups", BOTH)),
    UseCase("causal training", lambda x: _one_device(x, "head_groups", BOTH, causal=True)),
    UseCase("least memory in training", lambda x: _one_device(x, "head_groups", BOTH), figure="peak_bytes"),
    UseCase("all heads in all branches, as in the LongNet paper", lambda x: _one_device(x, "longnet", BOTH)),
    UseCase("weights of released LongNet models, inference", lambda x: _one_device(x, "torchscale", FORWARD)),
    UseCase("a layer with projections, inference", lambda x: _projecting(x, FORWARD)),
    UseCase("a layer with projections, training", lambda x: _projecting(x, BOTH)),
    UseCase("one sequence over 2 processes of this machine", lambda x: _over(x, 2)),
    UseCase("one sequence over 4 processes of this machine", lambda x: _over(x, 4)),
    UseCase("least memory a process, 4 processes", lambda x: _over(x, 4), figure="peak_bytes"),
)


def recommend(results: Results) -> dict[str, Any]:
    """recommendations (one for each use case), matrix (one for each implementation) and answer, for results.json."""
    found = [(case, _ranking(case, results["measurements"])) for case in USE_CASES]
    ranked = [(case, ranking) for case, ranking in found if len(ranking) > 1]
    return {
        "recommendations": [_recommendation(case, ranking, results["measurements"]) for case, ranking in ranked],
        "matrix": _matrix(results, ranked),
        "answer": answer(results),
    }


# --- use cases --------------------------------------------------------------------------------------------------


def _ranking(case: UseCase, measurements: Sequence[Record]) -> list[Record]:
    """The records of the setting that this case looks at, best first; one for each implementation."""
    groups: dict[tuple[Any, ...], dict[str, Record]] = defaultdict(dict)
    for record in measurements:
        known = record["status"] == "measured" and record[case.figure] is not None
        if known and record["suite"] in SUITES and case.fits(record):
            key = ("suite", "tokens", "samples", "heads", "head_dim", "lengths", "rates", "dtype")
            groups[tuple(str(record[name]) for name in key)].setdefault(record["implementation"], record)
    if not groups:
        return []
    most = max(len(group) for group in groups.values())
    fewest = min(most, FEWEST) if case.longest else most / 2  # at a short length most of them were measured
    full = [group for group in groups.values() if len(group) >= fewest]
    group = max(full, key=lambda group: (_length(group) if case.longest else -_length(group), len(group)))
    return sorted(group.values(), key=lambda record: _figure(case, record))


def _length(group: dict[str, Record]) -> int:
    record = next(iter(group.values()))
    return int(record["tokens"])


def _figure(case: UseCase, record: Record) -> float:
    found = record[case.figure]
    return float(found["median"] if case.figure == "ms" else found)


def _tied(case: UseCase, best: Record, other: Record) -> bool:
    if case.figure == "ms":
        return spread(other)[0] <= spread(best)[1]
    return bool(_figure(case, other) <= 1.02 * _figure(case, best))


def spread(record: Record) -> tuple[float, float]:
    """The quartiles, and at least what a time may be off by; that is more where it was measured once or twice."""
    timing = record["ms"]
    off = ONCE if timing["repeats"] < FEWEST else OFTEN
    return min(timing["lower"], (1 - off) * timing["median"]), max(timing["upper"], (1 + off) * timing["median"])


def _recommendation(case: UseCase, ranking: list[Record], measured: list[Record]) -> dict[str, Any]:
    level = [record for record in ranking if record is ranking[0] or _tied(case, ranking[0], record)]
    best = min(level, key=measured.index)  # of those that are level the plainest, which stands first
    ties = [record["implementation"] for record in level if record is not best]
    behind = next((record for record in ranking if record not in level), None)
    return {
        "use_case": f"{case.name} ({best['tokens']:,} tokens, {best['dtype']})",
        "best": best["implementation"],
        "value": _value(case, best),
        "runner_up": None if behind is None else behind["implementation"],
        "factor": None if behind is None else _figure(case, behind) / _figure(case, best),
        "ties": ties,
    }


def short(number: float) -> str:
    """Three digits, and no powers of ten."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _value(case: UseCase, record: Record) -> str:
    if case.figure == "ms":
        return f"{short(_figure(case, record))} ms"
    return f"{_figure(case, record) / (1 << 20):,.0f} MiB beyond the inputs"


# --- implementations --------------------------------------------------------------------------------------------


def _matrix(results: Results, ranked: list[tuple[UseCase, list[Record]]]) -> list[dict[str, Any]]:
    """What each implementation is best for, and how far behind the best it is where it is compared."""
    best_for: dict[str, list[str]] = defaultdict(list)
    behind: dict[str, list[float]] = defaultdict(list)
    for case, ranking in ranked:
        for record in ranking:
            if record is ranking[0] or _tied(case, ranking[0], record):
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
    if check["verdict"] == "exact":
        return ""
    if check["why"]:
        return str(check["why"])
    wrong = [name for name, error in check["errors"].items() if not float(error) <= float(check["limits"][name])]
    return ", ".join(f"{name} off by {float(check['errors'][name]):.1e}" for name in wrong[:3])


# --- the answer -------------------------------------------------------------------------------------------------


def answer(results: Results) -> str:
    """Two sentences: what to use and how it compares; how many were right."""
    if not results["checks"]:
        return "Nothing was checked, so nothing was timed. Run a suite to get an answer."
    return f"{_first(results['measurements'])} {_second(results['checks'])}"


def _first(measurements: Sequence[Record]) -> str:
    """Training under the rule head_groups, beside dense attention and the best other exact implementation."""
    at: dict[tuple[str, ...], dict[str, Record]] = defaultdict(dict)
    for record in measurements:
        wanted = record["suite"] in SUITES and record["direction"] == BOTH and not record["causal"]
        if wanted and record["samples"] == 1 and record["status"] == "measured" and record["ms"]:
            key = ("suite", "tokens", "heads", "head_dim", "lengths", "rates", "dtype")
            at[tuple(str(record[name]) for name in key)].setdefault(record["implementation"], record)
    dense: dict[int, tuple[Record, Record]] = {}
    others: dict[int, tuple[Record, Record]] = {}
    known = {record["implementation"] for record in measurements}
    name = next((name for name in OURS if name in known), OURS[0])
    for found in at.values():
        if name not in found:
            continue
        mine, tokens = found[name], found[name]["tokens"]
        if DENSE in found:
            dense.setdefault(tokens, (mine, found[DENSE]))
        same = [x for x in found.values() if not x["ours"] and (x["rule"], x["kind"]) == ("head_groups", "baseline")]
        if same:
            others.setdefault(tokens, (mine, min(same, key=lambda x: float(x["ms"]["median"]))))
    if not dense:
        return "The speed of `dilated_attention` beside dense attention was not measured in this run."
    said = (
        f"In training, `dilated_attention` is {_compared(*dense[max(dense)])} dense attention (another operation) at "
    )
    said += f"{max(dense):,} tokens"
    if others:
        mine, best = others[max(others)]
        said += f", and {_compared(mine, best)} the best other exact implementation, `{best['implementation']}`, at "
        said += f"{max(others):,} tokens"
    slower = [tokens for tokens, (mine, other) in dense.items() if spread(other)[1] < spread(mine)[0]]
    return said + (f". At {max(slower):,} tokens dense attention is still faster." if slower else ".")


def _compared(mine: Record, other: Record) -> str:
    """How fast ours is beside another; where quartiles overlap neither is faster."""
    (low, high), (other_low, other_high) = spread(mine), spread(other)
    if low <= other_high and other_low <= high:
        return "about as fast as"
    factor = other["ms"]["median"] / mine["ms"]["median"]
    return f"{short(factor)} times as fast as" if factor >= 1 else f"{short(1 / factor)} times slower than"


def _second(checks: Sequence[Record]) -> str:
    verdicts: dict[str, set[str]] = defaultdict(set)
    ours: dict[str, bool] = {}
    for check in checks:
        verdicts[check["implementation"]].add(check["verdict"])
        ours[check["implementation"]] = check["ours"]
    wrong = [name for name, found in verdicts.items() if found != {"exact"}]
    mine = [name for name in wrong if ours[name]]
    if not wrong:
        return (
            f"All {len(verdicts)} implementations matched the float64 oracle, gradients included, before any was timed."
        )
    whose = "none of them ours" if not mine else f"{len(mine)} of them ours ({', '.join(mine)})"
    return (
        f"{len(verdicts) - len(wrong)} of {len(verdicts)} implementations matched the float64 oracle, gradients "
        f"included; {len(wrong)} did not, {whose}: {', '.join(f'`{name}`' for name in wrong)}."
    )
