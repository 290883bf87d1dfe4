"""pattern + shapes -> the work: a list of blocks, each one strided dense problem read and written in place.

A branch's rows of one offset are a strided view of (B, N, H, D), whole segments folded into the batch. Heads of
different offsets share a view too when head and offset advance together (a diagonal: one stride per head).

Legend: B samples, N tokens, H query heads, Hk key/value heads, D head dim, b = samples x segments, L rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dilated_attention.pattern import DilatedPattern, rows_at_offset


@dataclass(frozen=True, slots=True)
class Block:
    """One strided dense problem: some segments of some samples, some heads, one dilation."""

    branch: int
    sample: int
    samples: int
    start: int  # first token of the first segment
    segments: int
    segment_length: int
    dilation: int
    offset: int  # of the first head
    offset_step: int  # 0: all heads share the offset; 1: a diagonal
    head: int  # first key/value head
    heads: int
    head_step: int
    rows: int  # per segment
    zeros: int  # appended zero keys that each row attends to (torchscale)
    first: bool  # no earlier block wrote these heads: write, do not merge

    def view(self, x: Tensor, group: int = 1) -> Tensor:
        """The block's (b, L, h, ...) part of x (B, N, H, ...), never a copy; group query heads per key/value head."""
        per_sample, per_token, per_head = x.stride()[:3]
        per_batch = per_sample if self.segments == 1 and self.samples > 1 else self.segment_length * per_token
        head_stride = per_head if group > 1 else self.head_step * per_head + self.offset_step * per_token
        return x.as_strided(
            (self.samples * self.segments, self.rows, self.heads * group, *x.shape[3:]),
            (per_batch, self.dilation * per_token, head_stride, *x.stride()[3:]),
            x.storage_offset()
            + self.sample * per_sample
            + (self.start + self.offset) * per_token
            + self.head * group * per_head,
        )

    def covers(self, x: Tensor) -> bool:
        """Whether the block is all of x (B, N, H, ...), in the same order."""
        return (
            self.dilation == 1
            and self.samples == x.shape[0]
            and self.segments * self.segment_length == x.shape[1]
            and (self.head, self.head_step, self.heads) == (0, 1, x.shape[2])
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks of one call, and whether some rows are in none of the blocks that write first."""

    blocks: tuple[Block, ...]
    leaves_rows: bool

    @property
    def merges(self) -> bool:
        """Whether some head runs several branches."""
        return not all(block.first for block in self.blocks)


def folds(*tensors: Tensor) -> bool:
    """Whether (B, N) of all these tensors is one stride, so that segments of many samples are one batch."""
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors)


@functools.lru_cache(maxsize=512)
def plan(pattern: DilatedPattern, samples: int, tokens: int, kv_heads: int, group: int, fold: bool) -> Plan:
    """The work of one device. ``group`` query heads per key/value head; ``fold`` as `folds` says of the tensors."""
    blocks: list[Block] = []
    written: set[int] = set()
    leaves_rows = False
    if samples == 0 or tokens == 0:
        return Plan((), False)
    order = sorted(range(len(pattern.branches)), key=lambda branch: pattern.dilation_rates[branch])
    for branch in order:  # densest first: with r = 1 the first branch writes every row and nothing needs filling
        heads = pattern.heads(branch, kv_heads)
        fresh = [head for head in heads if head not in written]
        leaves_rows |= bool(fresh) and pattern.dilation_rates[branch] > 1
        for first, some in ((True, fresh), (False, [head for head in heads if head in written])):
            blocks += _branch_blocks(pattern, branch, some, samples, tokens, kv_heads, group, fold, first)
        written.update(heads)
    return Plan(tuple(blocks), leaves_rows)


def _branch_blocks(
    pattern: DilatedPattern,
    branch: int,
    heads: Iterable[int],
    samples: int,
    tokens: int,
    kv_heads: int,
    group: int,
    fold: bool,
    first: bool,
) -> list[Block]:
    width = min(pattern.segment_lengths[branch], tokens)
    dilation = pattern.dilation_rates[branch]
    whole, tail = divmod(tokens, width)
    blocks = []
    for start, segments, length in ((0, whole, width), (whole * width, 1, tail)):
        for run in _runs(pattern, branch, heads, length, kv_heads, group):
            rows = rows_at_offset(length, dilation, run.offset)
            zeros = pattern.zeros_in_segment(branch, length, run.offset, tokens)
            # samples and segments are one batch only if their strides chain; else the shorter of the two is a loop
            if segments == 1 or samples == 1 or (fold and segments * length == tokens):
                pieces = [(0, samples, start, segments)]
            elif segments < samples:
                pieces = [(0, samples, start + i * length, 1) for i in range(segments)]
            else:
                pieces = [(i, 1, start, segments) for i in range(samples)]
            blocks += [
                Block(branch, sample, many, at, some, length, dilation, *run, rows, zeros, first)
                for sample, many, at, some in pieces
            ]
    return blocks


class Run(NamedTuple):
    """Key/value heads that one view takes: head and offset advance by constant steps."""

    offset: int
    offset_step: int
    head: int
    heads: int
    head_step: int


def _runs(
    pattern: DilatedPattern, branch: int, heads: Iterable[int], length: int, kv_heads: int, group: int
) -> list[Run]:
    """Heads dealt into the fewest views; the heads of a view have equally many rows."""
    rate = pattern.dilation_rates[branch]
    placed = [(head, pattern.offset(branch, head, kv_heads)) for head in heads]
    placed = [(head, offset) for head, offset in placed if rows_at_offset(length, rate, offset)]
    straight = _lanes(placed, lambda _, offset: offset)
    if group > 1:
        # the query heads of several key/value heads are one stride only where those are neighbours at one offset
        return [
            one
            for run in straight
            for one in ([run] if run.head_step == 1 else [Run(run.offset, 0, h, 1, 1) for h in _heads_of(run)])
        ]
    turn: dict[int, int] = {}  # how often an offset came before: heads of one turn have offsets in steps of one

    def diagonal_lane(_: int, offset: int) -> tuple[int, int]:
        turn[offset] = turn.get(offset, -1) + 1
        return turn[offset], rows_at_offset(length, rate, offset)

    return min(straight, _lanes(placed, diagonal_lane), key=len)


def _heads_of(run: Run) -> range:
    return range(run.head, run.head + run.heads * run.head_step, run.head_step)


def _lanes(placed: list[tuple[int, int]], lane_of: Callable[[int, int], Hashable]) -> list[Run]:
    """Deal (head, offset) pairs into lanes and cut each lane into stretches with constant steps."""
    lanes: dict[Hashable, list[tuple[int, int]]] = {}
    for head, offset in placed:
        lanes.setdefault(lane_of(head, offset), []).append((head, offset))
    runs = []
    for lane in lanes.values():
        while lane:
            (head, offset), count = lane[0], 1
            head_step, offset_step = (lane[1][0] - head, lane[1][1] - offset) if len(lane) > 1 else (1, 0)
            while count < len(lane) and lane[count] == (head + count * head_step, offset + count * offset_step):
                count += 1
            runs.append(Run(offset, offset_step if count > 1 else 0, head, count, head_step if count > 1 else 1))
            lane = lane[count:]
    return runs
