"""`suggest`: what it prints can be pasted."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from dilated_attention import DilatedPattern, advice
from dilated_attention.pattern import RULES


def test_it_prints_the_suggestion(run: Any) -> None:
    code, out, err = run("suggest", "-n", "1M", "--memory", "1GB", "--heads", 16, "--head-dim", 128, "--causal")
    found = advice.suggest(advice.Workload(2**20, 16, 128, is_causal=True), memory=10**9)
    assert (code, err) == (0, "")
    assert out.startswith(f"{found}\n")
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("rule", RULES)
def test_the_python_and_the_commands_it_prints_run_and_are_about_the_same(run: Any, rule: str) -> None:
    line = ("suggest", "-n", 10**5, "--heads", 12, "--kv-heads", 4, "--ranks", 4, "--batch", 2, "--dtype", "fp32")
    out = run(*line, "--rule", rule, "--causal").out
    code, commands = out.partition("\n\n")[0], out.partition("picture of it:\n")[2]
    found: dict[str, Any] = {"DilatedPattern": DilatedPattern}
    exec(code, found)
    pattern = advice.pattern_for(10**5, 12, rule, 4)  # type: ignore[arg-type]
    assert found["pattern"] == pattern
    words = [shlex.split(command) for command in commands.replace("\\\n", " ").splitlines()]
    assert [command[:2] for command in words] == [["dilated-attention", "plan"], ["dilated-attention", "show"]]
    plan, show = (run(*arguments) for _, *arguments in words)
    assert (plan.code, show.code) == (0, 0), (plan.err, show.err)
    assert repr(pattern) in plan.out
    memory = next(line for line in out.splitlines() if line.startswith("memory"))
    trains = memory.split(": ")[1].split(" to train")[0]
    assert f" {trains} " in next(line for line in plan.out.splitlines() if line.startswith("memory to train")) + " "
