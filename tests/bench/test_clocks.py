"""The GPU's clock beside a measurement, read from a program that stands in for nvidia-smi."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dilated_attention.bench.clocks import Clocks

CUDA = torch.device("cuda")


def test_medians_of_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    lines = "[N/A], [N/A]\\n1980, 650.5\\n1500, 650.5\\n1410, 650.5\\n14"
    program.write_text(f'#!/bin/sh\nprintf "{lines}"\necho "$@" > {asked}\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="12-34"))
    with Clocks(CUDA) as clocks:
        until = time.monotonic() + 30
        while not asked.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert clocks.medians() == (1500, 650.5)
        process = clocks.process
    assert process is not None
    assert process.poll() is not None  # nothing is left running
    assert "--id=GPU-12-34" in asked.read_text()


def test_nothing_where_nobody_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for device in (CUDA, torch.device("cpu")):
        with Clocks(device) as clocks:
            assert clocks.medians() == ()
