"""What a training over ranks needs beside its model: errors that stop every rank, and a log that outlives the program.

Every rank makes the same calls.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dilated_attention import charts
from dilated_attention.distributed import agreement
from dilated_attention.distributed.agreement import ask
from dilated_attention.distributed.group import GroupTransport


@contextmanager
def together(what: str, group: ProcessGroup | None = None, device: str = "cpu") -> Iterator[dict[str, object]]:
    """An error in here, on any rank, is raised on all of them: none waits for one that has left.

    What a rank writes into the dict must be the same on every rank, or all raise a ValueError. ``what`` describes the
    step in error messages. Nothing in here may wait for other ranks.
    """
    whole = dist.distributed_c10d._get_default_group() if group is None else group
    with agreement.together(functools.partial(ask, GroupTransport(whole, torch.device(device), None), what)) as same:
        yield same


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a log, each with its step. A torn last line is left out: the program was killed as it wrote it."""
    found, lines = [], file.read_text("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            facts = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"line {number} of {file} is not JSON: remove this line, or the file") from error
        if not isinstance(facts, dict) or not isinstance(facts.get("step"), int):
            raise ValueError(f"line {number} of {file} has no step: remove this line, or the file")
        found.append(facts)
    return found


class Log:
    """Writes the log of a training, on the first rank alone: a file of JSON lines, and a live line in the terminal.

    Args:
        file: gets the JSON lines. Lines of steps after ``step`` are removed, as these steps are run again.
        steps: the number of steps in the whole training.
        step: the last step that is done.
    """

    def __init__(self, file: Path, steps: int, step: int) -> None:
        self.file, self.steps = file, steps
        self.speaks, self.began = dist.get_rank() == 0, time.perf_counter()
        old = read_lines(file) if self.speaks and file.exists() else []
        self.lines = [line for line in old if line["step"] <= step]
        if self.speaks:
            charts.write(self.file, "".join(f"{json.dumps(line)}\n" for line in self.lines).encode())

    def add(self, step: int, **facts: float) -> None:
        if not self.speaks:
            return
        line = {"step": step, **facts}
        if self.lines[-1:] != [line]:  # a training that was finished before says the same again
            self.lines.append(line)
            with self.file.open("a") as file:
                file.write(f"{json.dumps(line)}\n")
        told = ", ".join(f"{name} {value:.4g}" for name, value in facts.items())
        said = f"step {step}/{self.steps}: {told}, {time.perf_counter() - self.began:.0f} s"
        if sys.stdout.isatty():
            print(f"\r\033[K{said}", end="", flush=True)
        elif step % max(1, self.steps // 10) == 0:
            print(said, flush=True)

    def plot(self, file: Path, levels: dict[str, float]) -> None:
        """Draws the losses in bits per token; ``levels`` are lines to compare them with."""
        altair = charts.library("altair")
        rows = [
            {"step": x["step"], "bits": x["loss"] / math.log(2), "what": "training"} for x in self.lines if "loss" in x
        ]
        rows += [{"step": at, "bits": bits, "what": name} for name, bits in levels.items() for at in (0, self.steps)]
        bits = altair.Y("bits:Q", title="bits per token", scale=altair.Scale(zero=False))
        chart = altair.Chart(altair.Data(values=rows)).mark_line().encode(x="step:Q", y=bits, color="what:N")
        charts.write(file, charts.drawn(chart.properties(width=560, height=320).to_dict(), ".svg"))
