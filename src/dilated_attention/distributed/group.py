"""Messages over a process group: one step of communication is posted together and awaited together.

Messages are bytes, (n,) uint8, and ranks count within the group. Posting sends and receives of a step in one batch, in
the same order of steps on every rank, is what keeps NCCL from hanging. Gloo cannot read CUDA memory: there messages go
through pinned host memory. Gloo also tells when a peer is late or gone, so waiting there ends with an error that names
it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

BEFORE_CLOSING = 0.05  # seconds: more than short messages take; ranks in a ring may notice one after the other
HOST = torch.device("cpu")
Works = list[tuple[int | None, Any]]  # handles, and whom each waits for; None: for several
Waiting = Callable[[], dict[int, Tensor]]  # until a step is over, for its received messages by rank
# Seconds, a year. torch adds a timeout to the time now in nanoseconds: one of some 230 years more than fits in 64 bits
# ends the wait at once, and the group with it.
LONGEST_TIMEOUT = 31_536_000
_NEVER_SENT = 2**30  # a tag


class CommunicationError(RuntimeError):
    """A rank did not get what another one should have sent.

    The text names who waited for whom, where and why. The group cannot be used again: make a new one, or restart.

    Examples:
        >>> x = torch.randn(1, 64, 4, 8)
        >>> try:
        ...     out = da.dilated_attention(x, x, x, da.DilatedPattern.longnet([64], [1]), group=group)
        ... except da.CommunicationError as error:
        ...     print("lost a rank:", error)
    """


@dataclass
class Stats:
    """What a rank's messages came to, since it was made."""

    hops: int = 0  # steps in which this rank sent or received
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    buffer_bytes: int = 0  # of messages held now,
    peak_buffer_bytes: int = 0  # and at most

    def hold(self, count: int) -> None:
        self.buffer_bytes += count
        self.peak_buffer_bytes = max(self.peak_buffer_bytes, self.buffer_bytes)


@dataclass
class Past:
    """What happened over a group, as far as this process knows."""

    failure: str = ""  # why it cannot be used again
    is_warm: bool = False
    checks: int = 0  # calls that all ranks compared,
    lengths: set[tuple[int, ...]] = field(default_factory=set)  # and their shards
    calls: int = 0  # that all ranks agreed on, checked or not


