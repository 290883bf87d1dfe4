"""What the suites share: the segments and rates of the reports, and who is in which picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from dilated_attention.bench.run import Call, Timing, time_calls

Key = TypeVar("Key")
PATTERNS = (((1024, 2048, 4096), (1, 2, 4)), ((2048, 4096, 8192), (1, 2, 4)))
MULTIHEAD = ("MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention", "nn.MultiheadAttention")
MIB = 1 << 20


def timed(calls: Mapping[Key, Call], device: torch.device, seconds: float = 2.0) -> dict[Key, Timing]:
    """For small tables: what is on and what is off, in turn."""
    return time_calls(calls, device, seconds=seconds, warmups=2)


def mib(count: float | None) -> float | None:
    return None if count is None else round(count / MIB, 2)
