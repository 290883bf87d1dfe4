"""A training that loses a rank and is started again by torchrun ends with the weights of one that was left alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import torch

import dilated_attention

SCRIPT = Path(__file__).with_name("resume_script.py")
STEPS = 6


def torchrun(folder: Path, *args: object) -> subprocess.Popen[str]:
    """Two ranks."""
    source = str(Path(dilated_attention.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(folder), *map(str, args)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def lives(folder: Path) -> list[int]:
    """In which life each process was; none of them may be left."""
    lines = [line.split() for line in (folder / "lives").read_text().splitlines()]
    assert not [pid for _, pid in lines if Path(f"/proc/{pid}").exists()]
    return [int(life) for life, _ in lines]


def test_weights_after_a_crash_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    death = (random.randrange(1, STEPS), random.randrange(2))
    calm, crashed = tmp_path / "calm", tmp_path / "crashed"
    runs = [torchrun(calm, STEPS), torchrun(crashed, STEPS, *death)]
    try:
        texts = [run.communicate(timeout=200)[0] for run in runs]
    finally:
        for run in runs:
            run.terminate()  # where it still runs; its ranks end with it
    assert [run.returncode for run in runs] == [0, 0], "\n".join(texts)
    assert lives(calm) == [0, 0]
    assert lives(crashed) == [0, 0, 1, 1], f"{death=}"
    assert "Signal 9 (SIGKILL) received" in texts[1] or "exitcode: -9" in texts[1], texts[1]
    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (calm, crashed)]
    assert states[0]["losses"] == states[1]["losses"], f"{death=}"
    assert len(set(states[0]["losses"])) == STEPS
    for name, weight in states[0]["model"].items():
        assert torch.equal(weight, states[1]["model"][name]), f"{name} differs, {death=}"
    for mine, other in zip(states[0]["random"], states[1]["random"], strict=True):
        assert torch.equal(mine, other)
