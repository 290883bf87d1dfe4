"""Every Python block in the documentation runs, in order, page by page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks, f"{page.name} shows no code"
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def test_readme_is_short_and_its_map_true() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    listed = set(re.findall(r"^\| `([\w./]+)` \|", text, re.MULTILINE))
    source = ROOT / "src/dilated_attention"
    there = {p.name for p in source.glob("*.py") if p.name != "__init__.py"}
    there |= {f"{p.name}/" for p in source.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert listed == there


@pytest.mark.parametrize(("results", "page"), [("h200.json", "README.md"), ("ring.json", "docs/scaling.md")])
def test_the_figures_shown_are_those_that_were_measured(results: str, page: str) -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "benchmarks/table.py", ROOT / "benchmarks/results" / results],
        capture_output=True, text=True, check=True, encoding="utf-8",
    ).stdout  # fmt: skip
    assert printed.strip() in (ROOT / page).read_text(encoding="utf-8"), "paste what benchmarks/table.py prints"
