"""Running a command line in this process, and results small enough to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from dilated_attention.cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]
Refused = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The exit code of a command line, its output and its errors."""

    def one(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return one


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is its page and its CSV: pictures take seconds."""
    monkeypatch.setattr("dilated_attention.bench.plots.pictures", lambda results: {})


@pytest.fixture
def refused(run: Run) -> Refused:
    """The one line that a command line which cannot be gets, on stderr and alone."""

    def one(*arguments: object) -> str:
        ran = run(*arguments)
        assert (ran.code, ran.out) == (2, ""), ran
        assert ran.err.startswith("error: ")
        assert ran.err.count("\n") == 1, ran.err
        return ran.err

    return one


SETTING = {
    "suite": "quick", "samples": 1, "tokens": 4096, "heads": 8, "head_dim": 64, "lengths": [1024, 4096],
    "rates": [1, 4], "dtype": "float32", "causal": False, "why": "", "tokens_per_s": None, "flops": 10**9,
    "bytes": 10**6, "tflops": None, "of_matmul": None, "gb_per_s": None, "of_copy": None,
}  # fmt: skip
OURS = {"implementation": "longnet, sdpa", "kind": "function", "ours": True, "rule": "longnet", "ranks": 1}
RING = {**OURS, "implementation": "RingDilatedAttention", "kind": "ring", "ranks": 2}
OTHER = {"implementation": "gather [padded]", "kind": "baseline", "ours": False, "rule": "longnet", "ranks": 1}


def measured(who: dict[str, Any], direction: str, median: float, peak: int, repeats: int = 9) -> dict[str, Any]:
    ms = {"median": median, "lower": 0.9 * median, "upper": 1.2 * median, "repeats": repeats}
    return {**SETTING, **who, "direction": direction, "status": "measured", "ms": ms, "peak_bytes": peak}


def without_time(who: dict[str, Any], direction: str, status: str) -> dict[str, Any]:
    found = {"status": status, "ms": None, "peak_bytes": None, "why": f"it is {status}"}
    return {**SETTING, **who, "direction": direction, **found}


def checked(who: dict[str, Any], verdict: str = "exact", **errors: Any) -> dict[str, Any]:
    found = {
        "verdict": verdict,
        "errors": {"out": 1e-7, **errors},
        "limits": {"out": 5e-6, **dict.fromkeys(errors, 5e-6)},
    }
    return {**who, "dtype": "float32", "causal": False, **found, "why": ""}


@pytest.fixture
def results() -> dict[str, Any]:
    """One of ours that is right, one over ranks that lacks memory, and another's with wrong gradients."""
    return {
        "schema": 1,
        "machine": {
            "date": "2026-01-02", "command": "bench", "commit": "0123456789abcdef", "dirty": False,
            "device": "CPU 9000", "cpu": "CPU 9000", "cores": 2, "threads": 2, "load": 0.1, "system": "Linux",
            "versions": {"dilated_attention": "0.1.0", "python": "3.11", "torch": "2.13"},
        },
        "suites": ["quick"],
        "complete": True,
        "seconds": 12.0,
        "ceilings": [{"dtype": "float32", "matmul_tflops": 0.15, "copy_gb_per_s": 9.1}],
        "answer": "Take longnet with sdpa.",
        "checks": [checked(OURS), checked(RING), checked(OTHER, "wrong gradients", dq=0.25, dk="inf")],
        "measurements": [
            measured(OURS, "forward", 1.234, 4_000_000),
            measured(OURS, "forward_backward", 45.67, 9_000_000),
            measured(RING, "forward", 345.6, 2_000_000, repeats=1),
            without_time(RING, "forward_backward", "out of memory"),
            measured(OTHER, "forward", 7.0, 3_000_000),
            without_time(OTHER, "forward_backward", "wrong"),
        ],
        "tables": [
            {"suite": "ring", "title": "bytes", "note": "as planned", "columns": ["ranks", "bytes", "ms"],
             "rows": [["two", 1234567, 0.5], ["four", None, 2345.6]]},
        ],
        "claims": [],
        "recommendations": [
            {"use_case": "long", "best": "longnet, sdpa", "value": "1.2 ms", "runner_up": "gather [padded]",
             "factor": 5.67, "ties": ["RingDilatedAttention"]},
        ],
    }  # fmt: skip
