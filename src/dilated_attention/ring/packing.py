"""Rows of a segment as bytes: what a rank sends, and views of what it received.

A packed field is (rows of all heads x B, ...): head after head, each (B, rows, ...). Fields follow one another in a
part, widest numbers first; parts follow one another in a message. Where widths are mixed, a part ends on a multiple of
16 bytes, so that every field is aligned.

Legend: R rows of all heads that a rank owns in a segment, B samples, D head dim.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.blocks import Block, Placed, View, head_runs
from dilated_attention.call import accumulate_dtype
from dilated_attention.ring.shards import SharedSegment


class Field(NamedTuple):
    """One tensor of a part: its dtype, and how many heads and which trailing sizes for each row."""

    dtype: torch.dtype
    heads: int = 1
    sizes: tuple[int, ...] = ()

    def bytes_per_row(self) -> int:
        return self.heads * math.prod(self.sizes) * self.dtype.itemsize


Fields = tuple[Field, ...]


class Travelling(NamedTuple):
    """What travels in each kind of message."""

    blocks: Fields  # ring and allgather: K and V, and padding if there is any;
    sums: Fields  # in the backward pass their gradients,
    totals: Fields  # which stay where the rows are, as do those of q
    inputs: Fields  # alltoall: q, k, v, padding
    results: Fields  # and back lse, out;
    rows: Fields  # in the backward pass lse, dout, out,
    gradients: Fields  # and back dq, dk, dv

    @classmethod
    def of(cls, dtype: torch.dtype, q_per_kv: int, head_dim: int, has_padding: bool) -> Travelling:
        """``q_per_kv`` query heads to a key/value head."""
        exact, dim = accumulate_dtype(dtype), (head_dim,)
        queries, keys, column = Field(dtype, q_per_kv, dim), Field(dtype, 1, dim), Field(exact, q_per_kv)
        padding = (Field(torch.bool),) if has_padding else ()
        sums = (Field(exact, 1, dim),) * 2
        inputs = (queries, keys, keys, *padding)
        rows = (column, queries, queries)
        totals = (Field(exact, q_per_kv, dim), *sums)
        return cls((keys, keys, *padding), sums, totals, inputs, (column, queries), rows, (queries, keys, keys))


def part_bytes(fields: Fields, rows: int) -> int:
    """The bytes of a part with so many rows (R x B)."""
    total = rows * sum(field.bytes_per_row() for field in fields)
    mixed = len({field.dtype.itemsize for field in fields}) > 1
    return -(-total // 16) * 16 if mixed else total


def unpack(part: Tensor, fields: Fields, rows: int) -> list[Tensor]:
    """Views of a part's bytes: one packed tensor (1, rows x heads, 1, ...) per field, as views of blocks take it."""
    found, at = [], 0
    for field in fields:
        count = rows * field.bytes_per_row()
        found.append(part[at : at + count].view(field.dtype).view(1, rows * field.heads, 1, *field.sizes))
        at += count
    return found


@functools.lru_cache(maxsize=4096)
def packed_blocks(
    segment: SharedSegment, rank: int, start: int, owner: int, samples: int, q_per_kv: int, zeros: tuple[int, ...] = ()
) -> tuple[Block, ...]:
    """The heads in the fewest blocks: rows of ``rank`` in place as queries, those of ``owner`` packed as keys.

    ``start``: the rank's first token.
    ``packed_queries`` of a block are the queries in a packed tensor of their own, ``q_per_kv`` heads per head.
    """
    mine, theirs, offsets = segment.piece(rank), segment.piece(owner), dict(segment.heads)
    rows, starts = {}, (0, 0)
    placed: list[Placed] = []  # head, first row here, and where the packed rows of both begin
    for index, (head, offset) in enumerate(segment.heads):
        counts = segment.rows(offset, theirs), segment.rows(offset, mine)
        placed.append((head, segment.first_row(offset, mine), *starts))
        rows[head] = (*counts, zeros[index] if zeros else 0)
        starts = (starts[0] + counts[0], starts[1] + counts[1])
    found = []
    for run in head_runs(placed, rows.__getitem__, q_per_kv):
        (head, at, their_start, my_start), (head_step, step, their_step, my_step) = run.first, run.steps
        their_count, my_count, filled = rows[head]
        numbers, length = [head + i * head_step for i in range(run.heads)], mine[1] - mine[0]
        found.append(
            Block(
                segment.branch,
                segment.dilation,
                segment.dilation,
                View(0, samples, at - start, 1, length, my_count, segment.dilation, head, run.heads, head_step, step),
                _packed(their_count, their_start, their_step, samples, run.heads, 1),
                None,
                None,
                tuple(at + i * step for i in range(run.heads)),
                tuple(segment.first_row(offsets[number], theirs) for number in numbers),
                segment.start,
                zeros=filled,
                packed_queries=_packed(my_count, my_start, my_step, samples, run.heads, q_per_kv),
            )
        )
    return tuple(found)


def _packed(rows: int, start: int, step: int, samples: int, heads: int, q_per_kv: int) -> View:
    """Rows in a packed tensor, (1, rows of all heads x samples, 1, ...): head after head, each (samples, rows)."""
    per_head = (step if q_per_kv == 1 else rows) * samples
    return View(0, 1, start * samples * q_per_kv, samples, rows, rows, 1, 0, heads * q_per_kv, 0, per_head)
