"""Runs files of cases in a process of its own: Triton reads at its import whether it interprets or compiles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The interpreter computes with numpy, whose threads only wait for one another: they took half of the time.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
CACHE = ROOT / ".cache/triton"  # of compiled kernels, by what they are compiled from: it is kept between runs


def run(*files: str, options: tuple[str, ...] = (), **environment: str) -> int:
    """How many of these cases passed; fails unless all did. ``options`` of pytest."""
    cases = [f"tests/{file}" for file in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases, *options]
    without = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CHUNK")}
    given = {**without, **ONE_THREAD, "TRITON_CACHE_DIR": str(CACHE), **environment}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    passed = re.fullmatch(r"(\d+) passed(, \d+ deselected)?(, \d+ warnings?)?( in .*)?", summary)
    assert passed, f"not all ran: {summary}"
    return int(passed[1])
