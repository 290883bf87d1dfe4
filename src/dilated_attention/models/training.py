"""What a training over ranks needs beside its model: errors that stop every rank, and a log that outlives the program.

Every rank makes the same calls.
"""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dilated_attention import charts
from dilated_attention.distributed import agreement
from dilated_attention.distributed.group import GroupTransport


def together(
    what: str, group: ProcessGroup | None = None, device: str = "cpu"
) -> AbstractContextManager[dict[str, object]]:
    """An error in here, on any rank, is raised on all of them: none waits for one that has left.

    What a rank writes into the dict must be the same on every rank, or all raise a ValueError. ``what`` describes the
    step in error messages. Nothing in here may wait for other ranks.
    """
    whole = dist.distributed_c10d._get_default_group() if group is None else group
    return agreement.together(partial(agreement.ask, GroupTransport(whole, torch.device(device), None), what))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a log, each with its step. A torn last line is left out: the program was killed as it wrote it."""
    rows, lines = [], file.read_text("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
            if number == len(lines):
                break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"line {number} of {file} is not JSON with a step: remove this line, or the file")
        rows.append(row)
    return rows


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
        points = [(line["step"], line["loss"] / math.log(2), "training") for line in self.lines if "loss" in line]
        points += [(at, bits, name) for name, bits in levels.items() for at in (0, self.steps)]
        chart = {
            "data": {"values": [{"step": at, "bits per token": bits, "of": name} for at, bits, name in points]},
            "mark": "line", "width": 560, "height": 320, "encoding": {
                "x": {"field": "step", "type": "quantitative"},
                "y": {"field": "bits per token", "type": "quantitative", "scale": {"zero": False}},
                "color": {"field": "of", "type": "nominal", "title": None},
            },
        }  # fmt: skip
        charts.write(file, charts.drawn(chart, ".svg"))
