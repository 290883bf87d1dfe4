"""`compare`: what it prints and its exit code; which changes count is tested with `bench.regress`."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

Results = dict[str, Any]


@pytest.fixture
def files(tmp_path: Path, results: Results) -> Callable[[Callable[[Results], object]], tuple[Path, Path]]:
    """The results as they are, and after a change."""

    def write(change: Callable[[Results], object]) -> tuple[Path, Path]:
        after = deepcopy(results)
        change(after)
        paths = tmp_path / "a.json", tmp_path / "b.json"
        for path, found in zip(paths, (results, after), strict=True):
            path.write_text(json.dumps(found))
        return paths

    return write


def times(results: Results, factor: float) -> None:
    for part in ("median", "lower", "upper"):
        results["measurements"][0]["ms"][part] *= factor


def test_nothing_changed(run: Any, files: Any) -> None:
    code, out, err = run("compare", *files(lambda after: None))
    assert (code, err) == (0, "")
    assert "5 same, 1 unclear" in out  # what was measured once
    assert "warning" not in out


def test_slower_and_faster(run: Any, files: Any) -> None:
    code, out, _ = run("compare", *files(lambda after: times(after, 2)))
    assert code == 1
    assert "quick: B=1 N=4,096 H=8 D=64 w=1024,4096 r=1,4 float32\n" in out
    row = next(line for line in out.splitlines() if line.startswith("longnet, sdpa"))
    assert row.split()[2:] == ["forward", "1.23", "2.47", "2.00", "1.50–2.67", "1.00", "slower"]
    assert not any(line.endswith("same") for line in out.splitlines())
    code, out, _ = run("compare", *files(lambda after: times(after, 2)), "--json")
    told = json.loads(out)
    assert (code, [one["ratio"] for one in told["changes"] if one["verdict"] == "slower"]) == (1, [2.0])
    code, out, _ = run("compare", *files(lambda after: times(after, 0.5)))
    assert code == 0
    assert "1 faster" in out
    assert run("compare", *files(lambda after: times(after, 2)), "--threshold", "2.5").code == 0


def test_wrong_and_right(run: Any, files: Any) -> None:
    def change(after: Results) -> None:
        after["checks"][0]["verdict"] = "wrong"
        after["checks"][2]["verdict"] = "exact"

    code, out, _ = run("compare", *files(change))
    assert code == 1
    assert "longnet, sdpa (float32) became wrong: exact, now wrong" in out
    assert "gather [padded] (float32) is right: wrong gradients, now exact" in out


def test_where_they_come_from_is_said_first(run: Any, files: Any) -> None:
    def change(after: Results) -> None:
        after["machine"] |= {"device": "GPU 1", "commit": "fedcba"}
        times(after, 3)

    out = run("compare", *files(change)).out
    assert out.index("GPU 1") < out.index("warning: the machines differ") < out.index("slower")
    assert "fedcba" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda after: after["measurements"].pop(0), "only before: quick: longnet, sdpa, 1 measurements\n"),
        (lambda after: after["measurements"].clear(), "nothing in common\n"),
    ],
)
def test_what_is_in_one_file_only(run: Any, files: Any, change: Callable[[Results], object], said: str) -> None:
    code, out, _ = run("compare", *files(change))
    assert (code, said in out) == (0, True), out


def test_what_cannot_be_is_one_line(refused: Any, files: Any, tmp_path: Path) -> None:
    good, other = files(lambda after: after.pop("schema"))
    assert "b.json is not a results file" in refused("compare", good, other)
    assert "b.json is not a results file" in refused("compare", other, good)
    assert "cannot read" in refused("compare", good, tmp_path / "none.json")
    assert "cannot read" in refused("compare", good, tmp_path)
    assert "threshold must be a ratio" in refused("compare", good, good, "--threshold", "0.9")
