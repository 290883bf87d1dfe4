"""Checks, timings, probes and the description of the machine."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.bench import machine, probes, runners
from dilated_attention.bench.run import Timing, interleave, oracle, time_calls
from dilated_attention.bench.setting import Implementation, Setting, Subject
from dilated_attention.testing import make_qkv

CPU = torch.device("cpu")
PATTERN = DilatedPattern.longnet([16, 40], [1, 3])


def test_calls_are_timed_in_turn() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = time_calls(calls, CPU, seconds=0.0, least=2, warmups=1)
    assert "".join(order) == "abcabccba"  # once to warm up, twice measured, there and back
    assert [timings[name].repeats for name in "abc"] == [2, 2, 2]


def test_slow_calls_are_timed_once_and_quick_ones_get_their_share() -> None:
    measures = {"slow": lambda: [1500.0], "quick": lambda: [1.0], "some": lambda: [2.0, 4.0]}
    timings = interleave(measures, seconds=0.03, least=5)
    assert timings["slow"] == Timing(1500.0, 1500.0, 1500.0, 1)
    assert timings["quick"].repeats == 10  # a third of 30 ms
    assert timings["some"] == Timing(3.0, 2.0, 4.0, 10)  # five rounds, whatever one gives


def test_out_without_gradients_is_checked_too() -> None:
    """It is what is timed as forward, and may run other code: rows of it are checked at full length."""
    setting = Setting(64, (16, 64), (1, 4), torch.device("cpu"), heads=4, head_dim=8)
    pattern = setting.pattern("longnet")

    def wrong_in_inference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = dilated_attention(q, k, v, pattern)
        return out if torch.is_grad_enabled() else out * 1.01

    for attention, right in ((oracle(pattern), True), (wrong_in_inference, False)):
        subject = Subject(attention, oracle(pattern), pattern, *setting.inputs())
        one = Implementation("one", "function", "longnet", lambda _, subject=subject: subject)
        assert bool(runners.prepare(one, setting, ["forward_backward"])[2]) != right


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rule", ["longnet", "torchscale", "head_groups"])
def test_single_rows_are_those_of_the_oracle(rule: str, is_causal: bool) -> None:
    pattern = DilatedPattern(rule, PATTERN.segment_lengths, PATTERN.dilation_rates)
    qkv = make_qkv(1, 59, 2, 8, dtype=torch.float64)
    out = oracle(pattern, is_causal)(*qkv)
    for head, query in itertools.product(range(2), range(59)):
        row, expected = probes.exact_row(qkv, pattern, query, head, is_causal), out[0, query, head]
        assert torch.allclose(torch.zeros_like(expected) if row is None else row, expected)


@pytest.mark.parametrize(("kept", "expected"), [(True, 5), (False, 2)])
def test_the_peak_is_what_was_held_at_once(kept: bool, expected: int) -> None:
    """Of five tensors of 1 MiB that are made one after another, and kept until the end or not."""
    x = torch.zeros(1 << 18)

    def call() -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for number in range(5):
            made = [*made * kept, x + number]
        return made

    assert probes.peak_bytes(call, CPU) / (1 << 20) == pytest.approx(expected, abs=0.01)


def test_a_single_wrong_row_and_a_row_without_keys_that_is_not_0_are_seen() -> None:
    pattern = DilatedPattern.longnet([8], [2])
    qkv = make_qkv(1, 8, 2, 8)
    right = dilated_attention(*qkv, pattern)
    for token, factor, added, is_right in ((0, 1.0, 0.0, True), (0, 1.01, 0.0, False), (0, torch.nan, 0.0, False),
                                           (1, 1.0, 1e-7, False)):  # fmt: skip
        out = right.clone()
        out[0, token, 0] = factor * out[0, token, 0] + added
        worst, limit = probes.check_rows(out, qkv, pattern, False)
        assert (worst <= limit) == is_right


def test_the_machine_is_described_in_json() -> None:
    found = machine.describe(CPU)
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert found["command"].startswith("python ")
    assert machine.one_line(found)
    assert machine.describe(CPU, commit="abc")["commit"] == "abc"


def test_the_commit_of_another_project_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a virtual environment inside someone's repository; and where there is no git."""
    package = tmp_path / "site-packages" / "dilated_attention"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "theirs").touch()
    who = ["-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["add", "theirs"], [*who, "commit", "-qm", "theirs"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(machine.dilated_attention, "__file__", str(package / "__init__.py"))
    assert machine.git_state() == {"commit": "unknown", "dirty": None}
    monkeypatch.setattr(subprocess, "run", mock.Mock(side_effect=FileNotFoundError("git")))
    assert machine.git_state() == {"commit": "unknown", "dirty": None}


@pytest.mark.parametrize(("seconds", "others"), [(1.0, 0.05), (15.0, 0.75), (-1.0, 0.0), (None, None)])
def test_a_machine_that_others_use_is_too_busy(monkeypatch: pytest.MonkeyPatch, seconds: Any, others: Any) -> None:
    """So much CPU time of others in ten seconds on two cores; None where no system tells."""
    now, cpu = iter([0.0, 10.0]), iter([5.0, 5.0 + (seconds or 0)])
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(machine, "_cpu_seconds", lambda: None if seconds is None else next(cpu))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    assert machine.Load().note() == {"others": others, "too_busy": (others or 0) > 0.25}
