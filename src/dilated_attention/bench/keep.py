"""A run that keeps its results whatever happens, and what its exit code says."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dilated_attention.bench import machine, results, suites
from dilated_attention.bench.results import Record

PREVIOUS = "previous.json"
INTERRUPTED = 130  # as a shell has it for a program ended by Ctrl-C


class Kept:
    """The results so far, in memory and on disk. Those of the run before are put aside when the first ones come."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "results.json"
        self.results: Record | None = None
        self.last: Record | None = None  # of the run before, if it can be read

    def run(self, names: Sequence[str], device: torch.device, dtypes: Any, **options: Any) -> int:
        """The exit code: 0, or that of an interrupted program."""
        try:
            suites.run(names, device, dtypes, save=self.save, **options)
        except KeyboardInterrupt:
            if self.results is not None:
                self.save({**self.results, "complete": False})
            return INTERRUPTED
        return 0

    def save(self, found: Record) -> None:
        if self.results is None and self.file.exists():
            with contextlib.suppress(ValueError):  # it is not a results file: it is kept, and not compared
                self.last = results.load(self.file)
            self.file.replace(self.file.with_name(PREVIOUS))
        self.results = found
        machine.write_json(self.file, found)


def is_ours_wrong(found: Record) -> bool:
    checks = any(check["ours"] and check["verdict"] != "exact" for check in found["checks"])
    return checks or any(x["ours"] and x["status"] == "wrong" for x in found["measurements"])


def check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ValueError(f"--seconds must be more than 0, got {seconds}")
