"""Ranks that share one GPU over gloo, their messages staged through pinned memory, against the oracle; NCCL alone."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import DilatedPattern, dilated_attention, testing
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

    def attention(*shards: torch.Tensor) -> Any:
        return dilated_attention(
            *shards, pattern, group=dist.group.WORLD, return_lse=True, enable_gqa=True,
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


def test_nccl_with_one_rank(tmp_path) -> None:
    """All that one GPU can show of NCCL: a group of one rank computes as without a group."""
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1, timeout=limit)
    try:
        q, k, v = testing.make_qkv(1, 500, 4, 32, dtype=torch.bfloat16, device="cuda")
        pattern = DilatedPattern.longnet([64, 256], [1, 2])
        alone = dilated_attention(q, k, v, pattern)
        assert torch.equal(dilated_attention(q, k, v, pattern, group=dist.group.WORLD), alone)
    finally:
        dist.destroy_process_group()
