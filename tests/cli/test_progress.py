"""How far a run is, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from dilated_attention.cli.output import Bar, watching


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    with watching() as watch:
        assert isinstance(watch, Bar)
        watch.step("checking [one]", 0.25, 52.0)
        assert watch.progress.tasks[0].percentage == 25
        watch.progress.refresh()
        watch.say("one: exact")
    for said in ("checking [one]", "52 s left", "one: exact"):
        assert said in written.getvalue()
