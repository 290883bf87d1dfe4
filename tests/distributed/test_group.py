"""Receive buffers that are used again."""

from __future__ import annotations

import torch

from dilated_attention.distributed.group import Buffers

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
