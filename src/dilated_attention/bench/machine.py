"""Where a number comes from: machine, versions, commit and command. A number without these is not a result."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import dilated_attention
from dilated_attention.show import charts

TOO_BUSY = 0.25  # of the cores, taken by others


def describe(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """Everything a result must carry; ``commit`` is for trees that came without their .git."""
    cpu, (first, *words) = cpu_model(), sys.orig_argv[1:] or [""]
    typed = ["python", os.path.relpath(first) if os.path.isabs(first) else first, *words]  # a script as seen from here
    ours, python = dilated_attention.__version__, platform.python_version()
    versions = {"dilated_attention": ours, "python": python, "torch": torch.__version__}
    if device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
        with contextlib.suppress(PackageNotFoundError):
            versions["triton"] = version("triton")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(typed),
        **({"commit": commit, "dirty": None} if commit else git_state()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,  # by what else runs there
        "system": platform.platform(),
        "versions": versions,
    }


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    told = f"{info.read_text('utf-8') if info.exists() else ''}\n{_output('lscpu')}"  # the second on ARM
    names = re.findall(r"(?im)^model name[ \t]*:[ \t]*(.*[^\s-].*)$", told)
    return names[0].strip() if names else platform.processor() or platform.machine()


def git_state() -> dict[str, Any]:
    """The commit of the tree this package runs from, and whether tracked or new files differ from it."""
    git = ("git", "-C", str(Path(dilated_attention.__file__).parent))
    is_ours = _output(*git, "ls-files", "--error-unmatch", "__init__.py")  # and not another project's tree
    commit = is_ours and _output(*git, "rev-parse", "HEAD")
    return {"commit": commit or "unknown", "dirty": bool(_output(*git, "status", "--porcelain")) if commit else None}


def _output(*command: str) -> str | None:
    """What a program said; None where there is none, or it failed."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def one_line(machine: dict[str, Any]) -> str:
    found = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    where = "{device}, {threads} threads, load {load}".format(**machine)
    return f"{where} | {found} | commit {machine['commit'][:12]}{' + changes' * bool(machine['dirty'])}"


class Load:
    """How busy the machine was with other work, from when this is made to the latest `note`."""

    def __init__(self) -> None:
        self.start, self.began = _cpu_seconds(), time.monotonic()

    def note(self) -> dict[str, Any]:
        """For the description of the machine: the share of the cores that others took, and a verdict.

        Only Linux tells that share; time that the hypervisor gave to other machines is in it.
        """
        now, seconds = _cpu_seconds(), time.monotonic() - self.began
        if now is None or self.start is None:
            return {"others": None, "too_busy": False}
        others = round(max(0.0, now - self.start) / seconds / (os.cpu_count() or 1), 3)
        return {"others": others, "too_busy": others > TOO_BUSY}


def _cpu_seconds() -> float | None:
    """CPU time of the whole machine, less that of the processes of our group: ranks are in it."""
    total, ours = Path("/proc/stat"), 0
    if not total.exists():
        return None
    user, nice, system, _, _, irq, soft, steal = (int(x) for x in total.read_text("utf-8").split()[1:9])
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has just ended
            fields = file.read_text("utf-8").rpartition(")")[2].split()  # a name may hold spaces
            if int(fields[2]) == os.getpgrp():
                ours += sum(int(x) for x in fields[11:15])  # its own time, and that of its children that ended
    return (user + nice + system + irq + soft + steal - ours) / os.sysconf("SC_CLK_TCK")


def write_json(file: Path, results: dict[str, Any]) -> None:
    """At once or not at all. JSON has no infinity: an error that large is written as a string."""
    finite = charts.changed(results, lambda x: str(x) if isinstance(x, float) and not math.isfinite(x) else x)
    charts.write(file, (json.dumps(finite, indent=1, allow_nan=False) + "\n").encode())
