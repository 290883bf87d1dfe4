"""PyTorch's attention kernels by name, forward and backward, with the traps of each kept in one place.

The public F.scaled_dot_product_attention gives no lse, its backward takes no merged out and lse, and it may go to the
math path; the aten ops below it do none of that.

Legend: q, out (b, h, L, D); k, v (b, hk, L, D); lse (b, h, L); bias (b, 1 or h, 1, L) of 0 and -inf. As a rule the
heads of a row are side by side in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.backends.problem import Gradients, Pair

ops = torch.ops.aten

# On a CPU keys and values are read anew for every tile of queries, and rows far apart share few places in the caches:
# of this many rows that span this many bytes, packing them first was measured to save 0 to 25 % of a call's time.
PACKED_ROWS, PACKED_SPAN = 384, 3 << 19
VECTOR_BYTES = 64  # the longest vector of a CPU that torch's kernel uses


class Operands(NamedTuple):
    """One dense problem, as kernels take it."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    causal: bool
    scale: float


class Kernel(NamedTuple):
    """One kernel: forward(problem), and backward(problem, out, lse, dout) with the merged out and lse."""

    name: str
    forward: Callable[[Operands], Pair]
    backward: Callable[[Operands, Tensor, Tensor, Tensor], Gradients]
    takes_bias: bool
    min_rows: int = 1

    def __str__(self) -> str:
        return self.name


def _flash_cpu_forward(x: Operands) -> Pair:
    # in half precision the kernel packs what it reads itself, when it goes forward
    q, k, v, bias, causal, scale = x if x.k.itemsize == 2 else _packed(x)
    return ops._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )


def _flash_cpu_backward(x: Operands, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    q, k, v, bias, causal, scale = _packed(x)
    return ops._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        dout, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=bias, scale=scale
    )


def _packed(x: Operands) -> Operands:
    """The problem with keys and values packed head by head, where that pays."""
    rows, step = x.k.shape[2], x.k.stride(2)
    often = min(rows, x.q.shape[2]) >= PACKED_ROWS
    if not often or step == x.k.shape[3] or rows * step * x.k.itemsize < PACKED_SPAN:
        return x
    return x._replace(k=x.k.contiguous(), v=x.v.contiguous())


def _flash_forward(x: Operands) -> Pair:
    out, lse, *_ = ops._scaled_dot_product_flash_attention(x.q, x.k, x.v, 0.0, x.causal, False, scale=x.scale)
    return out, lse


def _flash_backward(x: Operands, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    rows, keys, unused = x.q.shape[2], x.k.shape[2], _unused(x.q)
    return ops._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        dout, x.q, x.k, x.v, out, lse.contiguous(), None, None, rows, keys, 0.0, x.causal, unused, unused, scale=x.scale
    )


def _cudnn_forward(x: Operands) -> Pair:
    # lse is always asked for: without it, cuDNN 9.19 under torch 2.11 gave a wrong out for 16 problems of 64 rows
    given = x.q, x.k, x.v, None, True, 0.0, x.causal, False
    out, lse, *_ = ops._scaled_dot_product_cudnn_attention(*given, scale=x.scale)
    return out, lse.view(x.q.shape[:3])  # it comes as (b, h, L, 1)


def _cudnn_backward(x: Operands, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    if not x.causal and x.k.shape[2] % 128 == 64:
        # cuDNN 9.19 scores the rows that would fill its last tile of 128 keys with 0: of a very low lse, exp(0 - lse)
        # overflows, and dq is NaN. It masks rows that fill up a tile of 64, so each
        # half of the keys is a call of its own.
        halves = zip(x.k.chunk(2, 2), x.v.chunk(2, 2), strict=True)
        parts = [_cudnn_backward(x._replace(k=k, v=v), out, lse, dout) for k, v in halves]
        dq, dk, dv = zip(*parts, strict=True)
        return dq[0] + dq[1], torch.cat(dk, 2), torch.cat(dv, 2)
    if not x.q.stride() == out.stride() == dout.stride():
        # torch keeps one cuDNN plan for given strides of q, k and v, with the strides that out and dout had when it
        # was made: called again with others it reads them wrongly, without a word. So theirs always follow q's.
        x, out, dout = x._replace(q=_row_by_row(x.q)), _row_by_row(out), _row_by_row(dout)
    stats, rows, keys, unused = lse.contiguous().unsqueeze(-1), x.q.shape[2], x.k.shape[2], _unused(x.q)
    return ops._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        dout, x.q, x.k, x.v, out, stats, unused, unused, None, None, None, rows, keys, 0.0, x.causal, scale=x.scale
    )


def _by_kv_head(run: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """For a kernel that shares no heads: one call per key/value head, which its query heads see with stride 0."""

    @functools.wraps(run)
    def each(x: Operands, *results: Tensor) -> tuple[Tensor, ...]:
        count = x.k.shape[1]
        if x.q.shape[1] == count or count == 1:
            return run(x, *results)
        parts = zip(*(t.chunk(count, 1) for t in (*x[:3], *results)), strict=True)
        computed = [run(x._replace(q=q, k=k, v=v), *some) for q, k, v, *some in parts]
        return tuple(torch.cat(some, 1) for some in zip(*computed, strict=True))

    return each


@_by_kv_head
def _efficient_forward(x: Operands) -> Pair:
    q, k, v, bias = _spread(x)
    out, lse, *_ = ops._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, x.causal, scale=x.scale)
    return out, lse[:, :, : q.shape[2]]  # it comes padded to a multiple of 32


@_by_kv_head
def _efficient_backward(x: Operands, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    q, k, v, bias = _spread(x)
    out = _row_by_row(out)  # the kernel takes the row stride of out for granted: others give wrong gradients
    lse = F.pad(lse.contiguous(), (0, -lse.shape[2] % 32), value=torch.inf)  # as padded as the forward gives it
    which, unused = [True, True, True, False], _unused(q)
    dq, dk, dv, _ = ops._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, bias, out, lse, unused, unused, 0.0, which, x.causal, scale=x.scale
    )
    if q.shape[1] != x.k.shape[1]:
        dk, dv = (grad.sum(1, keepdim=True, dtype=torch.float32).to(grad.dtype) for grad in (dk, dv))
    return dq, dk, dv


def _row_by_row(x: Tensor) -> Tensor:
    """x with the heads of a row side by side in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _unused(q: Tensor) -> Tensor:
    """The random state that a backward reads only with dropout, which we never give to a kernel."""
    return torch.empty((), dtype=torch.int64, device=q.device)


def _spread(x: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and bias, of as many heads."""
    k, v = (t.expand(-1, x.q.shape[1], -1, -1) for t in (x.k, x.v))
    return x.q, k, v, None if x.bias is None else x.bias.expand(*x.q.shape[:3], x.k.shape[2])


# Where all keys fit in one vector and all score NaN, out and lse are 0, as in torch's SDPA: `sdpa` mends that.
FLASH_ON_CPU = Kernel("flash on CPU", _flash_cpu_forward, _flash_cpu_backward, takes_bias=True)
FLASH = Kernel("flash (FA2)", _flash_forward, _flash_backward, takes_bias=False)
# A single row is refused by cuDNN, and asking for it has brought the process down later.
CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward, takes_bias=False, min_rows=2)
EFFICIENT = Kernel("efficient", _efficient_forward, _efficient_backward, takes_bias=True)
