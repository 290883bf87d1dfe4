"""What the library kernels leave to do around them, in one launch each: parts merged, written or added in place.

A chain of elementwise kernels reads and writes everything several times, and on short sequences its launches take
longer than the attention itself. The results are those of `merge` up to rounding, and the same bits every time.

Legend: out, part, target (b, L, h, D), unit last stride and any others; lse, part_lse (b, L, h). A part may have
another dtype than what it goes into. All is computed in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.triton.fuse_kernel import merge_kernel, put_kernel

BLOCK = 4096  # numbers in a program: many programs a processor, each with loads enough to wait for
PER_WARP = 1024


def put_(target: Tensor, part: Tensor, add: bool) -> None:
    """target = part or target += part."""
    if target.numel():
        _launch(put_kernel, (target, part), target, part, add)


def merge_(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, log_zeros: Tensor | float | None = None, *, first: bool
) -> None:
    """Merge (part, part_lse) into (out, lse) in place, which are the same rows of two contiguous tensors.

    ``log_zeros``: the part first gets exp(log_zeros) keys of score 0 and value 0; a tensor (b, 1, h) is contiguous.
    ``first``: what is in (out, lse) does not count.
    """
    if out.numel():
        given = (out, lse, part, part_lse, log_zeros, *part_lse.stride())
        _launch(merge_kernel, given, out, part, first, isinstance(log_zeros, Tensor))


def _launch(kernel: Any, given: tuple[Any, ...], target: Tensor, part: Tensor, *flags: bool) -> None:
    """With the strides of both, their shape, and what the kernel is compiled for."""
    batch, rows, heads, dim = target.shape
    strides = (*target.stride()[:3], *part.stride()[:3])
    columns = 1 << (dim - 1).bit_length()  # triton.next_power_of_2 takes microseconds
    block = min(1 << (rows - 1).bit_length(), max(1, BLOCK // columns))
    is_wide = block * max(strides[1], strides[4]) >= 2**31
    with torch.cuda.device_of(target):  # type: ignore[no-untyped-call]
        kernel[(batch * heads * -(-rows // block),)](
            *given, *strides, rows, heads, dim, columns, block, math.gcd(8, *strides), is_wide, *flags,
            num_warps=max(1, min(8, block * columns // PER_WARP)),
        )  # fmt: skip
