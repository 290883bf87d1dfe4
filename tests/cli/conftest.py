"""Running a command line in this process, and results to print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from dilated_attention.cli import main
from tests.bench import sample


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


@pytest.fixture
def results() -> dict[str, Any]:
    """Of a run that came to its end."""
    return {**sample.sample(), "complete": True}
