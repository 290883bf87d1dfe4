"""`show`: what is asked for reaches the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.show import View, text

LINE = ("show", "-n", "8k", "-w", "2k,4k", "-r", "1,2")
PATTERN = DilatedPattern.longnet([2048, 4096], [1, 2])


def test_on_the_terminal(run: Any) -> None:
    assert run(*LINE) == (0, text(View.of(PATTERN, 8192, 8), 100), "")


def test_every_option_reaches_the_picture(run: Any) -> None:
    line = ("--rule", "torchscale", "--heads", 4, "--kv-heads", 2, "--head", 0, "--query", 0, "--causal", "--ranks", 4)
    out = run(*LINE, *line, "--exchange", "alltoall", "--head-dim", 32, "--dtype", "float32").out
    pattern = DilatedPattern.torchscale([2048, 4096], [1, 2])
    view = View.of(
        pattern, 8192, 4, kv_heads=2, is_causal=True, query=0, head=0, ranks=4, exchange="alltoall", head_dim=32,
        dtype=torch.float32,
    )  # fmt: skip
    assert out == text(view, 100)


@pytest.mark.parametrize("ending", ["html", "svg", "png"])
def test_into_a_file(run: Any, tmp_path: Path, ending: str) -> None:
    file = tmp_path / "new" / f"pattern.{ending}"
    code, out, _ = run(*LINE, "-o", file)
    assert (code, out) == (0, f"written: {file}\n")
    assert file.stat().st_size > 1000


def test_a_terminal_gets_colours_and_its_width(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    def terminal() -> Console:
        return Console(force_terminal=True, width=70, color_system="256")

    monkeypatch.setattr("dilated_attention.cli.show.console", terminal)
    assert run(*LINE).out == text(View.of(PATTERN, 8192, 8), 70, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query", "8192"], "there is no query 8192 among 8192 tokens"),
        (["--head", "8"], "there is no head 8 among 8"),
        (["--query", "-1"], "'--query': '-1' is not a whole number"),
        (["--exchange", "ring"], "they need --ranks"),
        (["--head-dim", "3"], "they need --ranks"),
        (["--ranks", "2", "--exchange", "star"], "unknown exchange 'star'"),
        (["--rule", "head_groups", "--heads", "1"], "2 branches to 1 key/value heads"),
        (["-o", "pattern.pdf"], "-o must end in .html, .svg, .png"),
        (["-o", "/dev/null/pattern.svg"], "cannot write into /dev/null"),
    ],
)
def test_what_cannot_be_is_one_line(refused: Any, arguments: list[str], message: str) -> None:
    assert message in refused(*LINE, *arguments)
