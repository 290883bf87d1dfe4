"""What a run looks like on a terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from dilated_attention.cli.bench import print_results

Results = dict[str, Any]


def printed(results: Results, width: int = 160, **options: Any) -> str:
    screen = Console(file=io.StringIO(), width=width, highlight=False, markup=False, **options)
    print_results(screen, results)
    return screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line",
    [
        r"quick: float32, B=1 H=8 D=64, w=256,1024 r=1,4",
        r"tokens +1,024 +2,048 +4,096 +8,192",
        r"longnet, auto +0\.90 / 2\.7 +1\.8 / 5\.4 +3\.6 / 10\.8 +7\.2 / 22",
        r" +4.00 / 8.00 +8.00 / 16.0 +16.0 / 32.0 +32.0 / 64.0",
        r"longnet, eager +3\.0 / 9\.0 +6\.0 / 18 +12\.0 / 36 +out of memory",
        r"gather-pad-scatter +2.0 / wrong .*",
        r".*longnet, eager: out of memory, 9 GiB wanted\.",
        r"index \[by mask\] +wrong +gradient of k: inf with a limit of 5.0e-06, float32 +The mask is shifted\.",
        r"steps: Splitting heads",
        r"einops +1,230 +yes",
        r"By reshape\.",
        r"training +.*DilatedPattern.head_groups\(w, r\)\) +1.2 ms +head_groups, sdpa +copy and gather, slicing, 2.*",
        r"It is fast\. All is right\.",
    ],
)
def test_lines(results: Results, line: str) -> None:
    text = printed(results)
    assert re.search(f"^{line} *$", text, re.MULTILINE), text
    assert "interrupted" not in text
    assert "interrupted" in printed({**results, "complete": False})


def test_what_cannot_run_here_and_what_was_not_measured_is_not_printed(results: Results) -> None:
    results["measurements"][0]["status"] = results["measurements"][1]["status"] = "skipped"
    assert re.search("^dense SDPA +– +4.0 / 12.0", printed(results), re.MULTILINE)
    empty = {name: [] if isinstance(value, list) else value for name, value in results.items()}
    assert printed({**empty, "answer": ""}).strip() == ""


def test_a_narrow_terminal_cuts_nothing(results: Results) -> None:
    text = printed(results, width=60, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in text
    assert "…" not in text
    assert "64.0" in "".join(part for part in text.split() if not part.startswith("\x1b"))
