"""Rows of a channel as bytes: what a rank sends, and views of what it received.

A packed field is (rows of all heads x B, ...): head after head, each (B, rows, ...). Fields follow one another in a
part, widest numbers first; parts follow one another in a message. Where widths are mixed, a part ends on a multiple of
16 bytes, so that every field is aligned.

Legend: R rows of all heads that a rank owns in a channel, B samples, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention._plan import Lane
from dilated_attention.backends.problem import accumulate_dtype


class Field(NamedTuple):
    """One tensor of a part: its dtype, and how many heads and which trailing sizes for each row."""

    dtype: torch.dtype
    heads: int = 1
    sizes: tuple[int, ...] = ()

    def bytes_per_row(self) -> int:
        count = self.heads
        for size in self.sizes:
            count *= size
        return count * self.dtype.itemsize


Fields = tuple[Field, ...]


class Travelling(NamedTuple):
    """What travels in each kind of message."""

    blocks: Fields  # ring and allgather: K and V, and padding if there is any;
    sums: Fields  # in the backward pass their gradients
    inputs: Fields  # alltoall: q, k, v, padding
    results: Fields  # and back lse, out;
    rows: Fields  # in the backward pass lse, dout, out,
    gradients: Fields  # and back dq, dk, dv

    @classmethod
    def of(cls, dtype: torch.dtype, group: int, head_dim: int, has_padding: bool) -> Travelling:
        """``group`` query heads to a key/value head."""
        exact, dim = accumulate_dtype(dtype), (head_dim,)
        queries, keys, column = Field(dtype, group, dim), Field(dtype, 1, dim), Field(exact, group)
        padding = (Field(torch.bool),) if has_padding else ()
        sums = (Field(exact, 1, dim),) * 2
        inputs = (queries, keys, keys, *padding)
        rows = (column, queries, queries)
        return cls((keys, keys, *padding), sums, inputs, (column, queries), rows, (queries, keys, keys))


def part_bytes(fields: Fields, rows: int) -> int:
    """The bytes of a part with so many rows (R x B)."""
    total = rows * sum(field.bytes_per_row() for field in fields)
    mixed = len({field.dtype.itemsize for field in fields}) > 1
    return -(-total // 16) * 16 if mixed else total


def unpack(part: Tensor, fields: Fields, rows: int) -> list[Tensor]:
    """Views of a part's bytes, one packed tensor (rows x heads, ...) a field."""
    found, at = [], 0
    for field in fields:
        count = rows * field.bytes_per_row()
        found.append(part[at : at + count].view(field.dtype).view(rows * field.heads, *field.sizes))
        at += count
    return found


def pack(part: Tensor, fields: Fields, rows: int, lanes: Sequence[Lane], tensors: Sequence[Tensor]) -> None:
    """Fill a part with this rank's rows of (B, n, H, ...) tensors, one a field."""
    for packed, field, x in zip(unpack(part, fields, rows), fields, tensors, strict=True):
        for lane in lanes:
            lane.packed(packed, x.shape[0], field.heads).copy_(lane.block.view(x, field.heads))


class Expected(NamedTuple):
    """A part to come: from whom, and how many bytes."""

    peer: int
    size: int


def totals(expected: Iterable[Expected]) -> dict[int, int]:
    """The bytes to come from each rank."""
    found: dict[int, int] = {}
    for peer, size in expected:
        found[peer] = found.get(peer, 0) + size
    return found


def split(messages: Mapping[int, Tensor], expected: Iterable[Expected]) -> Iterator[Tensor]:
    """The parts of messages, each rank's in the order in which they were expected."""
    taken: dict[int, int] = {}
    for peer, size in expected:
        first = taken.get(peer, 0)
        yield messages[peer][first : first + size]
        taken[peer] = first + size


def join(parts: Sequence[Tensor]) -> Tensor:
    """The message of some parts; a single part is sent as it lies."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
