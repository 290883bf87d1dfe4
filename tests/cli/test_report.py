"""`report`: the page of a results file, made again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dilated_attention.bench.conclude import conclusions


def test_next_to_the_results(run: Any, results: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    code, out, err = run("report", file)
    assert (code, err) == (0, "")
    assert "longnet, auto" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert {file.name for file in (tmp_path / "plots").iterdir()} >= {"time.svg", "time.png"}
    assert f"written: {tmp_path / 'index.html'}" in out
    assert json.loads(file.read_text()) == results


@pytest.mark.usefixtures("no_pictures")
def test_conclusions_are_drawn_anew_when_asked(run: Any, results: dict[str, Any], tmp_path: Path) -> None:
    file, page = tmp_path / "results.json", tmp_path / "a/b/index.html"
    file.write_text(json.dumps({**results, "answer": "An old answer."}))
    assert run("report", tmp_path, "--out", page.parent).code == 0
    assert "An old answer." in page.read_text(encoding="utf-8")
    assert {*tmp_path.iterdir()} == {tmp_path / "a", file}
    assert run("report", tmp_path, "--conclude").code == 0
    new = json.loads(file.read_text())
    assert {**new, **conclusions(new)} == new
    assert new["measurements"] == results["measurements"]
    assert "An old answer." not in new["answer"] + (tmp_path / "index.html").read_text(encoding="utf-8")


def test_without_what_draws_it_says_what_to_install(
    refused: Any, results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results))
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert "a chart needs vl_convert, which is not installed: pip install" in refused("report", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
