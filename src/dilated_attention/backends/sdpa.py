"""PyTorch's own attention kernels, forward and backward called by name, so that none goes to the math path.

The public F.scaled_dot_product_attention gives no lse and its backward takes no merged out and lse; the aten ops
below it do. Each kernel says why it cannot run: our reasons first, then torch's own check.

Legend: q, out (b, L, h, D) here; the kernels see (b, h, L, D), a transposed view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.attention
from torch import Tensor
from torch.backends import cuda as cuda_backends
from torch.nn import functional as F

from dilated_attention.backends import eager
from dilated_attention.backends.problem import Masking, Request, backward_lse

aten = torch.ops.aten
MAX_BATCH = 65535  # CUDA grids and cuDNN take no more

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, Masking], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Masking], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: how it is called and why it cannot run a request."""

    name: str
    unsupported: Callable[[Request], list[str]]
    forward: Forward
    backward: Backward
    min_rows: int = 1

    def __str__(self) -> str:
        return self.name


def unsupported(request: Request) -> list[str]:
    """Why none of the kernels can run, one sentence each."""
    reasons = why_not(request)
    if not reasons:
        return [f"torch has no such kernels for device {request.device.type!r}"]
    return [] if any(not r for r in reasons.values()) else [f"{name}: {r}" for name, rs in reasons.items() for r in rs]


def kernels(request: Request) -> tuple[Kernel, ...]:
    """The kernels that can run, fastest first."""
    return tuple(kernel for kernel, reasons in _reasons(request) if not reasons)


def why_not(request: Request) -> dict[str, list[str]]:
    """Each kernel's reasons, in the order in which they are tried."""
    return {str(kernel): reasons for kernel, reasons in _reasons(request)}


def pad_multiple(request: Request) -> int:
    """head_dim must be a multiple of this; torch's own SDPA pads likewise."""
    return 8 if request.device.type == "cuda" else 1


def forward(
    kernels: tuple[Kernel, ...], q: Tensor, k: Tensor, v: Tensor, masking: Masking
) -> tuple[Tensor, Tensor]:
    chosen = _kernel_for(q, kernels)
    if chosen is None:
        return eager.forward((), q, k, v, masking)
    bias = _bias(masking, q)
    parts = [
        chosen.forward(*(x.transpose(1, 2) for x in (q[s], k[s], v[s])), None if bias is None else bias[s], masking)
        for s in _batches(q)
    ]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    empty = masking.rows_without_keys(q.shape[1])
    if empty is not None:  # kernels disagree on these rows (lse 0, NaN): select
        empty = empty.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        lse = lse.masked_fill(empty, -torch.inf)
        out = out.masked_fill(empty.unsqueeze(-1), 0.0)
    return out, lse


