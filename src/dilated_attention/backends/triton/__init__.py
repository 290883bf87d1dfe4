"""Our own kernels: a whole call, all heads and all segments, in one launch each way wherever the pattern allows it.

`nesting` finds the launches of a pattern, `tiling` writes the work of a launch down, `table` puts it on the device,
`tiles`, `forward` and `backward` are the kernels that walk through it, `launch` calls them and `whole_call` puts a call
together. `decode` is decoding. `fuse` has what surrounds PyTorch's kernels. `cache` keeps what was prepared.
Importing this package imports no triton: it comes with the builds of torch that can use it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.problem import Gradients, Inputs, Outputs
from dilated_attention.backends.triton import configs, nesting
from dilated_attention.call import ON_DEVICE, Call

LARGEST_HEAD_DIM = max(configs.SMALL)
MOST_FEW_QUERIES = 64  # with more, most rows of a tile take no part in a dilated branch
INSTALLED = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, step by step: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unsupported(call: Call, backward: bool) -> list[str]:
    """Why these kernels cannot run a call, one sentence each."""
    reasons = []
    if not INSTALLED:
        reasons.append("triton is not installed: it comes with torch's CUDA builds")
    if call.in_parts:
        reasons.append("it takes whole calls on one device, not the parts that ranks exchange and streams are cut into")
    if call.memory_cap:
        reasons.append("it takes calls whole, and a cap on memory asks for parts")
    if call.dtype is torch.float64:
        reasons.append("it does not compute in float64")
    if call.head_dim > LARGEST_HEAD_DIM:
        reasons.append(f"it takes a head_dim up to {LARGEST_HEAD_DIM}, not {call.head_dim}")
    if call.is_decode and call.drops:
        reasons.append("its decoding has no dropout")
    if call.is_decode and backward:
        reasons.append("its decoding has no backward pass")
    if backward and not call.pattern.is_exact:
        reasons.append("it has no gradient with mixing_gradient='detached'")
    if call.device.type != "cuda":
        if not (interpreted() and call.device.type == "cpu"):
            reasons.append(f"it runs on CUDA, not on {call.device.type}")
    elif not reasons:
        capability = torch.cuda.get_device_capability(call.device)
        least = (8, 0) if call.dtype is torch.bfloat16 else (7, 5)
        if capability < least:
            reasons.append(f"{call.dtype} needs compute capability {least[0]}.{least[1]}, this is {capability}")
        elif capability < (8, 0) and call.dtype is torch.float32 and call.head_dim > 128 and not call.is_decode:
            reasons.append(f"float32 with a head_dim over 128 needs compute capability 8.0, this is {capability}")
    return reasons


def kernels(call: Call, backward: bool) -> tuple[str, ...]:
    if call.is_decode:
        return ("our kernel for few queries",)
    kernel, form = "dkdv" if backward else "forward", nesting.form_of(call.pattern, call.is_causal, call.drops)
    tile = configs.config(
        kernel, call.device, call.dtype, call.head_dim, call.is_causal, form, nesting.is_short(call)
    )  # fmt: skip
    return (f"tiles of {tile.rows} queries x {tile.keys} keys",)


def preference(call: Call, backward: bool) -> tuple[bool, str]:
    """Whether these kernels are the first choice for a call that they can run, and why."""
    if call.is_decode:
        few = call.start == ON_DEVICE or call.queries <= MOST_FEW_QUERIES
        return few, "" if few else (
            f"its decoding is for up to {MOST_FEW_QUERIES} queries, unless positions are on the device"
        )
    if call.has_padding or call.drops:
        return True, "of torch's fast kernels none takes a padding mask or our dropout"
    if call.deterministic:
        return True, "torch.use_deterministic_algorithms is on, and ours are the fastest that repeat"
    if call.dtype is torch.float32:
        return False, "in float32 torch's are faster"
    if call.device.type == "cuda" and torch.cuda.get_device_capability(call.device) < (8, 0):
        return False, "before compute capability 8.0 ours run without tensor cores"
    form = nesting.measured_as(call)
    asked = (call.device, call.head_dim, call.is_causal, form, backward)
    rows = nesting.rows_of_a_sequence(call)
    faster, first = configs.prefers_library(*asked, rows), configs.library_from(*asked)
    if faster is None:
        ours = form == "nested" and call.head_dim <= 64
        return ours, "this device was not measured: ours are taken where branches are nested, up to a head_dim of 64"
    if first is None:
        return True, "measured: ours are faster at every length"
    told = "tokens times heads, of all samples or of one packed sequence"
    return not faster, f"measured: torch's are faster from {first:,} rows on: {told}"


@functools.cache
def _ways() -> tuple[Any, Any]:
    """The modules of few queries and of whole calls. They are imported late, as triton may be missing."""
    from dilated_attention.backends.triton import decode, whole_call

    return decode, whole_call


def forward_call(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor]:
    decode, whole_call = _ways()
    found: tuple[Tensor, Tensor]
    if call.is_decode:
        found = decode.forward(call, inputs)
        return found

    def trains() -> bool:
        return preference(call, True)[0] and any(x.requires_grad for x in inputs[:3])

    found = whole_call.forward(call, inputs, trains)
    return found


def backward_call(call: Call, inputs: Inputs, results: Outputs) -> Gradients:
    found: Gradients = _ways()[1].backward(call, inputs, results)
    return found
