"""Claims and recommendations say what the measurements say, and nothing where there are none."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from dilated_attention import DilatedPattern
from dilated_attention.bench import conclude
from dilated_attention.bench.implementations import everything
from tests.bench import sample

EMPTY: dict[str, Any] = {"checks": [], "measurements": [], "tables": [], "suites": ["scaling"]}


def record(name: str, ms: float | None = 1.0, **more: Any) -> dict[str, Any]:
    timing = None if ms is None else {"median": ms, "lower": 0.99 * ms, "upper": 1.01 * ms, "repeats": 5}
    return {
        **sample.measurement("head_groups, auto", 4096, "forward_backward"), "suite": "scaling", "implementation": name,
        "lengths": [2048, 4096], "rates": [1, 2], "status": "measured" if ms else "wrong", "ms": timing,
        "peak_bytes": 1 << 30, **more,
    }  # fmt: skip


def check(name: str, verdict: str = "exact", error: float = 1e-7, **more: Any) -> dict[str, Any]:
    found = {"implementation": name, "verdict": verdict, "errors": {"out": error}, "limits": {"out": 5e-6}}
    return {**sample.check("DilatedAttention"), **found, **more}


def two(before: str, after: str, ms: float | None, **more: Any) -> dict[str, Any]:
    """One that takes 10 ms, and another."""
    return {"measurements": [record(before, 10.0), record(after, ms, **more)]}


SAME, RINGS = ("DilatedAttention", "ImprovedDilatedAttention"), ("RingDilatedAttention", "DilatedAttention")


@pytest.mark.parametrize(
    ("words", "results", "holds", "ours"),
    [
        ("takes less time", two(*SAME, 6.0), "yes", "40 % less"),
        ("takes less time", two(*SAME, 12.0), "no", "20 % more"),
        ("takes less time", two(*SAME, 1.0, tokens=8192), None, ""),  # only equal settings are compared
        ("takes less time", two(*SAME, None), None, ""),  # wrong
        ("takes less memory", two(*SAME, 5.0, peak_bytes=int(0.8 * (1 << 30))), "yes", "20 % less"),
        ("ring_size", two(*RINGS, 9.9), "no", "1 % less"),
        ("ring_size", two(*RINGS, 8.0), "yes", "20 % less"),
        ("many times faster", {"checks": [check("attention over heads", "wrong", 1.6)]}, "no", "it attends over heads"),
    ],
)
def test_a_claim_holds_where_the_measurements_reach_it(words: str, results: Any, holds: Any, ours: str) -> None:
    found = [x for x in conclude.claims({**EMPTY, **results}) if words in x["claim"]]
    assert [x["holds"] for x in found] == ([] if holds is None else [holds])
    assert all(x["ours"].startswith(ours) for x in found)


def recommended(*records: dict[str, Any], case: str) -> dict[str, Any]:
    found = conclude.conclusions({**EMPTY, "measurements": list(records)})["recommendations"]
    return next((x for x in found if x["use_case"].startswith(case)), {})


def several(times: dict[str, float], **more: Any) -> list[dict[str, Any]]:
    return [record(name, ms, **more) for name, ms in times.items()]


ONCE = {"ms": {"median": 10.0, "lower": 10.0, "upper": 10.0, "repeats": 1}}
OTHERS = [  # what computes something else is not compared
    record("dense", 1.0, rule="dense"), record("all", 1.0, rule="longnet"), record("ranks", 1.0, ranks=2, kind="ring"),
    record("projects", 1.0, kind="multihead"), record("causal", 1.0, causal=True), record("wrong", None),
    record("forward", 1.0, direction="forward"), record("elsewhere", 1.0, suite="quick", tokens=2048),
    record("elsewhere too", 1.0, suite="profile"), record("a class", 1.0, kind="module"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("records", "best", "ties", "runner_up"),
    [
        (several({"a": 10.0, "b": 10.15, "c": 20.0}), "a", ["b"], "c"),
        # of those that are level the first: the order of the comparison goes from the plainest on
        (several({"plain": 10.1, "special": 10.0, "c": 20.0}), "plain", ["special"], "c"),
        # times that were measured once are not taken for exact
        ([{**record("a"), **ONCE}, *several({"b": 10.4, "c": 20.0})], "a", ["b"], "c"),
        ([*several({"a": 10.0, "b": 12.0, "c": 13.0}), *OTHERS], "a", [], "b"),
    ],
)  # fmt: skip
def test_the_fastest_is_best_and_overlapping_quartiles_tie(records: Any, best: str, ties: Any, runner_up: str) -> None:
    one = recommended(*records, case="training on long")
    assert (one["best"], one["ties"], one["runner_up"]) == (best, ties, runner_up)
    times = {x["implementation"]: x["ms"]["median"] for x in records if x["ms"]}
    assert one["value"] == f"{times[best]:.1f} ms"
    assert one["factor"] == times[runner_up] / times[best]


def test_long_and_short_look_at_different_lengths() -> None:
    alone = record("a", 1e6, tokens=1 << 20)  # nothing to compare it with there
    assert recommended(alone, case="training on long") == {}
    short, long = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 9.0, "b": 5.0, "c": 7.0}
    records = [*several(short, tokens=1024), *several(long, tokens=65536), alone]
    assert recommended(*records, case="training on short")["best"] == "a"
    best = recommended(*records, case="training on long")
    assert best["best"] == "b"
    assert "65,536 tokens" in best["use_case"]


def test_memory_has_its_own_winner() -> None:
    records = [record("a", 1.0, peak_bytes=300 << 20), record("b", 9.0, peak_bytes=200 << 20)]
    one = recommended(*records, case="least memory in training")
    assert (one["best"], one["factor"], one["value"]) == ("b", 1.5, "200 MiB beyond the inputs")


def answer(speeds: dict[int, tuple[float, float, float]], *checks: dict[str, Any]) -> str:
    records = []
    for tokens, (ours, dense, copying) in speeds.items():
        baseline: dict[str, Any] = {"tokens": tokens, "kind": "baseline", "ours": False}
        records += [record("head_groups, auto", ours, tokens=tokens, kind="function")]
        records += several({"dense SDPA": dense}, rule="dense", **baseline)
        records += several({"copying": copying, "slow copying": 99.0}, **baseline)
    return conclude.answer({**EMPTY, "measurements": records, "checks": list(checks) or [check("a")]})


def test_the_answer_says_how_fast_beside_what_and_with_which_pattern() -> None:
    said = answer({2048: (10.0, 5.0, 9.0), 4096: (10.0, 9.0, 10.0), 8192: (10.0, 42.0, 13.0)})
    assert said.startswith(
        "In training at 8,192 tokens under head_groups with w=2048,4096 and r=1,2, this library is 4.20× as fast as "
        "dense attention (a different operation), and 1.30× as fast as the best exact alternative, copying. 25.0% of "
        "the rows (one token in one head) are in the longest segments, of 4,096 tokens. At 4,096 tokens dense "
        "attention is faster."
    )
    assert "is faster" not in answer({8192: (10.0, 42.0, 13.0)})
    assert "is 2.00× slower than dense attention" in answer({2048: (10.0, 5.0, 9.0)})  # also where it is slow
    assert "is about as fast as dense attention" in answer({2048: (10.0, 10.1, 9.0)})  # quartiles overlap


@pytest.mark.parametrize(("rule", "tokens"), [("longnet", 30), ("torchscale", 64), ("head_groups", 100)])
def test_the_rows_of_the_longest_segments_are_counted(rule: Any, tokens: int) -> None:
    pattern = DilatedPattern.of(rule, [8, 32], [1, 4])
    offsets = [pattern.offset(1, head, 3) for head in pattern.heads(1, 3)]
    rows = sum(token % 32 % 4 == offset for token in range(tokens) for offset in offsets)
    assert conclude.far_rows(pattern, tokens, 3) == (min(32, tokens), rows / (3 * tokens))


def test_what_is_recommended_can_be_imported() -> None:
    for name, code in {
        "longnet, sdpa": 'dilated_attention(q, k, v, DilatedPattern.longnet(w, r), backend="sdpa")',
        "longnet, auto, compiled": "torch.compile: dilated_attention(q, k, v, DilatedPattern.longnet(w, r))",
        "RingDilatedAttention, 4 ranks": "dilated_attention.RingDilatedAttention",
        "copy and gather, slicing": "dilated_attention.bench.baselines.copy_slices",
    }.items():
        assert conclude.code_of(name) == code
    for one in everything():
        path = conclude.code_of(one.name).partition("(")[0].removeprefix("torch.compile: ")
        module, _, found = path.rpartition(".")
        assert hasattr(importlib.import_module(module or "dilated_attention"), found), path


def test_the_answer_says_who_is_wrong() -> None:
    said = answer({2048: (1.0, 2.0, 3.0)}, check("a"), check("x", "wrong gradients", ours=False))
    assert "1 of 2 implementations match the float64 oracle; the others are not of this library." in said
    assert "wrong ones of this library: y." in conclude.answer({**EMPTY, "checks": [check("y", "wrong")]})
    assert "1 of 1 implementations match the float64 oracle in their outputs." in conclude.answer(
        {**EMPTY, "checks": [check("a")]}
    )
    assert conclude.answer(EMPTY).startswith("Nothing was checked")
    assert "not measured in this run" in conclude.answer({**EMPTY, "checks": [check("y")]})
