"""Claims that others published about dilated attention, each beside what was measured here: does it hold?

They are from the benchmark reports in the DarcStar fork of dilated-attention-pytorch. Only the claims are written by
hand. A claim that the results say nothing about is "not measured".

Legend: a record is one entry of results["measurements"]; "saved" is 1 - after / before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from dilated_attention.bench.recommend import recommend, spread
from dilated_attention.units import number_text

Results = dict[str, Any]
Record = dict[str, Any]
Finding = tuple[str, str, str]  # what was measured here, whether the claim holds, and how that is known
Find = Callable[[Results], Finding | None]
IMPROVED = ("DilatedAttention", "ImprovedDilatedAttention")
SAME = ("suite", "samples", "tokens", "heads", "head_dim", "lengths", "rates", "dtype", "causal", "direction")


def conclusions(results: Results) -> dict[str, Any]:
    """All that follows from checks, measurements and tables, for results.json."""
    return {"claims": claims(results), **recommend(results)}


def claims(results: Results) -> list[dict[str, str]]:
    """Every claim, with the figures that the results have for it."""
    found = []
    for claim, claimed, find in CLAIMS:
        ours, holds, how = find(results) or ("", "not measured", "")
        found.append({"claim": claim, "claimed": claimed, "ours": ours, "holds": holds, "how": how})
    return found


# --- faults of measurement --------------------------------------------------------------------------------------


def _over_heads(results: Results) -> Finding | None:
    found = [x for x in results["checks"] if x["implementation"] == "attention over heads" and x["errors"]]
    if not found:
        return None
    error, limit = float(found[0]["errors"]["out"]), float(found[0]["limits"]["out"])
    how = "checked against the float64 oracle before any timing"
    off = f"out is off by {error:.1e}, allowed {limit:.1e}"
    return (
        (off, "yes", how)
        if error <= limit
        else (f"it attends over heads, not tokens: {off}; it gets no time", "no", how)
    )


def _zero_memory(results: Results) -> Finding | None:
    known = [x for x in results["measurements"] if peak_of(x) is not None and x["ranks"] == 1]
    if not known:
        return None
    least = min(known, key=lambda x: x["peak_bytes"] / _out_bytes(x))
    times = least["peak_bytes"] / _out_bytes(least)
    ours = f"at least {times:.2f} times the size of out ({least['implementation']}, {least['tokens']:,} tokens)"
    how = f"{len(known)} measurements: the peak of what PyTorch allocates beyond the inputs"
    return ours, "no" if times > 0.5 else "yes", how


def _out_bytes(record: Record) -> int:
    size = {"float64": 8, "float32": 4}.get(record["dtype"], 2)
    return int(record["samples"] * record["tokens"] * record["heads"] * record["head_dim"] * size)


def _ring_of_one(results: Results) -> Finding | None:
    pairs = [
        pair for pair in _pairs(results, "DilatedAttention", "RingDilatedAttention") if pair[0]["ms"] and pair[1]["ms"]
    ]
    ratios = [ring["ms"]["median"] / plain["ms"]["median"] for plain, ring in pairs]
    if not ratios:
        return None
    slower = sum(spread(ring)[0] > spread(plain)[1] for plain, ring in pairs)
    ours = f"{min(ratios):.2f} to {max(ratios):.2f} times its time, median {statistics.median(ratios):.2f}"
    how = f"{len(ratios)} settings; in {slower} it is slower by more than the quartiles"
    return ours, "yes" if slower > len(ratios) / 2 else "no", how


# --- savings ----------------------------------------------------------------------------------------------------


def time_of(record: Record) -> float | None:
    return None if record["ms"] is None else float(record["ms"]["median"])


def peak_of(record: Record) -> float | None:
    known = record["status"] == "measured" and record["peak_bytes"] is not None
    return float(record["peak_bytes"]) if known else None


def speed_of(record: Record) -> float | None:
    return None if record["tokens_per_s"] is None else -float(record["tokens_per_s"])  # more is less time


def _improved(figure: Callable[[Record], float | None], least: float, *words: str) -> Find:
    """How much less ImprovedDilatedAttention takes."""

    def find(results: Results) -> Finding | None:
        pairs = [(figure(one), figure(other)) for one, other in _pairs(results, *IMPROVED)]
        saved = [(one - other) / abs(one) for one, other in pairs if one and other]
        how = f"{len(saved)} settings, medians; in this package both are one function, so what differs is noise"
        return (_range(saved, *words), _holds(saved, least), how) if saved else None

    return find


def _optimisation(what: str, least: float) -> Find:
    """One of the optimisations that its suite switched off and on."""

    def find(results: Results) -> Finding | None:
        rows = [row for row in _optimisations(results) if row[0] == what and row[5] is not None]
        if not rows:
            return None
        saved = [float(row[5]) for row in rows]
        if what == "DDP bucket size":  # tuned is the best of those tried
            saved = [max(saved)]
        how = "; ".join(f"{row[1]}: {number_text(row[2])} off, {number_text(row[3])} on, {row[4]}" for row in rows)
        return _range(saved), _holds(saved, least), how

    return find


def _communication(results: Results) -> Finding | None:
    rows = [row for row in _optimisations(results) if row[0] == "time in communication"]
    if not rows:
        return None
    ours = "; ".join(f"{row[3]:.1f} % with {row[1].partition(',')[0]}" for row in rows)
    is_within = all(10 <= row[3] <= 15 for row in rows)
    return ours, "yes" if is_within else "no", "waiting for others, over gloo on one machine"


def _optimisations(results: Results) -> list[list[Any]]:
    return [row for table in results["tables"] if table["suite"] == "optimisations" for row in table["rows"]]


# --- shared -----------------------------------------------------------------------------------------------------


def _pairs(results: Results, before: str, after: str) -> list[tuple[Record, Record]]:
    """Records of two implementations in the same setting and suite."""
    by_key: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in results["measurements"]:
        if record["implementation"] in (before, after):
            by_key.setdefault(tuple(str(record[name]) for name in SAME), {})[record["implementation"]] = record
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


CLAIMS: tuple[tuple[str, str, Find], ...] = (
    ("An implementation is many times faster than the others", "17 times faster", _over_heads),
    ("A call takes no memory", "0 MB", _zero_memory),
    ("A ring with ring_size=1 is slower than DilatedAttention", "slower", _ring_of_one),
    ("ImprovedDilatedAttention takes less time", "30–50 % faster", _improved(time_of, 0.30)),
    ("ImprovedDilatedAttention takes less memory", "15–20 % less", _improved(peak_of, 0.15)),
    ("ImprovedDilatedAttention has more tokens per second", "25–40 % more", _improved(speed_of, 0.25, "more", "fewer")),
    ("Reusing buffers takes less memory", "40–60 % less", _optimisation("buffers reused", 0.40)),
    ("Caching the plan takes less time", "25–40 % faster", _optimisation("plan cached", 0.25)),
    ("K and V packed in one message halve the latency", "half", _optimisation("K/V in one message", 0.50)),
    ("One fused qkv projection takes less time", "30–50 % faster", _optimisation("qkv fused", 0.30)),
    ("Tuned DDP bucket sizes take less time", "15–25 % faster", _optimisation("DDP bucket size", 0.15)),
    ("The share of time that a ring spends in communication", "10–15 %", _communication),
)
