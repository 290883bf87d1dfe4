"""`show`: what is asked for reaches the picture, and what cannot be is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dilated_attention import Blocks, DilatedPattern, Global, Pattern, Strided, Window
from dilated_attention.show import terminal
from dilated_attention.show.view import Plot

LINE = ("show", "-n", "8k", "-w", "2k,4k", "-r", "1,2")
PATTERN = DilatedPattern.longnet([2048, 4096], [1, 2])


def test_on_the_terminal(run: Any) -> None:
    code, out, err = run(*LINE)
    assert (code, err) == (0, "")
    assert out.startswith("longnet: w=2048 r=1, w=4096 r=2\n8,192 tokens, 8 heads, not causal\n")
    assert "A cell is 128 × 128 tokens." in out


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("Window(3), da.Strided(rate=8,)", Pattern([Window(3), Strided(8)])),
        ("Pattern([Global([0, 5]), Blocks(4, [(1, 0)])], counts='sum')",
         Pattern([Global([0, 5]), Blocks(4, [(1, 0)])], counts="sum")),
        ("Blocks.bigbird(8, num_tokens=64, seed=3)", Pattern([Blocks.bigbird(8, num_tokens=64, seed=3)])),
    ],
)  # fmt: skip
def test_any_pattern(run: Any, text: str, pattern: Pattern) -> None:
    code, out, err = run("show", "-n", 32, "--pattern", text, "--heads", 2)
    assert (code, err) == (0, "")
    assert out.startswith(f"{pattern.counts}: {Plot(pattern, 32, 2).branch_names[0]}")
    assert run("show", "-n", 32, "--pattern", repr(pattern), "--heads", 2).out == out


def test_a_terminal_gets_colours_and_its_width(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def console() -> Console:
        return Console(force_terminal=True, width=70, color_system="256", highlight=False)

    monkeypatch.setattr("dilated_attention.cli.output.console", console)
    out = run(*LINE).out
    assert "\x1b[38;5;117m██" in out
    assert f"A cell is {Plot(PATTERN, 8192, 8, cells=terminal.cells_in(console(), 8192)).cell_size} " in out


def test_every_option_reaches_the_picture(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.svg"
    assert run(*LINE, "-o", file).out == f"written: {file}\n"
    assert file.stat().st_size > 1000
    saved: list[tuple[Plot, Path]] = []
    monkeypatch.setattr("dilated_attention.show.vega.save", lambda view, file: saved.append((view, file)))
    what = ("--rule", "torchscale", "--heads", 4, "--kv-heads", 2, "--head", 1, "--query", "1k", "--window", "1k:2k")
    ran = run(*LINE, *what, "--causal", "--colour", "branch", "--ranks", 4, "-o", file)
    assert (ran.code, ran.out) == (0, f"written: {file}\n")
    pattern = DilatedPattern.torchscale([2048, 4096], [1, 2])
    expected = Plot(
        pattern, 8192, 4, kv_heads=2, is_causal=True, head=1, query=1024, window=(1024, 2048), ranks=4, colour="branch"
    )
    assert saved == [(expected, file)]
