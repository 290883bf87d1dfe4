"""Our own kernels: a whole call, all heads and all segments, in one launch each way wherever the pattern allows it.

`dispatch` says which calls they run, and with which tiles. `nesting` finds the launches of a DilatedPattern and
`strips` those of other patterns, `tiling` writes down what a launch has to do, `table` puts it on the device,
`attention` has the kernels that walk through it, `launch` calls them and `whole_call` puts a call together. `decode` is
decoding, which reads the rectangles of `endless`. `fuse` has what surrounds PyTorch's kernels. `cache` keeps what was
prepared. Importing this package imports no triton: it comes with the builds of torch that can use it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from dilated_attention.backends.problem import Gradients, Inputs, Outputs, Pair
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
def _module(name: str) -> Any:
    """One of this package that is imported late, as triton may be missing."""
    return importlib.import_module(f"{__package__}.{name}")


def forward_call(call: Call, inputs: Inputs) -> Pair:
    return _module("decode" if call.is_decode else "whole_call").forward(call, inputs)  # type: ignore[no-any-return]


def backward_call(call: Call, inputs: Inputs, results: Outputs) -> Gradients:
    return _module("whole_call").backward(call, inputs, results)  # type: ignore[no-any-return]
