"""Who sends which rows to whom, and in which step: pure integers, the same on both ends of every message.

Each member of a segment owns a part of its rows. Two ways to compute: the parts go to all members that need them (when
causal, only later ones do), or heads are dealt to the members, and the parts go to whoever computes them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from dilated_attention.ring.shards import SharedSegment


class Part(NamedTuple):
    """The rows of one shared segment that one owner holds."""

    segment: int  # which of this rank's
    owner: int


class Step(NamedTuple):
    """The parts that a rank sends and receives, by the other rank, in the order of its segments."""

    sends: dict[int, list[Part]]
    receives: dict[int, list[Part]]


class Traffic(NamedTuple):
    """All steps in which parts come by a rank."""

    blocks: tuple[Step, ...]
    sums: tuple[Step, ...]  # of their gradients, in the backward pass


class Dealing(NamedTuple):
    """Bundles: some heads of a segment, with equally many rows each, that one rank computes whole."""

    segments: tuple[SharedSegment, ...]  # with the bundle's heads only
    mine: tuple[int, ...]  # which of them this rank computes
    outward: Step
    homeward: Step


def follow(part: Part, path: Iterable[int], rank: int, steps: Iterable[Step]) -> None:
    """Add what the rank has to do with a part that goes along the path, from rank to rank, one step each."""
    ranks = tuple(path)
    for step, source, target in zip(steps, ranks, ranks[1:], strict=False):
        if source == rank != target:
            step.sends.setdefault(target, []).append(part)
        if target == rank != source:
            step.receives.setdefault(source, []).append(part)


@functools.lru_cache(maxsize=256)
def traffic(segments: tuple[SharedSegment, ...], exchange: str, is_causal: bool, rank: int) -> Traffic:
    """On a ring a part goes from user to user, as neighbours are; in an all-gather from its owner to all at once.

    A sum follows its part: after a step in which the part was used it goes to the next user, and at last to the owner.
    """
    longest = max((len(segment.members) - 1 for segment in segments), default=0)
    count = longest if exchange == "ring" else 1
    found = Traffic(*(tuple(Step({}, {}) for _ in range(count)) for _ in Traffic._fields))
    for index, segment in enumerate(segments):
        for place, owner in enumerate(segment.members):
            users = segment.members[place + 1 :] + (() if is_causal else segment.members[:place])
            for way in [users] if exchange == "ring" else [(user,) for user in users]:
                follow(Part(index, owner), (owner, *way), rank, found.blocks)
                follow(Part(index, owner), (*way, owner), rank, found.sums)
    return found


@functools.lru_cache(maxsize=256)
def dealing(segments: tuple[SharedSegment, ...], apart: bool, rank: int) -> Dealing:
    """Every segment's heads dealt to its members; rows go to the member that computes them, and results back."""
    dealt, outward = bundles(segments, apart), Step({}, {})
    for index, (segment, target) in enumerate(dealt):
        for owner in segment.members:
            follow(Part(index, owner), (owner, target), rank, [outward])
    mine = tuple(index for index, (_, target) in enumerate(dealt) if target == rank)
    return Dealing(tuple(segment for segment, _ in dealt), mine, outward, Step(outward.receives, outward.sends))


def bundles(segments: Iterable[SharedSegment], apart: bool) -> list[tuple[SharedSegment, int]]:
    """Each with the member that computes it. ``apart``: only heads of one offset are in a bundle."""
    dealt = []
    for segment in segments:
        rows = {offset: tuple(segment.rows(offset, piece) for piece in segment.pieces) for _, offset in segment.heads}
        for index, member in enumerate(segment.members):
            alike: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            turn = (index - segment.branch) % len(segment.members)  # where heads are few, others in each branch
            for at in share(len(segment.heads), len(segment.members), turn):
                head, offset = segment.heads[at]
                alike.setdefault((*rows[offset], offset if apart else 0), []).append((head, offset))
            dealt += [(replace(segment, heads=tuple(heads)), member) for heads in alike.values()]
    return dealt


def share(items: int, parts: int, index: int) -> range:
    """Which of so many items the index-th of so many parts gets: as even as can be, none where items are few."""
    return range(items * index // parts, items * (index + 1) // parts)
