"""The pictures of the documentation show what the library does and what was measured."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def test_the_speeds_are_those_of_the_committed_results() -> None:
    pictures: dict[str, Any] = runpy.run_path(str(DOCS / "pictures.py"))
    values = pictures["speed_chart"]()["data"]["values"]
    measured = json.loads((DOCS.parent / "benchmarks/results/suggested/results.json").read_text())["measurements"]
    medians = {x["ms"]["median"] for x in measured if x["ms"] and x["direction"] == "forward_backward"}
    assert {one["series"] for one in values} == set(pictures["NAMES"].values())
    assert {one["ms"] for one in values} <= medians
