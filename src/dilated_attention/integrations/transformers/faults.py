"""Errors that only the numbers in a tensor can tell, compiled or not.

Eager code reads the numbers at once. A compiler sees none: there, a registered op reads them when the compiled code
runs, and raises the same error. Who asks, asks once in a forward pass: the host waits for the device.

Legend: a fault, an int64 tensor without dimensions: 0, or the number of an error in FAULTS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

JUMPS, BREAKS, DIFFERS, KEYS, SHORT, WEIGHTS, PAST = range(1, 8)
NOT_CAUSAL = "dilated attention is for causal decoders: it takes no bidirectional and no cross-attention"
NO_WEIGHTS = "output_attentions: the attention weights are never held in memory"
FAULTS = {
    JUMPS: "position_ids jump to another number than 0: packed documents must begin at 0; leave position_ids out if "
    "these are not documents",
    BREAKS: "position_ids must grow by 1 from token to token, and go on after those in the cache; those of packed "
    "documents may begin again at 0, but only without attention_mask and without a cache (use_cache=False). If there "
    "is a cache, make a new one: it may hold some of these tokens already",
    DIFFERS: "position_ids and cu_seq_lens_q differ: position_ids must begin at 0 in each document, and grow by 1 "
    "inside it; without position_ids a model numbers all documents as one, so pass position_ids",
    KEYS: "cu_seq_lens_q and cu_seq_lens_k differ: dilated attention is self-attention, without a cache",
    SHORT: "attention_mask is too short: it must have a column for each token in the cache and for each new token",
    WEIGHTS: f"dilated attention cannot honour {NO_WEIGHTS}",
    PAST: "attention_mask has other real tokens before this call than DilatedCache kept: pass a mask with the columns "
    "of all earlier calls, the same as then, or none if none of them had one; make a new cache for another mask",
}

_library: Any = torch.library.Library("dilated_attention", "FRAGMENT")  # type: ignore[no-untyped-call]
# a CUDA graph cannot hold what the host reads
_library.define("no_fault(Tensor fault) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))


def no_fault(fault: Tensor | None) -> None:
    """Raise if there is one."""
    number = 0 if fault is None else int(fault)
    if number:
        raise ValueError(FAULTS[number])


def _no_fault(fault: Tensor) -> Tensor:
    no_fault(fault)
    return torch.zeros_like(fault)


_library.impl("no_fault", _no_fault, "CompositeExplicitAutograd")
torch.library.register_fake("dilated_attention::no_fault", torch.zeros_like, lib=_library)


def checked(x: Tensor, fault: Tensor | None) -> Tensor:
    """Returns x, or raises if there is a fault.

    Compiled code returns x + 0, and the 0 comes from the check: a compiler drops a check whose result nobody uses.
    """
    if fault is not None and torch.compiler.is_compiling():
        zero: Tensor = torch.ops.dilated_attention.no_fault(fault)
        return x + zero.to(x.device, x.dtype)
    no_fault(fault)
    return x
