"""What the library kernels leave to do around them, in one launch each: parts merged, written or added in place.

A chain of elementwise kernels reads and writes everything several times, and on short sequences its launches take
longer than the attention itself. The results are those of `merge` up to rounding, and the same bits every time.

Legend: out, part, target (b, L, h, D), unit last stride and any others; lse, part_lse (b, L, h). A part may have
another dtype than what it goes into. All is computed in the dtype of lse, sums in float32 at least. Gaps: the rate,
the first head's offset, how much more each head's is, and the tokens of a segment, of which a view has one in rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dilated_attention.backends.triton.fuse_kernel import merge_kernel, put_kernel

BLOCK = 4096  # numbers in a program: many programs a processor, each with loads enough to wait for
PER_WARP = 1024

Gaps = tuple[int, int, int, int]


def put_(targets: Sequence[Tensor], parts: Sequence[Tensor], add: bool, gaps: Gaps | None = None) -> None:
    """targets = parts or targets += parts: one to three pairs of one D, each of any (b, L, h). No targets overlap.

    Gaps get 0, where nothing is added.
    """
    assert not (add and gaps)
    rate, _, _, width = gaps or (1, 0, 0, 0)
    longest = -(-width // rate) if gaps else max(target.shape[1] for target in targets)
    block_rows, block_dim, warps = _block(longest, targets[0].shape[3])
    pointers: list[Tensor] = []
    numbers: list[int] = []
    unit, row_step, programs = 8, 0, 0
    for target, part in zip(targets, parts, strict=True):
        batch, rows, heads, dim = target.shape
        strides, part_strides = target.stride()[:3], part.stride()[:3]
        programs += batch * heads * -(-(longest if gaps else rows) // block_rows)
        pointers += (target, part)
        numbers += (*strides, *part_strides, rows, heads, programs)
        unit = math.gcd(unit, *strides, *part_strides, strides[1] // rate)
        row_step = max(row_step, strides[1], part_strides[1])
    if not programs or not dim:
        return
    for _ in range(len(targets), 3):  # no programs
        pointers += pointers[:2]
        numbers += numbers[:9]
    with torch.cuda.device_of(pointers[0]):  # type: ignore[no-untyped-call]
        put_kernel[(programs,)](
            *pointers, *numbers, *(gaps or (1, 0, 0, 0)), D=dim, BD=block_dim, BM=block_rows, UNIT=unit,
            WIDE=block_rows * row_step >= 2**31, ADD=add, FILLS=gaps is not None, num_warps=warps,
        )  # fmt: skip


def merge_(
    out: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    log_zeros: Tensor | float | None = None,
    gaps: Gaps | None = None,
    *,
    first: bool = False,
) -> None:
    """Merge (part, part_lse) into (out, lse) in place.

    ``log_zeros``: the part first gets exp(log_zeros) keys of score 0 and value 0; broadcast to (b, L, h). ``first``:
    what is in (out, lse) does not count, and gaps get 0 and -inf.
    """
    batch, rows, heads, dim = out.shape
    if not out.numel():
        return
    if isinstance(log_zeros, float) and lse.dtype is torch.float64:
        log_zeros = lse.new_full((), log_zeros)  # as an argument it would be rounded to float32
    zeros_strides = log_zeros.expand(lse.shape).stride() if isinstance(log_zeros, Tensor) else None
    strides, part_strides, lse_strides = out.stride()[:3], part.stride()[:3], lse.stride()
    part_lse_strides = part_lse.stride()
    rate, _, _, width = gaps or (1, 0, 0, 0)
    longest = -(-width // rate) if gaps else rows
    block_rows, block_dim, warps = _block(longest, dim)
    row_step = max(strides[1], part_strides[1], lse_strides[1], part_lse_strides[1])
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        merge_kernel[(batch * heads * -(-longest // block_rows),)](
            out, lse, part, part_lse, log_zeros,
            *strides, *part_strides, *lse_strides, *part_lse_strides, *(zeros_strides or (0, 0, 0)), rows, heads,
            *(gaps or (1, 0, 0, 0)),
            D=dim, BD=block_dim, BM=block_rows, UNIT=math.gcd(8, *strides, *part_strides, strides[1] // rate),
            WIDE=block_rows * row_step >= 2**31, EACH=zeros_strides is not None, FIRST=first,
            FILLS=gaps is not None, num_warps=warps,
        )  # fmt: skip


def _block(rows: int, dim: int) -> tuple[int, int, int]:
    """How many rows and columns a program has, both powers of two, and how many warps."""
    block_dim = 1 << (dim - 1).bit_length()  # triton.next_power_of_2 takes microseconds
    block_rows = min(1 << (rows - 1).bit_length(), max(1, BLOCK // block_dim))
    return block_rows, block_dim, max(1, min(8, block_rows * block_dim // PER_WARP))