def backward(
    kernels: tuple[Kernel, ...],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    masking: Masking,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = _kernel_for(q, kernels)
    if chosen is None:
        return eager.backward((), dout, q, k, v, out, lse, dlse, masking)
    lse = backward_lse(lse)
    dq, dk, dv = _backward_once(chosen, dout, q, k, v, out, lse, masking)
    if dlse is not None:
        # The kernels know d score = weight * (dout.v - dout.out). With v = 0 and dout.out = -dlse a second pass
        # gives exactly the part that lse sends back; dlse is split in two columns so that it keeps its digits.
        high = dlse.to(q.dtype)
        columns = torch.stack([high, (dlse - high).to(q.dtype)], -1)[..., : q.shape[-1]]
        rest = q.shape[-1] - columns.shape[-1]
        ones, minus = F.pad(torch.ones_like(columns), (0, rest)), F.pad(-columns, (0, rest))
        dq_lse, dk_lse, _ = _backward_once(chosen, ones, q, k, torch.zeros_like(v), minus, lse, masking)
        dq, dk = dq + dq_lse, dk + dk_lse
    return dq, dk, dv


def _backward_once(
    chosen: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, masking: Masking
) -> tuple[Tensor, Tensor, Tensor]:
    bias = _bias(masking, q)
    parts = [
        chosen.backward(
            *(x.transpose(1, 2) for x in (dout[s], q[s], k[s], v[s], out[s])),
            lse[s].transpose(1, 2).contiguous(),
            None if bias is None else bias[s],
            masking,
        )
        for s in _batches(q)
    ]
    grads = parts[0] if len(parts) == 1 else tuple(torch.cat(x) for x in zip(*parts, strict=True))
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _batches(q: Tensor) -> list[slice]:
    if q.device.type != "cuda" or q.shape[0] <= MAX_BATCH:
        return [slice(None)]
    return [slice(first, first + MAX_BATCH) for first in range(0, q.shape[0], MAX_BATCH)]


def _bias(masking: Masking, q: Tensor) -> Tensor | None:
    """(b, 1 or hk, 1, Lk) of 0 and -inf, its rows 16-byte aligned as the kernels want."""
    if masking.padding is None:
        return None
    padding = masking.padding if masking.padding.stride(2) else masking.padding[:, :, :1]
    padding = padding.transpose(1, 2)
    columns = -(-padding.shape[2] // 8) * 8
    bias = torch.zeros((*padding.shape[:2], 1, columns), dtype=q.dtype, device=q.device)[..., : padding.shape[2]]
    return bias.masked_fill_(padding.unsqueeze(2), -torch.inf)


# --- the kernels ------------------------------------------------------------------------------------------------


def _flash_cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masking: Masking
) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, masking.is_causal, attn_mask=bias, scale=masking.scale
    )
    return out, lse


