"""What a training over ranks needs beside its model: errors that stop every rank, and checkpoints.

Every rank makes the same calls.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dilated_attention.distributed import agreement
from dilated_attention.distributed.group import GroupTransport
from dilated_attention.models import weights


def together(
    what: str, group: ProcessGroup | None = None, device: str = "cpu"
) -> AbstractContextManager[dict[str, object]]:
    """An error in here, on any rank, is raised on all of them: none waits for one that has left.

    What a rank writes into the dict must be the same on every rank, or all raise a ValueError. ``what`` describes the
    step in error messages. Nothing in here may wait for other ranks.
    """
    whole = dist.distributed_c10d._get_default_group() if group is None else group
    return agreement.together(partial(agreement.ask, GroupTransport(whole, torch.device(device), None), what))


class Checkpoints:
    """The checkpoints in a folder: a file each, whole or not there, refused by another training.

    It holds numbers, text and plain tensors, so it is read without running any code in it, on any number of ranks, and
    by ``torch.load(file, weights_only=True)``. The two newest are kept. ``facts`` describe the training, in types that
    JSON can store: a checkpoint saved with others is refused.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder, self.facts = folder, json.loads(json.dumps(facts))

    def whole(self) -> list[Path]:
        """Those that are complete, old ones first."""
        return sorted(self.folder.glob("step-????????.pt"))

    def last(self) -> str:
        """The newest one, for messages."""
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
            last = max(self.whole(), default=None)
            same["the newest checkpoint"] = last and last.name
            return None if last is None else self._read(last)

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            found: dict[str, Any] = weights.unpickled(file, mmap=True)
            facts = dict(found["facts"])
        except (ValueError, TypeError, LookupError) as error:
            then = "remove it, and training goes on from the one before"
            raise ValueError(f"the checkpoint {file} cannot be read ({error}): {then}") from error
        other = [f"{key} was {facts.get(key)} and is {now}" for key, now in self.facts.items() if facts.get(key) != now]
        if other:
            raise ValueError(
                f"{file} is from another training: {'; '.join(other)}; use the old values, or another folder"
            )
        return found
