"""Cutting a sequence over ranks, putting it together, and losses over it: all as on one device."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dilated_attention as da
from dilated_attention import gather_sequence, global_mean, local_positions, shard_sequence
from dilated_attention.compat import sequence_mean
from dilated_attention.distributed.sequence import process_group
from dilated_attention.ranks import pool
from tests.over_ranks import raised, world

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8]
DTYPES += [torch.complex64, torch.float8_e4m3fn]
SHAPES: list[tuple[tuple[int, ...], int]] = [  # and the dimension that is cut
    ((2, 0, 3), 1), ((2, 1, 3), -2), ((2, 2, 3), 1), ((2, 8, 3), -2), ((7, 2), 0), ((2, 3, 7), 2), ((2, 3, 7), -1),
    ((5,), 0), ((2, 7, 0), 1),
]  # fmt: skip


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same random bits wherever it is called; any dtype, so NaNs and infinities among the floats."""
    like = torch.empty(shape, dtype=dtype)
    values = torch.randint(0, 256, (like.nbytes,), generator=torch.Generator().manual_seed(0))
    return (values > 127).view(shape) if dtype == torch.bool else values.to(torch.uint8).view(dtype).view(shape)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = [x.contiguous().flatten().view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def cut(x: Tensor, lengths: list[int], dim: int) -> Tensor:
    """A hand-made shard."""
    return x.split(lengths, dim)[dist.get_rank()]


# --- cutting and gathering ---


def round_trips() -> list[str]:
    """Every case on one start of the ranks: what came back wrong."""
    group, P, wrong = world(), dist.get_world_size(), []
    for shape, dim, dtype in [*(((2, 7, 3), 1, dtype) for dtype in DTYPES), *((*x, torch.bfloat16) for x in SHAPES)]:
        whole, n = tokens(*shape, dtype=dtype), shape[dim]
        part = shard_sequence(whole, group, dim)
        if not same_bits(part, torch.tensor_split(whole, P, dim)[dist.get_rank()]) or not part.is_contiguous():
            wrong.append(f"shard {shape} {dim} {dtype}")
        gathered = gather_sequence(part, group, dim)
        if not same_bits(gathered, whole) or not gathered.is_contiguous():
            wrong.append(f"gather {shape} {dim} {dtype}")
        if not torch.equal(local_positions(n, group), shard_sequence(torch.arange(n), group, 0)):
            wrong.append(f"positions {n}")
    return wrong


@pytest.mark.parametrize("P", [1, 3])
def test_round_trip_is_bit_exact(P: int) -> None:
    assert pool(P).run(round_trips) == [[]] * P


def hand_made(lengths: list[int]) -> bool:
    whole = tokens(2, sum(lengths), 3, dtype=torch.bfloat16)
    transposed = whole.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = tokens(1, sum(lengths), 3).expand(4, -1, -1)
    return all(same_bits(gather_sequence(cut(x, lengths, 1), world()), x) for x in (whole, transposed, expanded))


@pytest.mark.parametrize("lengths", [[5], [0, 4], [5, 0, 2], [0, 0, 0, 0]], ids=str)
def test_any_lengths_and_strides(lengths: list[int]) -> None:
    assert pool(len(lengths)).run(hand_made, lengths) == [True] * len(lengths)


def details() -> None:
    group, complex_numbers, whole = world(), normal(2, 6, 4).view(torch.complex128), torch.zeros(4, 2)
    x, grad = torch.zeros(3, 2, requires_grad=True), torch.ones(3 * group.size(), 2)
    torch.autograd.grad(gather_sequence(x, group, 0), x, grad)
    assert (grad == 1).all(), "a gradient that the caller gave is left alone"
    x = normal(3, 2).requires_grad_()
    (once,) = torch.autograd.grad(gather_sequence(x.square(), group, 0).square().sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), x)
    torch.testing.assert_close(twice, 96 * group.size() ** 2 * x**5)
    assert raised(local_positions, -1, group) == "ValueError: n must be the global number of tokens, got -1"
    conjugate = gather_sequence(shard_sequence(complex_numbers, group).conj(), group)
    assert torch.equal(conjugate, complex_numbers.conj()), "a lazy conjugate is sent as it reads"
    shard = shard_sequence(whole, group, 0)
    assert shard.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr(), "the whole is kept alive"


