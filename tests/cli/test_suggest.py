"""`suggest`: what it prints can be pasted, and what it writes can be piped."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import dilated_attention
from dilated_attention import advice
from dilated_attention.pattern import RULES


def test_it_prints_the_suggestion(run: Any) -> None:
    code, out, err = run("suggest", "1M", "--memory", "1GB", "--heads", 16, "--head-dim", 128, "--causal")
    found = advice.suggest(advice.Workload(2**20, 16, 128, is_causal=True), memory=10**9)
    assert (code, err) == (0, "")
    assert out.startswith(f"{found}\n")
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("rule", RULES)
def test_the_python_and_the_commands_it_prints_run_and_are_about_the_same(
    run: Any, rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("suggest", "-n", 10**5, "--heads", 12, "--kv-heads", 4, "--ranks", 4, "--batch", 2, "--dtype", "fp32")
    given = (*line, "--rule", rule, "--causal")
    out = run(*given).out
    _, code, _ = out.split("\n\n", 2)
    found: dict[str, Any] = {"da": dilated_attention}
    exec(code, found)
    pattern = advice.pattern_for(10**5, 12, rule, 4)
    assert found["pattern"] == pattern
    words = [shlex.split(c) for c in out.partition("picture of it:\n")[2].replace("\\\n", " ").splitlines()]
    assert [command[:2] for command in words] == [["dilated-attention", "plan"], ["dilated-attention", "show"]]
    plan, show = (run(*arguments) for _, *arguments in words)
    assert (plan.code, show.code) == (0, 0), (plan.err, show.err)
    assert repr(pattern) in plan.out
    memory = next(line for line in out.splitlines() if line.startswith("memory"))
    trains = memory.split(": ")[1].split(" to train")[0]
    assert f" {trains} " in next(line for line in plan.out.splitlines() if line.startswith("memory to train")) + " "

    written = tmp_path / "suggestion.json"
    written.write_text(run(*given, "--json").out)
    assert json.loads(written.read_text())["suggestion"]["pattern"]["segment_lengths"] == [*pattern.segment_lengths]
    assert run("plan", written) == plan
    assert run("show", written) == show
    monkeypatch.setattr("sys.stdin", io.StringIO(written.read_text()))
    again = run("plan", "--ranks", 8, "-")
    assert "on 8 ranks" in again.out, "an option replaces what a suggestion says"
    assert repr(pattern) in again.out


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"options": 3}', "[" * 10**5, '{"options": {"tokens": []}}'])
def test_what_is_no_suggestion(refused: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    said = refused("plan", tmp_path / "s.json")
    assert "holds nothing that `suggest --json` wrote" in said or "'[]' is not a whole number" in said
