"""What a training over ranks needs beside its model: errors that stop every rank, a log and checkpoints."""

import json
import math
import os
import sys
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention.distributed import agreement
from dilated_attention.distributed.group import GroupTransport
from dilated_attention.models.weights import STEPS, unpickled
from dilated_attention.show import charts


def together(what: str, device: str = "cpu") -> AbstractContextManager[dict[str, object]]:
    """An error in here is raised on all ranks; what they write into the dict must be alike. Nothing here may wait."""
    transport = GroupTransport(dist.distributed_c10d._get_default_group(), torch.device(device), None)
    return agreement.same_on_all(partial(agreement.ask, transport, what))


class Log:
    """A file of JSON lines and a live line in the terminal, on the first rank; steps after ``step`` are run again."""

    def __init__(self, file: Path, steps: int, step: int, tokens: int) -> None:  # the tokens of a step
        self.file, self.steps, self.first, self.tokens = file, steps, step, tokens
        self.speaks, self.began = dist.get_rank() == 0, time.perf_counter()
        # a torn last line is left out: the program was killed as it wrote it
        old = file.read_text("utf-8").split("\n")[:-1] if self.speaks and file.exists() else []
        self.lines = [line for line in map(json.loads, old) if line["step"] <= step]
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
        seconds = time.perf_counter() - self.began
        said = f"done in {seconds:.0f} s"
        if "loss" in facts:  # not after the last step
            rate = (step - self.first) / seconds
            told = f"{facts['loss'] / math.log(2):.3f} bits per token, {rate * self.tokens:,.0f} tokens/s"
            said = f"step {step}/{self.steps}: {told}, {(self.steps - step) / rate:.0f} s left"
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


class Checkpoints:
    """The two newest checkpoints in a folder: a file each, whole or not there, read without running any code in it.

    ``facts`` describe the training, in types that JSON can store: a checkpoint saved with others is refused.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder, self.facts = folder, json.loads(json.dumps(facts))

    def whole(self) -> list[Path]:  # old ones first
        return sorted(self.folder.glob(STEPS))

    def last(self) -> str:  # for messages
        return str(max(self.whole(), default="none"))

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write ``state``, which is whole on the first rank. If that fails, older checkpoints are as they were."""
        with together("Checkpoints.save()"):
            if dist.get_rank():
                return
            part = self.folder / "unfinished.pt"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with part.open("wb") as file:
                    torch.save({"facts": self.facts, "step": step, **state}, file)
                os.replace(part, self.folder / f"step-{step:08}.pt")
                for old in self.whole()[:-2]:
                    old.unlink()
            except (OSError, RuntimeError) as error:  # torch's own, if the disk is full
                said = f"step {step} could not be saved; the last good checkpoint is {self.last()}"
                raise OSError(f"{said}: {error.__context__ or error}") from error

    def load(self) -> dict[str, Any] | None:
        """What the newest checkpoint holds; None: there is none. One of other facts is an error, and a damaged one."""
        with together("Checkpoints.load()") as same:
            file = max(self.whole(), default=None)
            same["the newest checkpoint"] = file and file.name
            if file is None:
                return None
            try:
                found: dict[str, Any] = unpickled(file, mmap=True)
                facts = dict(found["facts"])
            except (ValueError, TypeError, LookupError) as error:
                then = "remove it, and training goes on from the one before"
                raise ValueError(f"the checkpoint {file} cannot be read ({error}): {then}") from error
            changed = [name for name, now in self.facts.items() if facts.get(name) != now]
            other = "; ".join(f"{name} was {facts.get(name)} and is {self.facts[name]}" for name in changed)
            if other:
                raise ValueError(f"{file} is from another training: {other}; use the old values, or another folder")
            return found