@pytest.mark.parametrize("P", [1, 2])
def test_details(P: int) -> None:
    pool(P).run(details)


# --- gradients ---


def weights(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """By rank, of its loss."""
    return [normal(2, tokens, 3, seed=1 + rank, dtype=dtype) for rank in range(4)]


def gather_gradient(lengths: list[int], dtype: torch.dtype, how: str) -> Tensor:
    x = cut(normal(2, sum(lengths), 3, dtype=dtype), lengths, 1).clone().requires_grad_()

    def gathered(x: Tensor) -> Tensor:
        return gather_sequence(x, world())

    whole = checkpoint(gathered, x, use_reentrant=how == "reentrant") if how.startswith("re") else gathered(x)
    whole.backward(weights(sum(lengths), dtype)[dist.get_rank()])
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("lengths", "how", "dtype"),
    [
        ([5], "", torch.float64), ([0, 3, 0, 9], "", torch.float64), ([3, 1], "recomputed", torch.float64),
        ([5, 0, 2], "reentrant", torch.float64), ([10, 13, 17, 0], "", torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_gather_gradient_is_that_of_the_sum_of_all_losses(lengths: list[int], how: str, dtype: torch.dtype) -> None:
    """To the last bit; a sum of halves is rounded once."""
    some = weights(sum(lengths), dtype)[: len(lengths)]
    total = torch.zeros(2, sum(lengths), 3, dtype=torch.promote_types(dtype, torch.float32))
    for weight in some:  # in rank order
        total += weight
    got = torch.cat(pool(len(lengths)).run(gather_gradient, lengths, dtype, how), 1)
    assert torch.equal(got, total.to(dtype))
    assert dtype.itemsize > 2 or not torch.equal(got, sum(some[1:], some[0])), "a sum in half precision is another"


def shard_gradient() -> Tensor:
    whole = normal(2, 7, 3).requires_grad_()
    (shard_sequence(whole, world()) * (1 + dist.get_rank())).sum().backward()
    assert whole.grad is not None
    return whole.grad


def test_shard_gradient_is_this_ranks_part_and_zero_elsewhere() -> None:
    for rank, grad in enumerate(pool(3).run(shard_gradient)):
        parts = [torch.full((2, n, 3), 1.0 + rank if r == rank else 0.0).double() for r, n in enumerate([3, 2, 2])]
        assert torch.equal(grad, torch.cat(parts, 1))


# --- groups ---


def on_a_mesh() -> list[bool]:
    """Ranks (0, 1) and (2, 3) at the same time: a rank of the group is not that of the world."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    which, group, few = square.get_local_rank("data"), square["sequence"], DeviceMesh("cpu", [0, 1])
    whole = normal(2, 7 + which, 3, seed=which)
    x = shard_sequence(whole, group).requires_grad_()
    gathered = gather_sequence(x, group)
    (gathered * (1 + dist.get_rank())).sum().backward()
    mean = global_mean(x.detach(), group)
    outside, not_a_line = "ValueError: this process is not a member of", "ValueError: the mesh has 2 dimensions"
    return [
        process_group(group).rank() == dist.get_rank() % 2,
        torch.equal(x, torch.tensor_split(whole, 2, 1)[dist.get_rank() % 2]),
        torch.equal(gathered, whole),
        torch.equal(x.grad, torch.full_like(x, [3.0, 7.0][which])),
        torch.allclose(mean, whole.mean(), rtol=1e-14),
        raised(process_group, few).startswith("nothing" if which == 0 else outside),
        raised(process_group, square) == f"{not_a_line} ('data', 'sequence'): slice it: mesh['sequence']",
    ]


def test_two_groups_at_once_on_a_mesh() -> None:
    assert pool(4).run(on_a_mesh) == [[True] * 7] * 4


def in_a_group_of_others() -> str:
    groups = [dist.new_group([rank]) for rank in range(2)]
    return raised(shard_sequence, normal(2, 7), groups[1 - dist.get_rank()])


def test_a_group_of_others() -> None:
    for said in pool(2).run(in_a_group_of_others):
        assert said.startswith("ValueError: this process is not a member of the group")


def test_what_is_not_a_group() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.* or a 1-D DeviceMesh, got .*WORLD"):
        process_group("sequence")  # type: ignore[arg-type]


# --- errors, on every rank ---


X = {"shape": (2, 5, 8), "dtype": torch.float32, "requires_grad": False, "dim": 1}


def refused(options: list[dict[str, Any]]) -> list[Any]:
    kinds = dict(options[dist.get_rank()])
    dim, odd = kinds.pop("dim"), [kinds.pop("x")] if "x" in kinds else []
    usual = torch.zeros(kinds.pop("shape"), **kinds)
    message = raised(gather_sequence, *(odd or [usual]), world(), dim)
    after = gather_sequence(torch.full((1, 1), dist.get_rank()), world())  # the group is still good
    return [message, after.tolist()]


CALL = "ValueError: the ranks do not make the same call to gather_sequence (this is rank {}): "
CALLED_OFF = "ValueError: gather_sequence was called off on all ranks (this is rank {}): rank 1 cannot run it: "
USUAL = "(2, tokens, 8) torch.float32"


@pytest.mark.parametrize(
    ("odd_rank", "odd", "told"),
    [
        (0, {"shape": (3, 5, 8)}, f"x is {USUAL} on ranks 1, 2 and (3, tokens, 8) torch.float32 on rank 0"),
        (1, {"shape": (2, 0, 7)}, f"x is {USUAL} on ranks 0, 2 and (2, tokens, 7) torch.float32 on rank 1"),
        (1, {"dtype": torch.bfloat16}, f"x is {USUAL} on ranks 0, 2 and (2, tokens, 8) torch.bfloat16 on rank 1"),
        (1, {"dim": 0}, "; dim is 1 on ranks 0, 2 and 0 on rank 1"),
        (0, {"requires_grad": True}, "every rank) is False on ranks 1, 2 and True on rank 0"),
        (1, {"dim": -4}, "IndexError: Dimension out of range (expected to be in range of [-3, 2], but got -4)"),
        (1, {"dim": "a"}, "TypeError: size(): argument 'dim' (position 1) must be int, not str"),
        (1, {"x": None}, "TypeError: x must be a tensor, got NoneType"),
        (1, {"x": torch.eye(3).to_sparse()}, "ValueError: x has the layout torch.sparse_coo on cpu"),
        (1, {"x": torch.empty(2, 5, 8, device="meta")}, "ValueError: x has the layout torch.strided on meta"),
        (1, {"dim": -2}, "nothing raised"),
    ],
)
def test_what_is_wrong_on_one_rank_is_told_on_all(odd_rank: int, odd: dict[str, Any], told: str) -> None:
    options = [X | odd if rank == odd_rank else X for rank in range(3)]
    for rank, (got, after) in enumerate(pool(3).run(refused, options)):
        if re.match("[A-Z][A-Za-z]*Error", told):
            assert got.startswith(told if rank == odd_rank else CALLED_OFF.format(rank) + told), got
        else:
            assert told in got
            assert got.startswith("nothing" if told == "nothing raised" else CALL.format(rank))
        assert after == [[0, 1, 2]]


def late_gradient(seconds: float) -> str:
    """Rank 1 runs no backward pass; the others wait as long as their group does."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    whole = gather_sequence(torch.ones(1, 2, requires_grad=True), group)
    if dist.get_rank() == 1:
        time.sleep(seconds)
        return "nothing"
    return raised(whole.sum().backward)


def test_a_rank_that_runs_no_backward_pass_is_named() -> None:
    for rank, told in enumerate(pool(2).run(late_gradient, 1.0)):
        where = r"rank 0 waited \d\.\d s for rank 1 in the gradients of gather_sequence: nothing came within the group"
        assert re.match("nothing" if rank else f"CommunicationError: {where}", told), told


def one_wrong_mean(wrong: dict[str, Any]) -> tuple[str, Tensor]:
    given = {"token_losses": torch.full((2, 3), float(dist.get_rank())), "mask": None}
    said = raised(sequence_mean, **given | (wrong if dist.get_rank() == 1 else {}), group=world())
    return said, global_mean(**given, group=world())


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"token_losses": None}, "TypeError: token_losses must be a tensor, got NoneType"),
        ({"token_losses": torch.zeros(2, 3).long()}, "TypeError: token_losses must be floating point, got torch.int64"),
        ({"mask": torch.ones(2, 2) > 0}, "ValueError: mask is (2, 2) and token_losses (2, 3): they must agree"),
        ({"gradients": "mean"}, "ValueError: gradients must be 'average' or 'sum'"),
    ],
)
def test_a_mean_that_one_rank_refuses_is_called_off_on_all(wrong: dict[str, Any], error: str) -> None:
    for rank, (said, after) in enumerate(pool(3).run(one_wrong_mean, wrong)):
        assert said.startswith(error if rank == 1 else "ValueError: the mean over ranks was called off"), said
        assert after == 1.0  # the group is still good


