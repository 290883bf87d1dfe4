"""The operation over ranks of a real gloo group: bit by bit one device where no segment crosses a border, as exact in
half precision whatever the number of ranks, in all that PyTorch does around a call, and in what is sent.

The table of cases has the numbers themselves. Many cases go to the ranks in one call. Inputs are made from seeds in the
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention import DilatedPattern, explain, functional, testing
from dilated_attention.backends.problem import Inputs
from dilated_attention.ranks import RanksFailed, pool
from dilated_attention.resolve import Options
from dilated_attention.ring import run
from dilated_attention.testing import Results
from tests.cases import EXCHANGES, Case
from tests.over_ranks import noted_calls
from tests.threads import joined

BY_EXCHANGE = pytest.mark.parametrize("exchange", EXCHANGES)


def make(pattern: DilatedPattern, lengths: tuple[int, ...], number: int = 0, **more: Any) -> Case:
    given = {"is_causal": False, "samples": 1, "ranks": len(lengths), "own_heads": (2, 2), **more}
    return Case(
        "ranks", number, pattern.rule, pattern="own", own_pattern=pattern, own_lengths=lengths, tokens=sum(lengths),
        **given,
    )  # fmt: skip


BASE = make(DilatedPattern.longnet([8, 24, 64], [1, 2, 3]), (9, 14, 3, 15), 11, samples=2, own_heads=(4, 2))


def vary(lengths: tuple[int, ...] = (), pattern: DilatedPattern | None = None, **changes: Any) -> Case:
    """The same case with other shards, another pattern, and so on."""
    if lengths:
        changes |= {"own_lengths": lengths, "tokens": sum(lengths), "ranks": len(lengths)}
    if pattern is not None:
        changes |= {"own_pattern": pattern, "rule": pattern.rule}
    return replace(BASE, **changes)


def run_here(cases: Sequence[Case]) -> list[Results]:
    """In a rank: its shard of each case."""
    return [case.on_this_rank() for case in cases]


def solve(cases: Sequence[Case]) -> list[Results]:
    """The joined results of cases for equally many ranks."""
    shards = pool(cases[0].ranks).run(run_here, cases)
    return [joined(parts) for parts in zip(*shards, strict=True)]


class Here(NamedTuple):
    """What a rank has of a case."""

    attention: Callable[..., Any]  # over the ranks
    leaves: list[Tensor]  # q, k, v
    dout: Tensor
    dlse: Tensor


def here(case: Case) -> Here:
    qkv, dout, dlse, padding = case.inputs()
    shard = case.shard(dist.get_rank())
    assert dlse is not None
    attention = case.attention(key_padding_mask=None if padding is None else padding[:, shard], group=case.over())
    return Here(attention, [x[:, shard].detach().requires_grad_() for x in qkv], dout[:, shard], dlse[:, shard])


# --- as on one device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("branches", "lengths", "mask"),
    [(((8, 16), (1, 2)), (64, 32, 0, 64), "right"), (((12, 18), (3, 5)), (36, 0, 72, 41), "none")],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_bit_for_bit_one_device_where_no_segment_crosses_a_border(
    branches: Any, lengths: tuple[int, ...], mask: str, is_causal: bool
) -> None:
    cases = [
        make(
            DilatedPattern(rule, *branches), lengths, 3, is_causal=is_causal, own_heads=heads, dtype=dtype,
            samples=samples, mask=mask, layout="fused", copied=samples > 1, backend=backend,
        )
        for rule, heads in (("longnet", (8, 4)), ("torchscale", (8, 8)), ("head_groups", (6, 3)))
        for dtype, samples, backend in (("f32", 1, "sdpa"), ("f64", 2, "eager"))
    ]  # fmt: skip
    for case, found in zip(cases, solve(cases), strict=True):
        for (name, got), (_, wanted) in zip(found.items(), case.on_one_device().items(), strict=True):
            assert torch.equal(got, wanted), f"{case.id}: {name} differs by {testing.error(got, wanted):.1e}"


@pytest.mark.parametrize("exchange", [*EXCHANGES, "auto"])
def test_nothing_or_next_to_nothing(exchange: str) -> None:
    kinds = [(0, (5, 6, 7)), (2, (0, 0, 0)), (0, (0, 0, 0)), (2, (0, 1, 0))]
    cases = [vary(lengths, DilatedPattern.longnet([4], [1]), exchange=exchange, samples=x) for x, lengths in kinds]
    for case, found in zip(cases, solve(cases), strict=True):
        testing.assert_exact(found, case.on_one_device())


# --- how it is used ---------------------------------------------------------------------------------------------


def different_losses_here(case: Case) -> tuple[Tensor, ...]:
    """Each rank's loss uses out, lse, both or neither."""
    attention, leaves, dout, dlse = here(case)
    out, lse = attention(*leaves)
    dlse = dlse.to(lse.dtype)
    pairs = {0: [(out, dout)], 1: [(lse, dlse)], 2: [(out, dout), (lse, dlse)], 3: [(out, dout * 0)]}
    outputs, grads = zip(*pairs[dist.get_rank()], strict=True)
    return torch.autograd.grad(outputs, leaves, grads)


