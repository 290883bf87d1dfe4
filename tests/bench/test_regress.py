"""Two results files beside one another: which changes are called so, and what is said about the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention.bench import regress
from dilated_attention.bench.page import page
from dilated_attention.bench.regress import Change, compare
from dilated_attention.bench.results import load
from tests.bench.sample import sample

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

MACHINE = {
    "date": "today", "command": "bench", "commit": "abc", "dirty": False, "device": "CPU 9000", "cpu": "CPU 9000",
    "cores": 2, "threads": 2, "load": 0.1, "system": "Linux", "versions": {"torch": "2.13.0", "python": "3.11"},
}  # fmt: skip


def measured(median: float = 10.0, spread: float = 0.02, repeats: int = 9, **change: Any) -> dict[str, Any]:
    ms = {"median": median, "lower": median * (1 - spread), "upper": median * (1 + spread), "repeats": repeats}
    return {
        "suite": "quick", "implementation": "ours", "kind": "function", "ours": True, "rule": "longnet", "ranks": 1,
        "samples": 1, "tokens": 4096, "heads": 8, "head_dim": 64, "lengths": [1024, 4096], "rates": [1, 4],
        "dtype": "float32", "causal": False, "direction": "forward", "status": "measured", "why": "", "ms": ms,
        "peak_bytes": 1000, **change,
    }  # fmt: skip


def without(status: str, **change: Any) -> dict[str, Any]:
    return measured(status=status, ms=None, peak_bytes=None, **change)


def check(verdict: str = "exact", **change: Any) -> dict[str, Any]:
    found = {"implementation": "ours", "kind": "function", "ours": True, "rule": "longnet", "ranks": 1}
    return {**found, "dtype": "float32", "causal": False, "verdict": verdict, **change}


def results(*measurements: dict[str, Any], checks: tuple[dict[str, Any], ...] = (), **machine: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "machine": {**MACHINE, **machine},
        "measurements": list(measurements),
        "checks": list(checks),
    }


def change(before: dict[str, Any], after: dict[str, Any], threshold: float = 1.05) -> Change:
    (found,) = compare(results(before), results(after), threshold).changes
    return found


# --- times --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "threshold", "verdict"),
    [
        (measured(10), measured(10), 1.05, "same"),
        (measured(10), measured(12), 1.05, "slower"),
        (measured(12), measured(10), 1.05, "faster"),
        (measured(10), measured(12), 1.3, "same"),
        (measured(12), measured(10), 1.3, "same"),
        (measured(10), measured(10.4, 0.001), 1.05, "same"),  # clear, and too little
        (measured(10, 0.2), measured(12, 0.2), 1.05, "same"),  # enough, and not clear
        (measured(10, 0.0), measured(10.5, 0.0), 1.05, "slower"),  # just
        (measured(10, repeats=2), measured(20), 1.05, "unclear"),
        (measured(10), measured(20, repeats=1), 1.05, "unclear"),
        (measured(10, repeats=3), measured(20, repeats=3), 1.05, "slower"),
    ],
)
def test_a_change_is_one_if_it_is_clear_and_large(
    before: dict[str, Any], after: dict[str, Any], threshold: float, verdict: str
) -> None:
    assert change(before, after, threshold).verdict == verdict


def test_the_interval_is_of_the_quartiles() -> None:
    found = change(measured(10, 0.1), measured(30, 0.2))
    assert found.ratio == pytest.approx(3)
    assert (found.low, found.high) == (pytest.approx(24 / 11), pytest.approx(36 / 9))


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(1.001, 2))
def test_the_other_way_round_says_the_opposite(a: float, b: float, da: float, db: float, threshold: float) -> None:
    there, back = (
        change(measured(a, da), measured(b, db), threshold),
        change(measured(b, db), measured(a, da), threshold),
    )
    opposite = {"slower": "faster", "faster": "slower", "same": "same"}
    close = abs(max(a / b, b / a) / threshold - 1) < 1e-9
    assert close or back.verdict == opposite[there.verdict]
    assert (there.low or 0) <= (there.ratio or 0) * (1 + 1e-9)
    assert (there.ratio or 0) <= (there.high or 0) * (1 + 1e-9)


def test_memory_has_a_ratio_and_is_no_failure() -> None:
    found = change(measured(peak_bytes=1000), measured(peak_bytes=3000))
    assert (found.memory, found.verdict, found.is_worse) == (3.0, "same", False)
    assert change(measured(peak_bytes=0), measured(peak_bytes=3000)).memory is None
    assert change(measured(peak_bytes=None), measured()).memory is None


# --- what else can happen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "verdict", "is_worse"),
    [
        (measured(), without("wrong"), "wrong", True),
        (without("wrong"), measured(), "right", False),
        (measured(), without("out of memory"), "out of memory", True),
        (without("out of memory"), measured(), "measured", False),
        (measured(), without("skipped"), "skipped", False),
        (measured(), {**without("skipped"), "why": f"{regress.EXPECTED} 9 s"}, regress.TOO_SLOW, True),
        (without("skipped"), {**without("skipped"), "why": f"{regress.EXPECTED} 9 s"}, "same", False),
        (without("wrong"), without("wrong"), "same", False),
        (without("skipped"), without("skipped"), "same", False),
        (measured(), measured(ms=None), "unclear", False),
        (measured(ms=None), measured(ms=None), "same", False),
    ],
)
def test_a_status_that_changes(before: dict[str, Any], after: dict[str, Any], verdict: str, is_worse: bool) -> None:
    found = change(before, after)
    assert (found.verdict, found.is_worse, found.ratio) == (verdict, is_worse, None)


def test_checks_that_come_out_differently() -> None:
    before = (check(), check("wrong", dtype="bfloat16"), check(causal=True), check("wrong", ranks=2), check(rule="x"))
    after = (check("wrong gradients"), check(dtype="bfloat16"), check(causal=True), check("failed", ranks=2))
    found = compare(results(checks=before), results(checks=after))
    assert [(x.before["verdict"], x.after["verdict"], x.is_worse) for x in found.verdicts] == [
        ("exact", "wrong gradients", True),
        ("wrong", "exact", False),
        ("wrong", "failed", False),
    ]
    assert found.is_worse
    assert not compare(results(checks=before[1:]), results(checks=after[1:])).is_worse


def test_all_but_results_tell_measurements_apart() -> None:
    assert set(regress.MEASURED_BY) == set(measured()) - {"ours", "status", "why", "ms", "peak_bytes"}
    assert set(regress.CHECKED_BY) == set(check()) - {"ours", "verdict"}


@pytest.mark.parametrize("name", regress.MEASURED_BY)
def test_everything_that_tells_measurements_apart_does(name: str) -> None:
    one = measured()
    value = one[name]
    other = {
        **one,
        name: [*value, 7] if isinstance(value, list) else f"{value} other" if isinstance(value, str) else 77,
    }
    found = compare(results(one), results(other))
    assert (found.changes, found.only_before, found.only_after) == ((), (one,), (other,))


def test_what_was_measured_twice_pairs_in_its_order() -> None:
    found = compare(results(measured(10), measured(20)), results(measured(10), measured(40), measured(50)))
    assert [x.ratio for x in found.changes] == [1.0, 2.0]
    assert len(found.only_after) == 1


def test_where_files_come_from() -> None:
    before = results()
    assert compare(before, results()).origins == ()
    newer = {**MACHINE["versions"], "torch": "2.14.0", "cuda": "13"}  # type: ignore[dict-item]
    found = compare(before, results(commit="def", versions=newer, date="tomorrow", load=9.0))
    assert found.origins == (("commit", "abc", "def"), ("torch", "2.13.0", "2.14.0"), ("cuda", "none", "13"))
    assert not found.is_other_machine
    found = compare(before, results(device="GPU", threads=4))
    assert found.origins == (("device", "CPU 9000", "GPU"), ("threads", "2", "4"))
    assert found.is_other_machine


@pytest.mark.parametrize("threshold", [1.0, 0.9, -1, float("nan"), float("inf")])
def test_thresholds_are_ratios_above_1(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold must be a ratio of more than 1"):
        compare(results(), results(), threshold)


# --- files --------------------------------------------------------------------------------------------------------


def test_a_file_and_a_folder_that_holds_one(tmp_path: Path) -> None:
    found = sample()
    (tmp_path / "results.json").write_text(json.dumps(found), encoding="utf-8")
    assert load(tmp_path) == load(tmp_path / "results.json") == found


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/results.json")), ids=lambda file: file.parent.name)
def test_what_earlier_versions_wrote_is_read(file: Path) -> None:
    found = load(file)
    assert page(found)
    assert not compare(found, found).is_worse


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "it has no schema"),
        (b'{"runs": []}', "it has no schema"),
        (b'{"schema": 2}', "has schema 2, and this version reads 1"),
        (b'{"schema": 1, "suites": []}', "it has no machine, measurements, checks"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "some.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"some.json .*{message}"):
        load(file)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "none" / "results.json"):
        with pytest.raises(ValueError, match=r"cannot read .*: No such file or directory"):
            load(path)
