"""Our own kernels: a whole call, all heads and all segments, in one launch each way wherever the pattern allows it.

`tiling` writes a call's work down, `table` puts it on the device, `tiles`, `forward` and `backward` are the kernels
that walk through it, `launch` calls them. `fuse` has what surrounds the library's kernels, `decode` the kernel for few
queries. Importing this package imports no triton: it comes with the builds of torch that can use it.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from dilated_attention.backends.problem import Request
from dilated_attention.backends.triton import configs

LARGEST_HEAD_DIM = max(configs.SMALL)
INSTALLED = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, step by step: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unsupported(request: Request) -> list[str]:
    """Why these kernels cannot run a call, one sentence each."""
    reasons = []
    if not INSTALLED:
        reasons.append("triton is not installed: it comes with torch's CUDA builds")
    if request.whole is None:
        reasons.append("it takes whole calls on one device, not the blocks that ranks exchange")
    if request.dtype is torch.float64:
        reasons.append("it does not compute in float64")
    if request.head_dim > LARGEST_HEAD_DIM:
        reasons.append(f"it takes a head_dim up to {LARGEST_HEAD_DIM}, not {request.head_dim}")
    if request.device.type != "cuda":
        if not (interpreted() and request.device.type == "cpu"):
            reasons.append(f"it runs on CUDA, not on {request.device.type}")
    elif not reasons:
        capability = torch.cuda.get_device_capability(request.device)
        least = (8, 0) if request.dtype is torch.bfloat16 else (7, 5)
        if capability < least:
            reasons.append(f"{request.dtype} needs compute capability {least[0]}.{least[1]}, this is {capability}")
        elif capability < (8, 0) and request.dtype is torch.float32 and request.head_dim > 128:
            reasons.append(f"float32 with a head_dim over 128 needs compute capability 8.0, this is {capability}")
    return reasons


def kernels(request: Request) -> tuple[str, ...]:
    assert request.whole is not None
    config = configs.config(
        "dkdv" if request.whole.backward else "forward",
        request.device,
        request.dtype,
        request.head_dim,
        request.is_causal,
        request.whole.form,
        request.whole.short,
    )
    return (f"tiles of {config.rows} queries x {config.keys} keys",)


def describe(kernels: tuple[str, ...], rows: set[int]) -> str:
    return kernels[0]


def is_preferred(request: Request) -> bool:
    """Whether these kernels are the first choice for a call that they can run."""
    return _preference(request)[0]


def because(request: Request) -> str:
    """Why they are, or are not, the first choice."""
    return _preference(request)[1]


def _preference(request: Request) -> tuple[bool, str]:
    whole = request.whole
    assert whole is not None
    if request.has_padding or request.has_dropout:
        return True, "of torch's fast kernels none takes a padding mask or our dropout"
    if request.deterministic:
        return True, "torch.use_deterministic_algorithms is on, and ours are the fastest that repeat"
    if request.dtype is torch.float32:
        return False, "in float32 torch's are faster"
    if request.device.type == "cuda" and torch.cuda.get_device_capability(request.device) < (8, 0):
        return False, "before compute capability 8.0 ours run without tensor cores"
    call = (request.device, request.head_dim, request.is_causal, whole.form, whole.backward)
    faster = configs.prefers_library(*call, whole.rows)
    if faster is None:
        ours = whole.form == "nested" and configs.head_dim_class(request.head_dim) == 64
        return ours, "this device was not measured: ours are taken where branches are nested, up to a head_dim of 64"
    first = configs.library_from(*call)
    if first is None:
        return True, "measured: ours are faster at every length"
    return not faster, f"measured: torch's are faster from {first:,} rows on: tokens times heads, of all samples"