_past: weakref.WeakKeyDictionary[ProcessGroup, Past] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class GroupTransport:
    """Messages over a process group."""

    group: ProcessGroup
    device: torch.device
    timeout: float | None  # in seconds; None: the group's own
    debug: bool = False
    stats: Stats = field(default_factory=Stats)
    number: int = 0  # of the call whose messages these are, the same on all ranks

    def __post_init__(self) -> None:
        self.rank, self.size = self.group.rank(), self.group.size()
        self.past = _past.setdefault(self.group, Past())
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.wire = wire_device(self.group, self.device)
        self.backend = backend_name(self.group, self.device) or "gloo"  # without one it goes through the host
        self.agrees_on_host = backend_name(self.group, HOST) == "gloo"  # small messages to all need no device

    def post(self, name: str, sends: Mapping[int, Tensor], receives: Mapping[int, int]) -> Waiting:
        """Begin one step. ``receives``: the bytes to come from each rank; ``name`` is for messages to people."""
        self._check_usable()
        sent = {peer: self._to_wire(message) for peer, message in sends.items()}
        arriving = {peer: self._on_wire(count) for peer, count in receives.items()}
        stats, received = self.stats, sum(receives.values())
        stats.bytes_sent += sum(map(Tensor.numel, sent.values()))
        stats.bytes_received += received
        stats.hold(received)
        works = self._batch(sent, arriving, name, kind=f"{name} of call {self.number}")
        stats.hops += bool(works)
        wait = functools.partial(self._wait, name, works, sent, arriving)
        if self.debug:  # the host waits, so that an error names the step in which it happened
            wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return wait

    def from_all(self, name: str, mine: Tensor) -> list[Tensor]:
        """A small tensor of every rank, by rank; not counted in the statistics."""
        self._check_usable()
        message = mine.to(HOST if self.agrees_on_host else self.device)
        messages = [torch.empty_like(message) for _ in range(self.size)]
        if self.agrees_on_host:  # one by one, so that a missing rank can be named
            messages[self.rank] = message
            others = {peer: messages[peer] for peer in self.others}
            works = self._batch(dict.fromkeys(others, message), others, name, kind="to all")
        else:
            works = [(None, dist.all_gather(messages, message, group=self.group, async_op=True))]
        self._wait(name, works, {}, {})
        return [x.to(mine.device) for x in messages]

    def _wait(self, name: str, works: Works, sent: dict[int, Tensor], arriving: dict[int, Tensor]) -> dict[int, Tensor]:
        """Wait until all messages of a step have come and gone; the received ones by rank. ``sent`` are kept until they
        have left."""
        began = time.monotonic()
        for peer, work in works:
            left = None
            if peer is not None and self.timeout is not None:  # gloo: waiting has an end
                left = datetime.timedelta(seconds=max(0.05, self.timeout - (time.monotonic() - began)))
            with self.naming(name, peer, began):
                _ = work.wait() if left is None else work.wait(left)
        works.clear()
        sent.clear()
        self.stats.seconds_waited += time.monotonic() - began
        return {peer: message.to(self.device) for peer, message in arriving.items()}

    def warm_up(self) -> None:
        """NCCL wants all ranks in the first call over a group: a batch over some of them may hang it for good."""
        if self.backend != "gloo" and self.agrees_on_host and not self.past.is_warm:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            self.past.is_warm = True

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Inside, an error on this rank ends the waiting of the others at once."""
        try:
            yield
        except BaseException:
            self._close(f"rank {self.rank} raised an error while others waited for its messages")
            raise

    def _close(self, why: str) -> None:
        """Gloo closes all connections when a receive times out, which the ranks at their other ends notice.

        A rank in the middle of a send does not notice: so messages on their way get a moment to arrive first.
        """
        self.past.failure = self.past.failure or why
        if not self.agrees_on_host:
            return
        time.sleep(BEFORE_CLOSING)
        never = torch.empty(1, dtype=torch.uint8)
        for peer in self.others:  # until one is alive: one from a dead rank fails at once
            with contextlib.suppress(RuntimeError):
                work: Any = dist.irecv(never, group=self.group, group_src=peer, tag=_NEVER_SENT)
                work.wait(datetime.timedelta(milliseconds=1))

    def gone(self) -> list[int]:
        """The ranks whose connections are closed: gloo refuses at once to send them anything."""
        closed = []
        for peer in self.others if self.agrees_on_host else ():
            try:
                dist.isend(torch.empty(1, dtype=torch.uint8), group=self.group, group_dst=peer, tag=_NEVER_SENT)
            except RuntimeError:
                closed.append(peer)
        return closed

    def _check_usable(self) -> None:
        """Raise if an earlier step over the group failed: messages may still be on their way in it."""
        if self.past.failure:
            raise CommunicationError(f"this process group failed before ({self.past.failure}): make a new one")

    def _on_wire(self, count: int) -> Tensor:
        """Memory for a message; torch keeps page-locked memory and that of a device, and gives it out again."""
        pinned = self.wire != self.device and torch.cuda.is_available()
        return torch.empty(count, dtype=torch.uint8, device=self.wire, pin_memory=pinned)

    def _to_wire(self, message: Tensor) -> Tensor:
        # a copy to the host waits for the device
        return message.contiguous() if self.wire == self.device else self._on_wire(message.numel()).copy_(message)

    def _batch(self, sent: dict[int, Tensor], arriving: dict[int, Tensor], name: str, *, kind: str) -> Works:
        """Only messages of one kind meet, so that no rank takes one for another where calls differ."""
        # receives are waited for first: gloo ends them when a connection closes, but may forget a send
        operations = [
            dist.P2POp(function, tensors[peer], group=self.group, group_peer=peer, tag=_tag(kind, tensors[peer]))
            for function, tensors in ((dist.irecv, arriving), (dist.isend, sent))
            for peer in sorted(tensors)
            if tensors[peer].numel()
        ]
        batches: list[tuple[int | None, list[Any]]] = [(x.group_peer, [x]) for x in operations]
        if operations and operations[0].tensor.device.type != "cpu":  # NCCL gives one handle for the whole batch
            batches = [(None, operations)]
        works: Works = []
        for peer, batch in batches:
            with self.naming(name, peer):  # its connection may be closed already
                works += [(peer, work) for work in dist.batch_isend_irecv(batch)]
        return works

    @contextlib.contextmanager
    def naming(self, step: str, peer: int | None, began: float | None = None) -> Iterator[None]:
        """An error of the group inside says who waited for whom, in which step and since when."""
        began = time.monotonic() if began is None else began
        try:
            yield
        except RuntimeError as error:
            whom = f"some of {self.size} ranks" if peer is None else f"rank {peer}"
            what = f"rank {self.rank} waited {time.monotonic() - began:.1f} s for {whom} in {step}"
            is_late = "timed out" in str(error).lower()  # gloo itself has then closed all connections
            others = [] if is_late else [rank for rank in self.gone() if rank != peer]
            self._close(what)  # the ranks that wait for this one need not
            limit = "the group's own timeout" if self.timeout is None else f"{self.timeout:g} s"
            why = f"nothing came within {limit}, it hangs or is far behind" if is_late else _short(error)
            more = f"; no connection to {ranks_text(others)} either" if others else ""
            raise CommunicationError(f"{what}: {why}{more}") from error

    def name_lost(self, error: RuntimeError) -> None:
        """Raise, if there are ranks to name in an error of somebody else's collective."""
        if gone := self.gone():
            what = f"rank {self.rank} lost {ranks_text(gone)}"
            self._close(what)
            raise CommunicationError(f"{what}: {_short(error)}") from error


