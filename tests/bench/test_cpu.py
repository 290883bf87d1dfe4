"""benchmarks/cpu.py, tried with everything made shorter."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/cpu.py"
SHORT = ["--scale", "128", "--seconds", "0", "--threads", "1", "--commit", "abc"]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts src there
    spec = importlib.util.spec_from_file_location("cpu_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cpu_benchmark", module)
    spec.loader.exec_module(module)
    return module


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "cpu.json").read_text())
    return found


def test_both_sides_are_checked_and_timed(cpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert cpu.main([*SHORT, "--out", str(tmp_path)]) == 0
    assert torch.get_num_threads() == threads
    found = written(tmp_path)
    assert found["machine"]["commit"] == "abc"
    assert found["machine"]["threads"] == 1
    cases = [(record["case"], record["causal"]) for record in found["cases"]]
    assert cases == [("long", False), ("long", True), ("short", False), ("short", True)]
    for record in found["cases"]:
        assert record["ours"]["verdict"] == record["dense"]["verdict"] == "exact"
        assert record["kernel"] == "flash on CPU"
        assert record["kernel_calls"]["dense"] == 3
        for part in ("forward", "forward_backward"):
            ours, dense, ratio = (record[part][key] for key in ("ours", "dense", "ratio"))
            assert ours["repeats"] == dense["repeats"] == ratio["repeats"] == 5
            assert ratio["lower"] <= ratio["median"] <= ratio["upper"]
            assert ours["gflops"] * ours["median"] == pytest.approx(dense["gflops"] * dense["median"])
    assert "no verdict" in capsys.readouterr().out  # only the full length has one


@pytest.mark.parametrize("which", [0, 1])
def test_dense_blocks_are_as_many_and_as_large_as_the_patterns(cpu: ModuleType, which: int) -> None:
    pattern = cpu.CASES[which].pattern()
    blocks = cpu.dense(pattern, cpu.TOKENS, False)
    rows = (2048, 2048, 2048) if which == 0 else (16, 16, 16)
    shapes = [tuple(problem.qkv[0].shape) for problem in blocks]
    segments = [cpu.TOKENS // length for length in pattern.segment_lengths]
    assert shapes == [(b, row, h, cpu.DIM) for b, row, h in zip(segments, rows, (3, 3, 2), strict=True)]
    assert all(x.transpose(1, 2).is_contiguous() for problem in blocks for x in problem.qkv)
    done = sum(4 * b * h * rows * rows * d for b, rows, h, d in shapes)
    assert done == pattern.flops(cpu.TOKENS, cpu.HEADS, cpu.DIM)


@pytest.mark.parametrize("side", ["ours", "dense"])
def test_a_wrong_one_gets_no_time(cpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    place, name = (cpu, "dilated_attention") if side == "ours" else (cpu.baselines, "dense")
    right = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *x, **options: right(*x, **options) * 1.001)
    assert cpu.main([*SHORT, "--out", str(tmp_path)]) == 1
    for record in written(tmp_path)["cases"]:
        assert record[side]["verdict"] == "wrong"
        assert "forward" not in record


def test_rows_at_full_length_count(cpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.dilated_attention
    full = cpu.TOKENS // 128

    def wrong_at_full_length(query: Any, *x: Any, **options: Any) -> Any:
        return right(query, *x, **options) * (1.01 if query.shape[1] == full else 1.0)

    monkeypatch.setattr(cpu, "dilated_attention", wrong_at_full_length)
    assert cpu.main([*SHORT, "--out", str(tmp_path)]) == 1
    assert {record["ours"]["verdict"] for record in written(tmp_path)["cases"]} == {"wrong rows"}


def test_a_ratio_of_rates_is_taken_round_by_round(
    cpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(calls: Any, device: Any, *, seconds: float, spent: dict[str, list[float]]) -> Any:
        spent |= {"ours": [2.0, 4.0, 40.0], "dense": [1.0, 3.0, 20.0, 9.0]}
        return {name: cpu.run.Timing.of(had) for name, had in spent.items()}

    monkeypatch.setattr(cpu.run, "time_calls", timed)
    bench = cpu.Bench(argparse.Namespace(scale=1, seconds=0.0, out=str(tmp_path), commit="abc"))
    found = bench.compare({}, flops=8_000_000)
    assert found["ratio"] == {"median": 0.5, "lower": 0.5, "upper": 0.625, "repeats": 3}
    assert found["ours"]["gflops"] == 2.0


def test_the_verdict_is_of_the_long_case_going_forward(cpu: ModuleType) -> None:
    def results(ratio: float) -> dict[str, Any]:
        other = {"case": "long", "causal": True, "forward": {"ratio": {"median": 0.1}}}
        return {"scale": 1, "cases": [other, {**other, "causal": False, "forward": {"ratio": {"median": ratio}}}]}

    assert cpu.conclusion(results(0.95)).endswith("0.950 of the dense rate, 0.9 met")
    assert cpu.conclusion(results(0.85)).endswith("missed")
