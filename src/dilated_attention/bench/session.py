"""The door of the benchmark: run suites by name, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dilated_attention.bench import machine
from dilated_attention.bench.steps import Session, Watch, continued
from dilated_attention.bench.suites import ALL, SUITES, steps_of

DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}


def run(
    suites: Sequence[str],
    device: torch.device,
    dtypes: Sequence[torch.dtype] | None = None,
    *,
    save: Callable[[dict[str, Any]], None],
    watch: Watch | None = None,
    seconds: float | None = None,
    limit_ms: float | None = None,
    commit: str | None = None,
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run suites by name; the results, which ``save`` got after every step, also when it is interrupted.

    Args:
        dtypes: the first is used where a suite needs one only. By default float32 on a CPU, bfloat16 on CUDA first.
        seconds: of timing for each setting, shared by what is timed there; 6 on a CPU and 2 on CUDA by default.
        limit_ms: what is expected to take longer for one call is skipped, and listed as skipped.
        commit: for a tree that came without its .git.
        before: the results of a run of the same suites that was interrupted; it goes on with the next step.
    """
    chosen, names = _planned(suites, device, dtypes)
    session = Session(device, names, watch=watch, seconds=seconds, limit_ms=limit_ms, commit=commit, before=before)
    with torch._dynamo.config.patch(recompile_limit=1 << 10):  # one function, many patterns
        return session.run({name: steps_of(name, session) for name in chosen}, save)


def check_continues(
    before: dict[str, Any], suites: Sequence[str], device: torch.device, dtypes: Sequence[torch.dtype] | None = None
) -> None:
    """ValueError where the run that these results are of cannot go on so."""
    chosen, found = _planned(suites, device, dtypes)
    continued(before, machine.describe(device), chosen, found)


def _planned(
    suites: Sequence[str], device: torch.device, dtypes: Sequence[torch.dtype] | None
) -> tuple[list[str], Sequence[torch.dtype]]:
    unknown = [name for name in suites if name not in SUITES]
    if unknown or not suites:
        raise ValueError(f"unknown suite {', '.join(unknown) or 'none'}: use one or more of {', '.join(SUITES)}")
    chosen = ALL if "all" in suites else list(dict.fromkeys(suites))
    return chosen, DTYPES.get(device.type, DTYPES["cuda"]) if dtypes is None else dtypes


__all__ = ["SUITES", "Watch", "check_continues", "run"]
