"""Two results files beside one another: what became slower, faster, larger, wrong or right, and where they come from.

A change of time is one if the ratio of the medians passes the threshold, and the interval from the quartiles (lower of
one over upper of the other) leaves out 1. A ratio is after / before: more than 1 is slower or larger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dilated_attention.bench.results import ENOUGH, MEASURED_BY, WHAT, Record

MACHINE = ("device", "cpu", "cores", "threads", "system")
TOO_SLOW = "too slow to be timed"
EXPECTED = "one call is expected to take"  # how the reason of such a skip begins
WORSE = ("slower", TOO_SLOW, "wrong", "out of memory", "became wrong")


@dataclass(frozen=True)
class Change:
    """A measurement or a check in both files. ``ratio`` and its interval are None unless both have a time."""

    before: Record
    after: Record
    verdict: str  # slower, faster, same, unclear, or what the measurement's status or the check became
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    memory: float | None = None

    @property
    def is_worse(self) -> bool:
        return self.verdict in WORSE


@dataclass(frozen=True)
class Regression:
    origins: list[tuple[str, str, str]]  # (what, before, after) where the files come from different places
    changes: list[Change]
    verdicts: list[Change]  # of checks
    only_before: list[Record]
    only_after: list[Record]

    @property
    def is_other_machine(self) -> bool:
        return any(name in MACHINE for name, _, _ in self.origins)

    @property
    def is_worse(self) -> bool:
        return any(x.is_worse for x in (*self.changes, *self.verdicts))


def compare(before: Record, after: Record, threshold: float = 1.05) -> Regression:
    """``threshold``: the ratio from which a change counts, more than 1."""
    if not 1 < threshold < float("inf"):
        raise ValueError(f"threshold must be a ratio of more than 1, such as 1.05, got {threshold}")
    old, new = (_by_key(found["measurements"], MEASURED_BY) for found in (before, after))
    checked, again = (_by_key(found["checks"], WHAT) for found in (before, after))
    verdicts = []
    for key, one in checked.items():
        was, now = one["verdict"], again.get(key, one)["verdict"]
        if was != now:
            said = "became wrong" if was == "exact" else "is right" if now == "exact" else "is wrong"
            verdicts.append(Change(one, again[key], said))
    told = [{**found["machine"], **found["machine"]["versions"]} for found in (before, after)]
    names = {name: None for one in told for name in (*MACHINE, "commit", "dirty", *one["versions"])}
    origins = [(name, *(str(one.get(name, "none")) for one in told)) for name in names]
    return Regression(
        [(name, one, other) for name, one, other in origins if one != other],
        [_change(one, new[key], threshold) for key, one in old.items() if key in new],
        verdicts,
        [one for key, one in old.items() if key not in new],
        [one for key, one in new.items() if key not in old],
    )


def _by_key(records: Iterable[Record], names: Iterable[str]) -> dict[str, Record]:
    return {str([record[name] for name in names]): record for record in records}


def _change(before: Record, after: Record, threshold: float) -> Change:
    sizes, (old, new) = (before["peak_bytes"], after["peak_bytes"]), (before["ms"], after["ms"])
    memory, verdict = sizes[1] / sizes[0] if all(sizes) else None, str(after["status"])
    if before["status"] != verdict:
        if (before["status"], verdict) == ("wrong", "measured"):
            verdict = "right"
        elif old is not None and str(after["why"]).startswith(EXPECTED):
            verdict = TOO_SLOW
        return Change(before, after, verdict, memory=memory)
    if not (old and new):
        return Change(before, after, "unclear" if old or new else "same", memory=memory)
    ratio, low, high = new["median"] / old["median"], new["lower"] / old["upper"], new["upper"] / old["lower"]
    if min(old["repeats"], new["repeats"]) < ENOUGH:
        verdict = "unclear"
    elif low > 1 and ratio >= threshold:
        verdict = "slower"
    else:
        verdict = "faster" if high < 1 and ratio <= 1 / threshold else "same"
    return Change(before, after, verdict, ratio, low, high, memory)
