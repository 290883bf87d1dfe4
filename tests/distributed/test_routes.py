"""Routes of blocks and of their sums: what one member plans is what the others plan, and nobody is forgotten."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import product

import pytest

from dilated_attention.ring.routes import Part, Step, Traffic, share, traffic
from dilated_attention.ring.shards import SharedSegment

MEMBERS = [
    *(tuple(range(count)) for count in (2, 3, 4, 8, 64)),
    (3, 4),
    (1, 7, 8, 20),
    tuple(sorted(random.Random(0).sample(range(200), 33))),
]


def plan(exchange: str, members: tuple[int, ...], causal: bool, rank: int) -> Traffic:
    return traffic((SharedSegment(0, 0, 1, 1, 1, (), members, ()),), exchange, causal, rank)


def trips(steps_of: dict[int, tuple[Step, ...]]) -> list[tuple[int, int, int, int]]:
    """(step, source, target, owner), as the sources say and as the targets say."""
    leaving, coming = (
        [(number, rank, peer, part.owner) for rank, steps in steps_of.items() for number, step in enumerate(steps, 1)
         for peer, parts in getattr(step, side).items() for part in parts]
        for side in ("sends", "receives")
    )  # fmt: skip
    assert sorted(leaving) == sorted((number, peer, rank, owner) for number, rank, peer, owner in coming)
    assert all(source != target for _, source, target, _ in leaving)
    return sorted(leaving)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exchange", ["ring", "allgather"])
@pytest.mark.parametrize("members", MEMBERS, ids=len)
def test_every_block_comes_once_and_every_sum_comes_home(members: tuple[int, ...], exchange: str, causal: bool) -> None:
    """A user adds its share when it uses the block, to the sum that came a step before, and sends it in that step."""
    plans = {rank: plan(exchange, members, causal, rank) for rank in members}
    blocks = trips({rank: found.blocks for rank, found in plans.items()})
    used = {(user, owner): number for number, _, user, owner in blocks}
    needed = [(a, b) for a, b in product(members, repeat=2) if (a > b if causal else a != b)]
    assert sorted((user, owner) for _, _, user, owner in blocks) == needed
    for number, source, target, owner in blocks:
        if exchange == "allgather":
            assert (number, source) == (1, owner)
        else:
            assert target == members[(members.index(source) + 1) % len(members)], "a neighbour"
            assert number == (1 if source == owner else used[source, owner] + 1), "it passes on what just came"
    shares = {key: [key[0]] for key in used}  # of whom, in the sum that a rank has
    home: dict[int, list[list[int]]] = defaultdict(list)
    for number, source, target, owner in trips({rank: found.sums for rank, found in plans.items()}):
        assert number == used[source, owner], "it goes in the step in which the block was used"
        if target == owner:
            home[owner].append(shares[source, owner])
        else:
            assert used[target, owner] == number + 1, "it comes just before the block is used"
            shares[target, owner] += shares[source, owner]
    for owner in members:
        users = [user for user, other in needed if other == owner]
        assert sorted(user for some in home[owner] for user in some) == users
        assert len(home[owner]) == (len(users) if exchange == "allgather" else min(1, len(users)))


def test_examples() -> None:
    four, six, nine = ([Part(0, owner)] for owner in (4, 6, 9))
    assert plan("ring", (4, 6, 9), False, 6) == (
        (Step({9: six}, {4: four}), Step({9: four}, {4: nine})),
        (Step({9: four}, {4: nine}), Step({9: nine}, {4: six})),
    )
    assert plan("allgather", (4, 6, 9), True, 6) == ((Step({9: six}, {4: four}),), (Step({4: four}, {9: six}),))
    assert traffic((), "ring", False, 5) == ((), ())
    assert traffic((), "allgather", False, 5) == ((Step({}, {}),), (Step({}, {}),)), "all take part in a collective"


@pytest.mark.parametrize("items", [0, 1, 2, 5, 8, 12, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 12])
def test_shares_are_even_and_complete(items: int, parts: int) -> None:
    shares = [share(items, parts, index) for index in range(parts)]
    assert [item for some in shares for item in some] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
