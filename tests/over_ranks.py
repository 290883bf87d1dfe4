"""What tests over ranks share. A rank imports this file: it stays small."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
