"""The claims of published reports on dilated attention, each beside what was measured here: does it hold?

A claim without a measurement in the results is listed as not measured; nothing here is written by hand but the claims.

Legend: a record is one entry of results["measurements"]; "saved" is 1 - after / before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dilated_attention.bench.recommend import recommend, short, spread

Results = dict[str, Any]
Pair = tuple[dict[str, Any], dict[str, Any]]
ONE_FUNCTION = "; in this package both are one function, so what differs is noise"
SAME = ("suite", "samples", "tokens", "heads", "head_dim", "lengths", "rates", "dtype", "causal", "direction")


@dataclass(frozen=True)
class Claim:
    claim: str
    claimed: str
    ours: str
    holds: str  # yes, no, not measured
    how: str


def conclusions(results: Results) -> dict[str, Any]:
    """All that follows from checks, measurements and tables, for results.json."""
    return {"claims": claims(results), **recommend(results)}


def claims(results: Results) -> list[dict[str, Any]]:
    """Every claim, with the figures that the results have for it."""
    return [asdict(one) for one in _all(results)]


def _all(results: Results) -> Iterator[Claim]:
    yield _over_heads(results)
    yield _zero_memory(results)
    yield _ring_of_one(results)
    improved = ("DilatedAttention", "ImprovedDilatedAttention")
    yield _saving(results, *improved, "ImprovedDilatedAttention takes less time", "30–50 % faster", 0.30, time_of)
    yield _saving(results, *improved, "ImprovedDilatedAttention takes less memory", "15–20 % less", 0.15, peak_of)
    yield _throughput(results, *improved)
    for what, claim, claimed, least in (
        ("buffers reused", "Reusing buffers takes less memory", "40–60 % less", 0.40),
        ("plan cached", "Caching the plan takes less time", "25–40 % faster", 0.25),
        ("K/V in one message", "K and V packed in one message halve the latency", "half", 0.50),
        ("qkv fused", "One fused qkv projection takes less time", "30–50 % faster", 0.30),
        ("DDP bucket size", "Tuned DDP bucket sizes take less time", "15–25 % faster", 0.15),
    ):
        yield _optimisation(results, what, claim, claimed, least)
    yield _communication(results)


# --- faults of measurement --------------------------------------------------------------------------------------


def _over_heads(results: Results) -> Claim:
    claim, claimed = "An implementation is many times faster than the others", "17 times faster"
    found = [x for x in results["checks"] if x["implementation"] == "attention over heads" and x["errors"]]
    if not found:
        return _not_measured(claim, claimed)
    error, limit = float(found[0]["errors"]["out"]), float(found[0]["limits"]["out"])
    how = "checked against the float64 oracle before any timing"
    if error <= limit:
        return Claim(claim, claimed, f"out is off by {error:.1e}, allowed {limit:.1e}", "yes", how)
    ours = f"it attends over heads, not tokens: out is off by {error:.1e}, allowed {limit:.1e}; it gets no time"
    return Claim(claim, claimed, ours, "no", how)


def _zero_memory(results: Results) -> Claim:
    claim, claimed = "A call takes no memory", "0 MB"
    known = [x for x in results["measurements"] if peak_of(x) is not None and x["ranks"] == 1]
    if not known:
        return _not_measured(claim, claimed)
    least = min(known, key=lambda x: x["peak_bytes"] / _out_bytes(x))
    times = least["peak_bytes"] / _out_bytes(least)
    ours = f"at least {times:.2f} times the size of out ({least['implementation']}, {least['tokens']:,} tokens)"
    how = f"{len(known)} measurements: CUDA's peak beyond inputs, or the peak of a fresh process"
    return Claim(claim, claimed, ours, "no" if times > 0.5 else "yes", how)


def _out_bytes(record: dict[str, Any]) -> int:
    size = {"float64": 8, "float32": 4}.get(record["dtype"], 2)
    return int(record["samples"] * record["tokens"] * record["heads"] * record["head_dim"] * size)


def _ring_of_one(results: Results) -> Claim:
    claim, claimed = "A ring with ring_size=1 is slower than DilatedAttention", "slower"
    pairs = _pairs(results, "DilatedAttention", "RingDilatedAttention")
    ratios = [after["ms"]["median"] / before["ms"]["median"] for before, after in pairs if before["ms"] and after["ms"]]
    if not ratios:
        return _not_measured(claim, claimed)
    slower = sum(_apart(before, after) for before, after in pairs if before["ms"] and after["ms"])
    ours = f"{min(ratios):.2f} to {max(ratios):.2f} times its time, median {statistics.median(ratios):.2f}"
    how = f"{len(ratios)} settings; in {slower} it is slower by more than the quartiles"
    return Claim(claim, claimed, ours, "yes" if slower > len(ratios) / 2 else "no", how)


def _apart(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return spread(after)[0] > spread(before)[1]


# --- savings ----------------------------------------------------------------------------------------------------


def time_of(record: dict[str, Any]) -> float | None:
    return None if record["ms"] is None else float(record["ms"]["median"])


def peak_of(record: dict[str, Any]) -> float | None:
    known = record["status"] == "measured" and record["peak_bytes"] is not None
    return float(record["peak_bytes"]) if known else None


def _saving(
    results: Results,
    before: str,
    after: str,
    claim: str,
    claimed: str,
    least: float,
    figure: Callable[[dict[str, Any]], float | None],
) -> Claim:
    pairs = [(figure(one), figure(other)) for one, other in _pairs(results, before, after)]
    saved = [1 - other / one for one, other in pairs if one and other]
    if not saved:
        return _not_measured(claim, claimed)
    return Claim(claim, claimed, _range(saved), _holds(saved, least), f"{len(saved)} settings, medians{ONE_FUNCTION}")


def _throughput(results: Results, before: str, after: str) -> Claim:
    claim, claimed = "ImprovedDilatedAttention has more tokens per second", "25–40 % more"
    pairs = _pairs(results, before, after)
    more = [b["tokens_per_s"] / a["tokens_per_s"] - 1 for a, b in pairs if a["tokens_per_s"] and b["tokens_per_s"]]
    if not more:
        return _not_measured(claim, claimed)
    how = f"{len(more)} settings, medians{ONE_FUNCTION}"
    return Claim(claim, claimed, _range(more, "more", "fewer"), _holds(more, 0.25), how)


def _optimisation(results: Results, what: str, claim: str, claimed: str, least: float) -> Claim:
    rows = [row for row in _optimisations(results) if row[0] == what and row[5] is not None]
    if not rows:
        return _not_measured(claim, claimed)
    saved = [float(row[5]) for row in rows]
    if what == "DDP bucket size":  # tuned is the best of those tried
        saved = [max(saved)]
    how = "; ".join(f"{row[1]}: {short(row[2])} off, {short(row[3])} on, {row[4]}" for row in rows)
    return Claim(claim, claimed, _range(saved), _holds(saved, least), how)


def _communication(results: Results) -> Claim:
    claim, claimed = "The share of time that a ring spends in communication", "10–15 %"
    rows = [row for row in _optimisations(results) if row[0] == "time in communication"]
    if not rows:
        return _not_measured(claim, claimed)
    ours = "; ".join(f"{row[3]:.1f} % with {row[1].partition(',')[0]}" for row in rows)
    within = all(10 <= row[3] <= 15 for row in rows)
    return Claim(claim, claimed, ours, "yes" if within else "no", "waiting for others, over gloo on one machine")


def _optimisations(results: Results) -> list[list[Any]]:
    return [row for table in results["tables"] if table["suite"] == "optimisations" for row in table["rows"]]


# --- shared -----------------------------------------------------------------------------------------------------


def _pairs(results: Results, before: str, after: str) -> list[Pair]:
    """Records of two implementations in the same setting and suite."""
    by_key: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for record in results["measurements"]:
        if record["implementation"] in (before, after):
            key = tuple(str(record[name]) for name in SAME)
            by_key.setdefault(key, {})[record["implementation"]] = record
    return [(both[before], both[after]) for both in by_key.values() if before in both and after in both]


def _range(saved: Sequence[float], less: str = "less", more: str = "more") -> str:
    def words(share: float) -> str:
        return f"{abs(100 * share):.0f} % {less if share >= 0 else more}"

    if len(saved) == 1:
        return words(saved[0])
    return f"{words(statistics.median(saved))} in the median, from {words(min(saved))} to {words(max(saved))}"


def _holds(saved: Sequence[float], least: float) -> str:
    """Whether what was measured reaches the claim's lower end."""
    return "yes" if statistics.median(saved) >= least else "no"


def _not_measured(claim: str, claimed: str) -> Claim:
    return Claim(claim, claimed, "", "not measured", "")
