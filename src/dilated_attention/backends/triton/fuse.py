"""What the library kernels leave to do around them, in one launch each: parts merged, written or added in place.

A chain of elementwise kernels reads and writes everything several times, and on short sequences its launches take
longer than the attention itself. The results are those of `merge` up to rounding, and the same bits every time.

Legend: out, part, target (b, L, h, D), unit last stride and any others; lse, part_lse (b, L, h). A part may have
another dtype than what it goes into. All is computed in float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends.triton.fuse_kernel import Shape, merge_kernel, put_kernel
from dilated_attention.backends.triton.launch import Launch
from dilated_attention.checks import Ints

BLOCK = 4096  # numbers in a program: many programs a processor, each with loads enough to wait for
PER_WARP = 1024


def put_(target: Tensor, part: Tensor, add: bool) -> None:
    """target = part or target += part."""
    if target.numel():
        _prepared(put_kernel, *_about(target), *_about(part), add)(target, part)


def zero_(target: Tensor) -> None:
    """As target.zero_(), which takes longer for some heads of a tensor than for all."""
    if target.numel():
        _prepared(put_kernel, *_about(target), *_about(target), False, True)(target, target)


def merge_(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, log_zeros: Tensor | float | None = None, *, first: bool
) -> None:
    """Merge (part, part_lse) into (out, lse) in place, which are the same rows of two contiguous tensors.

    ``log_zeros``: the part first gets exp(log_zeros) keys of score 0 and value 0; a tensor (b, 1, h) is contiguous.
    ``first``: what is in (out, lse) does not count.
    """
    if out.numel():
        given, number = [out, lse, part, part_lse], [log_zeros]
        if isinstance(log_zeros, Tensor):
            given, number = [*given, log_zeros], []
        _prepared(merge_kernel, *_about(out), *_about(part), first, bool(number), (*number, *part_lse.stride()))(*given)


def _about(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


@functools.lru_cache(maxsize=1024)
def _prepared(
    kernel: Any, shape: Ints, strides: Ints, dtype: torch.dtype, device: torch.device, _: Any,
    part_strides: Ints, part_dtype: torch.dtype, part_device: torch.device, flag: bool,
    is_number: bool = False, numbers: tuple[Any, ...] = (),
) -> Launch:  # fmt: skip
    """A launch for tensors of this kind. (Triton itself would look at all of a launch's arguments each time.)"""
    batch, rows, heads, dim = shape
    both = (*strides[:3], *part_strides[:3])
    columns = 1 << (dim - 1).bit_length()  # triton.next_power_of_2 takes microseconds
    block = min(1 << (rows - 1).bit_length(), max(1, BLOCK // columns))
    is_wide = block * max(strides[1], part_strides[1]) >= 2**31
    constants = Shape(dim, columns, block, math.gcd(8, *both), is_wide, flag, is_number, True)
    options = {"num_warps": max(1, min(8, block * columns // PER_WARP))}
    return Launch(kernel, device, batch * heads * -(-rows // block), (*numbers, *both, rows, heads), constants, options)
