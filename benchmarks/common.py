"""What the scripts of this folder share: the way to the library, two options, and how a file of results is read."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples")]  # import this before the library


def parser(about: str | None, out: str, what: str = "the file of the results") -> argparse.ArgumentParser:
    """``about``: the docstring of a script, whose first line describes it."""
    made = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    made.add_argument("--out", type=Path, default=Path(out), help=what)
    made.add_argument("--commit", help="of a tree that came without its .git")
    return made


def read(file: Path) -> dict[str, Any]:
    """What was measured before."""
    return json.loads(file.read_text("utf-8")) if file.exists() else {}