def backend_name(group: ProcessGroup, device: torch.device) -> str | None:
    """What carries a device's tensors: a group can have one backend a device type. None: nothing does."""
    try:
        name: str = group._get_backend(device).name()
    except RuntimeError:
        return None
    return name.lower()


def reachable_device(group: ProcessGroup, x: object) -> torch.device:
    """Where a rank can tell the others of an error: on the device of x, if it is a tensor that can be sent."""
    if isinstance(x, Tensor) and _wire(group, x.device):
        return x.device
    return HOST if _wire(group, HOST) else torch.accelerator.current_accelerator() or HOST


def wire_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where a device's tensors must be to be sent."""
    wire = _wire(group, device)
    if wire is None:
        raise ValueError(
            f"the process group carries no {device.type} tensors, because its only backend is {group.name()}: pass "
            "'cpu:gloo,cuda:nccl' to init_process_group()"
        )
    return wire


def _wire(group: ProcessGroup, device: torch.device) -> torch.device | None:
    """None: they cannot be sent. Gloo says that it takes CUDA tensors, and crashes on them."""
    if backend_name(group, device) not in (None, "gloo"):
        return device
    return HOST if backend_name(group, HOST) == "gloo" else None


def _tag(kind: str, message: Tensor) -> int:
    """Gloo hands a message over where tags agree, and aborts the process if its size is not the one expected."""
    return zlib.crc32(f"{kind}: {message.nbytes}".encode()) % _NEVER_SENT


def ranks_text(ranks: Sequence[int]) -> str:
    """For people."""
    few = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"
    return few if len(ranks) <= 8 else f"{few} and others"


def _short(error: RuntimeError) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if any(sign in text.lower() for sign in ("closed by peer", "reset by peer", "broken pipe")):
        return "the connection was closed: that rank died, left, or gave up waiting itself"
    return text
