"""A sequence cut over the ranks of a group in contiguous shards, and losses averaged over it.

Every rank of the group makes the same calls in the same order, also with an empty shard. Ranks are those of the group.
Legend: N tokens on P ranks; x (..., n, ...) with n of the N tokens along ``dim``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Group = ProcessGroup | DeviceMesh

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_MOST_DIMS = 64  # as many as torch's own kernels take


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
    """Cuts this rank's part out of a tensor that every rank holds whole, as ``torch.tensor_split(x, P, dim)`` does.

    No communication. The gradient of ``x`` is this rank's part of it, zero elsewhere: sum it over the ranks if ``x``
    is computed from parameters on each of them. A copy, so that a shard never keeps the whole alive.

    Examples:
        >>> tokens = torch.randn(2, 64, 32)  # the same on every rank
        >>> shard = da.shard_sequence(tokens, group)
        >>> shard.shape[1] == 64 // group.size()
        True
    """
    start, stop = _bounds(x.shape[dim], process_group(group))
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def local_positions(n: int, group: Group, *, device: torch.device | str | None = None) -> Tensor:
    """Gives the positions of this rank's tokens in a sequence of ``n`` that `shard_sequence` cuts: (n_local,) int64.

    Examples:
        >>> da.local_positions(5, group)  # here on a single rank
        tensor([0, 1, 2, 3, 4])
    """
    if n < 0:
        raise ValueError(f"n must be the global number of tokens, got {n}")
    return torch.arange(*_bounds(n, process_group(group)), device=device)


def gather_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Gives every rank the whole sequence from shards of any lengths, also none, in rank order and bit for bit.

    The gradient of ``x`` is the sum over all ranks of the gradients of its part: that of the sum of all ranks' losses.
    The backward communicates too, so every rank must run it, also one whose shard is empty; a rank that has no loss
    of its own adds ``0 * whole.sum()``.

    Examples:
        >>> tokens = torch.arange(6.0).view(1, 6)
        >>> da.gather_sequence(da.shard_sequence(tokens, group), group)
        tensor([[0., 1., 2., 3., 4., 5.]])
    """
    pg = process_group(group)
    dim, lengths = _agree(x, dim, pg)
    return _Gather.apply(x, dim, lengths, pg)  # type: ignore[no-any-return, no-untyped-call]


def sequence_mean(
    token_losses: Tensor,
    group: Group,
    mask: Tensor | None = None,
    *,
    gradients: Literal["average", "sum"] = "average",
) -> Tensor:
    """Averages over all tokens of all ranks, with gradients that come out as on one device.

    Args:
        token_losses: losses of this rank's tokens, any shape.
        group: the ranks that share the sequence.
        mask: bool, shaped as the losses, **True = counted** (the opposite of a padding mask). What is not counted
            reaches neither value nor gradient, even NaN.
        gradients: what the trainer does to parameter gradients over the ranks of ``group``: "average" (as DDP and
            FSDP do; each rank's gradient is P times its share) or "sum".

    Returns:
        The same 0-dim value on every rank, float64 for float64 losses and float32 for all others; 0 if no token counts.

    Examples:
        >>> losses = torch.tensor([[1.0, 2.0, 6.0]])  # of this rank's tokens
        >>> da.sequence_mean(losses, group, mask=torch.tensor([[True, True, False]]))
        tensor(1.5000)
    """
    pg = process_group(group)
    if gradients not in ("average", "sum"):
        raise ValueError(f"gradients must be 'average' or 'sum', what the trainer does to them, got {gradients!r}")
    if not token_losses.is_floating_point():
        raise TypeError(f"token_losses must be floating point, got {token_losses.dtype}")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, True = counted, got {mask.dtype}")
    if mask is not None and mask.shape != token_losses.shape:
        raise ValueError(f"mask is {tuple(mask.shape)} and token_losses {tuple(token_losses.shape)}: they must agree")
    losses = token_losses.to(torch.promote_types(token_losses.dtype, torch.float32))
    if mask is not None:
        losses = losses.masked_fill(~mask, 0.0)
    local = losses.sum()
    counted = torch.full_like(local, losses.numel(), dtype=torch.float64) if mask is None else mask.sum().double()
    # float64 on the wire: float32 loses count of tokens beyond 2**24
    totals = _to_wire(torch.stack((local.detach().double(), counted)), _wire_device(local, pg))
    dist.all_reduce(totals, group=pg)
    total, count = totals.to(local.device)
    factor = (pg.size() if gradients == "average" else 1) / count.clamp(min=1.0)
    return _Replace.apply(local, (total / count.clamp(min=1.0)).to(local.dtype), factor)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    """Concatenation over ranks; its transpose sends each gradient home and adds up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, lengths: list[int], pg: ProcessGroup) -> Tensor:
        ctx.dim, ctx.lengths, ctx.pg = dim, lengths, pg
        shapes = [(*x.shape[:dim], length, *x.shape[dim + 1 :]) for length in lengths]
        sizes = [torch.Size(shape).numel() * x.element_size() for shape in shapes]
        if not any(sizes):
            return x.new_empty((*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :]))
        wire = _wire_device(x, pg)
        # gloo gathers equal sizes only, so all are as long as the longest; what is behind a shard nobody reads
        sent, *received = _buffer(wire, x, 1 + len(sizes), max(sizes))
        sent[: sizes[pg.rank()]] = _bytes(x)
        dist.all_gather(received, sent, group=pg)
        parts = [part[:size].to(x.device) for part, size in zip(received, sizes, strict=True)]
        return torch.cat([part.view(x.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        parts = grad.split_with_sizes(ctx.lengths, ctx.dim)
        mine = parts[ctx.pg.rank()]
        sizes = [part.numel() * part.element_size() for part in parts]
        if not any(sizes):
            return torch.zeros_like(mine), None, None, None
        wire = _wire_device(grad, ctx.pg)
        sent = _to_wire(torch.cat([_bytes(part) for part in parts]), wire)
        copies = [sizes[ctx.pg.rank()]] * len(sizes)
        received = _buffer(wire, grad, sum(copies))
        dist.all_to_all_single(received, sent, copies, sizes, group=ctx.pg)
        first, *others = received.to(grad.device).view(grad.dtype).view(len(sizes), *mine.shape)
        total = first.to(torch.promote_types(grad.dtype, torch.float32))  # half precision would round at every rank
        for other in others:  # in rank order, so that the sum is the same every time
            total += other
        return total.to(grad.dtype), None, None, None


class _Replace(torch.autograd.Function):
    """``value`` in place of x, for which the gradient of x is ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad * ctx.factor).to(grad.dtype), None, None


