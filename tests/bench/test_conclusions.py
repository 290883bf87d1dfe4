"""Claims and recommendations say what the measurements say, and nothing where there are none."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from dilated_attention import DilatedPattern
from dilated_attention.bench import conclude
from dilated_attention.bench.implementations import everything

EMPTY: dict[str, Any] = {"checks": [], "measurements": [], "tables": [], "suites": ["scaling"]}


def record(name: str, ms: float | None = 1.0, **more: Any) -> dict[str, Any]:
    tokens = more.get("tokens", 4096)
    timing = None if ms is None else {"median": ms, "lower": 0.99 * ms, "upper": 1.01 * ms, "repeats": 5}
    return {
        "suite": "scaling", "implementation": name, "kind": "module", "ours": True, "rule": "head_groups", "ranks": 1,
        "samples": 1, "tokens": tokens, "heads": 8, "head_dim": 64, "lengths": [2048, 4096], "rates": [1, 2],
        "dtype": "float32", "causal": False, "direction": "forward_backward",
        "status": "measured" if ms else "wrong", "ms": timing, "peak_bytes": 1 << 30, **more,
    }  # fmt: skip


def check(name: str, verdict: str = "exact", error: float = 1e-7, **more: Any) -> dict[str, Any]:
    found = {"implementation": name, "ours": True, "verdict": verdict, "errors": {"out": error}}
    return {**found, "limits": {"out": 5e-6}, "why": "", "dtype": "float32", "causal": False, **more}


def improved(before: float, after: float, **more: Any) -> dict[str, Any]:
    two = [record("DilatedAttention", before), record("ImprovedDilatedAttention", after, **more)]
    return {"measurements": two}


# --- claims -----------------------------------------------------------------------------------------------------

PLAIN = record("DilatedAttention", 10.0)
LESS, MEMORY, RING, HEADS, NONE = (
    "ImprovedDilatedAttention takes less time", "Attention takes less memory", "ring_size", "many times faster",
    "no memory",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "results", "holds", "ours"),
    [
        (LESS, improved(10.0, 6.0), "yes", "40 % less"),
        (LESS, improved(10.0, 9.9), "no", "1 % less"),
        (LESS, improved(10.0, 12.0), "no", "20 % more"),
        (LESS, improved(10.0, 1.0, tokens=8192), None, ""),  # only equal settings are compared
        (LESS, improved(10.0, 1.0, causal=True), None, ""),
        (LESS, {"measurements": [PLAIN, record("ImprovedDilatedAttention", None)]}, None, ""),  # wrong
        (MEMORY, improved(10.0, 5.0, peak_bytes=int(0.8 * (1 << 30))), "yes", "20 % less"),
        (RING, {"measurements": [PLAIN, record("RingDilatedAttention", 10.1)]}, "no", "1 % less"),
        (RING, {"measurements": [PLAIN, record("RingDilatedAttention", 12.5)]}, "yes", "20 % less"),
        (HEADS, {"checks": [check("attention over heads", "wrong", 1.6)]}, "no", "it attends over heads"),
        (HEADS, {"checks": [check("attention over heads", "exact", 1e-7)]}, "yes", "it attends"),
        (NONE, {"measurements": [record("a", peak_bytes=3 << 20)]}, "no", "at least 3 MiB"),
        (NONE, {"measurements": [record("a", peak_bytes=3, status="wrong")]}, None, ""),
    ],
)
def test_a_claim_holds_where_the_measurements_reach_it(
    words: str, results: dict[str, Any], holds: str | None, ours: str
) -> None:
    found = [x for x in conclude.claims({**EMPTY, **results}) if words in x["claim"]]
    assert [x["holds"] for x in found] == ([] if holds is None else [holds])
    assert all(x["ours"].startswith(ours) for x in found)
    assert conclude.claims({**EMPTY, **results, "suites": ["quick"]}) == []


# --- recommendations --------------------------------------------------------------------------------------------


def recommended(*records: dict[str, Any], case: str) -> dict[str, Any]:
    found = conclude.conclusions({**EMPTY, "measurements": list(records)})["recommendations"]
    (one,) = [x for x in found if x["use_case"].startswith(case)]
    return one


def test_the_fastest_is_best_and_overlapping_quartiles_tie() -> None:
    one = recommended(record("a", 10.0), record("b", 10.15), record("c", 20.0), case="training on long")
    assert (one["best"], one["ties"], one["runner_up"], one["factor"]) == ("a", ["b"], "c", 2.0)
    assert one["value"] == "10.0 ms"


def test_of_those_that_are_level_the_first_is_named() -> None:
    """The order of the comparison goes from the plainest on: a newcomer is not sent to the most special class."""
    one = recommended(record("plain", 10.1), record("special", 10.0), record("c", 20.0), case="training on long")
    assert (one["best"], one["ties"], one["value"]) == ("plain", ["special"], "10.1 ms")


def test_times_measured_once_are_not_taken_for_exact() -> None:
    rough = [record(name, ms) for name, ms in (("a", 10.0), ("b", 10.7), ("c", 20.0))]
    for one in rough:
        one["ms"] |= {"lower": one["ms"]["median"], "upper": one["ms"]["median"], "repeats": 1}
    assert recommended(*rough, case="training on long")["ties"] == ["b"]


def test_other_names_of_a_function_are_neither_level_nor_behind() -> None:
    names = {"head_groups, auto": 10.0, "DilatedAttention": 9.9, "RingDilatedAttention": 11.0, "copying": 30.0}
    one = recommended(*(record(name, ms) for name, ms in names.items()), case="training on long")
    assert (one["best"], one["ties"], one["runner_up"]) == ("head_groups, auto", [], "copying")


def test_different_runs_are_not_compared() -> None:
    """What was timed at another time met another machine, in a way."""
    here = [record(name, ms) for name, ms in (("a", 10.0), ("b", 12.0), ("c", 13.0))]
    there = [record(name, ms, suite="quick", tokens=2048) for name, ms in (("d", 1.0), ("e", 2.0))]
    assert recommended(*here, *there, case="training on long")["best"] == "a"
    assert not conclude.conclusions({**EMPTY, "measurements": [{**x, "suite": "profile"} for x in here]})[
        "recommendations"
    ]


def test_long_and_short_look_at_different_lengths() -> None:
    short = [record(name, ms, tokens=1024) for name, ms in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    long = [record(name, ms, tokens=65536) for name, ms in (("a", 9.0), ("b", 5.0), ("c", 7.0))]
    alone = [record("a", 1e6, tokens=1 << 20)]  # nothing to compare it with there
    assert recommended(*short, *long, *alone, case="training on short")["best"] == "a"
    best = recommended(*short, *long, *alone, case="training on long")
    assert best["best"] == "b"
    assert "65,536 tokens" in best["use_case"]


def test_only_what_computes_the_same_is_compared() -> None:
    records = [
        record("a", 10.0), record("b", 12.0), record("dense", 1.0, rule="dense"), record("all", 1.0, rule="longnet"),
        record("ranks", 1.0, ranks=2, kind="ring"), record("projects", 1.0, kind="multihead"),
        record("causal", 1.0, causal=True), record("forward", 1.0, direction="forward"),
    ]  # fmt: skip
    assert recommended(*records, case="training on long")["best"] == "a"


def test_what_is_wrong_wins_nothing() -> None:
    wrong = record("wrong", None)
    assert recommended(wrong, record("a", 10.0), record("b", 12.0), case="training on long")["best"] == "a"


def test_memory_has_its_own_winner() -> None:
    records = [record("a", 1.0, peak_bytes=300 << 20), record("b", 9.0, peak_bytes=200 << 20)]
    one = recommended(*records, case="least memory in training")
    assert (one["best"], one["factor"], one["value"]) == ("b", 1.5, "200 MiB beyond the inputs")


def answer(speeds: dict[int, tuple[float, float, float]], *checks: dict[str, Any]) -> str:
    kinds = (("head_groups, auto", "function", "head_groups"), ("dense SDPA", "baseline", "dense"),
             ("copying", "baseline", "head_groups"))  # fmt: skip
    records = [
        record(name, ms, tokens=tokens, kind=kind, rule=rule, ours=kind == "function")
        for tokens, times in speeds.items()
        for (name, kind, rule), ms in zip(kinds, times, strict=True)
    ]
    records += [record("slow copying", 99.0, tokens=n, kind="baseline", ours=False) for n in speeds]
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


@pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
@pytest.mark.parametrize("tokens", [30, 64, 100])
def test_the_rows_of_the_longest_segments_are_counted(rule: Any, tokens: int) -> None:
    pattern = DilatedPattern.of(rule, [8, 32], [1, 4])
    offsets = [pattern.offset(1, head, 3) for head in pattern.heads(1, 3)]
    rows = sum(token % 32 % 4 == offset for token in range(tokens) for offset in offsets)
    assert conclude.far_rows(pattern, tokens, 3) == (min(32, tokens), rows / (3 * tokens))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("head_groups, auto", "dilated_attention(q, k, v, DilatedPattern.head_groups(w, r))"),
        ("longnet, sdpa", 'dilated_attention(q, k, v, DilatedPattern.longnet(w, r), backend="sdpa")'),
        ("longnet, auto, compiled", "torch.compile: dilated_attention(q, k, v, DilatedPattern.longnet(w, r))"),
        ("RingDilatedAttention, 4 ranks", "dilated_attention.RingDilatedAttention"),
        ("copy and gather, slicing", "dilated_attention.bench.baselines.copy_slices"),
    ],
)
def test_what_is_recommended_can_be_imported(name: str, code: str) -> None:
    assert conclude.code_of(name) == code


def test_every_implementation_has_something_to_import() -> None:
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
