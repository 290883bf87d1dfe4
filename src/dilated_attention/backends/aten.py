"""PyTorch's attention kernels by name, forward and backward, with the traps of each kept in one place.

The public F.scaled_dot_product_attention gives no lse, its backward takes no merged out and lse, and it may go to the
math path; the aten ops below it do none of that.

Legend: q, out (b, L, h, D); k, v (b, L, hk, D); lse (b, L, h); bias (b, 1 or h, 1, L) of 0 and -inf.
The ops themselves see (b, h, L, D), a transposed view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ops = torch.ops.aten

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: forward(q, k, v, bias, causal, scale), backward(dout, q, k, v, out, lse, bias, causal, scale)."""

    name: str
    forward: Forward
    backward: Backward
    takes_bias: bool
    min_rows: int = 1

    def __str__(self) -> str:
        return self.name


def flash_on_cpu() -> Kernel:
    return Kernel("flash on CPU", _flash_cpu_forward, _flash_cpu_backward, takes_bias=True)


def flash(implementation: str | None) -> Kernel:
    """torch's flash attention, in whatever implementation the user activated."""
    return Kernel(f"flash ({implementation or 'FA2'})", _flash_forward, _flash_backward, takes_bias=False)


def cudnn() -> Kernel:
    """A single row is refused by cuDNN, and asking for it has brought the process down later."""
    return Kernel("cudnn", _cudnn_forward, _cudnn_backward, takes_bias=False, min_rows=2)


def efficient() -> Kernel:
    return Kernel("efficient", _efficient_forward, _efficient_backward, takes_bias=True)


def _swap(*tensors: Tensor) -> list[Tensor]:
    """(b, L, h, ...) to (b, h, L, ...) and back."""
    return [x.transpose(1, 2) for x in tensors]


def _unused(q: Tensor) -> Tensor:
    """The random state that a backward reads only with dropout, which we never give to a kernel."""
    return torch.empty((), dtype=torch.int64, device=q.device)


def _flash_cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = _swap(q, k, v)
    out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    out, lse = _swap(out, lse)
    return out, lse


def _flash_cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse = _swap(dout, q, k, v, out, lse)
    grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=bias, scale=scale
    )
    dq, dk, dv = _swap(*grads)
    return dq, dk, dv


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = _swap(q, k, v)
    out, lse, *_ = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    out, lse = _swap(out, lse)
    return out, lse


def _flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys, unused = q.shape[1], k.shape[1], _unused(q)
    dout, q, k, v, out, lse = _swap(dout, q, k, v, out, lse)
    grads = ops._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, rows, keys, 0.0, causal, unused, unused, scale=scale
    )
    dq, dk, dv = _swap(*grads)
    return dq, dk, dv


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = _swap(q, k, v)
    out, lse, *_ = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    out, lse = _swap(out, lse.view(q.shape[:3]))  # lse comes as (b, h, L, 1)
    return out, lse


def _cudnn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys, unused = q.shape[1], k.shape[1], _unused(q)
    dout, q, k, v, out, lse = _swap(dout, q, k, v, out, lse)
    stats = lse.contiguous().unsqueeze(-1)
    grads = ops._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, stats, unused, unused, None, None, None, rows, keys, 0.0, causal, scale=scale
    )
    dq, dk, dv = _swap(*grads)
    return dq, dk, dv


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if q.shape[2] != k.shape[2] > 1:  # this kernel shares no heads: one call per key/value head
        heads = zip(*_by_kv_head(k.shape[2], q, k, v), strict=True)
        parts = [_efficient_forward(a, b, c, bias, causal, scale) for a, b, c in heads]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    q, k, v = _swap(q, *_spread(q, k, v))
    bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
    out, lse, *_ = ops._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    out, lse = _swap(out, lse[:, :, : q.shape[2]])  # lse comes padded to a multiple of 32
    return out, lse


def _efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads, heads = k.shape[2], q.shape[2]
    if heads != kv_heads > 1:
        each = zip(*_by_kv_head(kv_heads, dout, q, k, v, out, lse), strict=True)
        grads = [_efficient_backward(a, b, c, d, e, f, bias, causal, scale) for a, b, c, d, e, f in each]
        dq, dk, dv = (torch.cat(parts, 2) for parts in zip(*grads, strict=True))
        return dq, dk, dv
    k, v = _spread(q, k, v)
    out = out.contiguous()  # the kernel takes the row stride of out for granted: a strided one gives wrong gradients
    dout, q, k, v, out, lse = _swap(dout, q, k, v, out, lse)
    bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
    lse = F.pad(lse.contiguous(), (0, -lse.shape[2] % 32), value=torch.inf)  # as padded as the forward gives it
    which, unused = [True, True, True, False], _unused(q)
    *grads, _ = ops._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, bias, out, lse, unused, unused, 0.0, which, causal, scale=scale
    )
    dq, dk, dv = _swap(*grads)
    if kv_heads != heads:
        dk, dv = (x.sum(2, keepdim=True, dtype=torch.float32).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv


def _by_kv_head(kv_heads: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """For each tensor its parts, a key/value head or its query heads each."""
    return [x.chunk(kv_heads, 2) for x in tensors]


def _spread(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """One key/value head seen by every query head, with stride 0."""
    return [x.expand(-1, -1, q.shape[2], -1) for x in (k, v)]
