"""Local processes ("ranks") joined in one gloo group and kept alive between calls: a tool of tests and benchmarks.

They are forked from one server process that has imported torch: only the first pool takes long. A script that makes a
pool needs ``if __name__ == "__main__"``, and its functions are at the top level of a module, since they go by name.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

# Imported once for all ranks. Not this package: the server might find another copy of it.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "torch.distributed.tensor"]
TIMEOUT = 120.0  # seconds after which a collective of the group fails
GRACE = 5.0  # seconds that a call outlives it, so that ranks can say themselves where they waited
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Outcome:
    """What became of a call on one rank. ``error_type`` is the name of an exception, "died", "hung", or None."""

    rank: int
    value: Any = None
    error: str | None = None
    error_type: str | None = None
    seconds: float = 0.0
    exitcode: int | None = None  # of a rank that is gone; negative: the signal that ended it
    traceback: str = ""


class RanksFailed(RuntimeError):  # noqa: N818 - it says what happened
    def __init__(self, what: str, outcomes: Sequence[Outcome]) -> None:
        failed = [f"rank {x.rank}: {x.error_type}: {x.error}\n{x.traceback}" for x in outcomes if x.error_type]
        super().__init__(f"{what} failed on {len(failed)} of {len(outcomes)} ranks: " + "\n".join(failed))


class Pool:
    """Ranks that form one group. One call runs at a time, and none when a rank died or hung: the pool is broken."""

    def __init__(self, size: int) -> None:
        self._groups = 0
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)  # where ranks meet
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            pipe, far_end = context.Pipe()
            process = context.Process(target=_serve, args=(far_end,), name=str(rank), daemon=True)
            process.start()
            far_end.close()  # the rank's copy is the only one: when it dies the pipe ends
            self._processes.append(process)
            self._pipes.append(pipe)
        self.join()

    @property
    def broken(self) -> bool:
        return not all(process.is_alive() for process in self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT + GRACE, check: bool = True
    ) -> list[Any]:
        """Calls ``function(*args)`` on every rank and returns the results, in the order of ranks.

        If a rank fails, it raises RanksFailed, once the others have answered or ``timeout`` seconds have passed; with
        ``check=False`` it returns an `Outcome` for each rank instead. Then the ranks form a new group, so that the next
        call does not receive what this one sent; or, if one died or hung, the pool is closed.
        """
        if self.broken:
            raise RuntimeError("this pool is broken or closed: make a new one, or ask pool() for one")
        self.used = True
        outcomes = self._call(function, args, timeout)
        failed = any(x.error_type for x in outcomes)
        if self.broken:
            self.close()
        elif failed:
            self.join()
        if check and failed:
            raise RanksFailed(getattr(function, "__qualname__", repr(function)), outcomes)
        return [x.value for x in outcomes] if check else outcomes

    def close(self) -> None:
        """Ends all ranks, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()

    def join(self) -> None:
        """Form a new group; messages of the last one are lost with it."""
        self._groups, self.used = self._groups + 1, False
        outcomes = self._call(_enter_group, (self._store.port, self._groups, len(self._pipes)), TIMEOUT)
        if any(x.error_type for x in outcomes):
            self.close()
            raise RanksFailed("forming a group", outcomes)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Outcome]:
        message, start = _pack((function, args)), time.monotonic()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it is dead, which is seen below
                pipe.send_bytes(message)
        return [self._answer(rank, start, timeout) for rank in range(len(self._pipes))]

    def _answer(self, rank: int, start: float, timeout: float) -> Outcome:
        """What a rank says, or how it ended; one that says nothing in time is killed."""
        process, pipe, lost = self._processes[rank], self._pipes[rank], "died"
        if pipe.poll(max(0.0, start + timeout - time.monotonic())):  # the end of the pipe is news, too
            with contextlib.suppress(EOFError, OSError):
                return Outcome(rank, *_unpack(pipe.recv_bytes()))
        else:
            process.kill()
            lost = "hung"
        process.join(GRACE)
        seconds = time.monotonic() - start
        error = f"the process ended with exit code {process.exitcode} after {seconds:.1f} s"
        return Outcome(rank, None, error, lost, seconds, process.exitcode)


POOLS: dict[int, Pool] = {}


def pool(size: int) -> Pool:
    """The pool of that size: it is made at first use, made anew if broken, and closed at exit."""
    if size not in POOLS or POOLS[size].broken:
        POOLS[size] = Pool(size)
    return POOLS[size]


@atexit.register
def close_pools() -> None:
    for ranks in POOLS.values():
        ranks.close()


def _pack(thing: Any) -> bytes:
    """Tensors keep their dtypes, strides and shared storages."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _unpack(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)  # from our own process, and it holds functions


def _serve(pipe: Connection) -> None:
    """Answer calls until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(_perform(pipe.recv_bytes()))


def _die_with_parent() -> None:
    """Even of a parent that is killed nothing is left, whatever a rank is doing."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _perform(message: bytes) -> bytes:
    """The fields of an Outcome after its rank, packed. SystemExit ends the rank, as it would end a program."""
    start = time.perf_counter()
    try:
        function, args = _unpack(message)
        return _pack((function(*args), None, None, time.perf_counter() - start))
    except SystemExit:
        raise
    except BaseException as error:  # whatever it is, the parent is to know (pytest's outcomes are no Exceptions)
        seconds = time.perf_counter() - start
        return _pack((None, str(error), type(error).__name__, seconds, None, traceback.format_exc()))


def _enter_group(port: int, number: int, size: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # The default is the address of the host's name, which on some machines is none that can be bound.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    rank, limit = int(multiprocessing.current_process().name), timedelta(seconds=TIMEOUT)
    store = PrefixStore(str(number), TCPStore(LOOPBACK, port, timeout=limit))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
