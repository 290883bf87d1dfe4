"""Our own kernels: a whole call, all heads and all segments, in one launch each way wherever the pattern allows it.

`dispatch` says which calls they run, and with which tiles. `nesting` finds the launches of a pattern, `tiling` writes
down what a launch has to do, `table` puts it on the device, `tiles`, `forward` and `backward` are the kernels that walk
through it, `launch` calls them and `whole_call` puts a call together. `decode` is decoding. `fuse` has what surrounds
PyTorch's kernels. `cache` keeps what was prepared. Importing this package imports no triton: it comes with the builds
of torch that can use it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from dilated_attention.backends.problem import Gradients, Inputs, Outputs
from dilated_attention.backends.triton import dispatch
from dilated_attention.backends.triton.dispatch import INSTALLED, preference, unsupported
from dilated_attention.call import Call

__all__ = ["INSTALLED", "backward_call", "forward_call", "kernels", "preference", "unsupported"]


def kernels(call: Call, backward: bool) -> tuple[str, ...]:
    if call.is_decode:
        return ("our kernel for few queries",)
    tile = dispatch.config("dkdv" if backward else "forward", call, dispatch.form_of(call, call.drops))
    return (f"tiles of {tile.rows} queries x {tile.keys} keys",)


@functools.cache
def _ways() -> tuple[Any, Any]:
    """The modules of decoding and of whole calls. They are imported late, as triton may be missing."""
    from dilated_attention.backends.triton import decode, whole_call

    return decode, whole_call


def forward_call(call: Call, inputs: Inputs) -> tuple[Tensor, Tensor]:
    decode, whole_call = _ways()
    found: tuple[Tensor, Tensor] = (decode if call.is_decode else whole_call).forward(call, inputs)
    return found


def backward_call(call: Call, inputs: Inputs, results: Outputs) -> Gradients:
    found: Gradients = _ways()[1].backward(call, inputs, results)
    return found
