"""The way that NCCL goes, over gloo: one collective a step, agreement by all-gather, and none after the first calls.

NCCL itself needs a GPU for every rank. What differs there is decided by two properties of the transport; here they are
set as NCCL has them, so that the same code runs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import DilatedPattern, testing
from dilated_attention.distributed.group import GroupTransport
from dilated_attention.distributed.transport import Transport
from dilated_attention.functional import attend
from dilated_attention.ranks import pool
from dilated_attention.ring.run import FIRST_CALLS, Link

LENGTHS = (17, 0, 30, 9)
CASES = list(itertools.product(["ring", "allgather", "alltoall"], [False, True], ["longnet", "torchscale"], [0.0, 0.3]))


@dataclass
class LinkAsOnNccl(Link):
    def transport(self, device: torch.device) -> Transport:
        transport: Any = super().transport(device)
        transport.names_peers = transport.agrees_on_host = False
        return transport


def inputs(padded: bool):
    qkv = testing.make_qkv(2, sum(LENGTHS), 4, 8, kv_heads=2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(qkv[0].shape, generator=generator, dtype=torch.float64)
    dlse = torch.randn(qkv[0].shape[:3], generator=generator, dtype=torch.float64)
    mask = torch.rand(2, sum(LENGTHS), generator=generator) < 0.3 if padded else None
    return qkv, dout, dlse, mask


def shards_of(cases: list[tuple[str, bool, str, float]]) -> tuple[list[list[torch.Tensor]], dict[str, int]]:
    """Every case three times over one group, which is more calls than are checked; and what was called in all."""
    counts: dict[str, int] = {}
    for name in ("all_gather", "all_to_all_single", "batch_isend_irecv"):
        setattr(dist, name, _counting(getattr(dist, name), name, counts))
    rank = dist.get_rank()
    part = slice(sum(LENGTHS[:rank]), sum(LENGTHS[: rank + 1]))
    found = []
    for exchange, is_causal, rule, dropout_p in cases:
        pattern = DilatedPattern.of(rule, [8, 20, 100], [1, 2, 3])
        qkv, dout, dlse, mask = inputs(rule == "torchscale")
        mask = None if mask is None else mask[:, part]
        link = LinkAsOnNccl(dist.group.WORLD, exchange)

        def attention(q, k, v, pattern=pattern, c=is_causal, p=dropout_p, mask=mask, link=link):
            torch.manual_seed(5 + dist.get_rank())  # rank 0's draw is the one that counts
            return attend(q, k, v, pattern, c, None, p, mask, True, "auto", None, link)

        shard = tuple(x[:, part] for x in qkv)
        results = [testing.run(attention, shard, dout[:, part], dlse[:, part]) for _ in range(3)]
        for other in results[1:]:
            assert all(torch.equal(x, y) for (_, x), (_, y) in zip(results[0].items(), other.items(), strict=True))
        found.append([value for _, value in results[0].items()])
    return found, counts


def _counting(function: Any, name: str, counts: dict[str, int]) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return function(*args, **options)

    return call


@pytest.fixture(scope="module")
def outcome():
    torch.manual_seed(5)
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    with pool(len(LENGTHS)) as ranks:  # its own: torch.distributed is patched in there
        return ranks.run(shards_of, CASES), seed


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_it_matches_the_oracle(outcome, index: int) -> None:
    ranks, seed = outcome
    _, is_causal, rule, dropout_p = CASES[index]
    got = testing.joined([testing.Results(*found[index]) for found, _ in ranks])
    qkv, dout, dlse, mask = inputs(rule == "torchscale")
    options = {"is_causal": is_causal, "dropout_p": dropout_p, "key_padding_mask": mask, "seed": seed}
    pattern = DilatedPattern.of(rule, [8, 20, 100], [1, 2, 3])
    testing.assert_exact(got, testing.oracle(qkv, pattern, dout, dlse, **options))


def test_collectives_are_called_as_often_as_they_should(outcome) -> None:
    ranks, _ = outcome
    counts = [counts for _, counts in ranks]
    assert len({count["all_to_all_single"] for count in counts}) == 1
    # two forward and two backward in an all-to-all, one forward, and two backward, in an all-gather
    assert counts[0]["all_to_all_single"] == 3 * 8 * (4 + 3)
    calls = [case for case in CASES for _ in range(3)]
    unchecked = calls[FIRST_CALLS // 2 :]  # a call is checked forward and backward
    seeds = sum(dropout_p > 0 for _, _, _, dropout_p in unchecked)
    ends = sum(rule == "torchscale" and not is_causal for _, is_causal, rule, _ in calls)
    assert counts[0]["all_gather"] == FIRST_CALLS + seeds + ends
    assert counts[1].get("batch_isend_irecv", 0) == 0  # an empty shard takes part in collectives only
    assert counts[0]["batch_isend_irecv"] > 0


def debugged() -> list[tuple[bool, list[int]]]:
    """Whether a step was over when it had been posted, and what came."""
    found = []
    for debug in (False, True):
        transport = GroupTransport(dist.group.WORLD, torch.device("cpu"), 10.0, debug=debug)
        peer = 1 - transport.rank
        message = torch.full((5,), transport.rank, dtype=torch.uint8)
        pending: Any = transport.post("a step", {peer: message}, {peer: 5})
        found.append((not pending.works, pending.wait()[peer].tolist()))
    return found


def test_debug_waits_in_every_step() -> None:
    for rank, found in enumerate(pool(2).run(debugged)):
        assert found == [(False, [1 - rank] * 5), (True, [1 - rank] * 5)]