@BY_EXCHANGE
def test_ranks_whose_losses_use_different_results(exchange: str) -> None:
    case = vary(exchange=exchange)
    qkv, dout, dlse, _ = case.inputs()
    assert dlse is not None
    dout, dlse = dout.clone(), dlse.clone()
    dout[:, case.shard(1)] = dout[:, case.shard(3)] = 0
    dlse[:, case.shard(0)] = dlse[:, case.shard(3)] = 0
    expected = testing.oracle(qkv, case.the_pattern(), dout, dlse)
    got = [torch.cat(parts, 1) for parts in zip(*pool(4).run(different_losses_here, case), strict=True)]
    for x, wanted in zip(got, (expected.dq, expected.dk, expected.dv), strict=True):
        assert testing.error(x, wanted) < 1e-12


def again_here(case: Case) -> None:
    """A call without gradients, and a second backward pass, are the same; there is no second derivative."""
    attention, leaves, dout, _ = here(case)
    torch.manual_seed(case.number)
    with torch.no_grad():
        quiet = attention(*leaves)
    torch.manual_seed(case.number)
    out, lse = attention(*leaves)
    assert all(map(torch.equal, quiet, (out, lse)))
    once, again = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(grad.square().sum(), leaves[2])  # no other leaf is reached


@pytest.mark.parametrize(
    ("exchange", "recompute"), [("ring", False), ("ring", True), ("allgather", False), ("alltoall", True)]
)
def test_no_gradients_two_backward_passes_and_no_second_derivative(exchange: str, recompute: bool) -> None:
    pool(4).run(again_here, vary(exchange=exchange, recompute=recompute, dropout_p=0.2))


def around(attention: Callable[..., Any]) -> Callable[..., Any]:
    def call(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(*(x * 1.5 for x in qkv))
        return out * 2, lse

    return call


def compiled_here(case: Case) -> Results:
    attention, leaves, dout, dlse = here(case)
    return testing.run(torch.compile(around(attention), backend="aot_eager"), tuple(leaves), dout, dlse)


def test_compiled_around_the_call() -> None:
    case = vary(lengths=(17, 24), exchange="ring")
    single = testing.run(around(case.attention()), *case.inputs()[:3])
    testing.assert_exact(joined(pool(2).run(compiled_here, case)), single)


# --- groups among others ----------------------------------------------------------------------------------------


def in_a_subgroup_here(case: Case, ranks: list[int], options: dict[str, Any]) -> tuple[int, Results] | None:
    group = dist.new_group(ranks, **options)
    if dist.get_rank() not in ranks:
        return None
    return dist.get_group_rank(group, dist.get_rank()), case.on_this_rank(group)


UNSORTED = {"sort_ranks": False}


@pytest.mark.parametrize(
    ("ranks", "options", "exchange"),
    [([2, 0, 3], UNSORTED, "ring"), ([3, 1], UNSORTED, "allgather"), ([2, 0, 3], {}, "alltoall")],
    ids=str,
)
def test_ranks_of_a_group_are_not_those_of_the_world(ranks: list[int], options: dict[str, Any], exchange: str) -> None:
    case = vary(lengths=(17, 24, 5)[: len(ranks)], exchange=exchange, mask="right", dropout_p=0.2)
    found = pool(4).run(in_a_subgroup_here, case, ranks, options)
    assert [rank for rank, one in enumerate(found) if one is not None] == sorted(ranks)
    in_order = sorted((one for one in found if one is not None), key=lambda one: one[0])
    testing.assert_exact(joined([one for _, one in in_order]), case.expected())


# --- what is sent -----------------------------------------------------------------------------------------------

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "gather",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
)  # fmt: skip


