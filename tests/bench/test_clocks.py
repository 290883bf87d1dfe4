"""The GPU's clock beside a measurement, read from a program that stands in for nvidia-smi."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dilated_attention.bench.clocks import Clocks

CUDA = torch.device("cuda")


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where its arguments are written."""
    program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {asked}\n'
        'echo "[N/A], [N/A]"\nfor mhz in 1980 1500 1410; do echo "$mhz, 650.5"; done\nexec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="12-34"))
    return asked


def test_medians_since_a_time(nvidia_smi: Path) -> None:
    start = time.monotonic()
    with Clocks(CUDA) as clocks:
        while len(clocks.samples) < 3 and time.monotonic() < start + 30:
            time.sleep(0.01)
        assert clocks.since(start) == {"sm_mhz": 1500, "watts": 650.5}
        assert clocks.since(time.monotonic() + 1) == {}
        process = clocks.process
    assert process is not None
    assert process.poll() is not None  # nothing is left running
    assert "--id=GPU-12-34" in nvidia_smi.read_text()


def test_nothing_where_nobody_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for device in (CUDA, torch.device("cpu")):
        with Clocks(device) as clocks:
            assert clocks.since(0.0) == {}