# --- means ---


def masked(*empty: int) -> Tensor:
    """(2, 9) bool, about half counted, and none at the positions named."""
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(3)) > 0.5
    mask[:, list(empty)] = False
    return mask


MEANS = [
    ([9], masked(), "global_mean"),
    ([4, 5], None, "global_mean_for_ddp"),
    ([2, 0, 7], masked(), "sequence_mean"),  # a rank without tokens
    ([2, 0, 7], None, "global_mean"),
    ([4, 2, 3], masked(4, 5), "global_mean_for_ddp"),  # a rank whose tokens are all masked
    ([1, 3, 5, 0], masked(0), "global_mean"),
    ([3, 3, 3], torch.zeros(2, 9, dtype=torch.bool), "global_mean_for_ddp"),  # nothing counts anywhere
]


def means(
    losses: Tensor, lengths: list[int], mask: Tensor | None = None, name: str = "global_mean"
) -> tuple[Tensor, Tensor]:
    """The loss that a trainer logs, and what three times that sends back."""
    x = cut(losses, lengths, 1).clone().requires_grad_()
    mean = getattr(da, name)(x, world(), None if mask is None else cut(mask, lengths, 1))
    (3 * mean).backward()
    assert x.grad is not None
    return mean.detach(), x.grad


@pytest.mark.parametrize(("lengths", "mask", "name"), MEANS, ids=lambda x: "" if isinstance(x, Tensor) else str(x))
def test_mean_trains_as_on_one_device(lengths: list[int], mask: Tensor | None, name: str) -> None:
    """What is masked out reaches nothing. Gradients that are averaged over the ranks count as many times more."""
    counted = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask
    losses = normal(2, 9).masked_fill(~counted, torch.nan)
    expected = losses[counted].mean() if counted.any() else torch.zeros((), dtype=torch.float64)
    results = pool(len(lengths)).run(means, losses, lengths, mask, name)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0.0)
        assert torch.equal(loss, results[0][0])
    times = 3 * (1 if name == "global_mean" else len(lengths))
    wanted = times * counted.double() / max(1, counted.sum())
    torch.testing.assert_close(torch.cat([grad for _, grad in results], 1), wanted, rtol=1e-14, atol=0.0)


