"""The training script of the page on many GPUs: one that loses a rank ends with the weights of one left alone."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dilated_attention

ROOT = Path(__file__).parents[2]
STEPS = 5  # of the script


@pytest.mark.slow
def test_weights_after_a_crash_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/many-gpus.md").read_text("utf-8")
    (script,) = re.findall(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    death = [random.randrange(1, STEPS), random.randrange(2), "0"]  # step, rank, restart
    here = '[step, group.rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]]'
    kill = f"    if {here} == {death}:\n        logits.register_hook(lambda _: os.kill(os.getpid(), 9))\n"
    source = str(Path(dilated_attention.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    states = []
    for name, inserted in (("calm", ""), ("crashed", kill)):
        folder = tmp_path / name
        folder.mkdir()
        assert script.count("    loss.backward()\n") == 1
        (folder / "train.py").write_text(script.replace("    loss.backward()\n", f"{inserted}    loss.backward()\n"))
        result = subprocess.run(
            [*command, "train.py"], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=200, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout
        assert ("SIGKILL" in result.stdout or "exitcode: -9" in result.stdout) == bool(inserted), result.stdout
        states.append(torch.load(folder / "checkpoint.pt", weights_only=True))
    calm, crashed = states
    assert calm["step"] == crashed["step"] == STEPS - 1
    assert all(torch.equal(weight, crashed["model"][name]) for name, weight in calm["model"].items()), f"{death=}"
