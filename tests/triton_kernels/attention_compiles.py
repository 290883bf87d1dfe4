"""The attention kernels through Triton's compiler, for GPUs that need not be there. Run by test_triton in a process of
its own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from triton.runtime import driver

from dilated_attention import DilatedPattern
from dilated_attention._courses import launches
from dilated_attention._shards import Heads
from dilated_attention.backends.triton import configs, launch
from dilated_attention.backends.triton.configs import Config
from tests.triton_kernels.decode_compiles import Compiled, Driver

assert os.environ.get("TRITON_INTERPRET") != "1"

NESTED = DilatedPattern.longnet([2048, 8192], [1, 4])
SINGLE = DilatedPattern.longnet([2048], [2])
SHARED = {75: 65_536, 80: 166_912, 86: 101_376, 90: 232_448}  # bytes of shared memory that a program can have
HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Compiled]:
    found = {}
    for name in configs.KERNELS:
        found[name] = Compiled(getattr(launch, f"{name}_kernel"))
        monkeypatch.setattr(launch, f"{name}_kernel", found[name])
    return found
