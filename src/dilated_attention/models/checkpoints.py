"""Checkpoints of a training over ranks: written while it goes on, whole or not there, refused by another training.

torch.distributed.checkpoint writes them, so they load on any number of ranks. A folder gets its name when all of it is
there. Every rank makes the same calls.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from dilated_attention.charts import write


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: where they are.
        facts: what they are of, as JSON takes it. A checkpoint of other facts is refused.
        kept: so many are kept, the newest ones.
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
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of a training that was killed
            folder.mkdir(parents=True)
        dist.barrier()
        self.writing = step, async_save(state, checkpoint_id=str(folder), process_group=self.group)

    def finish(self) -> None:
        """Wait for what is being written. Raises OSError if it failed; older checkpoints are as they were."""
        if self.writing is None:
            return
        (step, future), self.writing = self.writing, None
        folder = self.folder / f"unfinished-{step:08}"
        try:
            future.result()
            if dist.get_rank() == 0:
                write(folder / "facts.json", json.dumps(self.facts).encode())
                os.replace(folder, self.folder / f"step-{step:08}")
                for old in self.whole()[: -self.kept]:
                    shutil.rmtree(old)
        except (OSError, CheckpointException) as error:
            raise OSError(
                f"step {step} could not be saved; the last good checkpoint is {self.last()}: {error}"
            ) from error
        dist.barrier()

    def load(self, state: dict[str, Any]) -> bool:
        """Fill ``state`` from the newest checkpoint; False: there is none. One of other facts is a ValueError."""
        found = self.whole()
        if not found:
            return False
        facts = json.loads((found[-1] / "facts.json").read_text())
        other = [f"{key} was {facts.get(key)} and is {now}" for key, now in self.facts.items() if facts.get(key) != now]
        if other:
            raise ValueError(f"{found[-1]} is from another training: {'; '.join(other)}; use another folder")
        load(state, checkpoint_id=str(found[-1]))
        return True
