"""Two calls that look alike are still two calls: ranks that run their backward passes in different orders are told.

Without a number for each call, a rank would take the rows of the other call for those it waits for.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dilated_attention import ContextParallel, DilatedPattern, dilated_attention, testing
from dilated_attention.ranks import pool
from dilated_attention.testing import Results

EXCHANGES = ("ring", "allgather", "alltoall")
P, VICTIM, TOKENS = 3, 1, 20
PATTERN = DilatedPattern.longnet([16, 100], [1, 2])  # the second segment lies on all ranks
CHECKS = 64  # what verify="first" checks
SHORT, LONG = 1.5, 30.0
AT_ONCE = 5.0  # seconds, on a busy machine


@pytest.fixture(autouse=True)
def group_in_order() -> Iterator[None]:
    """The pool's ranks have made the same calls before each test, and make the right ones after it."""
    assert_right(pool(P).run(in_order, "ring", None))
    yield
    assert_right(pool(P).run(in_order, "ring", None))


def make(index: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """The sequence of all ranks for the first or second call, and a gradient for it."""
    q, k, v = testing.make_qkv(2, TOKENS * P, 4, 8, dtype=torch.float64, seed=index)
    return (q, k, v), testing.make_qkv(2, TOKENS * P, 4, 8, dtype=torch.float64, seed=9 + index)[0]


def shard(x: Tensor) -> Tensor:
    return x[:, dist.get_rank() * TOKENS : (dist.get_rank() + 1) * TOKENS]


def attend(exchange: str, *qkv: Tensor, **options: Any) -> Tensor:
    of_group = {name: options.pop(name) for name in ("group", "timeout", "verify") if name in options}
    group = ContextParallel(exchange=exchange, **{"timeout": LONG, **of_group})
    out = dilated_attention(*qkv, PATTERN, group=group, **options)
    assert isinstance(out, Tensor)
    return out


def in_order(exchange: str, reentrant: bool | None, order: tuple[int, int] = (0, 1), **options: Any) -> list[Results]:
    """Two calls forward, then their backward passes in ``order``; ``reentrant``: of a checkpoint around each call."""
    leaves, outs = [], []
    for index in range(2):
        leaves.append([shard(x).detach().requires_grad_() for x in make(index)[0]])
        call = functools.partial(attend, exchange, **options)
        with torch.no_grad():  # as an evaluation between two steps: it counts on every rank
            call(*leaves[index])
        if reentrant is None:
            outs.append(call(*leaves[index]))
        else:
            outs.append(checkpoint(call, *leaves[index], use_reentrant=reentrant))
    results: dict[int, Results] = {}
    for index in order:
        outs[index].backward(shard(make(index)[1]))
        dq, dk, dv = (x.grad for x in leaves[index])
        assert dq is not None
        assert dk is not None
        assert dv is not None
        results[index] = Results(outs[index].detach(), None, dq, dk, dv)
    return [results[0], results[1]]


def assert_right(ranks: list[list[Results]]) -> None:
    for index, parts in enumerate(zip(*ranks, strict=True)):
        wanted = testing.oracle(make(index)[0], PATTERN, make(index)[1])
        testing.assert_exact(testing.joined(parts), Results(wanted.out, None, wanted.dq, wanted.dk, wanted.dv))


def swapped(exchange: str, reentrant: bool | None, **options: Any) -> None:
    """One rank runs the second backward pass first."""
    in_order(exchange, reentrant, (1, 0) if dist.get_rank() == VICTIM else (0, 1), **options)


def swapped_then_in_order(exchange: str, reentrant: bool | None) -> tuple[str, float, list[Results]]:
    """The error of this rank and after how long; the right calls over the same group."""
    began = time.monotonic()
    try:
        swapped(exchange, reentrant)
    except ValueError as error:
        return str(error), time.monotonic() - began, in_order(exchange, reentrant)
    raise AssertionError("no error")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("reentrant", [None, False])
def test_every_rank_is_told_that_backward_passes_come_in_different_orders(
    exchange: str, reentrant: bool | None
) -> None:
    told = pool(P).run(swapped_then_in_order, exchange, reentrant)
    for rank, (error, seconds, _) in enumerate(told):
        number = r"the number of the call \(all ranks must run their backward passes in one order\)"
        who = rf"is (\d+) on ranks 0, 2 and (\d+) on rank {VICTIM}"
        found = re.fullmatch(rf".*the backward of .*\(this is rank {rank}\): {number} {who}", error)
        assert found is not None, error
        assert found[1] != found[2]
        assert seconds < AT_ONCE
    assert_right([results for _, _, results in told])


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_any_order_that_the_ranks_share_is_right(exchange: str, order: tuple[int, int], reentrant: bool | None) -> None:
    """With checkpoints too, whose backward passes make the calls again."""
    assert_right(pool(P).run(in_order, exchange, reentrant, order))


def refused_on_one_rank(exchange: str) -> list[Results]:
    """A call that one rank refuses counts on no rank, so that later numbers still agree."""
    q = shard(make(0)[0][0])
    try:
        attend(exchange, q, q, q, dropout_p=2.0 if dist.get_rank() == VICTIM else 0.0)
    except ValueError:
        return in_order(exchange, None)
    raise AssertionError("no error")


def test_a_call_that_was_called_off_does_not_count() -> None:
    assert_right(pool(P).run(refused_on_one_rank, "ring"))


def unchecked(exchange: str, then_swapped: bool = False) -> list[Results]:
    """The same after all the checks that ``verify="first"`` makes, in a group that knows no other lengths."""
    q, group = shard(make(0)[0][0]), dist.new_group()
    for _ in range(CHECKS + 1):
        attend(exchange, q, q, q, verify="first", group=group)
    results = in_order(exchange, None, (1, 0), verify="first", group=group)
    if then_swapped:
        swapped(exchange, None, verify="first", timeout=SHORT, group=group)
    return results


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_without_checks_gloo_takes_no_message_of_another_call(exchange: str) -> None:
    """Late, and at the price of the group; but no gradient is wrong. Over NCCL nothing would tell."""
    assert_right(pool(P).run(unchecked, exchange))
    outcomes = pool(P).run(unchecked, exchange, True, check=False)
    assert [x.error_type for x in outcomes] == ["CommunicationError"] * P, outcomes
