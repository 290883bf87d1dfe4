"""A sequence cut over the ranks of a group in contiguous shards, and losses averaged over it.

Every rank of the group makes the same calls in the same order, also with an empty shard. Ranks are those of the group.
Legend: N tokens on P ranks; x (..., n, ...) with n of the N tokens along ``dim``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention.distributed.agreement import ask, errors_reach_all
from dilated_attention.distributed.group import CommunicationError, GroupTransport, reachable_device, wire_device

Group = ProcessGroup | DeviceMesh


def process_group(group: Group) -> ProcessGroup:
    """The process group behind ``group``, of which this process is a member."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ("sequence",)
            raise ValueError(f"the mesh has {group.ndim} dimensions {names}: slice it: mesh[{names[-1]!r}]")
        if group.get_coordinate() is None:
            raise ValueError(f"this process is not a member of {group}: call only on the ranks in it")
        return group.get_group()
    if isinstance(group, ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() gives to those outside
        raise ValueError("this process is not a member of the group: call only on the ranks given to new_group()")
    raise TypeError(
        f"group must be a torch.distributed.ProcessGroup or a 1-D DeviceMesh, got {group!r}: "
        "for all ranks give torch.distributed.group.WORLD, which is None before init_process_group()"
    )


def shard_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Cuts this rank's part out of a tensor that every rank holds whole.

    With P ranks in the group it cuts like ``torch.tensor_split(x, P, dim)``, and communicates nothing. On each rank the
    gradient of ``x`` is zero outside its own part. If ``x`` comes from parameters, sum their gradients over the ranks.
    The shard is a copy, so the memory of ``x`` can be freed.

    Examples:
        >>> tokens = torch.randn(2, 64, 32)  # the same on every rank
        >>> shard = da.shard_sequence(tokens, group)
        >>> shard.shape[1] == 64 // group.size()
        True
    """
    pg = process_group(group)
    return x.tensor_split(pg.size(), dim)[pg.rank()].clone(memory_format=torch.contiguous_format)


def local_positions(n: int, group: Group, *, device: torch.device | str | None = None) -> Tensor:
    """Gives the positions of this rank's tokens in a sequence of ``n`` that `shard_sequence` cuts: (n_local,) int64.

    Examples:
        >>> da.local_positions(5, group)  # here on a single rank
        tensor([0, 1, 2, 3, 4])
    """
    if n < 0:
        raise ValueError(f"n must be the global number of tokens, got {n}")
    return shard_sequence(torch.arange(n, device=device), group, 0)


def gather_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Gives every rank the whole sequence: the shards in rank order, unchanged.

    Shards may differ in length along ``dim``, and may be empty. The gradient of ``x`` is that of the sum of all ranks'
    losses. So if every rank computes the same loss from the whole sequence, average the parameter gradients over the
    ranks, as DDP does; or divide the loss by the number of ranks and sum them. The backward pass communicates, too:
    every rank must run it, also one whose shard is empty. A rank that has no loss of its own adds ``0 * whole.sum()``.

    Examples:
        >>> tokens = torch.arange(6.0).view(1, 6)
        >>> da.gather_sequence(da.shard_sequence(tokens, group), group)
        tensor([[0., 1., 2., 3., 4., 5.]])
    """
    pg = process_group(group)
    transport = GroupTransport(pg, reachable_device(pg, x), timeout=None)
    say = functools.partial(ask, transport, "gather_sequence")
    with errors_reach_all(say):
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        if x.layout is not torch.strided or x.is_meta:
            raise ValueError(f"x has the layout {x.layout} on {x.device}: only plain tensors can be gathered")
        length, dim = x.size(dim), dim % x.ndim
        wire_device(pg, x.device)
    # backends check neither shape nor dtype: without this a mismatch is garbage, or the end of the process
    fields = {
        "x": f"({', '.join('tokens' if i == dim else str(size) for i, size in enumerate(x.shape))}) {x.dtype}",
        "dim": dim,
        "requires_grad (the backward pass needs every rank)": x.requires_grad and torch.is_grad_enabled(),
    }
    lengths = say(fields, length).lengths
    transport.warm_up()
    return _Gather.apply(x, False, dim, lengths, transport)  # type: ignore[no-any-return, no-untyped-call]


@contextlib.contextmanager
def naming_lost_ranks(group: Group) -> Iterator[None]:
    """Makes an error of any collective say which ranks are gone, also one of FSDP or DDP. Over gloo.

    Put it around the steps of a training. Calls of this library name the rank by themselves.

    Examples:
        >>> with da.naming_lost_ranks(group):
        ...     torch.distributed.all_reduce(torch.ones(1), group=group)  # and so on
    """
    pg = process_group(group)
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, CommunicationError):
            GroupTransport(pg, reachable_device(pg, None), None).name_lost(error)
        raise


def global_mean(token_losses: Tensor, group: Group, mask: Tensor | None = None) -> Tensor:
    """Averages over all tokens of all ranks. The gradients are those of this mean.

    Those of this rank's tokens, as of its q, k and v, are the ones of one device. Those of parameters are this rank's
    part: **sum them over the ranks**. If DDP or FSDP averages them instead, use :func:`global_mean_for_ddp`.

    Args:
        token_losses: losses of this rank's tokens, any shape.
        group: the ranks that share the sequence.
        mask: bool, shaped as the losses, **True = counted** (the opposite of a padding mask). Tokens that are not
            counted change neither the value nor the gradients, even if their loss is NaN.

    Returns:
        The same 0-dim value on every rank, float64 for float64 losses and float32 for all others; 0 if no token counts.
        If the arguments of one rank are refused, all ranks raise. Over NCCL the others get NaN instead, as their hosts
        do not wait.

    Examples:
        >>> losses = torch.tensor([[1.0, 2.0, 6.0]])  # of this rank's tokens
        >>> da.global_mean(losses, group, mask=torch.tensor([[True, True, False]]))
        tensor(1.5000)
    """
    return mean_over_ranks(token_losses, group, mask, "sum")