def calls_here(case: Case) -> tuple[set[str], set[int]]:
    """What one forward and backward call of torch.distributed in this rank, and to whom more than 100 bytes go."""
    with noted_calls([*COLLECTIVES, "batch_isend_irecv"]) as calls:
        case.on_this_rank()
    messages = [x for name, args in calls if name == "batch_isend_irecv" for x in args[0]]
    peers = {x.peer for x in messages if x.op is dist.isend and x.tensor.numel() > 100}
    return {name for name, _ in calls}, peers


@BY_EXCHANGE
def test_messages_go_from_rank_to_rank(exchange: str) -> None:
    """A collective could not tell whose message is missing."""
    case = vary(pattern=DilatedPattern.torchscale([64], [1]), exchange=exchange, mask="right", own_heads=(8, 4))
    for rank, (calls, peers) in enumerate(pool(4).run(calls_here, case)):
        assert calls == {"batch_isend_irecv"}
        assert peers == {0, 1, 2, 3} - {rank}


def stats_here(case: Case) -> list[tuple[int, ...]]:
    """Hops, bytes sent, received, still held and held at most, after the forward and after the backward pass."""
    ranks, shard = run.Ranks(case.over()), case.shard(dist.get_rank())
    _, leaves, dout, _ = here(case)
    padding = case.padding()
    padding = None if padding is None else padding[:, shard]
    out, _ = functional.attend(
        Inputs(*leaves, padding), Options(case.the_pattern(), case.is_causal, enable_gqa=True), ranks
    )
    forward = replace(ranks.stats)
    out.backward(dout)
    return [
        (x.hops, x.bytes_sent, x.bytes_received, x.buffer_bytes, x.peak_buffer_bytes) for x in (forward, ranks.stats)
    ]


@BY_EXCHANGE
@pytest.mark.parametrize(("is_causal", "mask"), [(False, "none"), (True, "none"), (False, "random")])
def test_bytes_and_hops_are_those_of_plan_cost(exchange: str, is_causal: bool, mask: str) -> None:
    case = vary(exchange=exchange, is_causal=is_causal, mask=mask, dtype="f32", head_dim=8)
    cost = case.cost()
    for rank, ((*forward, _), (*both, peak)) in enumerate(pool(case.ranks).run(stats_here, case)):
        there, back = ((x.hops, x.bytes_sent, x.bytes_received, 0) for x in cost.of_rank(rank, exchange))
        assert tuple(forward) == there
        assert tuple(both) == tuple(a + b for a, b in zip(there, back, strict=True))
        assert 0 < peak <= cost.exchanges[exchange].held


# --- what is told -----------------------------------------------------------------------------------------------


def explained(options: dict[str, Any]) -> list[Any]:
    x = testing.make_qkv(1, 32, 4, 8)[0]
    told = explain(x, x, x, DilatedPattern.longnet([8, 64], [1, 2]), group=dist.group.WORLD, **options)
    return [told.backend, told.kernel, told.backward, told.why_not["triton"]]


@pytest.mark.parametrize("P", [1, 2])
def test_explain_over_ranks(P: int) -> None:
    for backend, kernel, backward, why in pool(P).run(explained, {}):
        assert (backend, kernel, backward) == ("sdpa", "flash on CPU", "sdpa, kernel: flash on CPU")
        assert ("it takes whole calls on one device" in "; ".join(why)) == (P > 1)
    with pytest.raises(RanksFailed, match="query_offset is for one device"):
        pool(P).run(explained, {"query_offset": 0})
