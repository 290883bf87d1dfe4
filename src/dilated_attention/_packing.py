"""Rows of a channel as bytes: what a rank sends, and views of what it received.

A packed field is (rows of all heads x B, ...): head after head, each (B, rows, ...). Fields follow one another in a
part, widest numbers first; parts follow one another in a message. Where widths are mixed, a part ends on a multiple of
16 bytes, so that every field is aligned.

Legend: R rows of all heads that a rank owns in a channel, B samples, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention._plan import Lane


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


def split(message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of a message."""
    return list(torch.split(message, list(sizes)))


def join(parts: Sequence[Tensor]) -> Tensor:
    """The message of some parts; a single part is sent as it lies."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
