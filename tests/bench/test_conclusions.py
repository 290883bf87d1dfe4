"""Claims and recommendations say what the measurements say, and nothing where there are none."""

from __future__ import annotations

from typing import Any

import pytest

from dilated_attention.bench import claims, recommend
from dilated_attention.bench.suites import optimisations

EMPTY: dict[str, Any] = {"checks": [], "measurements": [], "tables": []}


def record(name: str, ms: float | None = 1.0, **more: Any) -> dict[str, Any]:
    tokens = more.get("tokens", 4096)
    timing = None if ms is None else {"median": ms, "lower": 0.99 * ms, "upper": 1.01 * ms, "repeats": 5}
    return {
        "suite": "scaling", "implementation": name, "kind": "module", "ours": True, "rule": "head_groups", "ranks": 1,
        "samples": 1, "tokens": tokens, "heads": 8, "head_dim": 64, "lengths": [4], "rates": [1], "dtype": "float32",
        "causal": False, "direction": "forward_backward", "status": "measured" if ms else "wrong", "ms": timing,
        "tokens_per_s": None if ms is None else 1000 * tokens / ms, "peak_bytes": 1 << 30, **more,
    }  # fmt: skip


def check(name: str, verdict: str = "exact", error: float = 1e-7, **more: Any) -> dict[str, Any]:
    found = {"implementation": name, "ours": True, "verdict": verdict, "errors": {"out": error}}
    return {**found, "limits": {"out": 5e-6}, "why": "", "dtype": "float32", "causal": False, **more}


def claim(results: dict[str, Any], words: str) -> dict[str, Any]:
    (found,) = [x for x in claims.claims({**EMPTY, **results}) if words in x["claim"]]
    return found


def improved(before: float, after: float, **more: Any) -> dict[str, Any]:
    two = [record("DilatedAttention", before), record("ImprovedDilatedAttention", after, **more)]
    return {"measurements": two}


# --- claims -----------------------------------------------------------------------------------------------------


def test_without_results_no_claim_is_judged() -> None:
    found = claims.claims(EMPTY)
    assert len(found) == 12
    assert {x["holds"] for x in found} == {"not measured"}
    assert {x["ours"] for x in found} == {""}


OUT = 4096 * 8 * 64 * 4  # bytes of out
PLAIN = record("DilatedAttention", 10.0)
LESS, MEMORY, MORE, RING = (
    "ImprovedDilatedAttention takes less time",
    "Attention takes less memory",
    "tokens per second",
    "ring_size",
)
HEADS, NONE = "many times faster", "no memory"


@pytest.mark.parametrize(
    ("words", "results", "holds", "ours"),
    [
        (LESS, improved(10.0, 6.0), "yes", "40 % less"),
        (LESS, improved(10.0, 9.9), "no", "1 % less"),
        (LESS, improved(10.0, 12.0), "no", "20 % more"),
        (MEMORY, improved(10.0, 5.0, peak_bytes=int(0.8 * (1 << 30))), "yes", "20 % less"),
        (MORE, improved(10.0, 5.0), "yes", "100 % more"),
        (MORE, improved(10.0, 9.0), "no", "11 % more"),
        (MORE, improved(10.0, 20.0), "no", "50 % fewer"),
        (MORE, improved(10.0, 1.0, tokens=8192), "not measured", ""),  # only equal settings are compared
        (MORE, improved(10.0, 1.0, causal=True), "not measured", ""),
        (MORE, {"measurements": [PLAIN, record("ImprovedDilatedAttention", None)]}, "not measured", ""),  # wrong
        (
            RING,
            {"measurements": [PLAIN, record("RingDilatedAttention", 10.1)]},
            "no",
            "1.01 to 1.01",
        ),  # quartiles overlap
        (RING, {"measurements": [PLAIN, record("RingDilatedAttention", 12.0)]}, "yes", "1.20 to 1.20"),
        (HEADS, {"checks": [check("attention over heads", "wrong", 1.6)]}, "no", "it attends over heads"),
        (HEADS, {"checks": [check("attention over heads", "exact", 1e-7)]}, "yes", "out is off by 1.0e-07"),
        (NONE, {"measurements": [record("a", peak_bytes=2 * OUT)]}, "no", "at least 2.00"),
        (NONE, {"measurements": [record("a", peak_bytes=0)]}, "yes", "at least 0.00"),
        (NONE, {"measurements": [record("a", peak_bytes=0, status="wrong")]}, "not measured", ""),
    ],
)
def test_a_claim_holds_where_the_measurements_reach_it(
    words: str, results: dict[str, Any], holds: str, ours: str
) -> None:
    found = claim(results, words)
    assert found["holds"] == holds
    assert found["ours"].startswith(ours)
    assert bool(found["ours"]) == bool(ours)


