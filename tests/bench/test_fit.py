"""benchmarks/fit.py with small layers, on a CPU: patterns of equal cost, and that it goes on where it was cut."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dilated_attention import Dense, Pattern
from dilated_attention.models import fitting
from dilated_attention.models.transformer import read_pattern

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import fit  # noqa: E402
import tasks_model  # noqa: E402

ALL = Pattern([Dense()])


@pytest.mark.parametrize("n", [512, 8192])
def test_all_have_an_eighth_of_the_pairs(n: int) -> None:
    random = fit.some_full(n, 10)
    assert random.count(ALL) == 1
    shares = [fitting.share_of(one, n, 8) for one in (fit.window(n, 1 / 8), fit.longnet(n))]
    for share in (*shares, sum(fitting.share_of(one, n, 8) for one in random) / 10):
        assert 0.06 < share <= 1 / 8


@pytest.mark.slow
def test_it_goes_on_where_it_was_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in range(20):
        (tmp_path / f"code/package{package}").mkdir(parents=True)
        (tmp_path / f"code/package{package}/a.py").write_text("".join(f"name{package}_{i % 97}\n" for i in range(1200)))
    short = ["--shrink", "16", "--seconds", "0.01", "--tuning", "0.01"]
    given = [*short, "--device", "cpu", "--code", str(tmp_path / "code")]

    def results(names: tuple[str, ...]) -> dict[str, Any]:
        few = mock.patch.multiple(tasks_model, ASKED=1, ROWS=1, CHECKED_ROWS=1, CHECKED=512, STEP=512)
        with few, mock.patch.multiple(fit, SEQUENCES=2):
            fit.main(["dense", *names, *given, "--out", str(tmp_path / "out")])
        return {name: json.loads((tmp_path / f"out/{name}.json").read_text()) for name in ("dense", *names)}

    first = results(("fitted",))
    both = results(("fitted", "random-full-layers"))
    assert {name: both[name] for name in first} == first, "what is done is not done again"
    for name, one in both.items():
        patterns, (judged,) = read_pattern(one["patterns"]), one["after"].values()
        assert one["share"] == pytest.approx(sum(fitting.share_of(x, 512, 8) for x in patterns) / 10)
        assert one["share"] == 1 if name == "dense" else 0.06 < one["share"] <= 1 / 8
        assert 4 < judged["bits"] < 10
        assert (one["before"] is None) == (name == "dense")
        assert {"commit", "command", "versions", "device"} <= one["machine"].keys()
    before = both["fitted"]["before"]["512"]
    assert before != both["random-full-layers"]["before"]["512"]
    assert "fitted" in capsys.readouterr().out
