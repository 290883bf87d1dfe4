"""benchmarks/roofline.py, on the results that are committed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("matplotlib")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts src there
    spec = importlib.util.spec_from_file_location("roofline", BENCHMARKS / "roofline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / "results/h200.json").read_text())
    return found


def test_the_committed_results(roofline: ModuleType, results: dict[str, Any], tmp_path: Path) -> None:
    assert roofline.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "roofline.svg").read_text()
    for record in results["cases"]:
        assert f"{record['implementation']}, {record['rule']}" in drawn
    assert f"matmul, {results['ceilings'][0]['matmul_tflops']:.0f} TFLOP/s" in drawn
    assert results["machine"]["commit"] in drawn
    roofline.main(["--out", str(tmp_path / "again")])
    assert (tmp_path / "again/roofline.svg").read_text() == drawn


def test_where_a_point_stands(roofline: ModuleType, results: dict[str, Any]) -> None:
    """Dense attention over n rows: 4 n^2 D flops forward for 4 n D numbers of 2 bytes, 14 for 8 with the backward."""
    for part, expected in (("forward", 2048 / 2), ("forward_backward", 2048 * 14 / 16)):
        dense = [p for p in roofline.points(results, part) if p.series.startswith("dense") and not p.causal]
        assert len(dense) == 2
        assert [p.intensity for p in dense] == pytest.approx([expected] * 2)


def test_what_has_no_time_is_not_drawn(roofline: ModuleType, results: dict[str, Any]) -> None:
    timed = sum("forward_backward" in record for record in results["cases"] + results["dense"])
    assert 0 < timed < len(results["cases"] + results["dense"])
    assert len(roofline.points(results, "forward_backward")) == timed
    with pytest.raises(ValueError, match="no times"):
        roofline.draw(results | {"cases": [], "dense": []})
