"""Checkpoints of a training over ranks: a file each, whole or not there, refused by another training.

The first rank writes it while training goes on. It holds numbers, text and plain tensors, so it is read without running
any code in it, on any number of ranks, and by ``torch.load(file, weights_only=True)``. Every rank makes the same calls.
"""

from __future__ import annotations

import copy
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention.models import weights
from dilated_attention.models.training import together


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: where they are.
        facts: describe the training, in types that JSON can store. A checkpoint saved with other facts is refused.
        kept: the number of checkpoints to keep, the newest ones.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], kept: int = 2) -> None:
        self.folder, self.facts, self.kept = folder, json.loads(json.dumps(facts)), kept
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None

    def whole(self) -> list[Path]:
        """Those that are complete, old ones first."""
        return sorted(self.folder.glob("step-????????.pt"))

    def last(self) -> str:
        """The newest one, for messages."""
        return str(self.whole()[-1]) if self.whole() else "none"

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to write a copy of ``state``, which is whole on the first rank; `finish`, or the next save, ends it."""
        self.finish()
        if dist.get_rank() == 0:
            self.writing = self.writer.submit(self._write, step, copy.deepcopy(state))

    def finish(self) -> None:
        """Wait for what is being written. Raises on every rank if it failed; older checkpoints are as they were."""
        writing, self.writing = self.writing, None
        with together("Checkpoints.finish()"):
            if writing is not None:
                writing.result()

    def _write(self, step: int, state: dict[str, Any]) -> None:
        part = self.folder / "unfinished.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save({"facts": self.facts, "step": step, **state}, file)
            os.replace(part, self.folder / f"step-{step:08}.pt")
            for old in self.whole()[: -self.kept]:
                old.unlink()
        except (OSError, RuntimeError) as error:  # torch's own, if the disk is full
            cause = error.__context__ or error
            raise OSError(
                f"step {step} could not be saved; the last good checkpoint is {self.last()}: {cause}"
            ) from error

    def load(self) -> dict[str, Any] | None:
        """What the newest checkpoint holds; None: there is none.

        One of other facts is a ValueError, and so is a damaged one: the user decides whether an older one will do.
        """
        with together("Checkpoints.load()") as same:
            *older, last = [None, *self.whole()]
            same["the newest checkpoint"] = last and last.name
            return None if last is None else self._read(last, older[-1])

    def _read(self, file: Path, older: Path | None) -> dict[str, Any]:
        try:
            found: dict[str, Any] = weights.unpickled(file, mmap=True)
            facts = dict(found["facts"])
        except (ValueError, TypeError, KeyError) as error:
            then = f"goes on from {older}" if older else "begins anew"
            raise ValueError(
                f"the checkpoint {file} cannot be read ({error}): try again; if it is damaged, remove it, and training "
                f"{then}"
            ) from error
        other = [f"{key} was {facts.get(key)} and is {now}" for key, now in self.facts.items() if facts.get(key) != now]
        if other:
            raise ValueError(
                f"{file} is from another training: {'; '.join(other)}; use the old values, or another folder"
            )
        return found
