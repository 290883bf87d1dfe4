"""How far a run is, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from dilated_attention.cli.progress import Bar, Lines, roughly, watching


def test_lines_count_and_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 0.0, 10.0, 30.0])
    watch = Lines(clock=lambda: next(now))
    watch.begin(4)
    watch.step("first")
    watch.step("second")
    watch.say("by the way")
    watch.step("third")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["[1/4] first", "[2/4, 30 s left] second", "by the way", "[3/4, 30 s left] third"]


def test_estimates_are_rough() -> None:
    assert [roughly(x) for x in (0.4, 99, 100, 5999, 6000)] == ["0 s", "99 s", "2 min", "100 min", "1.7 h"]


def test_more_steps_than_planned(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Lines()
    watch.begin(1)
    watch.step("first")
    watch.step("second")
    assert capsys.readouterr().err.splitlines() == ["[1/1] first", "[2/2] second"]


def test_the_bar_counts_what_is_done() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Progress(console=screen, auto_refresh=False) as progress:
        watch = Bar(progress)
        watch.begin(3)
        (task,) = progress.tasks
        for done in range(3):
            watch.step(f"N=8 [of three]: step {done}")
            assert (task.completed, task.total, task.description) == (done, 3, f"step {done} N=8 [of three]")
        watch.say("by the way")
    assert "by the way" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_lines_where_there_is_no_terminal() -> None:
    with watching() as watch:
        assert isinstance(watch, Lines)


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    with watching() as watch:
        assert isinstance(watch, Bar)
        watch.begin(2)
        watch.step("checking [one]")
        watch.progress.refresh()
    assert "checking [one]" in written.getvalue()
    assert "0/2" in written.getvalue()
