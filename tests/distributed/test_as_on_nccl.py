"""The way that NCCL goes, over gloo: agreement by all-gather, and none after the first calls.

NCCL itself needs a GPU for every rank. What differs there is decided by a property of the transport; here it is set as
NCCL has it, so that the same code runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dilated_attention import DilatedPattern
from dilated_attention.distributed.group import GroupTransport
from dilated_attention.ranks import pool
from dilated_attention.ring import run
from dilated_attention.testing import Results
from tests.cases import Case
from tests.over_ranks import noted_calls, world
from tests.threads import joined

LENGTHS = (17, 0, 30, 9)
CHECKED, TIMES = 8, 3  # agreements, and how often each case runs, which is more calls than are checked
CASES = [
    Case(
        "nccl", number, rule, is_causal, "own", sum(LENGTHS), ranks=len(LENGTHS), own_lengths=LENGTHS,
        own_heads=(4, 2), mask="random" if rule == "torchscale" else "none", exchange=exchange, dropout_p=dropout_p,
        own_pattern=DilatedPattern.of(rule, [8, 20, 100], [1, 2, 3]),
    )
    for number, (exchange, rule, is_causal, dropout_p) in enumerate([
        ("ring", "torchscale", False, 0.0), ("ring", "longnet", True, 0.3), ("allgather", "torchscale", False, 0.3),
        ("allgather", "longnet", True, 0.0), ("alltoall", "torchscale", True, 0.3), ("alltoall", "longnet", False, 0.0),
    ])
]  # fmt: skip


@contextmanager
def as_on_nccl() -> Iterator[None]:
    init = GroupTransport.__post_init__

    def changed(self: GroupTransport) -> None:
        init(self)
        self.agrees_on_host = False

    with mock.patch.object(GroupTransport, "__post_init__", changed):
        yield


def all_cases() -> tuple[list[Results], Counter[str]]:
    """Every case several times over one group, with the same results; and what was called in all."""
    group, found = dist.new_group(), []
    names = ("all_gather", "batch_isend_irecv")
    with as_on_nccl(), mock.patch.object(run, "FIRST_CALLS", CHECKED), noted_calls(names) as calls:
        for case in CASES:
            first, *others = (case.on_this_rank(group) for _ in range(TIMES))
            for other in others:
                assert all(torch.equal(x, y) for (_, x), (_, y) in zip(first.items(), other.items(), strict=True))
            found.append(first)
    return found, Counter(name for name, _ in calls)


def test_it_matches_the_oracle_with_as_few_collectives_as_can_be() -> None:
    results, counts = zip(*pool(len(LENGTHS)).run(all_cases), strict=True)
    for case, parts in zip(CASES, zip(*results, strict=True), strict=True):
        case.check(joined(parts))
    calls = [case for case in CASES for _ in range(TIMES)]
    seeds = sum(case.dropout_p > 0 for case in calls[CHECKED // 2 :])  # a call is checked forward and backward
    ends = sum(case.mask != "none" and not case.is_causal for case in calls)
    assert {count["all_gather"] for count in counts} == {CHECKED + seeds + ends}
    assert counts[1]["batch_isend_irecv"] == 0  # an empty shard has nothing to send
    assert counts[0]["batch_isend_irecv"] > 0


def debugged() -> list[tuple[bool, list[int]]]:
    """Whether a step was over when it had been posted, and what came."""
    found = []
    for debug in (False, True):
        transport = GroupTransport(world(), torch.device("cpu"), 10.0, debug=debug)
        peer = 1 - transport.rank
        message = torch.full((5,), transport.rank, dtype=torch.uint8)
        wait: Any = transport.post("a step", {peer: message}, {peer: 5})
        found.append((not wait.args[1], wait()[peer].tolist()))
    return found


def test_debug_waits_in_every_step() -> None:
    for rank, found in enumerate(pool(2).run(debugged)):
        assert found == [(False, [1 - rank] * 5), (True, [1 - rank] * 5)]
