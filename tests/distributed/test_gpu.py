"""Ranks that share one GPU over gloo, staged through pinned memory, against the oracle; NCCL with one rank."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import (
    ContextParallel,
    DilatedPattern,
    RingDilatedAttentionProduction,
    dilated_attention,
    testing,
)
from dilated_attention.distributed.group import GroupTransport
from dilated_attention.ranks import pool

pytestmark = pytest.mark.gpu

PATTERNS = [
    DilatedPattern.longnet([64, 256, 1024], [1, 2, 8]),
    DilatedPattern.head_groups([96, 400], [1, 3]),
    DilatedPattern.torchscale([100, 512], [1, 4]),
]
SHARDS = [(300, 300), (1, 450, 149), (0, 128, 200, 271), (600, 3, 3, 3)]
CASES = list(
    itertools.product(range(3), range(4), ["ring", "allgather", "alltoall"], [False, True], ["bfloat16", "float32"])
)


def shard_of(pattern: DilatedPattern, lengths: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]):
    """This rank's part of forward and backward, on the one GPU."""
    rank, tokens = dist.get_rank(), sum(lengths)
    part = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    qkv, dout, dlse, mask = inputs(tokens, dtype, options.pop("padded"))

    group = ContextParallel(**{name: options.pop(name) for name in ("exchange", "use_checkpointing")})

    def attention(*shards: torch.Tensor) -> Any:
        return dilated_attention(
            *shards, pattern, group=group, return_lse=True, enable_gqa=True,
            key_padding_mask=None if mask is None else mask[:, part], **options,
        )  # fmt: skip

    found = testing.run(attention, tuple(x[:, part] for x in qkv), dout[:, part], dlse[:, part])
    return [value.cpu() for _, value in found.items()]


def inputs(tokens: int, dtype: torch.dtype, padded: bool):
    qkv = testing.make_qkv(2, tokens, 4, 32, kv_heads=2, dtype=dtype, device="cuda")
    generator = torch.Generator("cuda").manual_seed(3)
    dout = torch.randn(2, tokens, 4, 32, generator=generator, device="cuda").to(dtype)
    dlse = torch.randn(2, tokens, 4, generator=generator, device="cuda")
    mask = torch.rand(2, tokens, generator=generator, device="cuda") < 0.3 if padded else None
    return qkv, dout, dlse, mask


@pytest.mark.parametrize(("which", "shards", "exchange", "is_causal", "dtype"), CASES)
def test_ranks_on_one_gpu_match_the_oracle(which, shards, exchange, is_causal, dtype) -> None:
    pattern, lengths, dtype = PATTERNS[which], SHARDS[shards], getattr(torch, dtype)
    padded = (which + shards) % 2 == 1
    options = {"exchange": exchange, "is_causal": is_causal, "use_checkpointing": shards != 1, "padded": padded}
    parts = pool(len(lengths)).run(shard_of, pattern, lengths, dtype, options)
    got = testing.joined([testing.Results(*part) for part in parts])
    qkv, dout, dlse, mask = inputs(sum(lengths), dtype, padded)
    known = {"is_causal": is_causal, "key_padding_mask": mask}
    plain = None if dtype in testing.TOLERANCE else testing.oracle(qkv, pattern, dout, dlse, dtype=None, **known)
    want = testing.oracle(qkv, pattern, dout, dlse, **known)

    def on_host(results):
        return None if results is None else testing.Results(*(value.cpu() for _, value in results.items()))

    testing.assert_exact(got, on_host(want), on_host(plain))


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
    """Its host has no backend: messages to all, and steps, are collectives of CUDA tensors."""
    transport = GroupTransport(nccl, torch.device("cuda"), 60.0)
    assert (transport.backend, transport.names_peers, transport.agrees_on_host) == ("nccl", False, False)
    transport.warm_up()
    assert transport.post_all("a word", torch.zeros(8, dtype=torch.uint8)).wait() == {}
    assert transport.post("a step", {}, {}, collective=True).wait() == {}
    with pytest.raises(ValueError, match="carries no cpu tensors"):
        GroupTransport(nccl, torch.device("cpu"), 60.0)


@pytest.mark.parametrize("cap", [8, 64])
def test_a_cap_on_memory_is_one(cap: int) -> None:
    """Less is held than without it, and what is held beyond the results is no more than it says and some."""
    mib = 1 << 20

    def peak(attention, backward: bool) -> int:
        q, k, v = (
            x.requires_grad_() for x in testing.make_qkv(1, 1 << 17, 16, 64, dtype=torch.bfloat16, device="cuda")
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        out = attention(q, k, v)
        if backward:
            out.backward(torch.ones_like(out))
        return (torch.cuda.max_memory_allocated() - base) // mib

    shape = ([2048, 8192], [1, 1])
    for backward in (False, True):
        free = peak(RingDilatedAttentionProduction(*shape, rule="longnet"), backward)
        capped = peak(RingDilatedAttentionProduction(*shape, rule="longnet", max_workspace_bytes=cap * mib), backward)
        assert capped < free, f"{capped} MiB with a cap and {free} without"
