"""`doctor`: what it finds, and that it notices what does not work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention import testing
from dilated_attention.cli.doctor import checks, kernels
from dilated_attention.pattern import RULES

CPU = [torch.device("cpu")]


def test_it_tells_what_is_here_and_that_it_works(run: Any) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    for said in (
        f"PyTorch version: {torch.__version__}",
        "cpu float32 runs: ",
        "not eager: ",
        "longnet float32 on cpu",
    ):
        assert said in out
    assert "failed" not in out
    if torch.cuda.is_available():
        assert "cuda:0 bfloat16 runs: " in out


def test_every_dtype_says_what_runs_and_why_not_others() -> None:
    lines = list(kernels(CPU))
    first = [line for line in lines if not line.startswith(" ")]
    assert len(first) == 4
    assert all("runs: " in line for line in first)
    assert sum("not triton" in line for line in lines) == 4


def test_the_checks_are_of_every_rule() -> None:
    found = dict(checks(CPU))
    assert len(found) == 6
    assert all(any(what.startswith(rule) for what in found) for rule in RULES)
    assert set(found.values()) == {""}


def test_a_wrong_gradient_is_noticed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = testing.dilated_attention

    def scaled(query, key, value, pattern, **more):  # type: ignore[no-untyped-def]
        return real(query, key * (1.001 if pattern.rule == "longnet" else 1), value, pattern, **more)

    monkeypatch.setattr(testing, "dilated_attention", scaled)
    code, out, _ = run("doctor")
    assert code == 1
    assert "longnet float32 on cpu: failed: out is off by" in out
    assert "torchscale float32 on cpu: exact" in out


def test_a_kernel_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image\nand a long story")

    monkeypatch.setattr(testing, "check", fail)
    assert set(dict(checks(CPU)).values()) == {"failed: no kernel image"}
