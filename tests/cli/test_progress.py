"""How far a run is, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from dilated_attention.cli.output import watching


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    with watching() as watch:
        watch("checking [one]", 0.25, 52.0)
        watch("one: exact")  # what stays is drawn above the bar, and draws the bar again
    for said in ("checking [one]", "52 s left", "one: exact", f"m{5 * '━'}\x1b"):  # a quarter of the bar
        assert said in written.getvalue()
