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


@pytest.mark.parametrize("head", range(2))
def test_the_cells_are_the_keys_that_a_query_sees(pictures: dict[str, Any], head: int) -> None:
    pattern = DilatedPattern.longnet(pictures["LENGTHS"], pictures["RATES"])
    drawn = pictures["cells"](head)
    for query in range(pictures["TOKENS"]):
        keys = pattern.keys(query, head, num_tokens=pictures["TOKENS"], num_heads=pictures["HEADS"])
        assert {key for row, key in drawn if row == query} == {*keys}


def test_the_speeds_are_those_of_the_committed_results(pictures: dict[str, Any]) -> None:
    values = pictures["speed_chart"]().to_dict()["data"]["values"]
    measured = json.loads((DOCS.parent / "benchmarks/results/suggested/results.json").read_text())["measurements"]
    medians = {x["ms"]["median"] for x in measured if x["ms"] and x["direction"] == "forward_backward"}
    assert {one["series"] for one in values} == set(pictures["NAMES"].values())
    assert {one["ms"] for one in values} <= medians


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pattern", ["dense attention", "head 1", "w = 32, r = 4"]),
        ("speed", ["this library", "dense attention", "NVIDIA H200"]),
    ],
)
def test_the_files_have_their_names_and_a_dark_form(name: str, words: list[str]) -> None:
    drawn = (DOCS / f"{name}.svg").read_text(encoding="utf-8")
    for word in (*words, "prefers-color-scheme: dark"):
        assert word in drawn
