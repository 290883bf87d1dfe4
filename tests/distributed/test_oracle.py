"""The operation over ranks of a real gloo group: bit by bit one device where no segment crosses a border, as exact in
half precision whatever the number of ranks, in all that PyTorch does around a call, and in what is sent.

The table of cases has the numbers themselves. Many cases go to the ranks in one call. Inputs are made from seeds in the
ranks.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from dilated_attention import DilatedPattern, explain, functional, testing
from dilated_attention.distributed.group import GroupTransport
from dilated_attention.pattern import RULES
from dilated_attention.ranks import RanksFailed, pool
from dilated_attention.ring import run
from dilated_attention.testing import Results
from tests.cases import Case
from tests.table import cover

EXCHANGES = ("ring", "allgather", "alltoall", "auto")


def make(pattern: DilatedPattern, lengths: tuple[int, ...], number: int = 0, **more: Any) -> Case:
    given = {"is_causal": False, "samples": 1, "ranks": len(lengths), "own_heads": (2, 2), **more}
    return Case(
        "ranks", number, pattern.rule, pattern="own", own_pattern=pattern, own_lengths=lengths, tokens=sum(lengths),
        **given,
    )  # fmt: skip


def run_here(cases: Sequence[Case]) -> list[Results]:
    """In a rank: its shard of each case."""
    return [case.on_this_rank() for case in cases]


def solve(cases: Sequence[Case]) -> list[Results]:
    """The joined results of cases for equally many ranks."""
    shards = pool(cases[0].ranks).run(run_here, cases)
    return [testing.joined(parts) for parts in zip(*shards, strict=True)]


# --- long segments: the oracle is quadratic, so one device is what they are checked against ----------------------


@pytest.mark.parametrize("lengths", [(1000,) * 3, (900, 2000, 1), (5792, 1, 0, 300)], ids=str)
def test_long_segments_are_as_on_one_device(lengths: tuple[int, ...]) -> None:
    """No border of a shard is one of a segment."""
    cases = [
        make(
            DilatedPattern(rule, (1024, 5792), (4, 16)), lengths, 7, exchange=exchange, is_causal=(i + j) % 2 == 0,
            mask=("none", "right")[i % 2], dropout_p=(0.0, 0.3)[j % 2],
        )
        for (i, exchange), (j, rule) in itertools.product(enumerate(EXCHANGES[:3]), enumerate(RULES))
    ]  # fmt: skip
    for case, found in zip(cases, solve(cases), strict=True):
        testing.assert_exact(found, case.on_one_device())


# --- bit for bit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("branches", "lengths", "mask"),
    [
        (((8, 16), (1, 2)), (64, 128), "none"),
        (((8, 16), (1, 2)), (64, 32, 0, 64), "right"),
        (((12, 18), (3, 5)), (36, 72), "none"),
        (((12, 18), (3, 5)), (36, 0, 72, 41), "right"),
    ],
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
        for dtype, samples, backend in (("f32", 1, "sdpa"), ("f64", 1, "eager"), ("f64", 2, "sdpa"))
    ]  # fmt: skip
    for case, found in zip(cases, solve(cases), strict=True):
        for (name, got), (_, wanted) in zip(found.items(), case.on_one_device().items(), strict=True):
            assert torch.equal(got, wanted), f"{case.id}: {name} differs by {testing.error(got, wanted):.1e}"


def size_one_here(cases: Sequence[Case]) -> list[bool]:
    """In a rank: a group of this rank alone gives what no group gives."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = []
    for case in cases:
        results = [case.on_this_rank(alone), case.on_one_device()]
        found.append(all(torch.equal(a, b) for (_, a), (_, b) in zip(*(x.items() for x in results), strict=True)))
    return found


def test_a_group_of_one_is_the_plain_function() -> None:
    cases = [replace(case, copied=False) for case in cover("ranks") if case.ranks == 1]
    assert len(cases) > 8
    assert pool(2).run(size_one_here, cases) == [[True] * len(cases)] * 2


# --- half precision ---------------------------------------------------------------------------------------------


@functools.cache
def expected_of_half(dtype: str, is_causal: bool) -> tuple[Results, Results]:
    """In float64, and by plain PyTorch in the dtype itself."""
    case = half((160,), dtype, is_causal)
    return case.expected(), case.expected(dtype=None)


