"""What a run looks like on a terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from dilated_attention.cli.tables import print_results

Results = dict[str, Any]


def printed(results: Results, width: int = 160, **options: Any) -> str:
    screen = Console(file=io.StringIO(), width=width, highlight=False, markup=False, **options)
    print_results(screen, results)
    return screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line",
    [
        r"quick: B=1 N=4,096 H=8 D=64 w=1024,4096 r=1,4 float32",
        r"longnet, sdpa +forward +1.2 \(1.11–1.48\) +3.81 MiB +exact",
        r"longnet, sdpa +forward \+ backward +46 \(41.1–54.8\) +8.58 MiB +exact",
        r"RingDilatedAttention, 2 ranks +forward +350 \(once\) +1.91 MiB +exact",
        r"RingDilatedAttention, 2 ranks +forward \+ backward +out of memory +– +exact",
        r"gather \[padded\] +forward +7.0 \S+ +2.86 MiB +wrong gradients",
        r"gather \[padded\] +forward \+ backward +wrong +– +wrong gradients",
        r"gather \[padded\] \(float32\): wrong gradients: dq off by 2.5e-01, allowed 5.0e-06; "
        r"dk off by inf, allowed 5.0e-06",
        r"ring: bytes",
        r"two +1,234,567 +0.500",
        r"four +– +2,350",
        r"as planned",
        r"long +.*DilatedPattern.longnet\(w, r\), backend=\"sdpa\"\) \(level with RingDilatedAttention\).* 5.67",
        r"Take longnet with sdpa\.",
    ],
)
def test_lines(results: Results, line: str) -> None:
    text = printed(results)
    assert re.search(f"^{line} *$", text, re.MULTILINE), text
    assert "OURS" not in text
    assert "interrupted" not in text
    assert "interrupted" in printed({**results, "complete": False})


def test_nothing_measured(results: Results) -> None:
    empty = {name: [] if isinstance(value, list) else value for name, value in results.items()}
    assert printed({**empty, "answer": ""}).strip() == ""


def test_a_narrow_terminal_cuts_nothing(results: Results) -> None:
    text = printed(results, width=60, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in text
    assert "…" not in text
    assert "54.8" in "".join(part for part in text.split() if not part.startswith("\x1b"))
