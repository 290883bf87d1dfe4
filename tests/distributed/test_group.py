"""What goes over a group, in small: buffers used again, rows that are kept, the longest timeout."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dilated_attention import ContextParallel, DilatedPattern, dilated_attention, testing
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call
from dilated_attention.distributed.group import LONGEST_TIMEOUT, Buffers
from dilated_attention.ranks import pool
from dilated_attention.ring.circulate import Circulation
from dilated_attention.ring.run import attend_over_ranks
from tests.threads import FakeRanks, FakeTransport, run_threads

HOST = torch.device("cpu")


def test_buffers_are_used_again_and_sizes_no_longer_used_are_let_go() -> None:
    buffers = Buffers()
    first = buffers.take(8, HOST)
    buffers.give(first)
    buffers.begin()
    assert buffers.take(8, HOST) is first
    assert buffers.take(8, HOST) is not first
    for size in range(1, 50):
        buffers.begin()
        buffers.give(buffers.take(size, HOST))
    assert len(buffers.free) <= 2


@pytest.mark.parametrize("grad", [False, True])
def test_rows_are_kept_only_for_a_backward_pass(grad: bool) -> None:
    keeps: list[bool] = []
    forward = Circulation.forward

    def noted(self: Circulation, work: Any) -> Any:
        keeps.append(self.keeps)
        return forward(self, work)

    def rank(transport: FakeTransport) -> None:
        q = testing.make_qkv(1, 8, 2, 4, seed=transport.rank)[0].requires_grad_()
        ranks = FakeRanks(transport, exchange="ring", use_checkpointing=False)
        call = Call(DilatedPattern.longnet([16], [1]), in_parts=True).of(q, q, None, 0)
        with torch.set_grad_enabled(grad):
            attend_over_ranks(Inputs(q, q, q), call, ranks)

    with mock.patch.object(Circulation, "forward", noted):
        run_threads(2, rank)
    assert keeps == [grad] * 2


def with_timeout(timeout: float) -> float:
    """One rank comes late, and the other waits for it."""
    q = testing.make_qkv(1, 8, 2, 4)[0]
    if dist.get_rank():
        time.sleep(0.2)
    over = ContextParallel(timeout=timeout)
    return dilated_attention(q, q, q, DilatedPattern.longnet([16], [1]), group=over).sum().item()


def test_the_longest_timeout_works() -> None:
    first, second = pool(2).run(with_timeout, LONGEST_TIMEOUT)
    assert first == second
