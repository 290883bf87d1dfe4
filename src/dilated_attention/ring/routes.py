"""Who sends a block to whom, and in which step: pure integers, the same on every rank.

Each member of a set of ranks owns one block, and the others need it; when causal, only later members do. A route is
what one member sees of the plan. Sums that travel back (gradients) follow the blocks: after a block was used in step t
its sum goes to whoever uses the block in step t + 1, and from its last user home to the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Trip(NamedTuple):
    """A block on its way between two ranks, in one step."""

    step: int
    owner: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Route:
    """All trips that touch one rank."""

    arrivals: tuple[Trip, ...]  # blocks of others that come to it
    departures: tuple[Trip, ...]  # blocks that it sends: its own, and those it passes on
    returns: tuple[Trip, ...]  # sums of its own block that come home

    def sums_sent(self) -> list[Trip]:
        """Where the sums of the arrived blocks go, each in the step in which the block was used."""
        onward = {(trip.step, trip.owner): trip.target for trip in self.departures}
        return [
            Trip(trip.step, trip.owner, trip.target, onward.get((trip.step + 1, trip.owner), trip.owner))
            for trip in self.arrivals
        ]

    def sums_received(self) -> list[Trip]:
        """Sums that others began and this rank continues, in the step before it uses the block; and those come home."""
        begun = [trip._replace(step=trip.step - 1) for trip in self.arrivals if trip.source != trip.owner]
        return [*begun, *self.returns]


def ring(members: Sequence[int], causal: bool, rank: int) -> Route:
    """Neighbour to neighbour: in step t each member hands on what it got in step t - 1, first its own block.

    When causal the ring is a line: nothing goes from the last member to the first.
    """
    count, me = len(members), members.index(rank)
    before, after = members[me - 1], members[(me + 1) % count]
    last = me if causal else count - 1  # how many blocks come
    arrivals = [Trip(t, members[me - t], before, rank) for t in range(1, last + 1)]
    sent = (me + 1 if me + 1 < count else 0) if causal else count - 1
    departures = [Trip(t, members[me - t + 1], rank, after) for t in range(1, sent + 1)]
    steps_out = count - 1 - me if causal else count - 1  # how many members use my block
    user = members[-1] if causal else before
    returns = [Trip(steps_out, rank, user, rank)] if steps_out else []
    return Route(tuple(arrivals), tuple(departures), tuple(returns))


def allgather(members: Sequence[int], causal: bool, rank: int) -> Route:
    """All at once: one step in which every owner sends its block to all who need it."""
    me = members.index(rank)
    earlier, later = members[:me], members[me + 1 :]
    owners = earlier if causal else (*earlier, *later)
    users = later if causal else (*earlier, *later)
    return Route(
        tuple(Trip(1, owner, owner, rank) for owner in owners),
        tuple(Trip(1, rank, rank, user) for user in users),
        tuple(Trip(1, rank, user, rank) for user in users),
    )


ROUTES: dict[str, Callable[[Sequence[int], bool, int], Route]] = {"ring": ring, "allgather": allgather}


def share(items: int, parts: int, index: int) -> range:
    """Which of so many items the index-th of so many parts gets: as even as can be, none where items are few."""
    return range(items * index // parts, items * (index + 1) // parts)
