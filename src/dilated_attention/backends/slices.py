"""A dense problem in slices of its heads: under a cap on the memory of one call, and again when memory runs out.

Heads do not know of one another, so the result is the same whatever the slices. Whoever asks takes each slice's results
before the next is computed, so no more than those of one slice are there at a time.

Legend: q, out (b, Lq, h, D); k, v (b, Lk, hk, D); lse (b, Lq, h).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.choose import Choice
from dilated_attention.backends.problem import Masking, accumulate_dtype
from dilated_attention.dropout import Dropout

log = logging.getLogger("dilated_attention")


@dataclass
class Limit:
    """How many bytes the results of one call may take (None: no cap), and how often memory ran out nevertheless."""

    max_workspace_bytes: int | None = None
    retries: int = 0


ALL = slice(None)


def of_heads(x: Tensor, heads: slice) -> Tensor:
    """x (b, L, h, ...) of some heads; of all it is x itself, as even a view takes its time."""
    return x if heads == ALL else x[:, :, heads]


class Part(NamedTuple):
    """The results for some key/value heads and the query heads that follow them."""

    heads: slice
    rows: slice
    results: tuple[Tensor, ...]


def forward(choice: Choice, limit: Limit, q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Iterator[Part]:
    """(out, lse), some heads at a time."""

    def one(heads: slice, rows: slice) -> tuple[Tensor, ...]:
        part: tuple[Tensor, Tensor] = choice.module.forward(
            choice.kernels, q[:, :, rows], k[:, :, heads], v[:, :, heads], _masking(masking, heads, rows)
        )
        return part

    group, exact = q.shape[2] // k.shape[2], accumulate_dtype(q.dtype).itemsize
    per_head = group * q.shape[0] * q.shape[1] * (q.shape[3] * q.itemsize + exact)
    return _sliced(one, k.shape[2], group, per_head, limit)


def backward(
    choice: Choice,
    limit: Limit,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    masking: Masking,
) -> Iterator[Part]:
    """(dq, dk, dv), some heads at a time."""

    def one(heads: slice, rows: slice) -> tuple[Tensor, ...]:
        part: tuple[Tensor, Tensor, Tensor] = choice.module.backward(
            choice.kernels,
            dout[:, :, rows],
            q[:, :, rows],
            k[:, :, heads],
            v[:, :, heads],
            out[:, :, rows],
            lse[:, :, rows],
            None if dlse is None else dlse[:, :, rows],
            _masking(masking, heads, rows),
        )
        return part

    group = q.shape[2] // k.shape[2]
    per_head = (group * q[:, :, 0].numel() + 2 * k[:, :, 0].numel()) * q.itemsize
    return _sliced(one, k.shape[2], group, per_head, limit)


def _sliced(
    one: Callable[[slice, slice], tuple[Tensor, ...]], heads: int, group: int, bytes_per_head: int, limit: Limit
) -> Iterator[Part]:
    """All heads, as many at a time as the cap allows; half as many each time that memory runs out."""
    cap = limit.max_workspace_bytes
    step = heads if cap is None else max(1, min(heads, cap // max(1, bytes_per_head)))
    first = 0
    while first < heads:
        last = min(heads, first + step)
        rows = slice(first * group, last * group)
        try:
            results = one(slice(first, last), rows)
        except torch.OutOfMemoryError as error:
            if step == 1:
                raise torch.OutOfMemoryError(
                    f"out of memory with a single head in a call, whose results alone take {bytes_per_head:,} bytes: "
                    "use more ranks, shorter segments, or fewer samples at a time"
                ) from error
            limit.retries += 1
            log.warning("out of memory with %d heads in a call: going on with %d at a time", last - first, step // 2)
            step = max(1, step // 2)
            continue
        yield Part(slice(first, last), rows, results)
        del results  # taken by now: the next slice has its room
        first = last


def _masking(masking: Masking, heads: slice, rows: slice) -> Masking:
    padding = None if masking.padding is None else masking.padding[:, :, heads]
    dropout = masking.dropout
    if dropout is not None:
        dropout = Dropout(dropout.p, dropout.low[:, :, rows], dropout.high[:, :, rows], dropout.key[:, :, rows])
    return Masking(masking.scale, masking.is_causal, padding, dropout)
