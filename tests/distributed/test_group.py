"""What goes over a group, in small: buffers used again, rows that are kept, options that one rank gets wrong."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dilated_attention import DilatedPattern, dilated_attention, testing
from dilated_attention.ring.circulate import Exchange
from dilated_attention.distributed.fake import FakeTransport, run_threads
from dilated_attention.distributed.group import Buffers
from dilated_attention.ranks import pool

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
        settings = testing.Settings(DilatedPattern.longnet([16], [1]), False, 0.5, 0.0, "auto")
        with torch.set_grad_enabled(grad):
            testing._parallel.attend(q, q, q, None, None, settings, link)

    with mock.patch.object(Exchange, "forward", noted):
        run_threads(2, rank)
    assert keeps == [grad] * 2


def with_timeout(timeout: float) -> float:
    """One rank comes late, and the other waits for it."""
    q = testing.make_qkv(1, 8, 2, 4)[0]
    if dist.get_rank():
        time.sleep(0.2)
    return (
        dilated_attention(q, q, q, DilatedPattern.longnet([16], [1]), group=dist.group.WORLD, timeout=timeout)
        .sum()
        .item()
    )


def test_the_longest_timeout_works() -> None:
    first, second = pool(2).run(with_timeout, 31_536_000)
    assert first == second


def misspelt(options: dict[str, object]) -> tuple[str, float]:
    q = testing.make_qkv(1, 8, 2, 4)[0]
    mine = options if dist.get_rank() else {}
    start = time.monotonic()
    try:
        dilated_attention(q, q, q, DilatedPattern.longnet([16], [1]), group=dist.group.WORLD, **mine)
    except (TypeError, ValueError) as error:
        return str(error), time.monotonic() - start
    return "nothing raised", 0.0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"exchange": "rnig"}, "unknown exchange 'rnig'"),
        ({"verify": "never"}, "unknown verify 'never'"),
        ({"timeout": -1}, "timeout must be a positive number of seconds, at most 31536000 (a year), got -1"),
        ({"timeout": 1e10}, "timeout must be a positive number of seconds, at most 31536000 (a year), got 1000000000"),
        ({"timeout": 1e20}, "timeout must be a positive number of seconds, at most 31536000 (a year), got 1e+20"),
        ({"timeout": 10**400}, "timeout must be a positive number of seconds, at most 31536000 (a year), got 1000"),
        ({"debug": 1}, "debug must be True or False, got 1"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_a_wrong_option_on_one_rank_reaches_all(options: dict[str, object], what: str) -> None:
    told, own = pool(2).run(misspelt, options)
    assert what in own[0]
    assert "rank 1 cannot run it" in told[0]
    assert what in told[0]
    assert told[1] < 30  # not the timeout, which is a minute