def as_the_first_page_says(whole: list[Tensor], module: nn.Module, uncut: bool) -> Any:
    """Gradients of this rank's q, k and v; those of parameters, summed and averaged by DDP; or the error."""
    group, pattern = world(), da.Pattern([da.Window(5), da.Strided(4)])
    over = da.ContextParallel(group, total_length=whole[0].shape[1])
    shard = [(x if uncut else da.shard_sequence(x, group)).detach().requires_grad_() for x in whole]
    if uncut:
        return raised(da.dilated_attention, *shard, pattern, group=over)
    da.global_mean(da.dilated_attention(*shard, pattern, group=over).square().mean((-1, -2)), group).backward()
    found = [[x.grad for x in shard]]
    for model, mean in ((module, da.global_mean), (DistributedDataParallel(module), da.global_mean_for_ddp)):
        module.zero_grad()
        mean(model(shard[0].detach()).square().mean((-1, -2)), group).backward()
        found.append([x.grad for x in module.parameters()])
    for x in found[1]:
        dist.all_reduce(x)
    return found


def test_the_first_thing_that_a_reader_does() -> None:
    """Two names for two uses; and whoever forgets to cut is told."""
    whole, module = [normal(2, 31, 4, 8, seed=seed).requires_grad_() for seed in range(3)], nn.Linear(8, 8).double()
    da.dilated_attention(*whole, da.Pattern([da.Window(5), da.Strided(4)])).square().mean().backward()
    module(whole[0].detach()).square().mean().backward()
    results = pool(3).run(as_the_first_page_says, whole, module, False)
    for index, x in enumerate(whole):
        torch.testing.assert_close(torch.cat([got[0][index] for got in results], 1), x.grad, rtol=1e-10, atol=1e-14)
    for _, *of_parameters in results:
        for some in of_parameters:
            torch.testing.assert_close(some, [x.grad for x in module.parameters()], rtol=1e-10, atol=1e-14)
    for said in pool(3).run(as_the_first_page_says, whole, module, True):
        assert "every rank seems to have passed the whole sequence" in said