def test_optimisations_are_read_from_their_table() -> None:
    rows = [
        optimisations.row(optimisations.PLAN, "here", 10.0, 7.0, "ms"),
        optimisations.row(optimisations.BUFFERS, "here", 10.0, 9.0, "MiB"),
        optimisations.row(optimisations.PACKED, "here", 10.0, 4.0, "ms"),
        optimisations.row(optimisations.FUSED, "here", 10.0, 11.0, "ms"),
        optimisations.row(optimisations.BUCKETS, "here", 10.0, 11.0, "ms"),
        optimisations.row(optimisations.BUCKETS, "there", 10.0, 8.0, "ms"),
        [optimisations.SHARE, "2 ranks, here", None, 12.0, "%", None],
    ]
    results = {"tables": [{"suite": "optimisations", "rows": rows}]}
    holds = {x["claim"]: x["holds"] for x in claims.claims({**EMPTY, **results}) if x["holds"] != "not measured"}
    assert list(holds.values()) == ["no", "yes", "yes", "no", "yes", "yes"]
    assert claim(results, "fused")["ours"] == "10 % more"
    assert claim(results, "DDP")["ours"] == "20 % less"  # tuned: the best of those tried
    rows[-1][3] = 30.0
    assert claim(results, "communication")["holds"] == "no"


# --- recommendations --------------------------------------------------------------------------------------------


def recommended(*records: dict[str, Any], case: str) -> dict[str, Any]:
    found = recommend.recommend({**EMPTY, "measurements": list(records)})["recommendations"]
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
    assert not recommend.recommend({**EMPTY, "measurements": [{**x, "suite": "profile"} for x in here]})[
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


def test_the_matrix_has_every_implementation_and_its_worst_verdict() -> None:
    records = [record("a", 10.0), record("b", 30.0)]
    checks = [check("a"), check("b"), check("c", "wrong", 0.5), check("c", causal=True)]
    found = {
        x["implementation"]: x
        for x in recommend.recommend({**EMPTY, "measurements": records, "checks": checks})["matrix"]
    }
    assert set(found) == {"a", "b", "c"}
    assert "training on long sequences" in found["a"]["best_for"]
    assert (found["a"]["slower"], found["b"]["slower"], found["c"]["slower"]) == (1.0, 3.0, None)
    assert (found["c"]["verdict"], found["c"]["note"]) == ("wrong", "out off by 5.0e-01")


def answer(speeds: dict[int, tuple[float, float, float]], *checks: dict[str, Any]) -> str:
    kinds = (("head_groups, auto", "function", "head_groups"), ("dense SDPA", "baseline", "dense"),
             ("copying", "baseline", "head_groups"))  # fmt: skip
    records = [
        record(name, ms, tokens=tokens, kind=kind, rule=rule, ours=kind == "function")
        for tokens, times in speeds.items()
        for (name, kind, rule), ms in zip(kinds, times, strict=True)
    ]
    records += [record("slow copying", 99.0, tokens=n, kind="baseline", ours=False) for n in speeds]
    return recommend.answer({**EMPTY, "measurements": records, "checks": list(checks) or [check("a")]})


def test_the_answer_says_how_fast() -> None:
    said = answer({2048: (10.0, 5.0, 9.0), 4096: (10.0, 9.0, 10.0), 8192: (10.0, 42.0, 13.0)})
    assert "is 4.20× as fast as dense attention (a different operation) at 8,192 tokens" in said
    assert "1.30× as fast as the best exact alternative at 8,192." in said
    assert "At 4,096 tokens dense attention is faster." in said
    assert "is faster" not in answer({8192: (10.0, 42.0, 13.0)})
    assert "is 2.00× slower than dense attention" in answer({2048: (10.0, 5.0, 9.0)})  # also where it is slow
    assert "is about as fast as dense attention" in answer({2048: (10.0, 10.1, 9.0)})  # quartiles overlap


def test_the_answer_says_who_is_wrong() -> None:
    said = answer({2048: (1.0, 2.0, 3.0)}, check("a"), check("x", "wrong gradients", ours=False))
    assert "1 of 2 implementations match the float64 oracle; the others are not of this library." in said
    assert "wrong ones of this library: y." in recommend.answer({**EMPTY, "checks": [check("y", "wrong")]})
    outputs = check("a") | {"errors": {"out": 0.0}, "limits": {"out": 1.0}}
    assert "1 of 1 implementations match the float64 oracle in their outputs." in recommend.answer(
        {**EMPTY, "checks": [outputs]}
    )
    assert recommend.answer(EMPTY).startswith("Nothing was checked")
    assert "not measured in this run" in recommend.answer({**EMPTY, "checks": [check("y")]})