def _flash_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, masking: Masking
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, masking.is_causal, attn_mask=bias, scale=masking.scale
    )
    return dq, dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masking: Masking) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, masking.is_causal, False, scale=masking.scale
    )
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, masking: Masking
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # philox state, read only with dropout
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, masking.is_causal, unused, unused,
        scale=masking.scale,
    )  # fmt: skip
    return dq, dk, dv


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masking: Masking) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, masking.is_causal, False, scale=masking.scale
    )
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, masking: Masking
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1), unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0,
        masking.is_causal, scale=masking.scale,
    )  # fmt: skip
    return dq, dk, dv


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masking: Masking
) -> tuple[Tensor, Tensor]:
    if q.shape[1] != k.shape[1] > 1:  # no shared heads in this kernel: one call per key/value head
        parts = [_efficient_forward(*one, masking) for one in _by_kv_head(k.shape[1], (q, k, v), bias)]
        out, lse = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return out, lse
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _full_bias(bias, q, k), True, 0.0, masking.is_causal, scale=masking.scale
    )
    return out, lse[:, :, : q.shape[2]]  # it comes padded to a multiple of 32


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, masking: Masking
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = k.shape[1]
    if q.shape[1] != kv_heads > 1:
        parts = [_efficient_backward(*one, masking) for one in _by_kv_head(kv_heads, (dout, q, k, v, out, lse), bias)]
        dq, dk, dv = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return dq, dk, dv
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel takes out's row stride for granted
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, _full_bias(bias, q, k), out, lse, unused, unused, 0.0, [True, True, True, False],
        masking.is_causal, scale=masking.scale,
    )  # fmt: skip
    if kv_heads != q.shape[1]:
        dk, dv = (x.sum(1, keepdim=True, dtype=torch.float32).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv


def _by_kv_head(
    kv_heads: int, tensors: tuple[Tensor, ...], bias: Tensor | None
) -> list[tuple[*tuple[Tensor, ...], Tensor | None]]:
    """The tensors of each key/value head with its query heads."""
    chunks = [x.chunk(kv_heads, 1) for x in tensors]
    biases = [None] * kv_heads if bias is None else bias.expand(-1, kv_heads, -1, -1).chunk(kv_heads, 1)
    return [(*one, b) for *one, b in zip(*chunks, biases, strict=True)]


def _full_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


# --- which of them can run --------------------------------------------------------------------------------------


def _flash_cpu_unsupported(request: Request) -> list[str]:
    return []


def _flash_unsupported(request: Request) -> list[str]:
    return ["it takes no key_padding_mask"] if request.has_padding else _refusals("flash", request)


def _cudnn_unsupported(request: Request) -> list[str]:
    if request.has_padding:
        return ["it takes no key_padding_mask"]
    if request.deterministic:
        return ["it is not repeatable and torch.use_deterministic_algorithms is on"]
    return _refusals("cudnn", request)


def _efficient_unsupported(request: Request) -> list[str]:
    return _refusals("efficient", request)


def _refusals(name: str, request: Request) -> list[str]:
    """Why torch would not run its kernel on such tensors; its own check, asked with a small problem, has the last word.

    The check knows torch's build, the device and every shape rule, but says its reasons to stderr only.
    """
    if name in request.switched_off:
        return [f"torch.backends.cuda has the {name} kernel switched off"]
    reasons = []
    if name != "efficient" and request.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it computes in float16 and bfloat16, not {request.dtype}")
    if name == "efficient" and request.dtype is torch.float64:
        reasons.append("it does not compute in float64")
    capability = torch.cuda.get_device_capability(request.device)
    if name != "efficient" and capability < (8, 0):
        reasons.append(f"it needs compute capability 8.0, this device has {capability[0]}.{capability[1]}")
    check = {
        "flash": cuda_backends.can_use_flash_attention,
        "cudnn": cuda_backends.can_use_cudnn_attention,
        "efficient": cuda_backends.can_use_efficient_attention,
    }[name]
    width = -(-request.head_dim // pad_multiple(request)) * pad_multiple(request)
    probe = torch.empty((1, 1, 64, width), dtype=request.dtype, device=request.device, requires_grad=True)
    if not reasons and not check(cuda_backends.SDPAParams(probe, probe, probe, None, 0.0, request.is_causal, False)):
        reasons.append(
            f"torch.backends.cuda.can_use_{name}_attention refuses {request.dtype} with head_dim {request.head_dim}"
        )
    return reasons


_FLASH_CPU = Kernel("flash on CPU", _flash_cpu_unsupported, _flash_cpu_forward, _flash_cpu_backward)
_CUDNN = Kernel("cudnn", _cudnn_unsupported, _cudnn_forward, _cudnn_backward, min_rows=2)
_EFFICIENT = Kernel("efficient", _efficient_unsupported, _efficient_forward, _efficient_backward)


def _candidates(request: Request) -> tuple[Kernel, ...]:
    """The kernels of a device, fastest first as measured on segments of 2048 rows."""
    if request.device.type == "cpu":
        return (_FLASH_CPU,)
    if request.device.type != "cuda":
        return ()
    flash = Kernel(f"flash ({request.flash or 'FA2'})", _flash_unsupported, _flash_forward, _flash_backward)
    if request.flash is not None:  # the user asked for it
        return (flash, _CUDNN, _EFFICIENT)
    if torch.cuda.get_device_capability(request.device) >= (9, 0):
        return (_CUDNN, flash, _EFFICIENT)
    return (flash, _EFFICIENT, _CUDNN)


def _reasons(request: Request) -> list[tuple[Kernel, list[str]]]:
    if request.has_dropout:
        why = ["its dropout cannot follow the seeded mask that all backends share"]
        return [(kernel, why) for kernel in _candidates(request)]
    return [(kernel, kernel.unsupported(request)) for kernel in _candidates(request)]


def _kernel_for(q: Tensor, kernels: tuple[Kernel, ...]) -> Kernel | None:
    """The first kernel that takes these rows; None: a block so short that no kernel takes it, a few eager products."""
    return next((kernel for kernel in kernels if q.shape[1] >= kernel.min_rows), None)
