"""The kernels of `fuse`: a program has BM rows of one head in one segment, and reads and writes each number once.

Neighbouring programs have neighbouring heads of the same rows: at one time they are in one stretch of memory, whether a
tensor has its heads side by side, as what is written, or its rows, as many a library's result.

Where a view has gaps, rows that are in no block, a program of FILLS rows writes them too: 0, and -inf for lse. Row i of
the view is then one of the ``rate`` tokens from i * rate on, out of ``width``; ``offset`` is which, ``step`` more for
each head.

Legend: out, part (BM, BD); lse, part_lse, zeros (BM), natural log; BD = D rounded up to a power of two. All strides of
out and part, of targets and parts are multiples of UNIT, which long accesses need; WIDE: 64-bit offsets within a block.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(program, rows, heads, BM: tl.constexpr):
    """The batch, first row and head of a program, 64-bit so that no tensor is too large; which of BM rows are there."""
    blocks = (rows + BM - 1) // BM
    head, rest = program % heads, program // heads
    first = rest % blocks * BM
    here = tl.arange(0, BM) < rows - first
    return (rest // blocks).to(tl.int64), first.to(tl.int64), head.to(tl.int64), here


@triton.jit
def rows_at(X, batch, first, head, per_batch, per_row, per_head, BM: tl.constexpr, WIDE: tl.constexpr):
    """Pointers to BM rows of X (b, L, h)."""
    row = tl.arange(0, BM)
    if WIDE:
        row = row.to(tl.int64)
    return X + (batch * per_batch + first * per_row + head * per_head) + row * per_row


@triton.jit
def numbers_at(
    X, batch, first, head, per_batch, per_row, per_head, BD: tl.constexpr, BM: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Pointers to BM rows of X (b, L, h, D); dividing and multiplying tells the compiler that UNIT divides strides."""
    per_batch, per_row, per_head = per_batch // UNIT * UNIT, per_row // UNIT * UNIT, per_head // UNIT * UNIT
    rows = rows_at(X, batch, first, head, per_batch, per_row, per_head, BM, WIDE)
    return rows[:, None] + tl.arange(0, BD)[None, :]


@triton.jit
def fill_gaps(at, blank, columns, there, first, rate, own, width, per_token, BM: tl.constexpr):
    """``blank`` in all rows between those ``at`` (BM, columns), of which ``own`` is the offset."""
    row = first + tl.arange(0, BM)
    for gap in range(0, rate):
        if gap != own:
            gaps = there & (row * rate + gap < width)
            tl.store(at + (gap - own) * per_token, blank, mask=gaps[:, None] & columns)


@triton.jit
def lighter(apart):
    """Of two states whose lse are so far apart, the weight of the lighter one."""
    e = tl.exp(-tl.abs(apart))
    return e / (1.0 + e)


@triton.jit
def log_add_exp(a, b):
    both = tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))
    return tl.where(a == b, a + 0.6931471805599453, both)  # + log 2; -inf - -inf is NaN: selected, not computed


