"""`compare`: what it prints and its exit code; which changes count is tested with `bench.regress`."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

Results = dict[str, Any]
Change = Callable[[Results], object]


@pytest.fixture
def compared(run: Any, tmp_path: Path, results: Results) -> Callable[..., Any]:
    """The command line, for the results as they are and after a change."""

    def command(change: Change, *options: object) -> Any:
        after = deepcopy(results)
        change(after)
        (tmp_path / "a.json").write_text(json.dumps(results))
        (tmp_path / "b.json").write_text(json.dumps(after))
        return run("compare", tmp_path / "a.json", tmp_path / "b.json", *options)

    return command


def times(factor: float) -> Change:
    """The first measurement takes longer by this factor."""

    def change(after: Results) -> None:
        ms = after["measurements"][0]["ms"]
        ms |= {part: factor * ms[part] for part in ("median", "lower", "upper")}

    return change


def verdicts(after: Results) -> None:
    after["checks"][0]["verdict"] = "wrong"
    after["checks"][-1]["verdict"] = "exact"


def elsewhere(after: Results) -> None:
    after["machine"] |= {"device": "GPU 1", "commit": "fedcba"}
    times(3)(after)


@pytest.mark.parametrize(
    ("change", "options", "code", "said"),
    [
        (times(1), [], 0, ["2 unclear"]),  # what was measured once
        (times(0.5), [], 0, ["1 faster"]),
        (times(2), ["--threshold", 2.5], 0, ["same"]),
        (verdicts, [], 1, ["dense SDPA (float32) became wrong: exact, now wrong",
                           "index [by mask] (float32) is right: wrong, now exact"]),
        (elsewhere, [], 1, ["GPU 1", "fedcba", "warning: the machines differ", "slower"]),
        (lambda after: after["measurements"].pop(0), [], 0, ["only before: quick: dense SDPA, 1 measurements\n"]),
        (lambda after: after["measurements"].clear(), [], 0, ["nothing in common\n"]),
    ],
)  # fmt: skip
def test_what_is_said(compared: Any, change: Change, options: list[Any], code: int, said: list[str]) -> None:
    ran = compared(change, *options)
    assert (ran.code, ran.err) == (code, "")
    assert sorted(said, key=ran.out.index) == said
    assert ("warning" in ran.out) == (change is elsewhere)


def test_slower(compared: Any) -> None:
    code, out, _ = compared(times(2))
    assert code == 1
    assert "quick: float32, B=1 H=8 D=64, w=256,1024 r=1,4, 1,024 tokens\n" in out
    row = next(line for line in out.splitlines() if line.startswith("dense SDPA"))
    assert row.split()[2:] == ["forward", "1.00", "2.00", "2.00", "1.87–2.14", "1.00", "slower"]
    assert not any(line.endswith("same") for line in out.splitlines())
    code, out, _ = compared(times(2), "--json")
    assert (code, [x["ratio"] for x in json.loads(out)["changes"] if x["verdict"] == "slower"]) == (1, [2.0])
