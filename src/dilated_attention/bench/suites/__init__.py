"""The suites by name, and the door of the benchmark. Each module has `steps(session)`, which plans it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dilated_attention.bench.pace import Watch
from dilated_attention.bench.session import Session, Step
from dilated_attention.bench.suites import (
    copies,
    decode,
    improved,
    kernels,
    language,
    optimisations,
    packed,
    profile,
    quick,
    ring,
    scaling,
    slides,
    stream,
)

_COMPARED = (copies, improved, ring, profile, scaling, optimisations)
_MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (quick, *_COMPARED, kernels, decode, stream, packed, slides, language)
}
ALL = [module.__name__.rpartition(".")[2] for module in _COMPARED]
SUITES = {
    **{name: (module.__doc__ or "").splitlines()[0] for name, module in _MODULES.items()},
    "all": f"{', '.join(ALL)}.",
}
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}


def named(given: Sequence[str]) -> list[str]:
    """The names in some texts, each of which may have several with commas between them."""
    names = [name for text in given for name in text.split(",")]
    unknown = [name for name in names if name not in SUITES]
    if unknown or not names:
        raise ValueError(f"unknown suite {', '.join(unknown)!r}: use one or more of {', '.join(SUITES)}")
    return names


def steps_of(name: str, session: Session) -> list[Step]:
    steps: list[Step] = _MODULES[name].steps(session)
    return steps


def run(
    suites: Sequence[str],
    device: torch.device,
    dtypes: Sequence[torch.dtype] | None = None,
    *,
    save: Callable[[dict[str, Any]], None],
    watch: Watch | None = None,
    seconds: float | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Run suites by name; the results, which ``save`` got after every step, also when it is interrupted.

    Args:
        dtypes: the first is used where a suite needs one only. By default float32 on a CPU, bfloat16 on CUDA first.
        seconds: of timing for each setting, shared by what is timed there; 3 on a CPU and 2 on CUDA by default.
        commit: for a tree that came without its .git.
    """
    chosen = [name for some in named(suites) for name in (ALL if some == "all" else [some])]
    # PyTorch's profiler, which counts memory, else prints two lines each time that it is used
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    session = Session(device, dtypes or DTYPES[device.type], watch=watch, seconds=seconds, commit=commit)
    with torch._dynamo.config.patch(recompile_limit=1 << 10):  # one function, many patterns
        return session.run({name: steps_of(name, session) for name in dict.fromkeys(chosen)}, save)
