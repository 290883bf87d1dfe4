"""benchmarks/h200.py, tried on a CPU with everything made shorter."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/h200.py"
ON_CPU = ["--device", "cpu", "--scale", "1024", "--seconds", "0", "--commit", "abc"]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts src there
    spec = importlib.util.spec_from_file_location("h200", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "h200", module)
    spec.loader.exec_module(module)
    return module


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "h200.json").read_text())
    return found


def test_all_cases_and_figures(h200: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert h200.main([*ON_CPU, "--out", str(tmp_path)]) == 0
    found = written(tmp_path)
    assert found["machine"]["commit"] == "abc"
    assert len(found["cases"]) == 3 * 2 * 4
    for record in found["cases"]:
        assert record["rows"]["right"]
        assert record["forward"]["median"] > 0
        if record["implementation"] == "dilated_attention":
            assert record["check"]["verdict"] == "exact"
            assert record["saved_bytes"] == record["saved_bytes_expected"]
            assert record["forward_backward"]["tflops"] > 0
        if record["rule"] == "torchscale":
            assert record["check"]["verdict"] == "wrong gradients"
            assert "forward_backward" not in record
    assert [(r["case"], r["causal"]) for r in found["dense"]] == [("A", False), ("A", True), ("B", False), ("B", True)]
    profiled = [(record["case"], record["rule"]) for record in found["profiles"]]
    assert profiled == list(product("ABC", ("head_groups", "longnet")))
    for record in found["profiles"]:
        assert record["kernels"]
        assert sum(ms for *_, ms in record["kernels"]) == pytest.approx(record["all_ms"])
    assert found["ceilings"][0]["copy_tb_per_s"] > 0
    assert "wrong gradients" in capsys.readouterr().out


def test_a_wrong_one_gets_no_time(h200: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = h200.dilated_attention
    monkeypatch.setattr(h200, "dilated_attention", lambda *x, **options: right(*x, **options) * 1.001)
    assert h200.main([*ON_CPU, "--cases", "C", "--out", str(tmp_path)]) == 1
    ours = [r for r in written(tmp_path)["cases"] if r["implementation"] == "dilated_attention"]
    assert len(ours) == 4
    assert all(r["check"]["verdict"] == "wrong" and "forward" not in r for r in ours)


def test_out_of_memory_is_recorded_and_the_rest_goes_on(
    h200: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = h200.Bench.measure

    def no_room_for_longnet(self: Any, case: Any, one: Any, *rest: Any) -> Any:
        if one.rule == "longnet":
            raise torch.OutOfMemoryError("tried to allocate too much")
        return measure(self, case, one, *rest)

    monkeypatch.setattr(h200.Bench, "measure", no_room_for_longnet)
    assert h200.main([*ON_CPU, "--cases", "C", "--out", str(tmp_path)]) == 1
    records = written(tmp_path)["cases"]
    assert len(records) == 8
    assert all(("out_of_memory" in r) == (r["rule"] == "longnet") for r in records)


def test_nothing_is_lost_when_a_run_dies(h200: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = h200.Bench.measure

    def dies_when_causal(self: Any, case: Any, one: Any, is_causal: bool, *rest: Any) -> Any:
        if is_causal:
            raise RuntimeError("the device is gone")
        return measure(self, case, one, is_causal, *rest)

    monkeypatch.setattr(h200.Bench, "measure", dies_when_causal)
    with pytest.raises(RuntimeError, match="gone"):
        h200.main([*ON_CPU, "--cases", "C", "--out", str(tmp_path)])
    assert len(written(tmp_path)["cases"]) == 4
