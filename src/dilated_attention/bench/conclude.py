"""What follows from checks, measurements and tables: which to use for what, claims of others, the answer in a few
sentences.

A use case compares what computes the same thing. Two are equally fast if their quartiles overlap. What is wrong has no
times, so it can win nothing. The other names of one function are left out. The claims are from the benchmark reports in
the DarcStar fork of dilated-attention-pytorch; only those that the results say something about are listed.

Legend: a record is one entry of results["measurements"]; "saved" is 1 - after / before.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dilated_attention.bench.results import DIRECTIONS, ENOUGH, Record, far_off, setting
from dilated_attention.pattern import RULES, DilatedPattern
from dilated_attention.units import bytes_text, number_text

FORWARD, BOTH = DIRECTIONS
OURS, DENSE = ("head_groups, auto", "head_groups, sdpa"), "dense SDPA"  # the second where results have no first
SUITES = ("quick", "scaling", "ring", "suggested")  # the others look at a few implementations only
CLAIMED_IN = {"copies", "improved", "ring", "profile", "scaling", "optimisations"}
ONCE, OFTEN = 0.05, 0.01  # how far a time may be off that was measured less often than ENOUGH, or more
# One of each way to compute it: they are timed at every length, and seen first.
TELLING = (
    DENSE, "head_groups, auto", "longnet, auto", "torchscale, auto", "copy and gather, slicing", "gather-pad-scatter",
    "copy and gather, index_select", "head_groups, sdpa", "longnet, sdpa", "torchscale, sdpa",
)  # fmt: skip
# On one device these classes call that function and do nothing else.
ONE_FUNCTION = {
    "DilatedAttention": "head_groups, auto",
    "ImprovedDilatedAttention": "head_groups, auto",
    "RingDilatedAttention": "head_groups, auto",
    "RingDilatedAttentionV2Collective": "head_groups, auto",
    "RingMultiheadDilatedAttention": "MultiheadDilatedAttention",
}
BASELINES = {  # how their names begin, and what they are in dilated_attention.bench.baselines
    "copy and gather, slicing": "copy_slices", "copy and gather, index": "copy_and_gather", "dense": "dense",
    "gather-pad-scatter": "gather_pad_scatter", "FlexAttention": "flex", "attention over heads": "over_heads",
}  # fmt: skip


def conclusions(results: Record) -> Record:
    """All of it, for results.json."""
    records = folded(results["measurements"])
    ranked = [(case, _ranking(case, records)) for case in USE_CASES]
    found = [_recommendation(case, ranking, records) for case, ranking in ranked if len(ranking) > 1]
    return {"claims": claims(results), "recommendations": found, "answer": answer(results)}


def folded(measurements: Iterable[Record]) -> list[Record]:
    """Without the other names of a function where the function itself was measured, too."""
    found = list(measurements)
    present = {(setting(one), one["tokens"], one["direction"], one["implementation"]) for one in found}

    def is_alias(one: Record) -> bool:
        function = ONE_FUNCTION.get(one["implementation"])
        return one["ranks"] == 1 and (setting(one), one["tokens"], one["direction"], function) in present

    return [one for one in found if not is_alias(one)]


def code_of(name: str) -> str:
    """What to import or call for an implementation."""
    first, _, rest = name.partition(", ")
    baseline = next((one for begin, one in BASELINES.items() if name.startswith(begin)), None)
    if baseline is not None:
        return f"dilated_attention.bench.baselines.{baseline}"
    if first not in RULES:
        return f"torch.{first}" if "." in first else f"dilated_attention.{first}"
    backend = rest.removesuffix(", compiled")
    chosen = "" if backend == "auto" else f', backend="{backend}"'
    call = f"dilated_attention(q, k, v, DilatedPattern.{first}(w, r){chosen})"
    return f"torch.compile: {call}" if backend != rest else call


# --- which to use -----------------------------------------------------------------------------------------------


class UseCase(NamedTuple):
    """Records of these kinds and values; at the longest or shortest length; the least of ``figure`` is best."""

    name: str
    kinds: Sequence[str]
    wanted: Record
    longest: bool = True
    figure: str = "ms"

    def fits(self, record: Record) -> bool:
        return record["kind"] in self.kinds and all(record[name] == value for name, value in self.wanted.items())

    def value(self, record: Record) -> float:
        return float(record["ms"]["median"] if self.figure == "ms" else record[self.figure])

    def is_level(self, best: Record, other: Record) -> bool:
        if self.figure == "ms":
            return spread(other)[0] <= spread(best)[1]
        return self.value(other) <= 1.02 * self.value(best)


def _alone(name: str, rule: str, direction: str = BOTH, causal: bool = False, **more: Any) -> UseCase:
    """Attention on one device."""
    wanted = {"rule": rule, "direction": direction, "causal": causal, "ranks": 1}
    return UseCase(name, ("function", "module", "baseline"), wanted, **more)


USE_CASES = (
    _alone("training on long sequences", "head_groups"),
    _alone("training on short sequences", "head_groups", longest=False),
    _alone("inference on long sequences", "head_groups", FORWARD),
    _alone("causal training", "head_groups", causal=True),
    _alone("least memory in training", "head_groups", figure="peak_bytes"),
    _alone("every head in every branch, as in the LongNet paper", "longnet"),
    _alone("weights of released LongNet models", "torchscale", FORWARD),
    UseCase("a layer with projections", ["multihead"], {"ours": True, "direction": BOTH, "causal": False}),
    UseCase(
        "one sequence over 4 processes of this machine",
        ["ring"],
        {"ranks": 4, "direction": BOTH, "causal": False, "rule": "head_groups"},
    ),
)


def _by_setting(records: Iterable[Record]) -> list[dict[str, Record]]:
    """The records of each setting and length, by implementation."""
    groups: dict[tuple[str, int], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record["suite"] in SUITES and record["status"] == "measured":
            groups[setting(record), record["tokens"]].setdefault(record["implementation"], record)
    return list(groups.values())


def _ranking(case: UseCase, records: Iterable[Record]) -> list[Record]:
    """The records of the setting that this case looks at, best first; one for each implementation."""
    groups = _by_setting(x for x in records if case.fits(x) and x[case.figure] is not None)
    if not groups:
        return []
    most = max(len(group) for group in groups)
    fewest = min(most, ENOUGH) if case.longest else most / 2  # at a short length most of them were measured
    full = [list(group.values()) for group in groups if len(group) >= fewest]
    sign = 1 if case.longest else -1
    chosen = max(full, key=lambda group: (sign * int(group[0]["tokens"]), len(group)))
    return sorted(chosen, key=case.value)


def spread(record: Record) -> tuple[float, float]:
    """The quartiles, and at least what a time may be off by; that is more where it was measured once or twice."""
    timing = record["ms"]
    off = ONCE if timing["repeats"] < ENOUGH else OFTEN
    return min(timing["lower"], (1 - off) * timing["median"]), max(timing["upper"], (1 + off) * timing["median"])


def _recommendation(case: UseCase, ranking: list[Record], measured: list[Record]) -> Record:
    level = [record for record in ranking if case.is_level(ranking[0], record)]
    best = min(level, key=measured.index)  # of those that are level the plainest, which stands first
    behind = next((record for record in ranking if record not in level), None)
    value = case.value(best)
    return {
        "use_case": f"{case.name} ({best['tokens']:,} tokens, {best['dtype']})",
        "best": best["implementation"],
        "value": f"{number_text(value)} ms" if case.figure == "ms" else f"{value / 2**20:,.0f} MiB beyond the inputs",
        "runner_up": None if behind is None else behind["implementation"],
        "factor": None if behind is None else case.value(behind) / value,
        "ties": [record["implementation"] for record in level if record is not best],
    }


# --- the answer -------------------------------------------------------------------------------------------------


def answer(results: Record) -> str:
    """How fast the library is in training, and with which pattern; how many implementations are right."""
    if not results["checks"]:
        return "Nothing was checked, so nothing was timed. Run a suite to get an answer."
    return f"{_speed(results['measurements'])} {_right(results['checks'])}"


def _speed(measurements: Sequence[Record]) -> str:
    """Training under the rule head_groups, beside dense attention and the best other exact implementation."""
    wanted = {"direction": BOTH, "causal": False, "samples": 1}
    groups = _by_setting(x for x in measurements if x["ms"] and all(x[key] == wanted[key] for key in wanted))
    known = {record["implementation"] for record in measurements}
    name = next((name for name in OURS if name in known), OURS[0])
    dense: dict[int, tuple[Record, Record]] = {}
    others: dict[int, tuple[Record, Record]] = {}
    for group in (group for group in groups if name in group):
        mine, tokens = group[name], group[name]["tokens"]
        same = [x for x in group.values() if not x["ours"] and (x["rule"], x["kind"]) == (mine["rule"], "baseline")]
        if DENSE in group:
            dense.setdefault(tokens, (mine, group[DENSE]))
        if same:
            others.setdefault(tokens, (mine, min(same, key=lambda x: float(x["ms"]["median"]))))
    if not dense:
        return "The speed of this library beside dense attention was not measured in this run."
    longest = max(dense)
    mine, other = dense[longest]
    lengths, rates = (",".join(map(str, mine[key])) for key in ("lengths", "rates"))
    said = (
        f"In training at {longest:,} tokens under {mine['rule']} with w={lengths} and r={rates}, this library is "
        f"{_compared(mine, other)} dense attention (a different operation)"
    )
    if others:
        tokens = max(others)
        where = "" if tokens == longest else f" at {tokens:,} tokens"
        best = others[tokens][1]["implementation"]
        said += f", and{where} {_compared(*others[tokens])} the best exact alternative, {best}"
    pattern = DilatedPattern(mine["rule"], mine["lengths"], mine["rates"])
    reach, share = far_rows(pattern, longest, mine["heads"])
    said += f". {share:.1%} of the rows (one token in one head) are in the longest segments, of {reach:,} tokens."
    slower = [tokens for tokens, (mine, other) in dense.items() if spread(other)[1] < spread(mine)[0]]
    return f"{said} At {max(slower):,} tokens dense attention is faster." if slower else said


def far_rows(pattern: DilatedPattern, tokens: int, heads: int) -> tuple[int, float]:
    """Tokens of the longest segment, and the share of all rows (one token in one head) that are in the branch it is
    of."""
    width = max(pattern.segment_lengths)
    branch = pattern.segment_lengths.index(width)
    rows = sum(
        len(
            range(
                start + pattern.offset(branch, head, heads), min(start + width, tokens), pattern.dilation_rates[branch]
            )
        )
        for head in pattern.heads(branch, heads)
        for start in range(0, tokens, width)
    )
    return min(width, tokens), rows / (tokens * heads)


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
    if mine:
        return f"{said}; wrong ones of this library: {', '.join(mine)}."
    if wrong:
        return f"{said}; the others are not of this library."
    only_outputs = any(set(check["errors"]) == {"out"} for check in checks)
    return f"{said} in their outputs." if only_outputs else f"{said}, gradients included."


# --- claims of others -------------------------------------------------------------------------------------------

HEADS, NO_MEMORY = "attention over heads", "peak_bytes"
SAME = ("DilatedAttention", "ImprovedDilatedAttention")
# What is claimed; by how much; the share that must be saved at least; and two implementations and the figure of which
# the second takes less. Of the first two claims there is one implementation, or one figure of all.
CLAIMS: tuple[tuple[str, str, float, Any], ...] = (
    ("An implementation is many times faster than the others", "17 times faster", 0, HEADS),
    ("A call takes no memory", "0 MB", 0, NO_MEMORY),
    ("DilatedAttention takes less time than a ring with ring_size=1", "less", 0.02,
     ("RingDilatedAttention", "DilatedAttention", "ms")),
    ("ImprovedDilatedAttention takes less time", "30–50 % less", 0.3, (*SAME, "ms")),
    ("ImprovedDilatedAttention takes less memory", "15–20 % less", 0.15, (*SAME, "peak_bytes")),
    ("Reusing buffers takes less memory", "40–60 % less", 0.4,
     ("RingDilatedAttention, 2 ranks", "RingDilatedAttentionProduction, 2 ranks", "peak_bytes")),
    ("Caching the plan takes less time", "25–40 % less", 0.25,
     ("longnet, sdpa, plans not cached", "longnet, sdpa", "ms")),
    ("One fused qkv projection takes less time", "30–50 % less", 0.3,
     ("MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention", "ms")),
)  # fmt: skip


def claims(results: Record) -> list[dict[str, str]]:
    """The claims that these suites look at and have figures for."""
    found = []
    for claim, claimed, least, where in CLAIMS if CLAIMED_IN & set(results["suites"]) else ():
        ours, holds, how = _finding(results, least, where)
        if ours:
            told = {"claim": claim, "claimed": claimed, "ours": ours, "holds": "yes" if holds else "no", "how": how}
            found.append(told)
    return found


def _finding(results: Record, least: float, where: Any) -> tuple[str, bool, str]:
    """What was measured here, whether the claim holds, and how that is known; the first is "" if nothing was."""
    if where == HEADS:
        checks = [x for x in results["checks"] if x["implementation"] == where]
        wrong = next((text for x in checks for text in far_off(x["errors"], x["limits"])), "")
        return (f"it attends over heads, not tokens: {wrong}" if checks else ""), not wrong, "it gets no time"
    if where == NO_MEMORY:
        peaks = [x["peak_bytes"] for x in results["measurements"] if x["status"] == "measured" and x["peak_bytes"]]
        return (f"at least {bytes_text(min(peaks))}" if peaks else ""), not peaks, "beyond the inputs"
    saved = _saved(results["measurements"], *where)
    if not saved:
        return "", False, ""
    low, median, high = (_less(share) for share in (min(saved), statistics.median(saved), max(saved)))
    how = f"from {low} to {high} in {len(saved)} settings and passes"
    return f"{median} in the median", statistics.median(saved) >= least, how


def _less(share: float) -> str:
    return f"{abs(100 * share):.0f} % {'less' if share >= 0 else 'more'}"


def _saved(records: Iterable[Record], before: str, after: str, figure: str) -> list[float]:
    """The shares that the second of two implementations takes less, in the settings of both."""
    groups: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for record in records:
        if record["status"] == "measured" and record[figure]:
            value = record["ms"]["median"] if figure == "ms" else record[figure]
            groups[setting(record), record["tokens"], record["direction"]][record["implementation"]] = value
    return [1 - group[after] / group[before] for group in groups.values() if before in group and after in group]
