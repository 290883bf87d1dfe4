"""benchmarks/ring.py on two CPU ranks measures and counts bytes; the picture of speeds shows what was measured."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    size = ["--tokens", "8192", "--heads", "2", "--dim", "8", "--dtype", "float32", "--repeats", "1"]
    command = [*launch, ROOT / "benchmarks/ring.py", "--device", "cpu", *size, "--causal", "--out", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "ring.json").read_text())["runs"]
    assert run["ranks"] == 2
    assert run["received_mib"] == run["planned_received_mib"] > 0
    assert run["forward/ms"] > 0
    assert run["forward/peak_mib"] > 0
    assert run["machine"]["versions"]["torch"]


def test_the_speeds_are_those_of_the_committed_results() -> None:
    pictures: dict[str, Any] = runpy.run_path(str(ROOT / "docs/pictures.py"))
    values = pictures["speed_chart"]()["data"]["values"]
    measured = json.loads((ROOT / "benchmarks/results/suggested/results.json").read_text())["measurements"]
    medians = {x["ms"]["median"] for x in measured if x["ms"] and x["direction"] == "forward_backward"}
    assert {one["series"] for one in values} == set(pictures["NAMES"].values())
    assert {one["ms"] for one in values} <= medians
