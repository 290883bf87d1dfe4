"""Local processes ("ranks") joined in one gloo group and kept alive between calls: for tests and benchmarks.

All ranks are forked from one server process that has imported torch and done nothing else: the first pool takes as long
as that import, the next ones a tenth of a second. A script that makes a pool needs the usual
``if __name__ == "__main__"``. Ranks share nothing with their parent. What goes there and back is written by torch.save:
functions and classes go by name, so they are at the top level of a module.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported once for all ranks. Not this package: the server would import it from wherever it finds one, not from where
# we come from.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "torch.distributed.tensor"]
GRACE = 5.0  # seconds that a call outlives the group's timeout, so that ranks can say themselves where they waited


@dataclass(frozen=True)
class Outcome:
    """What became of a call on one rank. ``error_type`` is the name of an exception, "died", "hung", or None."""

    rank: int
    value: Any = None
    error: str | None = None
    error_type: str | None = None
    seconds: float = 0.0
    exitcode: int | None = None  # of a rank that is gone; negative: the signal that ended it
    traceback: str = ""  # of a rank that hung: where it was


class RanksFailed(RuntimeError):  # noqa: N818 - it says what happened
    """Some ranks failed; ``errors`` has their outcomes by rank."""

    def __init__(self, what: str, outcomes: Sequence[Outcome]) -> None:
        self.errors = {x.rank: x for x in outcomes if x.error_type is not None}
        lines = [f"{what} failed on {len(self.errors)} of {len(outcomes)} ranks"]
        for rank, x in self.errors.items():
            lines += [f"\nrank {rank}: {x.error_type}: {x.error}", x.traceback.rstrip()]
        super().__init__("\n".join(lines))


class Pool:
    """Starts ``size`` local processes that form one gloo process group, for tests.

    The processes, called ranks, stay alive between calls; one call runs at a time. A script needs
    ``if __name__ == "__main__"``. Functions that are sent must be at the top level of a module. Collectives fail after
    ``timeout`` seconds.

    Examples:
        >>> with ranks.Pool(2) as two:
        ...     two.run(torch.distributed.get_rank)
        [0, 1]
    """

    def __init__(self, size: int, *, timeout: float = 120.0) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one rank, got {size=}")
        self.size, self.timeout = size, timeout
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._groups = 0
        self._out_of_step = self._used = False
        self._end = weakref.finalize(self, _end, os.getpid(), self._processes, self._pipes, self._folder)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(size):
            pipe, far_end = context.Pipe()
            self._pipes.append(pipe)
            arguments = (rank, far_end, str(self._stack(rank)))
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank} of {size}", daemon=True)
            process.start()
            self._processes.append(process)
            far_end.close()  # the rank's copy is the only one: when it dies the pipe ends
        outcomes = self._join()
        if any(x.error_type for x in outcomes):
            self.close()
            raise RanksFailed(f"starting a pool of {size}", outcomes)

    @property
    def broken(self) -> bool:
        """Whether a rank died or hung, or the pool was closed: no more calls then."""
        return self._out_of_step or not self._end.alive or not all(x.is_alive() for x in self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None, check: bool = True
    ) -> list[Any]:
        """Calls ``function(*args)`` on every rank and returns the results, in the order of ranks.

        If a rank fails, it raises RanksFailed, once the others have answered or ``timeout`` seconds have passed. With
        ``check=False`` it raises nothing, and returns an `Outcome` for each rank. After a failure the ranks form a new
        group, so that the next call does not receive what this one sent. If a rank died or hung, the pool is closed.
        """
        if self.broken:
            raise RuntimeError("this pool is broken or closed: make a new one, or ask pool() for one")
        self._used = True
        outcomes = self._call(function, args, timeout)
        failed = any(x.error_type for x in outcomes)
        if failed and not self.broken:
            self._out_of_step = any(x.error_type for x in self._join())
        if self.broken:
            self.close()
        if not check:
            return outcomes
        if failed:
            raise RanksFailed(getattr(function, "__qualname__", repr(function)), outcomes)
        return [x.value for x in outcomes]

    def renew(self) -> None:
        """Gives the ranks a fresh process group, if they have run anything.

        Process groups that earlier calls made are destroyed, and their polling threads end.
        """
        if self._used and not self.broken:
            self._used, self._out_of_step = False, any(x.error_type for x in self._join())

    def close(self) -> None:
        """End all ranks, whatever they are doing."""
        self._end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stack(self, rank: int) -> Path:
        return self._folder / f"stack-{rank}"

    def _written_stack(self, rank: int, end: float) -> str:
        """Where a rank says it is, as soon as it has written it: at once, but for a busy machine or a frozen rank."""
        text, before, stack = "", None, self._stack(rank)
        while (not text or text != before) and time.monotonic() < end:
            time.sleep(0.1)
            before, text = text, stack.read_text(errors="replace") if stack.exists() else ""
        return text

    def _join(self) -> list[Outcome]:
        """Put the ranks in a new group. They meet in a file: no port that another process could take first."""
        self._groups += 1
        return self._call(_enter_group, (str(self._folder / f"group-{self._groups}"), self.size, self.timeout))

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None = None) -> list[Outcome]:
        try:
            message = _pack((function, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"cannot send {function!r} and its arguments to the ranks ({error}): they must be picklable, "
                "with functions and classes at the top level of a module"
            ) from error
        start = time.monotonic()
        end = start + (self.timeout + GRACE if timeout is None else timeout)
        self._out_of_step = True  # until every rank has answered, also if interrupted
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it is dead, which is seen below
                pipe.send_bytes(message)
        found: dict[int, Outcome] = {}
        while waiting := [rank for rank in range(self.size) if rank not in found]:
            handles = [x for rank in waiting for x in (self._pipes[rank], self._processes[rank].sentinel)]
            ready = wait(handles, max(0.0, end - time.monotonic()))
            for rank in waiting:
                if self._pipes[rank] in ready or self._processes[rank].sentinel in ready:
                    found[rank] = self._answer(rank, start)
            if not ready:
                found |= self._kill(waiting, time.monotonic() - start)
        self._out_of_step = any(x.exitcode is not None for x in found.values())
        return [found[rank] for rank in range(self.size)]

    def _answer(self, rank: int, start: float) -> Outcome:
        with contextlib.suppress(EOFError, OSError):
            if self._pipes[rank].poll():  # a rank may die just after it has answered
                return Outcome(rank, **_unpack(self._pipes[rank].recv_bytes()))
        process, seconds = self._processes[rank], time.monotonic() - start
        process.join(GRACE)
        code = process.exitcode
        ending = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return Outcome(rank, None, f"the process ended with {ending}", "died", seconds, code)

    def _kill(self, ranks: list[int], seconds: float) -> dict[int, Outcome]:
        """End ranks that did not answer in time, having asked each where it is."""
        outcomes = {}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # it ended this moment
                os.kill(self.pids[rank], signal.SIGUSR1)
        end = time.monotonic() + GRACE / 2
        stacks = {rank: self._written_stack(rank, end) for rank in ranks}
        for rank, text in stacks.items():
            process = self._processes[rank]
            process.kill()
            process.join()
            error = f"no answer in {seconds:.1f} s"
            outcomes[rank] = Outcome(rank, None, error, "hung", seconds, process.exitcode, text)
        return outcomes


_pools: dict[int, Pool] = {}


def renew_pools() -> None:
    for one in _pools.values():
        one.renew()


def close_pools() -> None:
    for one in _pools.values():
        one.close()


def pool(size: int) -> Pool:
    """Returns the pool of that size: it is made at first use, made anew if broken, and closed at exit.

    Examples:
        >>> ranks.pool(2).run(torch.distributed.get_world_size)
        [2, 2]
    """
    if size not in _pools or _pools[size].broken:
        _pools[size] = Pool(size)
    return _pools[size]


def _end(owner: int, processes: list[BaseProcess], pipes: list[Connection], folder: Path) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner ends: the ranks are not its own
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 1.0
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    for pipe in pipes:
        pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


# --- through the pipe -------------------------------------------------------------------------------------------


def _pack(thing: Any) -> bytes:
    """Tensors keep their dtypes, strides and shared storages."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _unpack(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)  # from our own process, and it holds functions


