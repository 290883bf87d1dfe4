"""ContextParallel: what it takes, what it refuses, and what calls over a group do with it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dilated_attention as da
from dilated_attention import testing
from dilated_attention.ranks import pool
from tests.over_ranks import raised, world

PATTERN = da.DilatedPattern.longnet([8, 32], [1, 2])


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"exchange": "star"}, ValueError, "unknown exchange 'star': use one of auto, ring, allgather, alltoall"),
        ({"timeout": -1}, ValueError, "timeout must be .* at most 31536000 .a year., got -1"),
        ({"timeout": True}, ValueError, "timeout must be a positive number"),
        ({"debug": "yes"}, TypeError, "debug must be True or False, got 'yes'"),
        ({"use_checkpointing": 1}, TypeError, "use_checkpointing must be True, False or None, got 1"),
        ({"total_length": 0}, ValueError, "total_length must be 1 or more, got 0"),
        ({"group": "world"}, TypeError, r"group must be a torch\.distributed\.ProcessGroup or a 1-D DeviceMesh"),
    ],
)
def test_values_are_checked_when_it_is_made(options: dict[str, Any], kind: type, match: str) -> None:
    with pytest.raises(kind, match=match):
        da.ContextParallel(**options)


def test_it_is_frozen_hashable_and_its_own_copy() -> None:
    one = da.ContextParallel(exchange="ring", timeout=5)
    assert {one: 1}[da.ContextParallel(exchange="ring", timeout=5)] == 1
    assert copy.deepcopy(one) is one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.timeout = 7.0  # type: ignore[misc]


@pytest.mark.parametrize("function", [da.dilated_attention, da.explain], ids=lambda f: f.__name__)
def test_without_any_group_the_error_says_what_to_do(function: Any) -> None:
    qkv = testing.make_qkv(1, 16, 2, 4)
    with pytest.raises(ValueError, match=r"no default process group is initialised: call .*init_process_group\(\)"):
        function(*qkv, PATTERN, group=da.ContextParallel())


def test_modules_take_one_and_refuse_what_contradicts_them() -> None:
    lists = ([8], [1])
    collective, keeps = da.RingDilatedAttentionV2Collective, da.ContextParallel(use_checkpointing=False)
    assert "allgather" in repr(collective(*lists, group=da.ContextParallel(exchange="allgather")))
    with pytest.raises(ValueError, match="V2Collective has the exchange 'allgather', and ContextParallel says 'ring'"):
        collective(*lists, group=da.ContextParallel(exchange="ring"))
    for cls in (da.RingDilatedAttention, da.RingDilatedAttentionProduction):
        assert cls(*lists, group=keeps).ranks.parallel.use_checkpointing is False
        assert cls(*lists, use_checkpointing=False, group=keeps).ranks.parallel.use_checkpointing is False
        assert cls(*lists).ranks.parallel.use_checkpointing is None
        with pytest.raises(ValueError, match="use_checkpointing is True, and False in ContextParallel: give it once"):
            cls(*lists, use_checkpointing=True, group=keeps)
        with pytest.raises(ValueError, match=f"{cls.__name__} has the exchange 'ring'"):
            cls(*lists, group=da.ContextParallel(exchange="auto"))
    multihead = da.RingMultiheadDilatedAttention(8, 2, *lists, group=da.ContextParallel(exchange="alltoall"))
    assert "alltoall" in repr(multihead)
    assert "ring, default group" in repr(da.RingMultiheadDilatedAttention(8, 2, *lists))


def test_on_one_device_a_total_length_is_the_length_of_the_sequence() -> None:
    qkv = testing.make_qkv(1, 16, 2, 4)
    parallel = da.ContextParallel(total_length=16)
    module = da.RingDilatedAttention([8], [1], group=parallel)
    assert torch.equal(module(*qkv), da.dilated_attention(*qkv, module.pattern))
    with pytest.raises(ValueError, match="the ranks have 8 tokens, 8 in all, and total_length is 16"):
        module(*(x[:, :8] for x in qkv))


# --- over ranks -------------------------------------------------------------------------------------------------


def lengths_here() -> list[str]:
    """The whole sequence on every rank, lengths that differ, and the right one."""
    x = testing.make_qkv(1, 21, 2, 4)[0]
    part = da.shard_sequence(x, world())

    def call(x: Tensor, total: int) -> None:
        da.dilated_attention(x, x, x, PATTERN, group=da.ContextParallel(total_length=total))

    da.explain(part, part, part, PATTERN, group=da.ContextParallel())  # asks nobody
    return [raised(call, x, 21), raised(call, part, 20 + dist.get_rank()), raised(call, part, 21)]


def test_total_length_over_ranks() -> None:
    for whole, differs, right in pool(2).run(lengths_here):
        assert "the ranks have 21, 21 tokens, 42 in all, and total_length is 21: every rank seems to have" in whole
        assert "total_length is 20 on rank 0 and 21 on rank 1" in differs
        assert right == "nothing raised"
