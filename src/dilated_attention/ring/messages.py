"""Rows as bytes: what a rank sends, and views of what it received.

A message has parts, each some rows of some heads in one view. It holds all parts of one field, then all of the next
one, widest numbers first: so every number is aligned.

Legend: a part (b, L, h): so many samples, rows of each, and key/value heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.blocks import View
from dilated_attention.call import accumulate_dtype
from dilated_attention.checks import Ints


class Field(NamedTuple):
    """One tensor of a part: its dtype, and how many heads per key/value head and which trailing sizes it has."""

    dtype: torch.dtype
    heads: int = 1
    sizes: Ints = ()

    @property
    def bytes_per_row(self) -> int:
        return self.heads * math.prod(self.sizes) * self.dtype.itemsize


Fields = tuple[Field, ...]
Part = tuple[Tensor, ...]  # one tensor per field


class Travelling(NamedTuple):
    """What travels in each kind of message."""

    blocks: Fields  # ring and allgather: K and V, and padding if there is any;
    sums: Fields  # in the backward pass their gradients
    inputs: Fields  # alltoall: q, k, v, padding
    results: Fields  # and back lse, out;
    rows: Fields  # in the backward pass dlse if there is one, lse, dout, out,
    gradients: Fields  # and back dq, dk, dv

    @classmethod
    def of(cls, dtype: torch.dtype, q_per_kv: int, head_dim: int, has_padding: bool) -> Travelling:
        """``q_per_kv`` query heads to a key/value head."""
        exact, dim = accumulate_dtype(dtype), (head_dim,)
        queries, keys, column = Field(dtype, q_per_kv, dim), Field(dtype, 1, dim), Field(exact, q_per_kv)
        blocks = (keys, keys, Field(torch.bool)) if has_padding else (keys, keys)
        sums, rows = (Field(exact, 1, dim),) * 2, (column, column, queries, queries)
        return cls(blocks, sums, (queries, *blocks), (column, queries), rows, (queries, keys, keys))


def shape_of(rows: View) -> tuple[int, int, int]:
    return rows.samples * rows.segments, rows.rows, rows.heads


def row_bytes(fields: Fields) -> int:
    """Of one key/value head and its query heads."""
    return sum(field.bytes_per_row for field in fields)


def message_bytes(parts: Iterable[View], fields: Fields) -> int:
    return sum(math.prod(shape_of(rows)) for rows in parts) * row_bytes(fields)


def sizes_of(peers: Mapping[int, Iterable[View]], fields: Fields) -> dict[int, int]:
    """The bytes of the message from each."""
    return {peer: message_bytes(parts, fields) for peer, parts in peers.items()}


def unpack(message: Tensor, parts: Sequence[View], fields: Fields) -> list[Part]:
    """Views of a message's bytes: for each part the tensors of its fields, (b, L, heads, ...)."""
    shapes = [shape_of(rows) for rows in parts]
    sizes = [math.prod(shape) * field.bytes_per_row for field in fields for shape in shapes]
    pieces = iter(message.split_with_sizes(sizes))
    columns = [
        [next(pieces).view(field.dtype).view(b, rows, heads * field.heads, *field.sizes) for b, rows, heads in shapes]
        for field in fields
    ]
    return [*zip(*columns, strict=True)]


def pack(tensors: Sequence[Part], parts: Sequence[View], fields: Fields) -> Tensor:
    """One message: for each part the tensors of its fields, which may be views with any strides."""
    message = torch.empty(message_bytes(parts, fields), dtype=torch.uint8, device=tensors[0][0].device)
    for places, some in zip(unpack(message, parts, fields), tensors, strict=True):
        for place, x in zip(places, some, strict=True):
            place.copy_(x)
    return message


def rows_of(tensors: Sequence[Tensor], rows: View, fields: Fields) -> Part:
    """A part of (B, n, H, ...) tensors, one per field."""
    return tuple(rows.of(x, field.heads) for x, field in zip(tensors, fields, strict=True))
