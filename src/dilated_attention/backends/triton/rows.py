"""Rows of a tile in one or two parts of columns: loaded, stored, multiplied.

Triton's tensors have powers of two of columns. Rows of 48 numbers are a part of 32 and one of 16: as one part they
would cost what 64 cost. A tile's rows are a tuple of (R, BD) and, unless BE is 0, (R, BE). C: `tiles.Constants`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, float32


@triton.jit
def load_columns(rows, valid, FIRST: constexpr, COUNT: constexpr, C: constexpr, MASKED: constexpr):
    """(R, COUNT), from the column FIRST on."""
    columns = FIRST + tl.arange(0, COUNT)
    pointers = rows[:, None] + columns[None, :]
    if MASKED:
        inside = valid[:, None] & (columns < C.D)[None, :] if FIRST + COUNT > C.D else valid[:, None]
        x = tl.load(pointers, mask=inside, other=0.0)
    elif FIRST + COUNT > C.D:
        x = tl.load(pointers, mask=(columns < C.D)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def load_rows(base, steps, stride, valid, C: constexpr, MASKED: constexpr):
    """The rows at ``base``, in parts; rows that are not valid, and columns beyond D, are 0.

    C.ALIGNED: Triton knows so by itself only where 16 divides all strides: with a head dim of 24 it would load number
    by number.
    """
    rows = base + steps * stride
    if C.ALIGNED:
        rows = tl.multiple_of(rows, 16)
    x = (load_columns(rows, valid, 0, C.BD, C, MASKED),)
    if C.BE:
        x += (load_columns(rows, valid, C.BD, C.BE, C, MASKED),)
    return x


@triton.jit
def store_columns(rows, valid, x, FIRST: constexpr, C: constexpr, ADD: constexpr):
    columns = FIRST + tl.arange(0, x.shape[1])
    inside = valid[:, None] & (columns < C.D)[None, :]
    pointers = rows[:, None] + columns[None, :]
    if ADD:
        x += tl.load(pointers, mask=inside, other=0.0).to(float32)
    tl.store(pointers, x.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(base, steps, stride, valid, x, C: constexpr, ADD: constexpr):
    """Write parts to the rows at ``base``, or add them to what is there."""
    rows = base + steps * stride
    store_columns(rows, valid, x[0], 0, C, ADD)
    if C.BE:
        store_columns(rows, valid, x[1], C.BD, C, ADD)


@triton.jit
def zeros(R: constexpr, BD: constexpr, BE: constexpr):
    """(R, D) of zeros, in parts."""
    x = (tl.zeros((R, BD), float32),)
    if BE:
        x += (tl.zeros((R, BE), float32),)
    return x


@triton.jit
def scaled(x, factor):
    """The rows of x in float32, times factor: one for all or (R, 1)."""
    return [part.to(float32) * factor for part in x]


@triton.jit
def not_finite(x):
    """(R,): 1 for rows with a number that is infinite or NaN, else 0."""
    found = 0
    for part in tl.static_range(len(x)):
        found |= tl.max(tl.where(tl.abs(x[part]) < float("inf"), 0, 1), 1)
    return found


@triton.jit
def row_products(x, y):
    """(R,): the product of each row of x with that of y, in float32."""
    found = tl.sum(x[0].to(float32) * y[0].to(float32), 1)
    if len(x) == 2:
        found += tl.sum(x[1].to(float32) * y[1].to(float32), 1)
    return found


@triton.jit
def products(x, y, C: constexpr):
    """(R, C): all rows of x times all rows of y."""
    found = None
    for part in tl.static_range(len(x)):
        found = tl.dot(x[part], tl.trans(y[part]), found, input_precision=C.PRECISION)
    return found


@triton.jit
def add_sums(acc, weights, x, C: constexpr):
    """acc plus, for each of its rows, the rows of x summed by weights (R, C)."""
    weights = weights.to(x[0].dtype)
    found = ()
    for part in tl.static_range(len(x)):
        found += (tl.dot(weights, x[part], acc[part], input_precision=C.PRECISION),)
    return found