def _bounds(n: int, pg: ProcessGroup) -> tuple[int, int]:
    """Start and stop of this rank's shard of n tokens; the first n % P shards have one more."""
    length, more = divmod(n, pg.size())
    start = pg.rank() * length + min(pg.rank(), more)
    return start, start + length + (pg.rank() < more)


def _agree(x: Tensor, dim: int, pg: ProcessGroup) -> tuple[int, list[int]]:
    """``dim`` counted from the front and the length of each rank's shard; raises on every rank what any rank has wrong.

    Backends check neither shape nor dtype: without this a mismatch is garbage, or the end of the process.
    """
    dim = dim + x.ndim if dim < 0 else dim
    requires_grad = x.requires_grad and torch.is_grad_enabled()
    mine = [dim, requires_grad, _DTYPES.index(x.dtype), x.ndim, *x.shape, *[0] * (_MOST_DIMS - x.ndim)]
    wire = _wire_device(x, pg)
    received = torch.empty(pg.size(), len(mine), dtype=torch.int64, device=wire)
    dist.all_gather(list(received), torch.tensor(mine, device=wire), group=pg)
    headers = received.tolist()
    shapes = [tuple(sizes[:ndim]) for _, _, _, ndim, *sizes in headers]
    dim0, grad0, code0, ndim0, *_ = headers[0]
    for rank, (dim_r, grad_r, code_r, ndim_r, *_) in enumerate(headers):
        others0, others = (shape[:dim0] + shape[dim0 + 1 :] for shape in (shapes[0], shapes[rank]))
        if (code_r, ndim_r, others) != (code0, ndim0, others0):
            there, here = (f"{shapes[r]} {_DTYPES[headers[r][2]]}".replace("torch.", "") for r in (0, rank))
            raise ValueError(f"x is {there} on rank 0 and {here} on rank {rank}: all but dim {dim0} must agree")
        if dim_r != dim0:
            raise ValueError(f"dim is {dim0} on rank 0 and {dim_r} on rank {rank}: it must agree")
        if grad_r != grad0:
            with_grad, without = (0, rank) if grad0 else (rank, 0)
            raise ValueError(
                f"x requires grad on rank {with_grad} and not on rank {without}: the backward needs every rank; "
                "call requires_grad_() on all of them, or gather under torch.no_grad() on all"
            )
    if not 0 <= dim < x.ndim:
        raise IndexError(f"dim counts as {dim} and x has {x.ndim} dimensions {tuple(x.shape)}: dim must be one of them")
    return dim, [shape[dim] for shape in shapes]


def _wire_device(x: Tensor, pg: ProcessGroup) -> torch.device:
    """Where tensors must be to be sent: gloo says it takes CUDA tensors, and crashes on them."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(pg).split(","))
    if x.device.type not in backends:
        raise ValueError(f"x is on {x.device} and the group moves tensors of {', '.join(backends)} only: move x there")
    return torch.device("cpu") if backends[x.device.type] == "gloo" else x.device


def _buffer(wire: torch.device, x: Tensor, *shape: int) -> Tensor:
    """Bytes to send or receive for x; pinned where x itself cannot be sent."""
    return torch.empty(shape, dtype=torch.uint8, device=wire, pin_memory=wire != x.device)


def _to_wire(x: Tensor, wire: torch.device) -> Tensor:
    if x.device == wire:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=wire, pin_memory=True).copy_(x)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of x, flat: every dtype travels as these."""
    return x.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
