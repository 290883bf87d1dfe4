"""Our kernels under NVIDIA's compute-sanitizer, where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sanitizer_cases

ROOT = Path(__file__).parents[1]
PROGRAM = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")

SHARES = 5  # the sanitizer makes a program many times slower: several processes take some of the cases each


@pytest.mark.gpu
@pytest.mark.skipif(PROGRAM is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str, share: int) -> None:
    """The script runs once without it: what it compiles is then read from Triton's cache."""
    cases = [str(index) for index in range(share, len(sanitizer_cases.CASES), SHARES)]
    script = [sys.executable, "tests/sanitizer_cases.py", *cases]
    environment = {**os.environ, "PYTHONPATH": "src", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for command in (script, [str(PROGRAM), "--tool", tool, "--error-exitcode", "1", *script]):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
