"""Small cases of our kernels, forward and backward, under NVIDIA's compute-sanitizer, where it is installed.

This file is also the script that it runs: "2/8" after it picks the third of eight shares of the cases. Without torch's
caching of memory every tensor has its own bounds, which memcheck then watches. Whether results are right is seen by
test_cases.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dilated_attention.backends.triton import nesting
from tests.table import cover

PROGRAM = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
SHARES = 8  # the sanitizer makes a program many times slower: several processes take some of the cases each


@pytest.mark.gpu
@pytest.mark.skipif(PROGRAM is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str, share: int) -> None:
    """The script runs once without it: what it compiles is then read from Triton's cache."""
    script = [sys.executable, __file__, f"{share}/{SHARES}"]
    environment = {**os.environ, "PYTHONPATH": "src:.", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for command in (script, [str(PROGRAM), "--tool", tool, "--error-exitcode", "1", *script]):
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:  # with its children, which would keep the device busy
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"it did not end after {process.communicate()[0][-3000:]}") from None
        assert process.returncode == 0, said[-3000:]


if __name__ == "__main__":
    nesting.TILE = 1  # branches share a table wherever they can: such short ones would not gain by it
    share, shares = map(int, sys.argv[1].split("/"))
    small = [case for path in ("triton", "packed_triton") for case in cover(path) if case.tokens < 130]
    for case in small[share::shares]:
        results = case.on_one_device(case.attention(backend="triton"))
        print(case.id, results.dk.cpu().shape, flush=True)  # which waits for the kernels
    os._exit(0)  # threads of torch may still be there, whose end is not what is watched
