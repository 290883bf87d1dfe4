"""PyTorch's own attention kernels on strided blocks: which of them can run, and what they leave to do around them.

Legend: q, out (b, Lq, h, D); k, v (b, Lk, hk, D); lse, dlse (b, Lq, h).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends import cuda as cuda_backends
from torch.nn import functional as F

from dilated_attention.backends import aten, eager
from dilated_attention.backends.aten import Dense, Kernel
from dilated_attention.backends.problem import Gradients, Limits, Masking
from dilated_attention.call import Call

# On CUDA one call can count a batch of 65,535 (CUDA grids, cuDNN), and 2 GiB from the first element to the last, beyond
# which offsets in cuDNN's and flash's backward wrap: wrong gradients without a word, or an illegal access.
MOST_PROBLEMS, MOST_BYTES = 65535, 2**31
PAD = 8  # head_dim must be a multiple of this on CUDA; torch's own SDPA pads likewise
CALL_BYTES = 8 << 20  # of keys per thread: what a call on a CPU packs and gives is then memory that was just used


def unsupported(call: Call, backward: bool) -> list[str]:
    """Why none of the kernels can run, one sentence each."""
    reasons = why_not(call)
    if not reasons:
        return [f"torch has no such kernels for device {call.device.type!r}"]
    return [] if any(not r for r in reasons.values()) else [f"{name}: {r}" for name, rs in reasons.items() for r in rs]


def preference(call: Call, backward: bool) -> tuple[bool, str]:
    return True, ""


def kernels(call: Call, backward: bool) -> tuple[Kernel, ...]:
    """The kernels that can run, fastest first."""
    return tuple(kernel for kernel in _candidates(call) if not _reasons(kernel, call))


def why_not(call: Call) -> dict[str, list[str]]:
    """Each kernel's reasons, in the order in which they are tried."""
    return {kernel.name: _reasons(kernel, call) for kernel in _candidates(call)}


def describe(kernels: tuple[Kernel, ...], rows: set[int]) -> str:
    """Which kernel runs blocks with so many rows, for people."""
    names = {str(_kernel_for(count, kernels) or "eager"): count for count in sorted(rows)}
    short = [f"{name} for blocks of {count} row" for name, count in names.items() if name != str(kernels[0])]
    return "; ".join([str(kernels[0]), *short])


