"""One step of communication: messages to and from some ranks, posted together and awaited together.

Messages are bytes, (n,) uint8. A transport carries them: over a process group (`group`), or in tests among threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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


class Pending(Protocol):
    def wait(self) -> dict[int, Tensor]:
        """The received messages by rank, on the device of the transport."""


class Transport(Protocol):
    """Where messages go: a process group, or another thread in a test."""

    rank: int
    size: int
    stats: Stats
    backend: str  # the name of what carries the messages
    names_peers: bool  # whether waiting has an end and tells for whom
    agrees_on_host: bool  # whether small messages to all need no device
    number: int  # of the call whose messages these are, the same on all ranks; for those that can tell calls apart

    def post(
        self, name: str, sends: Mapping[int, Tensor], receives: Mapping[int, int], *, collective: bool = False
    ) -> Pending:
        """Begin one step. ``receives`` gives the bytes to come from each rank; ``name`` is for messages to people.

        A collective step must be posted on every rank, also where it moves nothing.
        """

    def post_all(self, name: str, message: Tensor) -> Pending:
        """Begin sending a small message from every rank to every rank; not counted in the statistics."""

    def warm_up(self) -> None:
        """Before the first step, on every rank."""

    def release(self, messages: Mapping[int, Tensor], *, reuse: bool = True) -> None:
        """Say that received messages are no longer the transport's to count; ``reuse``: and that nobody reads them."""

    def closed_on_error(self) -> AbstractContextManager[None]:
        """Inside, an error on this rank ends the waiting of the others at once."""