# --- in the ranks -----------------------------------------------------------------------------------------------


_rank = -1  # of this process


def _serve(rank: int, pipe: Connection, stack: str) -> None:
    """Answer calls until the pipe ends."""
    global _rank
    _rank = rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_die_with_parent, args=(Path(stack).parent,), daemon=True).start()
    torch.set_num_threads(1)
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            pipe.send_bytes(_perform(message))


def _die_with_parent(folder: Path) -> None:
    """Even of a parent that is killed nothing is left."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _perform(message: bytes) -> bytes:
    """The fields of an Outcome, packed. SystemExit ends the rank, as it would end a program."""
    start = time.perf_counter()
    try:
        function, args = _unpack(message)
        start = time.perf_counter()
        value = function(*args)
        return _pack({"value": value, "seconds": time.perf_counter() - start})
    except SystemExit:
        raise
    except BaseException as error:  # whatever it is, the parent is to know (pytest's outcomes are no Exceptions)
        report = {"error": str(error), "error_type": type(error).__name__, "traceback": traceback.format_exc()}
        return _pack({**report, "seconds": time.perf_counter() - start})


def _enter_group(meeting: str, size: int, timeout: float) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # The default is the address of the host's name, which on some machines is none that can be bound.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=_rank, world_size=size, timeout=limit)
