"""`suggest`: what it prints can be pasted, and what it writes can be piped."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

import pytest

import dilated_attention
from dilated_attention import Pattern, advice
from dilated_attention.pattern import RULES


@pytest.mark.parametrize("rule", [*RULES, "union"])
def test_what_it_prints_and_writes_can_be_run(
    run: Any, rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"suggest -n 100000 --heads 12 --kv-heads 4 --ranks 4 --batch 2 --dtype fp32 --rule {rule} --causal".split()
    out = run(*line).out
    names: dict[str, Any] = {"da": dilated_attention}
    exec(out.split("\n\n")[1], names)
    pattern: Pattern = Pattern.suggest(10**5, 12, is_causal=True, kv_heads=4)
    if rule != "union":
        pattern = advice.pattern_for(10**5, 12, 4, rule)
    assert names["pattern"] == pattern
    commands = out.partition("picture of it:\n")[2].replace("\\\n", " ").splitlines()
    plan, show = (run(*shlex.split(command)[1:]) for command in commands)
    assert (plan.code, show.code) == (0, 0), (plan.err, show.err)
    assert repr(pattern) in plan.out

    written = tmp_path / "suggestion.json"
    written.write_text(run(*line, "--json").out)
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
