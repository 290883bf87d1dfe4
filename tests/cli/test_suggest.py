"""`suggest`: what it prints can be pasted."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from dilated_attention import advice
from dilated_attention.pattern import RULES


def test_it_prints_the_suggestion(run: Any) -> None:
    code, out, err = run("suggest", "-n", "1M", "--memory", "1GB", "--heads", 16, "--head-dim", 128, "--causal")
    found = advice.suggest(2**20, heads=16, head_dim=128, memory=10**9, is_causal=True)
    assert (code, err) == (0, "")
    assert out.startswith(f"{found}\n"), "not folded, however long its lines"


@pytest.mark.parametrize("rule", RULES)
def test_the_commands_it_prints_run_and_are_about_the_same(run: Any, rule: str) -> None:
    line = ("suggest", "-n", 10**5, "--heads", 12, "--kv-heads", 4, "--ranks", 4, "--batch", 2, "--dtype", "fp32")
    out = run(*line, "--rule", rule, "--memory", "1GB", "--causal").out
    found = advice.suggest(10**5, heads=12, head_dim=64, rule=rule, kv_heads=4)
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("    ")]
    assert [command[:2] for command in commands] == [["dilated-attention", "plan"], ["dilated-attention", "show"]]
    for _, *arguments in commands:
        ran = run(*arguments)
        assert ran.code == 0, ran.err
        assert str(max(found.pattern.segment_lengths)) in ran.out.replace(",", "")
    needs = [line for line in out.splitlines() if "training" in line]
    assert needs[0].removeprefix("- ") in run(*commands[0][1:]).out


def test_one_device(run: Any) -> None:
    out = run("suggest", "-n", "100").out
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("    ")]
    assert "--ranks" not in out
    assert all(run(*arguments).code == 0 for _, *arguments in commands)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0"], "-n must be a whole number"),
        (["-n", "2^60"], "tokens must be at most 2**48"),
        (["-n", "1k", "--rule", "x"], "unknown rule 'x'"),
        (["-n", "1k", "--heads", "0"], "--heads"),
        (["-n", "1k", "--memory", "-1GB"], "--memory must be at least one byte"),
    ],
)
def test_what_cannot_be_is_one_line(refused: Any, arguments: list[str], message: str) -> None:
    assert message in refused("suggest", *arguments)
