"""What goes over a group, in small: buffers used again, and rows that are kept."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dilated_attention import DilatedPattern, testing
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import Call
from dilated_attention.distributed.fake import FakeTransport, run_threads
from dilated_attention.distributed.group import Buffers
from dilated_attention.ring.circulate import Exchange
from dilated_attention.ring.run import attend

HOST = torch.device("cpu")


def test_a_buffer_is_used_again() -> None:
    buffers = Buffers()
    first = buffers.take(8, HOST)
    buffers.give(first)
    buffers.begin()
    assert buffers.take(8, HOST) is first
    assert buffers.take(8, HOST) is not first


def test_buffers_of_sizes_no_longer_used_are_let_go() -> None:
    buffers = Buffers()
    for size in range(1, 50):
        buffers.begin()
        buffers.give(buffers.take(size, HOST))
    assert len(buffers.free) <= 2


@pytest.mark.parametrize("grad", [False, True])
def test_rows_are_kept_only_for_a_backward_pass(grad: bool) -> None:
    keeps: list[bool] = []
    forward = Exchange.forward

    def noted(self: Exchange, keep: bool):
        keeps.append(keep)
        return forward(self, keep)

    def rank(transport: FakeTransport) -> None:
        q = testing.make_qkv(1, 8, 2, 4, seed=transport.rank)[0].requires_grad_()
        link = testing._FakeLink(transport, exchange="ring", use_checkpointing=False)
        call = Call(DilatedPattern.longnet([16], [1]), in_parts=True).of(q, q, None, 0)
        with torch.set_grad_enabled(grad):
            attend(Inputs(q, q, q), call, link)

    with mock.patch.object(Exchange, "forward", noted):
        run_threads(2, rank)
    assert keeps == [grad] * 2