def test_what_is_counted_is_not_hidden() -> None:
    for value in (torch.inf, torch.nan):
        losses = torch.ones(2, 4)
        losses[0, 3] = value
        for mean, grad in pool(2).run(means, losses, [2, 2]):
            torch.testing.assert_close(mean, torch.tensor(value), equal_nan=True)
            assert torch.equal(grad, torch.full((2, 2), 3 / 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_summed_and_returned_in_float32(dtype: torch.dtype) -> None:
    losses = normal(2, 3000, dtype=dtype).abs() + 20  # their sum is beyond float16
    for mean, grad in pool(2).run(means, losses, [1000, 2000]):
        assert mean.dtype == torch.float32
        assert grad.dtype == dtype
        torch.testing.assert_close(mean.double(), losses.double().mean(), rtol=1e-6, atol=0.0)
        assert torch.equal(grad, torch.full_like(grad, 3 / 6000))


# --- on a GPU: all ranks share the first ---


def on_a_gpu(backend: str) -> list[Any]:
    group = world() if backend == "gloo" else dist.new_group(backend=backend)
    whole = normal(2, 7, 3).cuda()
    x = shard_sequence(whole, group).requires_grad_()
    gathered = gather_sequence(x, group)
    ((1 + dist.get_rank()) * gathered).sum().backward()
    losses = shard_sequence(whole, group).requires_grad_()
    mean = global_mean(losses, group, losses > 0)
    mean.backward()
    refused = raised(gather_sequence, x.cpu(), group)
    return [y.detach().cpu() for y in (gathered, x.grad, mean, losses.grad) if y is not None] + [refused]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "P"), [("gloo", 1), ("gloo", 3), ("nccl", 1)])
def test_cuda_tensors(backend: str, P: int) -> None:
    whole = normal(2, 7, 3)
    results = pool(P).run(on_a_gpu, backend)
    for rank, (gathered, grad, mean, mean_grad, refused) in enumerate(results):
        part = torch.tensor_split(whole, P, 1)[rank]
        assert torch.equal(gathered, whole)
        assert torch.equal(grad, torch.full_like(part, P * (P + 1) / 2))
        torch.testing.assert_close(mean, whole[whole > 0].mean(), rtol=1e-14, atol=0.0)
        assert torch.equal(mean_grad, (part > 0) / (whole > 0).sum().double())
        assert refused.startswith("nothing" if backend == "gloo" else "ValueError: the process group carries no cpu")
