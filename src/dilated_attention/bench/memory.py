"""The most memory that a call held, beyond its inputs. On a CPU the peak of a fresh process, as the system counts it.

The C library would keep freed memory and hand it out again unseen, which is how "0 MB" is measured: here it is told to
give back what is freed, so that the peak is right to a few hundred kilobytes. Linux only; elsewhere there is no figure.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention.bench import probes
from dilated_attention.bench.run import Call, forward, forward_backward
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.subject import FORWARD, Subject
from dilated_attention.ranks import Outcome, Pool, pool

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Build = Callable[[Setting], Subject]
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's names for mallopt
SHARE = 0.8  # of the free memory of the machine that a process may take before it counts as out of memory
TIMEOUT = 900.0
SIGNS = ("out of memory", "not enough memory", "can't allocate memory", "bad_alloc", "Cannot allocate")
SET_THP_DISABLE = 41  # Linux's name for prctl


class OutOfMemory(RuntimeError):  # noqa: N818 - it says what happened
    """A call needs more memory than there is."""


def call_of(subject: Subject, direction: str) -> Call:
    if direction == FORWARD:
        return forward(subject.attention, subject.inputs)
    return forward_backward(subject.attention, subject.inputs, subject.dout, subject.parameters.values())


def peaks(
    build: Build, setting: Setting, directions: Sequence[str], ranks: int = 1, limit: int | None = None
) -> dict[str, int | None]:
    """Bytes by direction, of the busiest rank. Raises OutOfMemory. ``limit``: what a process on a CPU may take."""
    if setting.device.type == "cuda" and ranks == 1:
        return _on_cuda(build, setting, directions)
    if setting.device.type == "cpu" and not RESET.exists():
        return dict.fromkeys(directions)
    if setting.device.type == "cuda":  # CUDA counts for itself: ranks that are there will do
        outcomes = pool(ranks).run(_on_cuda, build, setting, tuple(directions), check=False, timeout=TIMEOUT)
    else:
        arguments = (build, setting, tuple(directions), max(1, torch.get_num_threads() // ranks), limit)
        with Pool(ranks, timeout=TIMEOUT) as fresh:
            outcomes = fresh.run(_on_cpu, *arguments, check=False, timeout=TIMEOUT)
    raise_if_failed(outcomes)
    return {one: max(x.value[one] for x in outcomes) for one in directions}


def raise_if_failed(outcomes: Sequence[Outcome]) -> None:
    failed = [x for x in outcomes if x.error_type is not None]
    for x in failed:
        killed = x.error_type == "died" and x.exitcode == -9  # by the system: a rank that hung was killed by us
        if ran_out(x.error or "") or x.error_type == "MemoryError" or killed:
            raise OutOfMemory(x.error or "the process was killed")
    for x in failed:
        raise RuntimeError(f"rank {x.rank}: {x.error_type}: {x.error}")


def ran_out(message: str) -> bool:
    """Whether an error is torch's or the system's way of saying that there is no memory left."""
    return any(sign in message for sign in SIGNS)


# --- in the fresh process ---------------------------------------------------------------------------------------


def _on_cpu(
    build: Build, setting: Setting, directions: tuple[str, ...], threads: int, limit: int | None
) -> dict[str, int | None]:
    torch.set_num_threads(threads)
    give_back_at_once()
    small = build(setting.checks()[0])
    for one in directions:  # libraries that load late and threads that start late are not part of a call
        call_of(small, one)()
    cap_memory(limit)
    subject = build(setting)
    if subject.compiled:
        for one in directions:
            call_of(subject, one)()
    return {one: peak_of(call_of(subject, one)) for one in directions}


def _on_cuda(build: Build, setting: Setting, directions: Sequence[str]) -> dict[str, int | None]:
    subject = build(setting)
    return {one: probes.peak_bytes(call_of(subject, one), setting.device) for one in directions}


def give_back_at_once() -> None:
    """From now on memory of 64 kB or more goes back to the system when it is freed, and none comes in huge pages.

    Of these, 2 MiB each, torch asks for some on ARM, and the system would count all of one that is in use in part.
    """
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(SET_THP_DISABLE, 1, 0, 0, 0)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, 1 << 16)
        libc.mallopt(TRIM_THRESHOLD, 0)


def cap_memory(limit: int | None) -> None:
    """Rather an error here than the system ending whatever it likes."""
    if limit is None:
        limit = int(SHARE * free_memory())
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + limit, hard))


def free_memory() -> int:
    """What the machine could still give, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_of(call: Call) -> int:
    """The most that this process grew by during a call, whose result is still held when it is read."""
    if dist.is_initialized():
        dist.barrier()
    RESET.write_text("5")  # the peak is now what is there
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM") - before
    del result
    return peak


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
