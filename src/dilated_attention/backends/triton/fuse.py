"""What the library kernels leave to do around them, in one launch each: parts merged, written or added in place.

A chain of elementwise kernels reads and writes everything several times, and on short sequences its launches take
longer than the attention itself. The results are those of `merge` up to rounding, and the same bits every time.

A program has BM rows of one head in one segment, and reads and writes each number once. Neighbouring programs have
neighbouring heads of the same rows: at one time they are in one stretch of memory, whether a tensor has its heads side
by side, as what is written, or its rows, as many a library's result.

Legend: out, part, target (b, L, h, D), unit last stride and any others; lse, part_lse (b, L, h), natural log; in a
program (BM, BD) and (BM). A part may have another dtype than what it goes into. All is computed in float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools
import math
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, float32, int64

from dilated_attention.backends.triton.launch import Launch
from dilated_attention.backends.triton.tiles import NOTHING

BLOCK = 4096  # numbers in a program: many programs a processor, each with loads enough to wait for
PER_WARP = 1024
# other lengths and heads compile nothing anew; of tuples Triton would read each number
SIZES = ["target_batch", "target_row", "target_head", "part_batch", "part_row", "part_head", "rows", "heads"]
LSE_SIZES = ["part_lse_batch", "part_lse_row", "part_lse_head"]


# What the kernels are compiled for.
Shape = namedtuple(
    "Shape",
    (
        "D", "BD", "BM",  # BD: D rounded up to a power of two
        "UNIT",  # which divides all strides of out and part, of targets and parts, as long accesses need it
        "WIDE",  # 64-bit offsets within a block
        "FLAG",  # of `merge_kernel`: what is in Out and Lse does not count; of `put_kernel`: add to what is there
        "IS_NUMBER",  # of `merge_kernel`: Zeros is no tensor
        "ALIGNED",  # whether all tensors begin at multiples of 16 bytes
    ),
)  # fmt: skip


@triton.jit
def place(rows, heads, C: constexpr):
    """This program's batch, first row and head, 64-bit so that no tensor is too large; which of BM rows are there."""
    blocks = (rows + C.BM - 1) // C.BM
    head, rest = tl.program_id(0) % heads, tl.program_id(0) // heads
    first = rest % blocks * C.BM
    here = tl.arange(0, C.BM) < rows - first
    at = (rest // blocks).to(int64), first.to(int64), head.to(int64)
    return at, here, here[:, None] & (tl.arange(0, C.BD) < C.D)[None, :]


@triton.jit
def rows_at(X, at, strides, C: constexpr):
    """Pointers to BM rows of X (b, L, h); ``at``: a batch, the first row and a head."""
    row = tl.arange(0, C.BM)
    if C.WIDE:
        row = row.to(int64)
    return X + (at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2]) + row * strides[1]


@triton.jit
def numbers_at(X, at, strides, C: constexpr):
    """Pointers to BM rows of X (b, L, h, D); dividing and multiplying tells the compiler that UNIT divides strides."""
    rows = rows_at(X, at, [stride // C.UNIT * C.UNIT for stride in strides], C)
    return rows[:, None] + tl.arange(0, C.BD)[None, :]


@triton.jit
def lighter(apart):
    """Of two states whose lse are so far apart, the weight of the lighter one."""
    e = tl.exp(-tl.abs(apart))
    return e / (1.0 + e)


@triton.jit
def log_add_exp(a, b):
    both = tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))
    return tl.where(a == b, a + 0.6931471805599453, both)  # + log 2; -inf - -inf is NaN: selected, not computed


