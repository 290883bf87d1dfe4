"""The pictures of the documentation show what the library does and what was measured."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from dilated_attention import DilatedPattern

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "pictures.py"))


def test_the_cells_are_the_keys_that_a_query_sees(pictures: dict[str, Any]) -> None:
    pattern, tokens = DilatedPattern.longnet(pictures["LENGTHS"], pictures["RATES"]), pictures["TOKENS"]
    for head in range(2):
        wanted = [pattern.keys(query, head, num_tokens=tokens, num_heads=pictures["HEADS"]) for query in range(tokens)]
        assert {*pictures["cells"](head)} == {(query, key) for query, keys in enumerate(wanted) for key in keys}


def test_the_speeds_are_those_of_the_committed_results(pictures: dict[str, Any]) -> None:
    values = pictures["speed_chart"]()["data"]["values"]
    measured = json.loads((DOCS.parent / "benchmarks/results/suggested/results.json").read_text())["measurements"]
    medians = {x["ms"]["median"] for x in measured if x["ms"] and x["direction"] == "forward_backward"}
    assert {one["series"] for one in values} == set(pictures["NAMES"].values())
    assert {one["ms"] for one in values} <= medians


def test_the_files_have_their_names_and_a_dark_form() -> None:
    files = {"pattern": ["dense attention", "head 1", "w = 32, r = 4"], "speed": ["this library", "NVIDIA H200"]}
    for name, words in files.items():
        drawn = (DOCS / f"{name}.svg").read_text(encoding="utf-8")
        assert all(word in drawn for word in (*words, "prefers-color-scheme: dark"))