@triton.jit(
    do_not_specialize=[
        "out_batch", "out_row", "out_head", "part_batch", "part_row", "part_head", "lse_batch", "lse_row", "lse_head",
        "part_lse_batch", "part_lse_row", "part_lse_head", "zeros_batch", "zeros_row", "zeros_head", "rows", "heads",
        "rate", "offset", "step", "width",
    ]
)  # fmt: skip
def merge_kernel(
    Out, Lse, Part, PartLse, Zeros,
    out_batch, out_row, out_head, part_batch, part_row, part_head, lse_batch, lse_row, lse_head,
    part_lse_batch, part_lse_row, part_lse_head, zeros_batch, zeros_row, zeros_head, rows, heads,
    rate, offset, step, width,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, EACH: tl.constexpr,
    FIRST: tl.constexpr, FILLS: tl.constexpr,
):  # fmt: skip
    """FIRST: what is in Out and Lse does not count. Zeros: None, a number, or (EACH) a tensor."""
    batch, first, head, there = place(tl.program_id(0), (width + rate - 1) // rate if FILLS else rows, heads, BM)
    here = there & (tl.arange(0, BM) < rows - first)
    columns = (tl.arange(0, BD) < D)[None, :]
    inside = here[:, None] & columns
    out_at = numbers_at(Out, batch, first, head, out_batch, out_row, out_head, BD, BM, UNIT, WIDE)
    lse_at = rows_at(Lse, batch, first, head, lse_batch, lse_row, lse_head, BM, WIDE)
    part_at = numbers_at(Part, batch, first, head, part_batch, part_row, part_head, BD, BM, UNIT, WIDE)
    part_lse_at = rows_at(PartLse, batch, first, head, part_lse_batch, part_lse_row, part_lse_head, BM, WIDE)
    part_lse = tl.load(part_lse_at, mask=here).to(Lse.dtype.element_ty)
    part = tl.load(part_at, mask=inside).to(Lse.dtype.element_ty)
    empty = part_lse == float("-inf")
    if Zeros is not None:
        if EACH:
            zeros_at = rows_at(Zeros, batch, first, head, zeros_batch, zeros_row, zeros_head, BM, WIDE)
            zeros = tl.load(zeros_at, mask=here).to(Lse.dtype.element_ty)
        else:
            zeros = tl.full((BM,), Zeros, Lse.dtype.element_ty)
        light = lighter(part_lse - zeros)
        part *= tl.where(part_lse >= zeros, 1.0 - light, light)[:, None]
        part_lse = log_add_exp(part_lse, zeros)
    if FIRST or Zeros is not None:
        part = tl.where(empty[:, None], 0.0, part)  # whatever stood there, and whatever weight came of -inf - -inf
    if FIRST:
        tl.store(out_at, part.to(Out.dtype.element_ty), mask=inside)
        tl.store(lse_at, part_lse, mask=here)
        if FILLS:
            own, one = offset + head * step, (tl.arange(0, 1) == 0)[None, :]
            blank, blank_lse = (
                tl.zeros((BM, BD), Out.dtype.element_ty),
                tl.full((BM, 1), -float("inf"), Lse.dtype.element_ty),
            )
            fill_gaps(out_at, blank, columns, there, first, rate, own, width, out_row // rate // UNIT * UNIT, BM)
            fill_gaps(lse_at[:, None], blank_lse, one, there, first, rate, own, width, lse_row // rate, BM)
    else:
        lse = tl.load(lse_at, mask=here)
        out = tl.load(out_at, mask=inside).to(Lse.dtype.element_ty)
        # one step from the heavier state towards the lighter: exact where they agree, or where one weighs nothing
        light = lighter(part_lse - lse)
        heavier = part_lse >= lse
        towards = tl.where((lse == float("-inf"))[:, None], 0.0, part - out) * tl.where(heavier, -light, light)[:, None]
        merged = tl.where(heavier[:, None], part, out) + towards
        some = here & (part_lse != float("-inf"))
        tl.debug_barrier()  # several threads may have loaded one lse: none stores before all have
        tl.store(out_at, merged.to(Out.dtype.element_ty), mask=inside & some[:, None])
        tl.store(lse_at, log_add_exp(lse, part_lse), mask=some)


@triton.jit
def put_rows(
    Target, Part, program, target_batch, target_row, target_head, part_batch, part_row, part_head, rows, heads,
    rate, offset, step, width,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr,
    FILLS: tl.constexpr,
):  # fmt: skip
    batch, first, head, there = place(program, (width + rate - 1) // rate if FILLS else rows, heads, BM)
    columns = (tl.arange(0, BD) < D)[None, :]
    inside = (there & (tl.arange(0, BM) < rows - first))[:, None] & columns
    target_at = numbers_at(Target, batch, first, head, target_batch, target_row, target_head, BD, BM, UNIT, WIDE)
    part_at = numbers_at(Part, batch, first, head, part_batch, part_row, part_head, BD, BM, UNIT, WIDE)
    part = tl.load(part_at, mask=inside)
    if ADD:
        SUM: tl.constexpr = tl.float64 if Target.dtype.element_ty == tl.float64 else tl.float32
        part = tl.load(target_at, mask=inside).to(SUM) + part.to(SUM)
        tl.debug_barrier()  # as above
    tl.store(target_at, part.to(Target.dtype.element_ty), mask=inside)
    if FILLS:
        own, blank = offset + head * step, tl.zeros((BM, BD), Target.dtype.element_ty)
        fill_gaps(target_at, blank, columns, there, first, rate, own, width, target_row // rate // UNIT * UNIT, BM)


@triton.jit(
    do_not_specialize=[
        "batch_0", "row_0", "head_0", "part_batch_0", "part_row_0", "part_head_0", "rows_0", "heads_0", "second",
        "batch_1", "row_1", "head_1", "part_batch_1", "part_row_1", "part_head_1", "rows_1", "heads_1", "third",
        "batch_2", "row_2", "head_2", "part_batch_2", "part_row_2", "part_head_2", "rows_2", "heads_2", "end",
        "rate", "offset", "step", "width",
    ]
)  # fmt: skip
def put_kernel(
    Target_0, Part_0, Target_1, Part_1, Target_2, Part_2,
    batch_0, row_0, head_0, part_batch_0, part_row_0, part_head_0, rows_0, heads_0, second,
    batch_1, row_1, head_1, part_batch_1, part_row_1, part_head_1, rows_1, heads_1, third,
    batch_2, row_2, head_2, part_batch_2, part_row_2, part_head_2, rows_2, heads_2, end, rate, offset, step, width,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr,
    FILLS: tl.constexpr,
):  # fmt: skip
    """The programs of the first pair, then from ``second`` on those of the second, from ``third`` on of the third."""
    program = tl.program_id(0)
    if program < second:
        put_rows(
            Target_0, Part_0, program, batch_0, row_0, head_0, part_batch_0, part_row_0, part_head_0, rows_0, heads_0,
            rate, offset, step, width, D, BD, BM, UNIT, WIDE, ADD, FILLS,
        )  # fmt: skip
    elif program < third:
        put_rows(
            Target_1, Part_1, program - second, batch_1, row_1, head_1, part_batch_1, part_row_1, part_head_1, rows_1,
            heads_1, rate, offset, step, width, D, BD, BM, UNIT, WIDE, ADD, FILLS,
        )  # fmt: skip
    else:
        put_rows(
            Target_2, Part_2, program - third, batch_2, row_2, head_2, part_batch_2, part_row_2, part_head_2, rows_2,
            heads_2, rate, offset, step, width, D, BD, BM, UNIT, WIDE, ADD, FILLS,
        )  # fmt: skip