@triton.jit(do_not_specialize=[*SIZES, *LSE_SIZES])
def merge_kernel(
    Out, Lse, Part, PartLse, Zeros, part_lse_batch, part_lse_row, part_lse_head,
    target_batch, target_row, target_head, part_batch, part_row, part_head, rows, heads, C: constexpr,
):  # fmt: skip
    """Zeros: None, a number, or one for each batch and head."""
    at, here, inside = place(rows, heads, C)
    strides = target_batch, target_row, target_head
    out_at, lse_at = numbers_at(Out, at, strides, C), rows_at(Lse, at, [stride // C.D for stride in strides], C)
    part_lse = tl.load(rows_at(PartLse, at, (part_lse_batch, part_lse_row, part_lse_head), C), mask=here)
    part = tl.load(numbers_at(Part, at, (part_batch, part_row, part_head), C), mask=inside).to(float32)
    empty = part_lse == NOTHING
    if Zeros is not None:
        zeros = Zeros if C.IS_NUMBER else tl.load(Zeros + at[0] * heads + at[2])
        light = lighter(part_lse - zeros)
        part *= tl.where(part_lse >= zeros, 1.0 - light, light)[:, None]
        part_lse = log_add_exp(part_lse, zeros)
    if C.FLAG or Zeros is not None:
        part = tl.where(empty[:, None], 0.0, part)  # whatever stood there, and whatever weight came of -inf - -inf
    if C.FLAG:
        tl.store(out_at, part.to(Out.dtype.element_ty), mask=inside)
        tl.store(lse_at, part_lse, mask=here)
    else:
        lse = tl.load(lse_at, mask=here)
        out = tl.load(out_at, mask=inside).to(float32)
        # one step from the heavier state towards the lighter: exact where they agree, or where one weighs nothing
        light = lighter(part_lse - lse)
        heavier = part_lse >= lse
        towards = tl.where((lse == NOTHING)[:, None], 0.0, part - out) * tl.where(heavier, -light, light)[:, None]
        merged = tl.where(heavier[:, None], part, out) + towards
        some = here & (part_lse != NOTHING)
        tl.debug_barrier()  # several threads may have loaded one lse: none stores before all have
        tl.store(out_at, merged.to(Out.dtype.element_ty), mask=inside & some[:, None])
        tl.store(lse_at, log_add_exp(lse, part_lse), mask=some)


@triton.jit(do_not_specialize=SIZES)
def put_kernel(
    Target, Part, target_batch, target_row, target_head, part_batch, part_row, part_head, rows, heads, C: constexpr
):
    at, _, inside = place(rows, heads, C)
    target_at = numbers_at(Target, at, (target_batch, target_row, target_head), C)
    part = tl.load(numbers_at(Part, at, (part_batch, part_row, part_head), C), mask=inside)
    if C.FLAG:
        part = tl.load(target_at, mask=inside).to(float32) + part.to(float32)
        tl.debug_barrier()  # as above
    tl.store(target_at, part.to(Target.dtype.element_ty), mask=inside)


def put_(target: Tensor, part: Tensor, add: bool) -> None:
    """target = part or target += part."""
    if target.numel():
        _prepared(put_kernel, _about(target), _about(part), add)(target, part)


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
        _prepared(merge_kernel, _about(out), _about(part), first, bool(number), (*number, *part_lse.stride()))(*given)


About = tuple[Any, Any, torch.dtype, torch.device]  # a tensor: its shape, strides, dtype and device


def _about(x: Tensor) -> About:
    return x.shape, x.stride(), x.dtype, x.device


@functools.lru_cache(maxsize=1024)
def _prepared(
    kernel: Any, target: About, part: About, flag: bool, is_number: bool = False, numbers: tuple[Any, ...] = ()
) -> Launch:
    """A launch for tensors of this kind. (Triton itself would look at all of a launch's arguments each time.)"""
    (batch, rows, heads, dim), strides, _, device = target
    both = (*strides[:3], *part[1][:3])
    columns = 1 << (dim - 1).bit_length()  # triton.next_power_of_2 takes microseconds
    block = min(1 << (rows - 1).bit_length(), max(1, BLOCK // columns))
    is_wide = block * max(both[1], both[4]) >= 2**31
    constants = Shape(dim, columns, block, math.gcd(8, *both), is_wide, flag, is_number, True)
    options = {"num_warps": max(1, min(8, block * columns // PER_WARP))}
    return Launch(kernel, device, batch * heads * -(-rows // block), (*numbers, *both, rows, heads), constants, options)