def half(lengths: tuple[int, ...], dtype: str, is_causal: bool, exchange: str = "ring") -> Case:
    pattern, given = DilatedPattern.longnet([32, 100, 200], [1, 2, 3]), {"own_heads": (4, 2), "head_dim": 16}
    return make(pattern, lengths, 1, dtype=dtype, is_causal=is_causal, exchange=exchange, **given)


@pytest.mark.parametrize("exchange", EXCHANGES[:3])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_error_of_half_precision_does_not_grow_with_ranks(ranks: int, exchange: str) -> None:
    """One limit for any number of ranks: twice plain PyTorch's own error, three times for gradients."""
    kinds = [("bf16", ranks > 2), ("f16", ranks <= 2)]
    cases = [half((160 // ranks,) * ranks, *kind, exchange) for kind in kinds]
    for kind, found in zip(kinds, solve(cases), strict=True):
        testing.assert_exact(found, *expected_of_half(*kind))


# --- how it is used ---------------------------------------------------------------------------------------------

BASE = make(DilatedPattern.longnet([8, 24, 64], [1, 2, 3]), (9, 14, 3, 15), 11, samples=2, own_heads=(4, 2))
BY_EXCHANGE = pytest.mark.parametrize("exchange", EXCHANGES[:3])


def vary(lengths: tuple[int, ...] = (), pattern: DilatedPattern | None = None, **changes: Any) -> Case:
    """The same case with other shards, another pattern, and so on."""
    if lengths:
        changes |= {"own_lengths": lengths, "tokens": sum(lengths), "ranks": len(lengths)}
    if pattern is not None:
        changes |= {"own_pattern": pattern, "rule": pattern.rule}
    return replace(BASE, **changes)


def layers(case: Case, attention: Callable[..., Any], x: Tensor) -> Tensor:
    """Four layers, each with q, k and v from the one before."""
    for scale in (1.0, 0.5, 2.0, 0.7):
        group = case.head_counts()[0] // case.head_counts()[1]
        out, lse = attention(x * scale, x[:, :, ::group].tanh(), x[:, :, group - 1 :: group])
        x = x + out * lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1).tanh()
    return x


def layers_here(case: Case) -> tuple[Tensor, Tensor]:
    (q, _, _), dout, _, _ = case.inputs()
    shard = case.shard(dist.get_rank())
    x = q[:, shard].detach().requires_grad_()
    options = {"group": case.over()}
    torch.manual_seed(case.number)
    y = layers(case, case.attention(**options), x)
    return y.detach(), torch.autograd.grad(y, x, dout[:, shard])[0]


BY_BOTH = pytest.mark.parametrize(
    ("exchange", "use_checkpointing"), [("ring", False), ("ring", True), ("allgather", False), ("alltoall", True)]
)


@BY_BOTH
def test_several_layers(exchange: str, use_checkpointing: bool) -> None:
    case = vary(exchange=exchange, recompute=use_checkpointing, dropout_p=0.2)
    (q, _, _), dout, _, _ = case.inputs()
    x = q.detach().requires_grad_()
    torch.manual_seed(case.number)
    y = layers(case, case.attention(), x)
    dx = torch.autograd.grad(y, x, dout)[0]
    got = [torch.cat(parts, 1) for parts in zip(*pool(4).run(layers_here, case), strict=True)]
    assert testing.error(got[0], y.detach()) < 1e-12
    assert testing.error(got[1], dx) < 1e-12


def recomputed_here(case: Case, reentrant: bool) -> Results:
    """The call under torch's activation checkpointing, which makes it again in the backward pass."""
    qkv, dout, dlse, padding = case.inputs()
    rank = dist.get_rank()
    shard = case.shard(rank)
    padding = None if padding is None else padding[:, shard]
    attention = case.attention(key_padding_mask=padding, group=case.over())
    leaves = [x[:, shard].detach().requires_grad_() for x in qkv]
    torch.manual_seed(case.number + rank)
    out, lse = checkpoint(attention, *leaves, use_reentrant=reentrant)
    torch.rand(rank)  # the generator moves on: what is made again must be the same nevertheless
    assert dlse is not None
    dlse = dlse[:, shard].to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)
    torch.autograd.backward([out, lse], [dout[:, shard], dlse])  # reentrant checkpoints refuse autograd.grad
    grads = [x.grad for x in leaves if x.grad is not None]
    return Results(out.detach(), lse.detach(), *grads)


@pytest.mark.parametrize(("exchange", "reentrant"), [("ring", True), ("allgather", False), ("alltoall", True)])
def test_activation_checkpointing(exchange: str, reentrant: bool) -> None:
    case = vary(exchange=exchange, mask="random", dropout_p=0.3)
    testing.assert_exact(testing.joined(pool(4).run(recomputed_here, case, reentrant)), case.expected())


def without_gradients_here(case: Case) -> tuple[Tensor, Tensor, bool]:
    qkv, _, _, _ = case.inputs()
    parts = [x[:, case.shard(dist.get_rank())].requires_grad_() for x in qkv]
    with torch.no_grad():
        out, lse = case.attention(group=case.over())(*parts)
    return out, lse, out.requires_grad or lse.requires_grad


@BY_EXCHANGE
def test_no_grad(exchange: str) -> None:
    case = vary(exchange=exchange, recompute=False)
    outs, lses, graded = zip(*pool(4).run(without_gradients_here, case), strict=True)
    expected = case.expected()
    assert expected.lse is not None
    assert testing.error(torch.cat(outs, 1), expected.out) < 1e-12
    assert testing.error(torch.cat(lses, 1), expected.lse) < 1e-12
    assert not any(graded)


def different_losses_here(case: Case) -> tuple[Tensor, ...]:
    """Each rank's loss uses out, lse, both or neither."""
    qkv, dout, dlse, _ = case.inputs()
    rank = dist.get_rank()
    shard = case.shard(rank)
    leaves = [x[:, shard].detach().requires_grad_() for x in qkv]
    out, lse = case.attention(group=case.over())(*leaves)
    assert dlse is not None
    outputs = {0: [out], 1: [lse], 2: [out, lse], 3: [out]}[rank]
    grads = {0: [dout], 1: [dlse.to(lse.dtype)], 2: [dout, dlse.to(lse.dtype)], 3: [dout * 0]}[rank]
    return torch.autograd.grad(outputs, leaves, [x[:, shard] for x in grads])


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


def backward_twice_here(case: Case) -> list[tuple[Tensor, ...]]:
    qkv, dout, _, _ = case.inputs()
    shard = case.shard(dist.get_rank())
    leaves = [x[:, shard].detach().requires_grad_() for x in qkv]
    options = {"group": case.over()}
    torch.manual_seed(case.number)
    out, _ = case.attention(**options)(*leaves)
    return [torch.autograd.grad(out, leaves, dout[:, shard], retain_graph=first) for first in (True, False)]


@BY_BOTH
def test_a_graph_can_be_gone_through_twice(exchange: str, use_checkpointing: bool) -> None:
    case = vary(exchange=exchange, recompute=use_checkpointing, dropout_p=0.2)
    for once, again in pool(4).run(backward_twice_here, case):
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def differentiated_twice_here(case: Case) -> str:
    qkv, _, _, _ = case.inputs()
    leaves = [x[:, case.shard(dist.get_rank())].detach().requires_grad_() for x in qkv]
    loss = case.attention(group=case.over())(*leaves)[0].sum()
    (grad,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
    with pytest.raises(RuntimeError) as raised:
        (loss + grad.square().sum()).backward()
    return str(raised.value)


@BY_EXCHANGE
def test_there_is_no_second_derivative(exchange: str) -> None:
    for error in pool(4).run(differentiated_twice_here, vary(exchange=exchange)):
        assert "cannot be differentiated twice" in error


def compiled_here(case: Case) -> Results:
    def twice(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = case.attention(group=case.over())(*(x * 1.5 for x in qkv))
        return out * 2, lse

    qkv, dout, dlse, _ = case.inputs()
    shard = case.shard(dist.get_rank())
    assert dlse is not None
    return testing.run(
        torch.compile(twice, backend="aot_eager"), tuple(x[:, shard] for x in qkv), dout[:, shard], dlse[:, shard]
    )


def test_compiled_around_the_call() -> None:
    case = vary(lengths=(17, 24), exchange="ring")
    qkv, dout, dlse, _ = case.inputs()
    single = testing.run(
        lambda *x: (lambda out, lse: (out * 2, lse))(*case.attention()(*(y * 1.5 for y in x))), qkv, dout, dlse
    )
    testing.assert_exact(testing.joined(pool(2).run(compiled_here, case)), single)


@BY_EXCHANGE
def test_nothing_or_next_to_nothing(exchange: str) -> None:
    kinds = [(0, (5, 6, 7)), (2, (0, 0, 0)), (0, (0, 0, 0)), (2, (0, 1, 0))]
    cases = [vary(lengths, DilatedPattern.longnet([4], [1]), exchange=exchange, samples=x) for x, lengths in kinds]
    for case, found in zip(cases, solve(cases), strict=True):
        testing.assert_exact(found, case.on_one_device())


# --- groups among others ----------------------------------------------------------------------------------------


def on_a_mesh_here(case: Case) -> Results:
    """Two groups at once, each with another sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    case = replace(case, number=case.number + mesh.get_local_rank("data"))
    group = mesh["sequence"]
    assert group.get_group().rank() == mesh.get_local_rank("sequence")
    shard = case.shard(mesh.get_local_rank("sequence"))
    qkv, dout, dlse, _ = case.inputs()
    assert dlse is not None
    attention = case.attention(group=case.over(group))
    return testing.run(attention, tuple(x[:, shard] for x in qkv), dout[:, shard], dlse[:, shard])


@BY_EXCHANGE
def test_two_groups_at_once_on_a_mesh(exchange: str) -> None:
    case = vary(lengths=(17, 24), exchange=exchange)
    results = pool(4).run(on_a_mesh_here, case)
    for data in range(2):
        expected = replace(case, number=case.number + data).expected()
        testing.assert_exact(testing.joined(results[2 * data : 2 * data + 2]), expected)


def in_a_subgroup_here(case: Case, ranks: list[int], options: dict[str, Any]) -> tuple[int, Results] | None:
    group = dist.new_group(ranks, **options)
    if dist.get_rank() not in ranks:
        return None
    return dist.get_group_rank(group, dist.get_rank()), case.on_this_rank(group)


UNSORTED = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


@pytest.mark.parametrize(
    ("ranks", "options", "exchange"),
    [([3, 1], {}, "ring"), ([2, 0, 3], UNSORTED, "ring"), ([3, 1], UNSORTED, "allgather"), ([2, 0, 3], {}, "alltoall")],
    ids=str,
)
def test_ranks_of_a_group_are_not_those_of_the_world(ranks: list[int], options: dict[str, Any], exchange: str) -> None:
    case = vary(lengths=(17, 24, 5)[: len(ranks)], exchange=exchange, mask="right", dropout_p=0.2)
    found = pool(4).run(in_a_subgroup_here, case, ranks, options)
    assert [rank for rank, one in enumerate(found) if one is not None] == sorted(ranks)
    in_order = sorted((one for one in found if one is not None), key=lambda one: one[0])
    testing.assert_exact(testing.joined([one for _, one in in_order]), case.expected())


def split_heads_here(case: Case) -> Results:
    """Heads over one dimension of a mesh, tokens over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
    mine, shard = mesh.get_local_rank("heads"), case.shard(mesh.get_local_rank("sequence"))
    qkv, dout, dlse, _ = case.inputs()
    assert dlse is not None

    def part(x: Tensor) -> Tensor:
        return x[:, shard].chunk(2, 2)[mine]

    torch.manual_seed(case.number)
    total = case.head_counts()[1]
    options = {"group": case.over(mesh["sequence"]), "heads": (mine * total // 2, total)}
    return testing.run(case.attention(**options), tuple(part(x) for x in qkv), part(dout), part(dlse))


@pytest.mark.parametrize(("rule", "exchange"), list(zip(RULES, EXCHANGES[:3], strict=True)))
def test_heads_split_too(rule: str, exchange: str) -> None:
    pattern = DilatedPattern(rule, (6, 24, 64), (1, 2, 3))
    case = vary(pattern=pattern, lengths=(17, 24), exchange=exchange, own_heads=(8, 4), dropout_p=0.3)
    results = pool(4).run(split_heads_here, case)
    halves = [testing.joined(results[:2]), testing.joined(results[2:])]
    whole = [torch.cat(pair, 2) for pair in zip(*([x for _, x in half.items()] for half in halves), strict=True)]
    testing.assert_exact(Results(*whole), case.expected())


# --- what is sent -----------------------------------------------------------------------------------------------

COLLECTIVES = [
    name
    for name, function in vars(dist).items()
    if type(function) is FunctionType and "async_op" in inspect.signature(function).parameters
]


def calls_here(case: Case) -> tuple[Counter[str], set[int]]:
    """What one forward and backward call of torch.distributed in this rank, and to whom more than 100 bytes go."""
    calls: Counter[str] = Counter()
    peers: set[int] = set()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            if name == "batch_isend_irecv":
                peers.update(x.peer for x in args[0] if x.op is dist.isend and x.tensor.numel() > 100)
            return function(*args, **options)

        return wrapped

    with ExitStack() as stack:
        for name in [*COLLECTIVES, "batch_isend_irecv"]:
            stack.enter_context(mock.patch.object(dist, name, counted(name)))
        case.on_this_rank()
    return calls, peers


@pytest.mark.parametrize("use_checkpointing", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES[:3])
def test_a_ring_is_point_to_point_between_neighbours(exchange: str, use_checkpointing: bool) -> None:
    """On gloo the others are so too, between any two ranks: a collective could not tell whose message is missing."""
    assert {"all_reduce", "all_gather", "all_to_all_single", "broadcast"} <= set(COLLECTIVES)
    case = vary(pattern=DilatedPattern.torchscale([64], [1]), exchange=exchange, mask="right", own_heads=(8, 4))
    for rank, (calls, peers) in enumerate(pool(4).run(calls_here, replace(case, recompute=use_checkpointing))):
        assert set(calls) == {"batch_isend_irecv"}
        assert peers == ({(rank + 1) % 4} if exchange == "ring" else {0, 1, 2, 3} - {rank})


def stats_here(case: Case) -> list[tuple[int, int, int, int]]:
    """Hops, bytes received, bytes sent and bytes still held, after the forward and after the backward pass."""
    link = run.Link(dist.group.WORLD, case.exchange, case.recompute)
    qkv, dout, _, padding = case.inputs()
    shard = case.shard(dist.get_rank())
    leaves = [x[:, shard].detach().requires_grad_() for x in qkv]
    found = []

    def note() -> None:
        stats = link.stats
        found.append((stats.hops, stats.bytes_received, stats.bytes_sent, stats.buffer_bytes))

    out, _ = functional.attend(
        *leaves, case.the_pattern(), case.is_causal, None, 0.0, padding, True, case.backend, None, link
    )
    note()
    out.backward(dout[:, shard])
    note()
    return found


@pytest.mark.parametrize("rate", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("use_checkpointing", [False, True])
@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_bytes_and_hops_of_keys_and_values(exchange: str, use_checkpointing: bool, is_causal: bool, rate: int) -> None:
    P, c, (H, Hk), D, e = 4, 16, (4, 2), 8, 4
    case = vary(
        lengths=(c,) * P, pattern=DilatedPattern.longnet([P * c], [rate]), exchange=exchange, dtype="f32",
        samples=1, is_causal=is_causal, recompute=use_checkpointing, head_dim=D, own_heads=(H, Hk),
    )  # fmt: skip
    block = 2 * Hk * D * e * c // rate  # a shard's rows in float32, and as large the sums of their gradients
    for rank, (forward, both) in enumerate(pool(P).run(stats_here, case)):
        arriving = rank if is_causal else P - 1  # blocks that this rank uses
        wanted = P - 1 - rank if is_causal else P - 1  # ranks that use its block
        steps = arriving if exchange == "ring" else min(1, arriving)
        # on a line a rank takes part as long as it gets something or has something to pass on
        if exchange == "ring":
            passing = min(1, wanted) * (rank + 1) if is_causal else P - 1
            steps = max(steps, passing)
        elif is_causal:
            steps = 1
        sent = wanted if exchange == "allgather" else (arriving + 1) * min(1, wanted) if is_causal else P - 1
        assert forward[:3] == (steps, arriving * block, sent * block)
        again = 1 if use_checkpointing else 0
        if exchange == "allgather":
            assert both[1:3] == ((arriving * (1 + again) + wanted) * block, (wanted * (1 + again) + arriving) * block)
        elif not is_causal:
            assert both[:3] == ((2 + again) * (P - 1), (2 + again) * (P - 1) * block, (2 + again) * (P - 1) * block)
        assert not use_checkpointing or (forward[3], both[3]) == (0, 0)


def test_bytes_and_hops_of_whole_segments() -> None:
    P, c, H, Hk, D, e, rate = 4, 16, 8, 4, 8, 4, 2
    case = vary(
        lengths=(c,) * P, pattern=DilatedPattern.longnet([P * c], [rate]), exchange="alltoall", dtype="f32",
        samples=1, own_heads=(H, Hk), head_dim=D,
    )  # fmt: skip
    rows = c // rate * (P - 1) // P  # of one shard's rows of a head, the share computed elsewhere
    forward_bytes = rows * ((2 * H + 2 * Hk) * D + H) * e  # there and back, and lse
    inputs, results = (H + 2 * Hk) * D * e, (H + 2 * Hk) * D * e
    backward_bytes = rows * (H * (2 * D + 1) * e + inputs + results)  # lse, dout, out; q, k, v again; gradients back
    for forward, both in pool(P).run(stats_here, case):
        assert forward == (2, forward_bytes, forward_bytes, 0)
        assert both == (4, forward_bytes + backward_bytes, forward_bytes + backward_bytes, 0)


def test_nothing_is_sent_where_no_segment_crosses_a_border() -> None:
    case = vary(lengths=(24, 48, 0, 24), pattern=DilatedPattern.longnet([8, 24], [1, 2]))
    for exchange in EXCHANGES[:3]:
        for found in pool(4).run(stats_here, replace(case, exchange=exchange)):
            assert found == [(0, 0, 0, 0)] * 2


# --- verify="first" ---------------------------------------------------------------------------------------------


def unverified_here(case: Case, calls: int) -> tuple[list[list[str]], list[Results], str]:
    """What each call says to all ranks, its results, and the error of a call with another length."""
    group = dist.new_group()
    said: list[str] = []
    post_all = GroupTransport.post_all

    def noted(self: GroupTransport, name: str, message: Tensor) -> Any:
        said.append(name)
        return post_all(self, name, message)

    words, results = [], []
    with mock.patch.object(GroupTransport, "post_all", noted), mock.patch.object(run, "FIRST_CALLS", 8):
        for _ in range(calls):
            results.append(case.on_this_rank(group, verify="first"))
            words.append(said.copy())
            said.clear()
        more = tuple(length + 1 for length in case.lengths())
        longer = replace(case, own_lengths=more, tokens=sum(more))
        try:
            longer.on_this_rank(group, verify="first")
        except ValueError as error:
            return words, results, str(error)
    return words, results, "nothing raised"


@pytest.mark.parametrize(
    ("exchange", "dropout_p"), [("ring", 0.0), ("ring", 0.3), ("allgather", 0.3), ("alltoall", 0.0)]
)
def test_after_the_first_calls_nothing_is_agreed_on(exchange: str, dropout_p: float) -> None:
    case = vary(exchange=exchange, dropout_p=dropout_p)
    found = pool(4).run(unverified_here, case, 6)
    agreements = ["the agreement on dilated_attention", "the agreement on the backward of dilated_attention"]
    for rank, (words, _, error) in enumerate(found):
        assert words == [agreements] * 4 + [["the seed"] if dropout_p else []] * 2
        assert f"rank {rank} has {case.lengths()[rank] + 1} tokens" in error
        assert "verify='always'" in error
    for call in range(6):
        testing.assert_exact(testing.joined([results[call] for _, results, _ in found]), case.expected())


def explained(options: dict[str, Any]) -> list[Any]:
    group = dist.group.WORLD
    x = testing.make_qkv(1, 32, 4, 8)[0]
    told = explain(x, x, x, DilatedPattern.longnet([8, 64], [1, 2]), group=group, **options)
    return [told.backend, told.kernel, told.backward, told.why_not["triton"]]


@pytest.mark.parametrize("P", [1, 2])
def test_explain_over_ranks(P: int) -> None:
    for backend, kernel, backward, why in pool(P).run(explained, {}):
        assert (backend, kernel, backward) == ("sdpa", "flash on CPU", "sdpa, kernel: flash on CPU")
        assert ("it takes whole calls on one device, not the blocks that ranks exchange" in why) == (P > 1)
    with pytest.raises(RanksFailed, match="query_offset is for one device"):
        pool(P).run(explained, {"query_offset": 0})
