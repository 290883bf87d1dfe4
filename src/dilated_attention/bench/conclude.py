"""What follows from checks and measurements: which to use for what, claims of others, the answer in a few sentences.

Two are equally fast if their quartiles overlap. What is wrong has no times, so it can win nothing.
Legend: a record is one entry of results["measurements"]; "saved" is 1 - after / before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from dilated_attention.bench.results import DIRECTIONS, ENOUGH, Record, far_off, segments, setting
from dilated_attention.branches.base import grouped
from dilated_attention.pattern import RULES, DilatedPattern
from dilated_attention.units import number_text

FORWARD, BOTH = DIRECTIONS
OURS, DENSE = "head_groups, auto", "dense SDPA"
SUITES = ("quick", "scaling", "ring", "suggested")  # the others look at a few implementations only
ONCE, OFTEN = 0.05, 0.01  # how far a time may be off that was measured less often than ENOUGH, or more
# One of each way to compute it: they are timed at every length, and seen first.
TELLING = (
    DENSE, "head_groups, auto", "longnet, auto", "torchscale, auto", "copy and gather, slicing", "gather-pad-scatter",
    "copy and gather, index_select", "head_groups, sdpa", "longnet, sdpa", "torchscale, sdpa",
)  # fmt: skip
BASELINES = {  # how their names begin, and what they are in dilated_attention.bench.baselines
    "copy and gather, slicing": "copy_slices", "copy and gather, index": "copy_and_gather", "dense": "dense",
    "gather-pad-scatter": "gather_pad_scatter", "FlexAttention": "flex", "attention over heads": "over_heads",
}  # fmt: skip


def conclusions(results: Record) -> Record:
    found = filter(None, (_recommendation(case, results["measurements"]) for case in USE_CASES))
    return {"claims": claims(results), "recommendations": [*found], "answer": answer(results)}


def code_of(name: str) -> str:
    first, _, rest = name.partition(", ")
    if found := [one for begin, one in BASELINES.items() if name.startswith(begin)]:
        return f"dilated_attention.bench.baselines.{found[0]}"
    if first not in RULES:
        return f"torch.{first}" if "." in first else f"dilated_attention.{first}"
    backend = rest.removesuffix(", compiled")
    chosen = "" if backend == "auto" else f', backend="{backend}"'
    call = f"dilated_attention(q, k, v, DilatedPattern.{first}(w, r){chosen})"
    return f"torch.compile: {call}" if backend != rest else call


Figure = tuple[float, float, float]  # a value, and from where to where it may be


def time(record: Record) -> Figure:
    """May be off by its quartiles, and at least by what a time may be off; more where it was measured once or twice."""
    timing = record["ms"]
    off, median = ONCE if timing["repeats"] < ENOUGH else OFTEN, timing["median"]
    return median, min(timing["lower"], (1 - off) * median), max(timing["upper"], (1 + off) * median)


def memory(record: Record) -> Figure:
    return record["peak_bytes"], record["peak_bytes"], 1.02 * record["peak_bytes"]


class UseCase(NamedTuple):
    """Where it differs from training; at the longest or the shortest length; the least of ``figure`` is best."""

    name: str
    wanted: dict[str, Sequence[Any]]
    longest: bool = True
    figure: Callable[[Record], Figure] = time


TRAINING: dict[str, Sequence[Any]] = {
    "kind": ("function", "baseline"), "rule": ["head_groups"], "direction": [BOTH], "causal": [False], "ranks": [1],
    "suite": SUITES,
}  # fmt: skip
USE_CASES = (
    UseCase("training on long sequences", {}),
    UseCase("training on short sequences", {}, longest=False),
    UseCase("inference on long sequences", {"direction": [FORWARD]}),
    UseCase("causal training", {"causal": [True]}),
    UseCase("least memory in training", {}, figure=memory),
    UseCase("every head in every branch, as in the LongNet paper", {"rule": ["longnet"]}),
    UseCase("weights of released LongNet models", {"rule": ["torchscale"], "direction": [FORWARD]}),
    UseCase("a layer with projections", {"rule": (*RULES, "dense"), "kind": ["multihead"], "ours": [True]}),
    UseCase("one sequence over 4 processes of this machine", {"kind": ["ring"], "ranks": [4]}),
)


def _by_setting(records: Iterable[Record], **wanted: Sequence[Any]) -> list[dict[str, Record]]:
    """Those with figures and one of these values each: of each setting, length and direction by implementation."""
    some = (x for x in records if all(x[name] in values for name, values in wanted.items()))
    measured = (x for x in some if x["ms"] and x["peak_bytes"])
    groups = grouped(measured, lambda x: (setting(x), x["tokens"], x["direction"]))
    return [{x["implementation"]: x for x in alike} for alike in groups.values()]


def _recommendation(case: UseCase, records: Sequence[Record]) -> Record | None:
    """The best in the setting that this case looks at, if there is more than one."""
    groups = [[*group.values()] for group in _by_setting(records, **TRAINING | case.wanted)]
    fewest = min(ENOUGH, max(map(len, groups), default=0))
    full = [group for group in groups if len(group) >= fewest]
    sign = 1 if case.longest else -1
    ranking = max(full, key=lambda group: (sign * int(group[0]["tokens"]), len(group)), default=[])
    if len(ranking) < 2:
        return None
    ranking.sort(key=case.figure)
    most = case.figure(ranking[0])[2]
    level = [record for record in ranking if case.figure(record)[1] <= most]
    best = min(level, key=records.index)  # of those that are level the plainest, which stands first
    behind = next((record for record in ranking if record not in level), None)
    value = case.figure(best)[0]
    return {
        "use_case": f"{case.name} ({best['tokens']:,} tokens, {best['dtype']})",
        "best": best["implementation"],
        "value": f"{number_text(value)} ms" if case.figure is time else f"{value / 2**20:,.0f} MiB beyond the inputs",
        "runner_up": behind and behind["implementation"],
        "factor": behind and case.figure(behind)[0] / value,
        "ties": [record["implementation"] for record in level if record is not best],
    }


def answer(results: Record) -> str:
    """How fast the library is in training, and with which pattern; how many implementations are right."""
    if not (checks := results["checks"]):
        return "Nothing was checked, so nothing was timed. Run a suite to get an answer."
    every = {check["implementation"] for check in checks}
    wrong = {check["implementation"]: check["ours"] for check in checks if check["verdict"] != "exact"}
    right = f"{len(every) - len(wrong)} of {len(every)} implementations match the float64 oracle"
    said = f"{_speed(results['measurements'])} {right}"
    if any(wrong.values()):
        return f"{said}; wrong ones of this library: {', '.join(sorted(filter(wrong.get, wrong)))}."
    if wrong:
        return f"{said}; the others are not of this library."
    only_outputs = any(set(check["errors"]) == {"out"} for check in checks)
    return f"{said} in their outputs." if only_outputs else f"{said}, gradients included."


def _speed(measurements: Sequence[Record]) -> str:
    """Training under the rule head_groups, beside dense attention and the best other exact implementation."""
    found = _by_setting(measurements, suite=SUITES, direction=[BOTH], causal=[False], samples=[1])
    groups = {x[OURS]["tokens"]: x for x in reversed(found) if OURS in x and DENSE in x}  # of each length the first
    if not groups:
        return "The speed of this library beside dense attention was not measured in this run."
    longest, group = max(groups.items(), key=lambda item: item[0])
    mine = group[OURS]
    said = (
        f"In training at {longest:,} tokens under {mine['rule']} with {segments(mine).replace(' ', ' and ')}, this "
        f"library is {_compared(mine, group[DENSE])} dense attention (a different operation)"
    )
    if others := [x for x in group.values() if (x["kind"], x["rule"]) == ("baseline", mine["rule"])]:
        best = min(others, key=time)
        said += f", and {_compared(mine, best)} the best exact alternative, {best['implementation']}"
    reach, share = far_rows(DilatedPattern(mine["rule"], mine["lengths"], mine["rates"]), longest, mine["heads"])
    said += f". {share:.1%} of the rows (one token in one head) are in the longest segments, of {reach:,} tokens."
    slower = [tokens for tokens, group in groups.items() if time(group[DENSE])[2] < time(group[OURS])[1]]
    return f"{said} At {max(slower):,} tokens dense attention is faster." if slower else said


def far_rows(pattern: DilatedPattern, tokens: int, heads: int) -> tuple[int, float]:
    """Tokens of the longest segment, and the share of all rows (one token in one head) that are in its branch."""
    far = max(pattern.branches_for(heads), key=lambda branch: (branch.length, branch.rate))
    rects = [rect for head in far.members for rect in far.rects(head, range(tokens), tokens, False)]
    rows = sum(len(rect.queries) * rect.repeats for rect in rects)
    return min(far.length, tokens), rows / (tokens * heads)


def _compared(mine: Record, other: Record) -> str:
    """How fast ours is beside another; where quartiles overlap neither is faster."""
    (median, low, high), (other_median, other_low, other_high) = time(mine), time(other)
    if low <= other_high and other_low <= high:
        return "about as fast as"
    factor = other_median / median
    return f"{number_text(factor)}× as fast as" if factor >= 1 else f"{number_text(1 / factor)}× slower than"


HEADS = "attention over heads"
SAME = ("DilatedAttention", "ImprovedDilatedAttention")
# What is claimed; by how much; the share that must be saved at least; and the figure of which the second of two
# implementations takes less.
CLAIMS: tuple[tuple[str, str, float, Callable[[Record], Figure], str, str], ...] = (
    ("DilatedAttention takes less time than a ring with ring_size=1", "less", 0.02, time,
     "RingDilatedAttention", "DilatedAttention"),
    ("ImprovedDilatedAttention takes less time", "30–50 % less", 0.3, time, *SAME),
    ("ImprovedDilatedAttention takes less memory", "15–20 % less", 0.15, memory, *SAME),
    ("Reusing buffers takes less memory", "40–60 % less", 0.4, memory,
     "RingDilatedAttention, 2 ranks", "RingDilatedAttentionProduction, 2 ranks"),
    ("One fused qkv projection takes less time", "30–50 % less", 0.3, time,
     "MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention"),
)  # fmt: skip


def claims(results: Record) -> list[dict[str, str]]:
    """Those that there are figures for."""
    found = []
    if check := next((x for x in results["checks"] if x["implementation"] == HEADS), None):
        claim = "An implementation is many times faster than the others"
        told = f"it attends over heads, not tokens: {', '.join(far_off(check['errors'], check['limits'])[:1])}"
        found.append((claim, "17 times faster", told, "no", "it gets no time"))
    groups = _by_setting(results["measurements"])
    for claim, claimed, least, figure, before, after in CLAIMS:
        both = [(group[before], group[after]) for group in groups if {before, after} <= group.keys()]
        if saved := [1 - figure(new)[0] / figure(old)[0] for old, new in both]:
            middle = statistics.median(saved)
            how = f"from {_less(min(saved))} to {_less(max(saved))} in {len(saved)} settings and passes"
            told = f"{_less(middle)} in the median"
            found.append((claim, claimed, told, "yes" if middle >= least else "no", how))
    return [dict(zip(("claim", "claimed", "ours", "holds", "how"), one, strict=True)) for one in found]


def _less(share: float) -> str:
    return f"{abs(100 * share):.0f} % {'less' if share >= 0 else 'more'}"
