"""`doctor`: what it finds, and that it notices what does not work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention.cli import doctor
from dilated_attention.cli.doctor import Case, all_cases, found_devices, kernels, self_check
from dilated_attention.pattern import RULES

CPU = torch.device("cpu")


def test_it_tells_what_is_here_and_that_it_works(run: Any) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    for said in (f"torch {torch.__version__}", "CPU: ", "process groups over gloo", "matplotlib", "cpu float32 runs: "):
        assert said in out
    assert "cases are exact" in out


def test_a_failing_check_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "check", lambda case: "dq is off" if case.rule == "longnet" and case.is_causal else None)
    code, out, _ = run("doctor")
    assert code == 1
    assert "failed: longnet float32 on cpu, causal: dq is off" in out
    assert "failed: longnet float32 on cpu:" not in out


def test_the_cases() -> None:
    cases = list(all_cases([CPU]))
    assert len(cases) == 12
    assert {case.rule for case in cases[:3]} == set(RULES)
    assert {case.dtype for case in cases} == {torch.float32, torch.bfloat16}


def test_a_case_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from dilated_attention import testing

    real = testing.dilated_attention

    def scaled(query, key, value, *args, **more):  # type: ignore[no-untyped-def]
        return real(query, key * 1.001, value, *args, **more)

    case = Case("longnet", CPU, torch.float32, True)
    assert case.check() is None
    monkeypatch.setattr(testing, "dilated_attention", scaled)
    assert "out is off by" in str(case.check())


def test_a_kernel_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image\nand a long story")

    monkeypatch.setattr("dilated_attention.testing.check", fail)
    assert Case("longnet", CPU, torch.float32, False).check() == "no kernel image"


def test_no_case_starts_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "check", lambda case: None)
    now = iter([0.0, 0.0, 4.0, 8.0, 12.0])
    said: list[Case] = []
    cases = list(all_cases([CPU]))
    assert self_check(cases, 10.0, said.append, clock=lambda: next(now)) == (3, [])
    assert said == cases[:3]


def test_too_few_cases_are_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.0)
    code, out, _ = run("doctor")
    assert code == 0
    assert "0 of 0 cases are exact" in out
    assert "before the other" in out


def test_every_device_and_dtype_says_what_runs() -> None:
    lines = [line for line in kernels() if not line.startswith(" ")]
    assert len(lines) == 4 * len(found_devices())
    assert all("runs: " in line for line in lines)


@pytest.mark.gpu
def test_a_gpu_is_checked_too(run: Any) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    assert "cuda:0 bfloat16 runs: " in out
    assert torch.cuda.get_device_name() in out
