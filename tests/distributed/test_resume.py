"""A training that loses a rank and is started again by torchrun ends with the weights of one that was left alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dilated_attention
from dilated_attention.ranks import pool
from tests.distributed.resume_script import train
from tests.over_ranks import alive, world

SCRIPT = Path(__file__).with_name("resume_script.py")
STEPS = 6


def train_undisturbed(folder: Path) -> None:
    train(folder, STEPS, None, world())


@pytest.mark.slow
def test_weights_after_a_crash_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    death = (random.randrange(1, STEPS), random.randrange(2))
    calm, crashed = tmp_path / "calm", tmp_path / "crashed"
    calm.mkdir()
    crashed.mkdir()
    pool(2).run(train_undisturbed, calm)
    source = str(Path(dilated_attention.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, SCRIPT, crashed, STEPS, *death]
    result = subprocess.run(
        [str(word) for word in command],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert "Signal 9 (SIGKILL) received" in result.stdout or "exitcode: -9" in result.stdout, result.stdout
    lives = [line.split() for line in (crashed / "lives").read_text().splitlines()]
    assert [life for life, _ in lives] == ["0", "0", "1", "1"], f"{death=}"
    assert not any(alive(int(pid)) for _, pid in lives)
    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (calm, crashed)]
    assert states[0]["losses"] == states[1]["losses"], f"{death=}"
    assert len(set(states[0]["losses"])) == STEPS
    for name, weight in states[0]["model"].items():
        assert torch.equal(weight, states[1]["model"][name]), f"{name} differs, {death=}"
    for mine, other in zip(states[0]["random"], states[1]["random"], strict=True):
        assert torch.equal(mine, other)
