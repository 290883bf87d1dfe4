"""Checkpoints of a training over ranks: written while it goes on, whole or not there, refused by another training.

torch.distributed.checkpoint writes them, so they load on any number of ranks. A folder gets its name when all of it is
there. Every rank makes the same calls.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import textwrap
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.futures import Future

from dilated_attention.charts import write
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
        self.writing: tuple[int, Any] | None = None
        # the writers of all ranks talk while training goes on: in a group of their own, or messages would be mixed up
        self.group = dist.new_group(backend="gloo")

    def whole(self) -> list[Path]:
        """Those that are complete, old ones first."""
        return sorted(x for x in self.folder.glob("step-????????") if x.is_dir())

    def last(self) -> str:
        """The newest one, for messages."""
        return str(self.whole()[-1]) if self.whole() else "none"

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to write a copy of ``state``; `finish`, or the next save, ends it."""
        self.finish()
        folder = self.folder / f"unfinished-{step:08}"
        with together("Checkpoints.save()", self.group):
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)  # of a training that was killed
                folder.mkdir(parents=True)
        self.writing = step, async_save(state, checkpoint_id=str(folder), process_group=self.group)

    def finish(self) -> None:
        """Wait for what is being written. Raises OSError if it failed; older checkpoints are as they were."""
        if self.writing is None:
            return
        (step, future), self.writing = self.writing, None
        folder = self.folder / f"unfinished-{step:08}"
        try:
            future.result()
            with together("Checkpoints.finish()", self.group):
                if dist.get_rank() == 0:
                    write(folder / "facts.json", json.dumps(self.facts).encode())
                    os.replace(folder, self.folder / f"step-{step:08}")
                    for old in self.whole()[: -self.kept]:
                        gone = old.with_name(old.name.replace("step", "unfinished"))  # half of it is no checkpoint
                        os.replace(old, gone)
                        shutil.rmtree(gone, ignore_errors=True)  # a file server may still hold some of it
        except (OSError, ValueError, CheckpointException) as error:
            cause = _cause(error) if isinstance(error, CheckpointException) else error
            raise OSError(
                f"step {step} could not be saved; the last good checkpoint is {self.last()}: {cause}"
            ) from error

    def load(self, state: dict[str, Any]) -> bool:
        """Fill ``state`` from the newest checkpoint; False: there is none.

        One of other facts is a ValueError, and so is a damaged one: the user decides whether an older one will do.
        """
        with together("Checkpoints.load()", self.group) as same:
            found = self.whole()
            same["the newest checkpoint"] = found[-1].name if found else "none"
            if found:
                self._check(found[-1])
        if not found:
            return False
        try:
            with _quiet():
                load(state, storage_reader=_Reader(found[-1]))
        except CheckpointException as error:  # on every rank
            for first, _ in error.failures.values():
                if not isinstance(first, Exception):  # Ctrl-C
                    raise first from error
            raise self._damaged(found[-1], _cause(error)) from error
        return True

    def _check(self, folder: Path) -> None:
        """Raise if a checkpoint is of other facts."""
        try:
            facts = dict(json.loads((folder / "facts.json").read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(folder, f"facts.json: {error}") from error
        other = [f"{key} was {facts.get(key)} and is {now}" for key, now in self.facts.items() if facts.get(key) != now]
        if other:
            raise ValueError(
                f"{folder} is from another training: {'; '.join(other)}; use the old values, or another folder"
            )

    def _damaged(self, folder: Path, cause: str) -> ValueError:
        older = [x for x in self.whole() if x != folder]
        then = f"goes on from {older[-1]}" if older else "begins anew"
        return ValueError(
            f"the checkpoint {folder} cannot be read ({cause}): try again; if it is damaged, remove this folder, and "
            f"training {then}"
        )


class _Reader(FileSystemReader):
    """Looks at the checksums, too. Torch writes them, and does not read them: a changed bit would be a weight."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self.storage_data[item.storage_index]  # a file has many tensors, each as a zip file of its own
            with open(Path(self.path) / place.relative_path, "rb") as file:
                file.seek(place.offset)
                part = io.BytesIO(file.read(place.length))
            with zipfile.ZipFile(part) as archive:
                if archive.testzip() is not None:
                    raise OSError(f"{place.relative_path} has a wrong checksum")
        return super().read_data(plan, planner)


def _cause(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed, in one line: torch tells it with all its tracebacks."""
    rank, (first, _) = min(error.failures.items(), key=lambda one: one[0])
    return f"rank {rank}: {textwrap.shorten(f'{type(first).__name__}: {first}', 200, placeholder=' ...')}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, torch logs no tracebacks of what it could not read: the error that it raises says so."""

    def is_other(record: logging.LogRecord) -> bool:
        return record.module != "state_dict_loader"

    root = logging.getLogger()  # which torch uses there
    root.addFilter(is_other)
    try:
        yield
    finally:
        root.removeFilter(is_other)
