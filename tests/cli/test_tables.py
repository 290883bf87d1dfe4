"""What a run looks like on a terminal."""

from __future__ import annotations

import io
import re
from copy import deepcopy
from typing import Any

from rich.console import Console

from dilated_attention.bench.keep import is_ours_wrong
from dilated_attention.cli.tables import print_results, wrong

Results = dict[str, Any]


def printed(results: Results, width: int = 160, **options: Any) -> str:
    screen = Console(file=io.StringIO(), width=width, highlight=False, markup=False, **options)
    print_results(screen, results)
    return screen.file.getvalue()  # type: ignore[attr-defined]


def line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_measurements(results: Results) -> None:
    text = printed(results)
    assert "quick: B=1 N=4,096 H=8 D=64 w=1024,4096 r=1,4 float32" in text
    ours = line(text, "longnet, sdpa ")
    assert "1.2 (1.11–1.48)" in ours
    assert "3.81 MiB" in ours
    assert ours.rstrip().endswith("exact")
    assert re.search(r"longnet, sdpa +forward \+ backward +46 \(41.1–54.8\) +8.58 MiB +exact", text)
    assert "346 (once)" in line(text, "RingDilatedAttention, 2 ranks")
    assert re.search(r"RingDilatedAttention, 2 ranks +forward \+ backward +out of memory +– +exact", text)


def test_what_is_wrong_has_no_time_and_says_why(results: Results) -> None:
    text = printed(results)
    assert re.search(r"gather \[padded\] +forward +7.0 \S+ +2.86 MiB +wrong gradients", text)
    assert re.search(r"gather \[padded\] +forward \+ backward +wrong +– +wrong gradients", text)
    said = (
        "gather [padded] (float32): wrong gradients: dq off by 2.5e-01, allowed 5.0e-06; dk off by inf, allowed 5.0e-06"
    )
    assert said in text
    assert "OURS" not in text


def test_ours_come_first_and_loud(results: Results) -> None:
    results["checks"].append(
        {**results["checks"][0], "verdict": "failed", "errors": {}, "limits": {}, "why": "no kernel"}
    )
    first, second = wrong(results)
    assert first.plain == "OURS: longnet, sdpa (float32): failed: no kernel"
    assert not second.plain.startswith("OURS")


def test_tables_of_suites(results: Results) -> None:
    text = printed(results)
    assert "ring: bytes" in text
    assert line(text, "two").split() == ["two", "1,234,567", "0.500"]
    assert line(text, "four").split() == ["four", "–", "2,350"]
    assert "as planned" in text


def test_recommendations_and_answer(results: Results) -> None:
    text = printed(results)
    assert 'DilatedPattern.longnet(w, r), backend="sdpa") (level with RingDilatedAttention)' in " ".join(text.split())
    assert "5.67" in line(text, "long ")
    assert "Take longnet with sdpa." in text
    assert "interrupted" not in text
    assert "interrupted" in printed({**results, "complete": False})


def test_nothing_measured(results: Results) -> None:
    empty = {name: [] if isinstance(value, list) else value for name, value in results.items()}
    assert printed({**empty, "answer": ""}).strip() == ""


def test_a_narrow_terminal_cuts_nothing(results: Results) -> None:
    text = printed(results, width=60, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in text
    assert "…" not in text
    joined = "".join(part for part in text.split() if not part.startswith("\x1b"))
    assert "54.8" in joined


def test_when_ours_is_wrong(results: Results) -> None:
    assert not is_ours_wrong(results)
    for part, change in (("checks", {"verdict": "wrong"}), ("measurements", {"status": "wrong"})):
        changed = deepcopy(results)
        changed[part][0] |= change
        assert is_ours_wrong(changed)
