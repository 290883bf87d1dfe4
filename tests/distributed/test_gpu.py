"""NCCL with one rank, and a cap on memory. The table of cases has ranks that share one GPU over gloo."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from dilated_attention import DilatedPattern, RingDilatedAttentionProduction, dilated_attention, testing
from dilated_attention.distributed.group import GroupTransport

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl(tmp_path):
    """A group of one rank: as much of NCCL as one GPU can run."""
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1, timeout=limit)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_on_nccl_computes_as_without_a_group(nccl) -> None:
    q, k, v = testing.make_qkv(1, 500, 4, 32, dtype=torch.bfloat16, device="cuda")
    pattern = DilatedPattern.longnet([64, 256], [1, 2])
    assert torch.equal(dilated_attention(q, k, v, pattern, group=nccl), dilated_attention(q, k, v, pattern))


def test_a_group_with_nccl_alone_agrees_on_the_device(nccl) -> None:
    """Its host has no backend: messages to all, and steps, are of CUDA tensors."""
    transport = GroupTransport(nccl, torch.device("cuda"), 60.0)
    assert (transport.backend, transport.agrees_on_host) == ("nccl", False)
    transport.warm_up()
    assert [x.tolist() for x in transport.from_all("a word", torch.arange(3))] == [[0, 1, 2]]
    assert transport.post("a step", {}, {})() == {}
    with pytest.raises(ValueError, match="carries no cpu tensors"):
        GroupTransport(nccl, torch.device("cpu"), 60.0)


@pytest.mark.parametrize("cap", [8, 64])
def test_a_cap_on_memory_is_one(cap: int) -> None:
    """Less is held than without it, and what is held beyond the results is no more than it says and some."""
    mib = 1 << 20

    def peak(attention, backward: bool) -> int:
        qkv = testing.make_qkv(1, 1 << 17, 16, 64, dtype=torch.bfloat16, device="cuda")
        leaves = [x.requires_grad_() for x in qkv]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        out = attention(*leaves)
        if backward:
            out.backward(torch.ones_like(out))
        return (torch.cuda.max_memory_allocated() - base) // mib

    shape = ([2048, 8192], [1, 1])
    for backward in (False, True):
        free = peak(RingDilatedAttentionProduction(*shape, rule="longnet"), backward)
        capped = peak(RingDilatedAttentionProduction(*shape, rule="longnet", max_workspace_bytes=cap * mib), backward)
        assert capped < free, f"{capped} MiB with a cap and {free} without"
