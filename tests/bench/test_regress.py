"""Two results files beside one another: which changes are called so, and what is said about the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilated_attention.bench import regress
from dilated_attention.bench.page import page
from dilated_attention.bench.regress import Change, compare
from dilated_attention.bench.results import load
from tests.bench import sample

FILES = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*/results.json"))
MACHINE = sample.empty()["machine"]


def measured(median: float = 10.0, spread: float = 0.02, repeats: int = 9, **change: Any) -> dict[str, Any]:
    ms = {"median": median, "lower": median * (1 - spread), "upper": median * (1 + spread), "repeats": repeats}
    return sample.measurement("longnet, auto", 4096, **{"ms": ms, "peak_bytes": 1000, **change})


def without(status: str, why: str = "") -> dict[str, Any]:
    return measured(status=status, ms=None, peak_bytes=None, why=why)


def check(verdict: str = "exact", **change: Any) -> dict[str, Any]:
    return {**sample.check("longnet, auto"), "verdict": verdict, **change}


def results(*measurements: Any, checks: Any = (), **machine: Any) -> dict[str, Any]:
    return {"machine": {**MACHINE, **machine}, "measurements": [*measurements], "checks": [*checks]}


def change(before: dict[str, Any], after: dict[str, Any], threshold: float = 1.05) -> Change:
    (found,) = compare(results(before), results(after), threshold).changes
    return found


@pytest.mark.parametrize(
    ("before", "after", "threshold", "verdict"),
    [
        (measured(10), measured(10), 1.05, "same"),
        (measured(10), measured(12), 1.05, "slower"),
        (measured(10), measured(12), 1.3, "same"),
        (measured(10), measured(10.4, 0.001), 1.05, "same"),  # clear, and too little
        (measured(10, 0.2), measured(12, 0.2), 1.05, "same"),  # enough, and not clear
        (measured(10, 0.0), measured(10.5, 0.0), 1.05, "slower"),  # just
        (measured(10, repeats=2), measured(20), 1.05, "unclear"),
        (measured(10), measured(20, repeats=1), 1.05, "unclear"),
        (measured(10, repeats=3), measured(20, repeats=3), 1.05, "slower"),
    ],
)
def test_a_change_is_one_if_it_is_clear_and_large_either_way(
    before: Any, after: Any, threshold: float, verdict: str
) -> None:
    found = change(before, after, threshold)
    assert found.verdict == verdict
    assert (found.low or 0) <= (found.ratio or 0) <= (found.high or 0)
    assert change(after, before, threshold).verdict == {"slower": "faster"}.get(verdict, verdict)


def test_ratios_of_times_and_memory() -> None:
    found = change(measured(10, 0.1), measured(30, 0.2, peak_bytes=3000))
    assert (found.ratio, found.low, found.high) == tuple(map(pytest.approx, (3, 24 / 11, 36 / 9)))
    assert found.memory == 3.0
    found = change(measured(), measured(peak_bytes=3000))
    assert (found.verdict, found.is_worse) == ("same", False)
    assert change(measured(peak_bytes=0), measured(peak_bytes=None)).memory is None


LATE = f"{regress.EXPECTED} 9 s"


@pytest.mark.parametrize(
    ("before", "after", "verdict", "is_worse"),
    [
        (measured(), without("wrong"), "wrong", True),
        (without("wrong"), measured(), "right", False),
        (measured(), without("out of memory"), "out of memory", True),
        (without("out of memory"), measured(), "measured", False),
        (measured(), without("skipped"), "skipped", False),
        (measured(), without("skipped", LATE), regress.TOO_SLOW, True),
        (without("skipped"), without("skipped", LATE), "same", False),
        (measured(), measured(ms=None), "unclear", False),
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


@pytest.mark.parametrize("name", regress.MEASURED_BY)
def test_measurements_are_told_apart_by_all_that_was_asked(name: str) -> None:
    one = measured()
    other = {**one, name: "other"}
    assert {*regress.MEASURED_BY} == {*one} - {"ours", "status", "why", "ms", "suggested", "flops", "peak_bytes"}
    found = compare(results(one), results(other))
    assert (found.changes, found.only_before, found.only_after) == ([], [one], [other])


def test_where_files_come_from() -> None:
    newer = {**MACHINE["versions"], "torch": "2.14.0", "cuda": "13"}
    found = compare(results(), results(commit="def", versions=newer, date="tomorrow", load=9.0))
    wanted = [("commit", MACHINE["commit"], "def"), ("torch", "2.13.0+cpu", "2.14.0"), ("cuda", "none", "13")]
    assert (found.origins, found.is_other_machine) == (wanted, False)
    found = compare(results(), results(threads=4))
    assert (found.origins, found.is_other_machine) == ([("threads", "8", "4")], True)


def test_a_file_and_a_folder_that_holds_one(tmp_path: Path) -> None:
    found = sample.sample()
    (tmp_path / "results.json").write_text(json.dumps(found), encoding="utf-8")
    assert load(tmp_path) == load(tmp_path / "results.json") == found
    for path in (tmp_path / "none.json", tmp_path / "none" / "results.json"):
        with pytest.raises(ValueError, match=r"cannot read .*: No such file or directory"):
            load(path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_what_earlier_versions_wrote_is_read(file: Path) -> None:
    found = load(file)
    assert page(found)
    assert not compare(found, found).is_worse
