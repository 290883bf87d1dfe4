"""PyTorch's own attention kernels on strided blocks: which of them can run, and what they leave to do around them.

Legend: q, out (b, Lq, h, D); k, v (b, Lk, hk, D); lse, dlse (b, Lq, h).
"""

from __future__ import annotations

import torch
from torch.backends import cuda as cuda_backends
from torch.nn import functional as F

from dilated_attention.backends import aten, eager
from dilated_attention.backends.aten import Kernel, Operands
from dilated_attention.backends.problem import Gradients, Limits, Outputs, Pair, Problem
from dilated_attention.call import Call

# On CUDA one call can count a batch of 65,535 (CUDA grids, cuDNN), and 2 GiB from the first element to the last, beyond
# which offsets in cuDNN's and flash's backward wrap: wrong gradients without a word, or an illegal access.
MOST_PROBLEMS, MOST_BYTES = 65535, 2**31
PAD = 8  # head_dim must be a multiple of this on CUDA; torch's own SDPA pads likewise
CALL_BYTES = 8 << 20  # of keys per thread: what a call on a CPU packs and gives is then memory that was just used


def unsupported(call: Call, backward: bool) -> list[str]:
    """Why none of the kernels can run, one sentence each."""
    by_kernel = why_not(call)
    if not all(by_kernel.values()):
        return []
    reasons = [f"{kernel}: {reason}" for kernel, some in by_kernel.items() for reason in some]
    return reasons or [f"torch has no such kernels for device {call.device.type!r}"]


def preference(call: Call, backward: bool) -> tuple[bool, str]:
    return True, ""


def kernels(call: Call, backward: bool) -> tuple[Kernel, ...]:
    """The kernels that can run, fastest first."""
    return tuple(kernel for kernel, reasons in why_not(call).items() if not reasons)


def why_not(call: Call) -> dict[Kernel, list[str]]:
    """Each kernel's reasons, in the order of trial: cuDNN first where it was measured to win, on Hopper."""
    candidates: tuple[Kernel, ...] = ()
    if call.device.type == "cpu":
        candidates = (aten.FLASH_ON_CPU,)
    elif call.device.type == "cuda":
        candidates = (aten.FLASH, aten.EFFICIENT, aten.CUDNN)
        if call.flash is not None:  # the implementation that the user activated
            candidates = (aten.FLASH._replace(name=f"flash ({call.flash})"), aten.CUDNN, aten.EFFICIENT)
        elif torch.cuda.get_device_capability(call.device) >= (9, 0):
            candidates = (aten.CUDNN, aten.FLASH, aten.EFFICIENT)
    return {kernel: _reasons(kernel, call) for kernel in candidates}


def describe(kernels: tuple[Kernel, ...], rows: set[int]) -> str:
    """Which kernel runs blocks with so many rows, for people."""
    names = {str(_kernel_for(count, kernels) or "eager"): count for count in sorted(rows)}
    names.pop(first := str(kernels[0]), None)
    return "; ".join([first, *(f"{name} for blocks of {count} row" for name, count in names.items())])


def limits(call: Call) -> Limits:
    if call.device.type == "cpu":
        row = call.head_dim * call.computed.itemsize
        return Limits(from_rows=aten.PACKED_ROWS, rows=max(1, CALL_BYTES * torch.get_num_threads() // row))
    return Limits(PAD, batch=MOST_PROBLEMS, span=MOST_BYTES) if call.device.type == "cuda" else Limits()


def forward(kernels: tuple[Kernel, ...], x: Problem) -> Pair:
    kernel = _kernel_for(min(x.q.shape[1], x.k.shape[1]), kernels)
    if kernel is None:
        return eager.forward((), x)
    out, lse = kernel.forward(_operands(x))
    if x.ignored is not None:  # kernels disagree on rows without keys (lse 0, NaN): select
        is_slanted = x.is_causal and x.ignored.shape[2] == 1
        empty = (~x.ignored).cumsum(-1).squeeze(2) == 0 if is_slanted else x.ignored.all(-1)
        empty = empty.repeat_interleave(x.q.shape[2] // empty.shape[1], 1)
        out, lse = out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -torch.inf)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    if x.q.device.type == "cpu" and x.k.shape[1] * x.k.itemsize < aten.VECTOR_BYTES and (lse == 0).any():
        lost = eager.forward((), x)[1].isnan()  # the kernel took NaN for a row without keys
        out, lse = out.masked_fill(lost.unsqueeze(-1), torch.nan), lse.masked_fill(lost, torch.nan)
    return out, lse


def backward(kernels: tuple[Kernel, ...], x: Problem, results: Outputs) -> Gradients:
    kernel = _kernel_for(min(x.q.shape[1], x.k.shape[1]), kernels)
    if kernel is None:
        return eager.backward((), x, results)
    problem, lse, dlse, dtype = _operands(x), results.lse.transpose(1, 2), results.dlse, x.q.dtype
    dq, dk, dv = kernel.backward(problem, results.out.transpose(1, 2), lse, results.dout.transpose(1, 2))
    if dlse is not None:
        # The kernels know d score = weight * (dout.v - dout.out). With v = 0 and dout.out = -dlse a second pass
        # gives exactly the part that lse sends back. dlse is a power of two times two columns, so that in half
        # precision it neither overflows nor loses its digits.
        unit = torch.ldexp(torch.ones_like(dlse), torch.frexp(dlse).exponent.clamp(-14, 15))
        high = (dlse / unit).to(dtype)
        columns = torch.stack([high, (dlse / unit - high).to(dtype)], -1)[..., : x.q.shape[-1]]
        units = unit.to(dtype).unsqueeze(-1).expand_as(columns)
        rest = (0, x.q.shape[-1] - columns.shape[-1])
        minus_dlse, units = (F.pad(y, rest).transpose(1, 2) for y in (-columns, units))
        dq_lse, dk_lse, _ = kernel.backward(problem._replace(v=torch.zeros_like(problem.v)), minus_dlse, lse, units)
        dq, dk = dq + dq_lse, dk + dk_lse
    if problem.scale != x.scale:
        dq, dk = dq * (x.scale / problem.scale), dk * (x.scale / problem.scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _operands(x: Problem) -> Operands:
    bias = None
    if x.ignored is not None:  # rows are 16-byte aligned, as the kernels want
        *sizes, keys = x.ignored.shape
        bias = torch.zeros((*sizes, -(-keys // 8) * 8), dtype=x.q.dtype, device=x.q.device)
        bias = bias[..., :keys].masked_fill_(x.ignored, -torch.inf)
    # kernels scale scores after they set the future, or rows that fill up a tile, to -inf: -inf * 0 is NaN
    scale = max(x.scale, 1e-30)
    return Operands(x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2), bias, x.is_causal, scale)


def _kernel_for(rows: int, kernels: tuple[Kernel, ...]) -> Kernel | None:
    """The first kernel that takes these rows; None: a block so short that no kernel takes it, a few eager products."""
    return next((kernel for kernel in kernels if rows >= kernel.min_rows), None)


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
    capability = torch.cuda.get_device_capability(device)
    refused = f"refuses {dtype} with head_dim {head_dim} at compute capability {capability}"
    return [] if runs else [f"torch.backends.cuda.can_use_{name}_attention {refused}"]
