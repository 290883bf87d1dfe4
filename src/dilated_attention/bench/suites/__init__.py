"""The suites by name, and the door of the benchmark: a run that keeps its results whatever happens.

Each suite is a function that plans its steps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dilated_attention.bench import machine
from dilated_attention.bench.results import Record, load
from dilated_attention.bench.session import Save, Session, Step
from dilated_attention.bench.suites import alone, compared, models

PLANS: dict[str, Callable[[Session], list[Step]]] = {
    **{name: partial(compared.plain, name) for name in ("quick", "copies", "improved", "ring")},
    "profile": compared.profile, "scaling": compared.scaling,
    "optimisations": partial(compared.plain, "optimisations"), "kernels": compared.kernels, "decode": alone.decode,
    "stream": alone.streams, "packed": alone.packed, "slides": models.slides, "language": models.language,
    "suggested": partial(compared.plain, "suggested"),
}  # fmt: skip
ALL = [*PLANS][1:7]
SUITES = (*PLANS, "all")
PREVIOUS = "previous.json"
HALVES = (torch.bfloat16, torch.float16)
DTYPES = {"cpu": (torch.float32, *HALVES), "cuda": (*HALVES, torch.float32)}


def named(given: Iterable[str]) -> list[str]:
    """The names in some texts, each of which may have several with commas between them."""
    names = [name for text in given for name in text.split(",")]
    if unknown := [name for name in names if name not in SUITES]:
        raise ValueError(f"unknown suite {', '.join(unknown)!r}: use one or more of {', '.join(SUITES)}")
    return [*dict.fromkeys(name for one in names for name in (ALL if one == "all" else [one]))]


def run(
    names: Sequence[str], device: torch.device, dtypes: Sequence[torch.dtype] | None, *, save: Save, **options: Any
) -> Record:
    """The results of some suites, which ``save`` got after every step, also when the run is interrupted.

    Where a suite needs one dtype only, it is the first. ``options`` are those of `Session`.
    """
    # PyTorch's profiler, which counts memory, else prints two lines each time that it is used
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    session = Session(device, dtypes or DTYPES[device.type], **options)
    with torch._dynamo.config.patch(recompile_limit=1 << 10):  # one function, many patterns
        return session.run({name: PLANS[name](session) for name in names}, save)


class ResultsFile:
    """The results so far, in memory and on disk. Those of the run before are put aside when the first ones come."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "results.json"
        self.results: Record | None = None
        self.last: Record | None = None  # of the run before, if it can be read

    def save(self, found: Record) -> None:
        if self.results is None and self.file.exists():
            with contextlib.suppress(ValueError):  # it is not a results file: it is kept, and not compared
                self.last = load(self.file)
            self.file.replace(self.file.with_name(PREVIOUS))
        self.results = found
        machine.write_json(self.file, found)


def is_ours_wrong(found: Record) -> bool:
    checks = any(check["ours"] and check["verdict"] != "exact" for check in found["checks"])
    return checks or any(x["ours"] and x["status"] == "wrong" for x in found["measurements"])
