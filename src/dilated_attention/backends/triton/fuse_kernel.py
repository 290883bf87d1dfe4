"""The kernels of `fuse`: a program has BM rows of one head in one segment, and reads and writes each number once.

Neighbouring programs have neighbouring heads of the same rows: at one time they are in one stretch of memory, whether a
tensor has its heads side by side, as what is written, or its rows, as many a library's result.

Legend: out, part, target (BM, BD); lse, part_lse (BM), natural log; BD = D rounded up to a power of two. All strides of
out and part, of targets and parts are multiples of UNIT, which long accesses need; WIDE: 64-bit offsets within a block.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from triton.language import constexpr, float32, int64

from dilated_attention.backends.triton.tiles import NOTHING

SIZES = ["target_batch", "target_row", "target_head", "part_batch", "part_row", "part_head", "rows", "heads"]
LSE_SIZES = ["part_lse_batch", "part_lse_row", "part_lse_head"]


# What the kernels are compiled for.
Shape = namedtuple(
    "Shape",
    (
        "D", "BD", "BM", "UNIT", "WIDE",
        "FLAG",  # of `merge_kernel`: what is in Out and Lse does not count; of `put_kernel`: add to what is there
        "IS_NUMBER",  # of `merge_kernel`: Zeros is no tensor; of `put_kernel`: the part is 0
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
def rows_at(X, at, per_batch, per_row, per_head, C: constexpr):
    """Pointers to BM rows of X (b, L, h); ``at``: a batch, the first row and a head."""
    row = tl.arange(0, C.BM)
    if C.WIDE:
        row = row.to(int64)
    return X + (at[0] * per_batch + at[1] * per_row + at[2] * per_head) + row * per_row


@triton.jit
def numbers_at(X, at, per_batch, per_row, per_head, C: constexpr):
    """Pointers to BM rows of X (b, L, h, D); dividing and multiplying tells the compiler that UNIT divides strides."""
    rows = rows_at(X, at, per_batch // C.UNIT * C.UNIT, per_row // C.UNIT * C.UNIT, per_head // C.UNIT * C.UNIT, C)
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


@triton.jit(do_not_specialize=[*SIZES, *LSE_SIZES])  # other lengths and heads compile nothing anew
def merge_kernel(
    Out, Lse, Part, PartLse, Zeros, part_lse_batch, part_lse_row, part_lse_head,
    target_batch, target_row, target_head, part_batch, part_row, part_head, rows, heads, C: constexpr,
):  # fmt: skip
    """Zeros: None, a number, or one for each batch and head."""
    at, here, inside = place(rows, heads, C)
    out_at = numbers_at(Out, at, target_batch, target_row, target_head, C)
    lse_at = rows_at(Lse, at, target_batch // C.D, target_row // C.D, target_head // C.D, C)
    part_lse = tl.load(rows_at(PartLse, at, part_lse_batch, part_lse_row, part_lse_head, C), mask=here)
    part = tl.load(numbers_at(Part, at, part_batch, part_row, part_head, C), mask=inside).to(float32)
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
    target_at = numbers_at(Target, at, target_batch, target_row, target_head, C)
    if C.IS_NUMBER:
        part = tl.where(inside, 0.0, 0.0)
    else:
        part = tl.load(numbers_at(Part, at, part_batch, part_row, part_head, C), mask=inside)
    if C.FLAG:
        part = tl.load(target_at, mask=inside).to(float32) + part.to(float32)
        tl.debug_barrier()  # as above
    tl.store(target_at, part.to(Target.dtype.element_ty), mask=inside)
