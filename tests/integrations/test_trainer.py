"""The Hugging Face Trainer itself, on two ranks that share sequences."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention.testing import error

ROOT = Path(__file__).parents[2]


def trained(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """The weights after three steps of plain gradient descent, which shows the size of gradients as well."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = [str(ROOT / "tests" / "integrations" / "trainer_script.py"), str(folder / f"{ranks}.pt"), str(ranks)]
    done = subprocess.run(
        [sys.executable, *words, *script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, torch.Tensor] = torch.load(folder / f"{ranks}.pt", weights_only=True)
    return found


@pytest.mark.slow
def test_the_trainer_on_two_ranks(tmp_path: Path) -> None:
    one, two = trained(tmp_path, 1), trained(tmp_path, 2)
    assert max(error(two[name], one[name]) for name in one) < 1e-6  # the loss of Llama is in float32