def limits(call: Call) -> Limits:
    if call.device.type == "cpu":
        row = call.head_dim * call.computed.itemsize
        return Limits(from_rows=aten.PACKED_ROWS, rows=max(1, CALL_BYTES * torch.get_num_threads() // row))
    return Limits(PAD, batch=MOST_PROBLEMS, span=MOST_BYTES) if call.device.type == "cuda" else Limits()


def forward(kernels: tuple[Kernel, ...], q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
    kernel = _kernel_for(min(q.shape[1], k.shape[1]), kernels)
    if kernel is None:
        return eager.forward((), q, k, v, masking)
    out, lse = kernel.forward(_problem(q, k, v, masking))
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    empty = masking.rows_without_keys(q.shape[1])
    if empty is not None:  # kernels disagree on these rows (lse 0, NaN): select
        empty = empty.expand(-1, -1, k.shape[2]).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        lse = lse.masked_fill(empty, -torch.inf)
        out = out.masked_fill(empty.unsqueeze(-1), 0.0)
    if q.device.type == "cpu" and k.shape[1] * k.itemsize < aten.VECTOR_BYTES and (lse == 0).any():
        lost = eager.forward((), q, k, v, masking)[1].isnan()  # the kernel took NaN for a row without keys
        out, lse = out.masked_fill(lost.unsqueeze(-1), torch.nan), lse.masked_fill(lost, torch.nan)
    return out, lse


def backward(
    kernels: tuple[Kernel, ...], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dlse: Tensor | None, masking: Masking,
) -> Gradients:  # fmt: skip
    kernel = _kernel_for(min(q.shape[1], k.shape[1]), kernels)
    if kernel is None:
        return eager.backward((), dout, q, k, v, out, lse, dlse, masking)
    problem = _problem(q, k, v, masking)
    lse = lse.transpose(1, 2)
    dq, dk, dv = kernel.backward(problem, out.transpose(1, 2), lse, dout.transpose(1, 2))
    if dlse is not None:
        # The kernels know d score = weight * (dout.v - dout.out). With v = 0 and dout.out = -dlse a second pass
        # gives exactly the part that lse sends back. dlse is a power of two times two columns, so that in half
        # precision it neither overflows nor loses its digits.
        unit = torch.ldexp(torch.ones_like(dlse), torch.frexp(dlse).exponent.clamp(-14, 15))
        high = (dlse / unit).to(q.dtype)
        columns = torch.stack([high, (dlse / unit - high).to(q.dtype)], -1)[..., : q.shape[-1]]
        rest = q.shape[-1] - columns.shape[-1]
        units = F.pad(unit.to(q.dtype).unsqueeze(-1).expand_as(columns), (0, rest))
        minus_dlse, units = F.pad(-columns, (0, rest)).transpose(1, 2), units.transpose(1, 2)
        dq_lse, dk_lse, _ = kernel.backward(problem._replace(v=torch.zeros_like(problem.v)), minus_dlse, lse, units)
        dq, dk = dq + dq_lse, dk + dk_lse
    if problem.scale != masking.scale:
        dq, dk = dq * (masking.scale / problem.scale), dk * (masking.scale / problem.scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _problem(q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Dense:
    # kernels scale scores after they set the future, or rows that fill up a tile, to -inf: -inf * 0 is NaN
    bias = None if masking.padding is masking.hidden is None else _bias(masking, q)
    scale = max(masking.scale, 1e-30)
    return Dense(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, masking.is_causal, scale)


def _bias(masking: Masking, q: Tensor) -> Tensor:
    """(b or 1, 1 or h, Lq or 1, Lk) of 0 and -inf, its rows 16-byte aligned as the kernels want."""
    ignored = masking.hidden
    if masking.padding is not None:
        padding = masking.padding if masking.padding.stride(2) else masking.padding[:, :, :1]
        padding = padding.transpose(1, 2).unsqueeze(2)
        ignored = padding if ignored is None else ignored | padding
    assert ignored is not None
    ignored = ignored[(None,) * (4 - ignored.dim())]
    columns = -(-ignored.shape[3] // 8) * 8
    bias = torch.zeros((*ignored.shape[:3], columns), dtype=q.dtype, device=q.device)[..., : ignored.shape[3]]
    return bias.masked_fill_(ignored, -torch.inf)


def _kernel_for(rows: int, kernels: tuple[Kernel, ...]) -> Kernel | None:
    """The first kernel that takes these rows; None: a block so short that no kernel takes it, a few eager products."""
    for kernel in kernels:
        if rows >= kernel.min_rows:
            return kernel
    return None


def _candidates(call: Call) -> tuple[Kernel, ...]:
    """The kernels of a device in the order of trial: cuDNN first where it was measured to win, on Hopper."""
    if call.device.type == "cpu":
        return (aten.FLASH_ON_CPU,)
    if call.device.type != "cuda":
        return ()
    if call.flash is not None:  # the implementation that the user activated
        return (aten.FLASH._replace(name=f"flash ({call.flash})"), aten.CUDNN, aten.EFFICIENT)
    if torch.cuda.get_device_capability(call.device) >= (9, 0):
        return (aten.CUDNN, aten.FLASH, aten.EFFICIENT)
    return (aten.FLASH, aten.EFFICIENT, aten.CUDNN)


def _reasons(kernel: Kernel, call: Call) -> list[str]:
    """Why a kernel cannot run: our reasons first, then torch's own check."""
    if call.drops:
        return ["its dropout cannot follow the seeded mask that all backends share"]
    if (call.has_padding or call.pattern.needs_masks) and not kernel.takes_bias:
        return ["it takes no key_padding_mask" if call.has_padding else "it takes no mask, and the pattern needs some"]
    name = kernel.name.split()[0]
    if name in call.switched_off:
        return [f"torch.backends.cuda has the {name} kernel switched off"]
    if call.device.type == "cpu":
        return []
    if name == "cudnn" and call.deterministic:
        return ["it is not repeatable and torch.use_deterministic_algorithms is on"]
    return _refusals(name, call.device, call.computed, call.head_dim, call.is_causal)


def _refusals(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, is_causal: bool) -> list[str]:
    """Why torch would not run its kernel on such tensors: its own check, asked with a small problem.

    The check knows torch's build, the device, and every rule of dtypes and shapes, but says its reasons to stderr only.
    """
    width = -(-head_dim // PAD) * PAD
    probe = torch.empty((1, 1, 64, width), dtype=dtype, device=device, requires_grad=True)
    check = getattr(cuda_backends, f"can_use_{name}_attention")
    # it looks at the mode and at the current device: on some, a kernel has no backward pass for some head dims
    with torch.enable_grad(), torch.cuda.device_of(probe):  # type: ignore[no-untyped-call]
        runs = check(cuda_backends.SDPAParams(probe, probe, probe, None, 0.0, is_causal, False))
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    refused = f"refuses {dtype} with head_dim {head_dim} at compute capability {capability}"
    return [] if runs else [f"torch.backends.cuda.can_use_{name}_attention {refused}"]