def global_mean_for_ddp(token_losses: Tensor, group: Group, mask: Tensor | None = None) -> Tensor:
    """Is :func:`global_mean` for trainers that average the gradients of parameters over the ranks, as DDP and FSDP do.

    The gradients on each rank are multiplied by the number of ranks, so that their average is the gradient of the mean.

    Examples:
        >>> da.global_mean_for_ddp(torch.tensor([[1.0, 2.0, 6.0]]), group)
        tensor(3.)
    """
    return mean_over_ranks(token_losses, group, mask, "average")


def mean_over_ranks(token_losses: Tensor, group: Group, mask: Tensor | None, gradients: str) -> Tensor:
    """``gradients``: what becomes of those of parameters, over the ranks of the group: "sum" or "average"."""
    pg = process_group(group)

    def summed(numbers: Tensor, device: torch.device) -> Tensor:
        # float64 on the wire: float32 loses count of tokens beyond 2**24
        numbers = numbers.double().to(wire_device(pg, device))
        dist.all_reduce(numbers, group=pg)
        return numbers

    refused = torch.tensor([torch.nan, torch.nan, 1.0])
    with errors_reach_all(lambda _: summed(refused, reachable_device(pg, token_losses))):
        local, counted = _summed(token_losses, mask, gradients)
    totals = summed(torch.stack((local.detach().double(), counted, counted * 0)), local.device)
    if totals.device.type == "cpu" and totals[2] > 0:  # elsewhere the host would wait for it, and the mean is NaN
        raise ValueError("the mean over ranks was called off: the arguments of another rank were refused there")
    total, count, _ = totals.to(local.device)
    count = count.clamp(min=1.0)
    factor = (pg.size() if gradients == "average" else 1) / count
    mean: Tensor = local * factor.to(local.dtype)  # which has the gradient; its value is that of all ranks
    with torch.no_grad():
        return mean.copy_(total / count)


def _summed(token_losses: Tensor, mask: Tensor | None, gradients: str) -> tuple[Tensor, Tensor]:
    """The sum of the losses of this rank's tokens, and how many of them count."""
    if gradients not in ("average", "sum"):
        raise ValueError(f"gradients must be 'average' or 'sum', what the trainer does to them, got {gradients!r}")
    if not isinstance(token_losses, Tensor):
        raise TypeError(f"token_losses must be a tensor, got {type(token_losses).__name__}")
    if not token_losses.is_floating_point():
        raise TypeError(f"token_losses must be floating point, got {token_losses.dtype}")
    if mask is None:
        mask = torch.ones_like(token_losses, dtype=torch.bool)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, True = counted, got {mask.dtype}")
    if mask.shape != token_losses.shape:
        raise ValueError(f"mask is {tuple(mask.shape)} and token_losses {tuple(token_losses.shape)}: they must agree")
    losses = token_losses.to(torch.promote_types(token_losses.dtype, torch.float32))
    return losses.masked_fill(~mask, 0.0).sum(), mask.sum().double()


class _Gather(torch.autograd.Function):
    """Concatenation over ranks. Its transpose sends each part home and adds up, and each is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_back: bool, *given: Any) -> Tensor:
        ctx.is_back, ctx.given = is_back, given
        return (_home if is_back else _whole)(x, *given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Gather.apply(grad, not ctx.is_back, *ctx.given), None, None, None, None  # type: ignore[no-untyped-call]


def _whole(x: Tensor, dim: int, lengths: tuple[int, ...], transport: GroupTransport) -> Tensor:
    shapes = [Size((*x.shape[:dim], length, *x.shape[dim + 1 :])) for length in lengths]
    return torch.cat(_exchanged("gather_sequence", [_plain(x)] * transport.size, shapes, transport), dim)


def _home(grad: Tensor, dim: int, lengths: tuple[int, ...], transport: GroupTransport) -> Tensor:
    parts = [_plain(part) for part in grad.split_with_sizes(lengths, dim)]
    shapes = [parts[transport.rank].shape] * len(parts)
    first, *others = _exchanged("the gradients of gather_sequence", parts, shapes, transport)
    # half precision would round at every rank
    total = first.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
    for other in others:  # in rank order, so that the sum is the same every time
        total += other
    return total.to(grad.dtype)


def _plain(x: Tensor) -> Tensor:
    """With the bytes that it reads as, which are what is sent."""
    return x.resolve_conj().resolve_neg().contiguous()


def _exchanged(name: str, sent: Sequence[Tensor], shapes: Sequence[Size], transport: GroupTransport) -> list[Tensor]:
    """What each rank has for this one, given what this one has for each, and the shapes of what comes."""
    mine, others = sent[transport.rank], transport.others
    sends = {peer: sent[peer].flatten().view(torch.uint8) for peer in others}
    messages = transport.post(name, sends, {peer: shapes[peer].numel() * mine.itemsize for peer in others})()
    arrived = {peer: message.view(mine.dtype).view(shapes[peer]) for peer, message in messages.items()}
    return [arrived.get(peer, mine) for peer in range(transport.size)]
