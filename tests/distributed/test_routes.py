"""Routes of blocks and of their sums: what one member plans is what the others plan, and nobody is forgotten."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from dilated_attention.ring.routes import ROUTES, Route, Trip, allgather, ring, share

MEMBERS = [
    *(tuple(range(count)) for count in (1, 2, 3, 4, 8, 64)),
    (3, 4),
    (1, 7, 8, 20),
    tuple(sorted(random.Random(0).sample(range(200), 33))),
]
EVERY = [
    pytest.param(name, members, causal, id=f"{name}-{len(members)}from{members[0]}{'-causal' * causal}")
    for name in ROUTES
    for members in MEMBERS
    for causal in (False, True)
]


def routes(name: str, members: tuple[int, ...], causal: bool) -> dict[int, Route]:
    return {rank: ROUTES[name](members, causal, rank) for rank in members}


def needed(members: tuple[int, ...], causal: bool) -> set[tuple[int, int]]:
    """(owner, user) of each block that a member needs."""
    return {(a, b) for a in members for b in members if (a < b if causal else a != b)}


@pytest.mark.parametrize(("name", "members", "causal"), EVERY)
def test_every_needed_block_arrives_once_in_the_step_in_which_it_is_sent(
    name: str, members: tuple[int, ...], causal: bool
) -> None:
    plan = routes(name, members, causal)
    found = Counter((trip.owner, rank) for rank, one in plan.items() for trip in one.arrivals)
    assert found == Counter(needed(members, causal))
    for sent, received in (
        (lambda one: one.departures, lambda one: one.arrivals),
        (Route.sums_sent, Route.sums_received),
    ):
        leaving = [trip for one in plan.values() for trip in sent(one)]
        coming = [trip for one in plan.values() for trip in received(one)]
        assert len(set(leaving)) == len(leaving)
        assert sorted(leaving) == sorted(coming)
        assert all(trip.step >= 1 and trip.source != trip.target for trip in leaving)
    for rank, one in plan.items():
        assert {trip.source for trip in (*one.departures, *one.sums_sent())} <= {rank}
        assert {trip.target for trip in (*one.arrivals, *one.sums_received())} <= {rank}
        came = {trip.owner: trip.step for trip in one.arrivals}
        for trip in one.departures:
            assert trip.owner == rank or came[trip.owner] < trip.step, "it sends only what it has"


@pytest.mark.parametrize("members", MEMBERS, ids=len)
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_ring_only_neighbours_exchange_blocks(members: tuple[int, ...], causal: bool) -> None:
    """When causal it is a line."""
    for place, rank in enumerate(members):
        one = ring(members, causal, rank)
        after = members[(place + 1) % len(members)]
        assert {trip.target for trip in one.departures} <= {after}
        assert {trip.source for trip in one.arrivals} <= {members[place - 1]}
        onward = {trip.target for trip in one.sums_sent() if trip.target != trip.owner}
        assert onward <= {after}, "a sum goes with its block, or home"
        for trips in (one.arrivals, one.departures):  # one block in each step, from the first on
            assert [trip.step for trip in trips] == list(range(1, len(trips) + 1))
        assert all(trip.owner == rank for trip in one.departures if trip.step == 1)
        if causal:
            assert all(trip.source < trip.target for trip in (*one.arrivals, *one.departures))
            assert len(one.arrivals) == place
            assert len(one.departures) == (place + 1 if place + 1 < len(members) else 0)


@pytest.mark.parametrize("members", MEMBERS, ids=len)
@pytest.mark.parametrize("causal", [False, True])
def test_an_allgather_is_one_step_from_the_owner(members: tuple[int, ...], causal: bool) -> None:
    for rank in members:
        one = allgather(members, causal, rank)
        assert {trip.step for trip in (*one.arrivals, *one.departures, *one.returns)} <= {1}
        assert all(trip.source == trip.owner for trip in one.arrivals)
        assert all(trip.owner == rank for trip in one.departures)
        assert not [trip for trip in one.sums_received() if trip.owner != rank]


@pytest.mark.parametrize(("name", "members", "causal"), EVERY)
def test_sums_come_home_with_every_users_share_once(name: str, members: tuple[int, ...], causal: bool) -> None:
    """A user adds its share when it uses the block, to the sum that came a step before, and sends it in that step."""
    plan = routes(name, members, causal)
    used = {(rank, trip.owner): trip.step for rank, one in plan.items() for trip in one.arrivals}
    shares: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)  # of whom, in the sum that a rank has
    for user, owner in used:
        shares[user, owner][user] += 1
    home: dict[int, list[Counter[int]]] = {rank: [] for rank in members}
    sums = sorted((trip for one in plan.values() for trip in one.sums_sent()), key=lambda trip: trip.step)
    for trip in sums:
        assert trip.step == used[trip.source, trip.owner], "it goes in the step in which the block was used"
        if trip.target == trip.owner:
            home[trip.owner].append(shares[trip.source, trip.owner])
        else:
            assert used[trip.target, trip.owner] == trip.step + 1, "it comes just before the block is used"
            shares[trip.target, trip.owner] += shares[trip.source, trip.owner]
    for owner, came in home.items():
        users = [user for other, user in needed(members, causal) if other == owner]
        assert sum(came, Counter()) == Counter(users)
        assert len(came) == (len(users) if name == "allgather" else min(1, len(users)))
        assert len(came) == len(plan[owner].returns)
    last = max(used.values(), default=0)
    assert all(1 <= trip.step <= last for trip in sums), "sums take no more steps than blocks"


def test_examples() -> None:
    assert ring((4, 6, 9), False, 6) == Route(
        (Trip(1, 4, 4, 6), Trip(2, 9, 4, 6)),
        (Trip(1, 6, 6, 9), Trip(2, 4, 6, 9)),
        (Trip(2, 6, 4, 6),),
    )
    assert ring((4, 6, 9), True, 6) == Route(
        (Trip(1, 4, 4, 6),), (Trip(1, 6, 6, 9), Trip(2, 4, 6, 9)), (Trip(1, 6, 9, 6),)
    )
    assert allgather((4, 6, 9), True, 6) == Route((Trip(1, 4, 4, 6),), (Trip(1, 6, 6, 9),), (Trip(1, 6, 9, 6),))
    assert ring((5,), False, 5) == ring((5,), True, 5) == allgather((5,), False, 5) == Route((), (), ())


@pytest.mark.parametrize("items", [0, 1, 2, 5, 8, 12, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 12])
def test_shares_are_even_and_complete(items: int, parts: int) -> None:
    shares = [share(items, parts, index) for index in range(parts)]
    assert [item for some in shares for item in some] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
