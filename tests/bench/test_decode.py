"""benchmarks/decode.py, tried on a CPU with everything made shorter."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/decode.py"
ON_CPU = ["--device", "cpu", "--scale", "128", "--seconds", "0", "--commit", "abc"]


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts src there
    spec = importlib.util.spec_from_file_location("decode", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_step_is_checked_and_timed(decode: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert decode.main([*ON_CPU, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "decode.json").read_text())
    assert found["machine"]["commit"] == "abc"
    assert [step["position"] for step in found["steps"]] == list(range(8192 - 16, 8192))
    for step in found["steps"]:
        assert step["error"] < 1e-4
        assert step["kernel_us"] == sum(step["kernels_us"].values()) > 0
        assert step["graph_us"] is None
    # at the end of every segment all 16 rows of each branch are seen, by the heads at the last offset
    assert found["steps"][-1]["rows"] == 16 * (12 + 6 + 3 + 1 + 0)
    assert found["slowest_us"] == max(step["kernel_us"] for step in found["steps"])
    assert all(timing["median"] > 0 for timing in found["call_us"].values())
    assert "target" not in capsys.readouterr().out  # that is one of the whole length


def test_a_wrong_step_gets_no_time(decode: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.dilated_attention
    monkeypatch.setattr(decode, "dilated_attention", lambda *x, **options: right(*x, **options) * 1.001)
    assert decode.main([*ON_CPU, "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "decode.json").read_text())
    assert len(found["steps"]) == 1
    assert not found["steps"][0]["right"]
    assert "kernel_us" not in found["steps"][0]
    assert "call_us" not in found
