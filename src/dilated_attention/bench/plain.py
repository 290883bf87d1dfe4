"""A run that keeps its results whatever happens, and the command `bench` for a machine that has PyTorch alone.

Without typer and rich, `python -m dilated_attention bench` takes the same options but --dtype, and writes
results.json. The report is made from it later, by `dilated-attention report`, where the extra `bench` is installed.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dilated_attention import charts
from dilated_attention.bench import machine, results
from dilated_attention.bench.pace import Lines

PREVIOUS = "previous.json"
INTERRUPTED = 130  # as a shell has it for a program ended by Ctrl-C


class Kept:
    """The results so far, in memory and on disk. Those of the run before are put aside when the first ones come."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "results.json"
        self.results: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None  # of the run before, if it can be read

    def run(self, names: Sequence[str], device: torch.device, dtypes: Any, **options: Any) -> int:
        """The exit code: 0, or that of an interrupted program."""
        from dilated_attention.bench import suites

        try:
            suites.run(names, device, dtypes, save=self.save, **options)
        except KeyboardInterrupt:
            if self.results is not None:
                self.save({**self.results, "complete": False})
            return INTERRUPTED
        return 0

    def save(self, found: dict[str, Any]) -> None:
        if self.results is None and self.file.exists():
            with contextlib.suppress(ValueError):  # it is not a results file: it is kept, and not compared
                self.last = results.load(self.file)
            self.file.replace(self.file.with_name(PREVIOUS))
        self.results = found
        machine.write_json(self.file, found)


def is_ours_wrong(found: dict[str, Any]) -> bool:
    checks = any(check["ours"] and check["verdict"] != "exact" for check in found["checks"])
    return checks or any(x["ours"] and x["status"] == "wrong" for x in found["measurements"])


def check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ValueError(f"--seconds must be more than 0, got {seconds}")


def main(arguments: Sequence[str]) -> int:
    from dilated_attention.bench import suites

    what = "Check implementations against the oracle, and time those that are right."
    parser = argparse.ArgumentParser("dilated-attention bench", description=what)
    parser.add_argument("--suite", action="append", help=f"comma-separated: {', '.join(suites.SUITES)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("report"), help="the folder for results.json")
    parser.add_argument("--seconds", type=float, help="of timing per setting")
    parser.add_argument("--commit", help="the commit to record if this copy has no .git")
    options = parser.parse_args(arguments)
    try:
        names = suites.named(options.suite or ["quick"])
        check_seconds(options.seconds)
        charts.writable(options.out)
    except ValueError as error:
        parser.error(str(error))
    kept = Kept(options.out)
    device = torch.device(options.device)
    code = kept.run(names, device, None, watch=Lines(), seconds=options.seconds, commit=options.commit)
    if kept.results is None:
        return code
    print(machine.one_line(kept.results["machine"]))
    print(kept.results["answer"])
    print(f"written: {kept.file}; where the extra bench is installed, `dilated-attention report` makes its page")
    return code or int(is_ours_wrong(kept.results))
