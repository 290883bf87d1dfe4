"""pattern + shapes + ranks -> the work: lists of blocks, each one strided dense problem read and written in place.

A branch's rows of one offset are a strided view of (B, n, H, D), whole segments folded into the batch. Heads of
different offsets share a view too when head and offset advance together (a diagonal: one stride per head). A segment
that a shard's border cuts is a block of its own, and its rows on other ranks come packed, head after head.

Legend: B samples, n tokens of this rank, H query heads, Hk key/value heads, D head dim, b = samples x segments, L rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from dilated_attention._shards import Channel, Heads, Shards
from dilated_attention.pattern import DilatedPattern, rows_at_offset

NO_STRIDE = 2**62  # as long as torch takes; only dimensions of size 1 have such
MOST_GAPS = 64


@dataclass(frozen=True, slots=True)
class Block:
    """One strided dense problem: some segments of some samples, some heads. Tokens count from the shard."""

    branch: int
    sample: int
    samples: int
    start: int  # first token of the first segment, or of what the shard has of it
    segments: int
    segment_length: int
    dilation: int
    head: int  # first key/value head
    heads: int
    head_step: int
    offset: int  # of the first head, counted from start
    offset_step: int  # 0: all heads share the offset; 1: a diagonal
    rows: int  # per segment
    segment_start: int = 0  # where the segment begins: before start, even before the shard, if a border cuts it
    zeros: int = 0  # appended zero keys that each row attends to (torchscale)
    first: bool = False  # no earlier block wrote these heads: write, do not merge

    def view(self, x: Tensor, group: int = 1) -> Tensor:
        """The block's (b, L, h, ...) part of x (B, n, H, ...), never a copy; group query heads per key/value head."""
        per_sample, per_token, per_head = x.stride()[:3]
        per_batch = per_sample if self.segments == 1 and self.samples > 1 else self.segment_length * per_token
        head_stride = per_head if group > 1 else self.head_step * per_head + self.offset_step * per_token
        return x.as_strided(
            (self.samples * self.segments, self.rows, self.heads * group, *x.shape[3:]),
            (min(per_batch, NO_STRIDE), min(self.dilation * per_token, NO_STRIDE), head_stride, *x.stride()[3:]),
            x.storage_offset()
            + self.sample * per_sample
            + (self.start + self.offset) * per_token
            + self.head * group * per_head,
        )

    def covers(self, x: Tensor) -> bool:
        """Whether the block is all of x (B, n, H, ...), in the same order."""
        return (
            self.dilation == 1
            and self.samples == x.shape[0]
            and self.segments * self.segment_length == x.shape[1]
            and (self.head, self.head_step, self.heads) == (0, 1, x.shape[2])
        )

    def gaps(self) -> tuple[int, int, int, int] | None:
        """What tells the rows of its segments that are not its own: dilation, offset, its step and the tokens."""
        if self.dilation == 1 or not self.first:
            return None
        return self.dilation, self.offset, self.offset_step if self.heads > 1 else 0, self.segment_length

    def cut(self, most: int) -> list[Block]:
        """The block in parts of at most so many rows, those of all its heads together, or of one head's segment."""
        heads = max(1, min(self.heads, most // self.rows))
        batch = max(1, most // (self.rows * heads))
        segments = min(batch, self.segments)
        samples = max(1, min(batch // self.segments, self.samples))
        return [
            replace(
                self,
                sample=self.sample + sample,
                samples=min(samples, self.samples - sample),
                start=self.start + segment * self.segment_length,
                segments=min(segments, self.segments - segment),
                head=self.head + head * self.head_step,
                heads=min(heads, self.heads - head),
                offset=self.offset + head * self.offset_step,
                segment_start=self.segment_start + segment * self.segment_length,
            )
            for sample in range(0, self.samples, samples)
            for segment in range(0, self.segments, segments)
            for head in range(0, self.heads, heads)
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks of one rank's own keys."""

    blocks: tuple[Block, ...]
    bare: tuple[int, int]  # all key/value heads with rows in none of the blocks that write first are in this range
    fillable: bool  # whether all such rows are gaps of those blocks, and not too many
    merges: bool  # whether some row gets several parts


@dataclass(frozen=True, slots=True)
class Lane:
    """Some heads of a channel: their rows here as a block, and their rows in packed tensors."""

    block: Block
    theirs: PackedRows  # of the owner's packed tensors
    mine: PackedRows  # of this rank's packed tensors

    def packed(self, x: Tensor, samples: int, group: int = 1) -> Tensor:
        """The lane's (B, L, h, ...) part of the owner's packed x (rows of all heads x B, ...), never a copy."""
        return self.theirs.view(x, samples, self.block.heads, group)

    def packed_here(self, x: Tensor, samples: int, group: int = 1) -> Tensor:
        """The same of a packed tensor of this rank's rows."""
        return self.mine.view(x, samples, self.block.heads, group)


class PackedRows(NamedTuple):
    """Where the rows of some heads lie in a packed tensor, counted in rows of one sample."""

    rows: int  # per head
    start: int  # of the first head
    step: int  # from head to head

    def view(self, x: Tensor, samples: int, heads: int, group: int) -> Tensor:
        per_row = x.stride(0)
        per_head = self.step * samples if group == 1 else self.rows * samples
        return x.as_strided(
            (samples, self.rows, heads * group, *x.shape[1:]),
            (self.rows * per_row, per_row, per_head * per_row, *x.stride()[1:]),
            x.storage_offset() + self.start * samples * group * per_row,
        )


def folds(*tensors: Tensor) -> bool:
    """Whether (B, n) of all these tensors is one stride, so that segments of many samples are one batch."""
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors)


@functools.lru_cache(maxsize=512)
def plan(
    pattern: DilatedPattern,
    samples: int,
    shards: Shards,
    rank: int,
    heads: Heads,
    group: int,
    fold: bool,
    visited: bool = False,
    elsewhere: tuple[Channel, ...] = (),
    cut: tuple[int, int] | None = None,
) -> Plan:
    """The work of one rank on its own keys. ``group`` query heads per key/value head; ``fold`` as `folds` says.

    ``visited``: keys of other ranks follow, to be merged. ``elsewhere``: channels whose rows other ranks compute.
    ``cut``: blocks of this many rows a segment, or more, are cut into parts of at most that many in all.
    """
    written: set[int] = set()
    blocks: list[Block] = []
    bare = list(range(heads.held)) if elsewhere else []
    fillable = not elsewhere
    merges = visited or bool(elsewhere)
    if samples == 0 or shards.starts[rank] == shards.starts[rank + 1]:
        return Plan((), (0, 0), False, False)
    order = sorted(range(len(pattern.branches)), key=lambda branch: pattern.dilation_rates[branch])
    for branch in order:  # densest first: with r = 1 the first branch writes every row and nothing needs filling
        placed = heads.of_branch(pattern, branch)
        fresh = [(head, offset) for head, offset in placed if head not in written]
        bare += [head for head, _ in fresh if pattern.dilation_rates[branch] > 1]
        for first, some in ((True, fresh), (False, [one for one in placed if one[0] in written])):
            for piece in _pieces(pattern, branch, shards, rank):
                # else some offsets have no row, or a program would go through too many gaps
                fillable &= not fresh or pattern.dilation_rates[branch] <= min(piece.length, MOST_GAPS)
                there = {
                    head
                    for channel in elsewhere
                    if (channel.branch, channel.start) == (branch, piece.segment_start + shards.starts[rank])
                    for head, _ in channel.heads
                }
                here = [one for one in some if one[0] not in there]
                blocks += _blocks(pattern, branch, here, piece, samples, shards, rank, group, fold, first)
        written.update(head for head, _ in placed)
    merges |= not all(block.first for block in blocks)
    if cut is not None:
        long, most = cut
        blocks = [part for block in blocks for part in (block.cut(most) if block.rows >= long else [block])]
    return Plan(tuple(blocks), (min(bare), max(bare) + 1) if bare else (0, 0), fillable, merges)


@functools.lru_cache(maxsize=4096)
def lanes(
    channel: Channel, shards: Shards, rank: int, owner: int, samples: int, group: int, zeros: tuple[int, ...] = ()
) -> tuple[Lane, ...]:
    """A channel's heads in the fewest lanes: rows of ``rank`` in place beside those of ``owner`` packed."""
    mine, theirs = channel.piece(shards, rank), channel.piece(shards, owner)
    starts, rows = (0, 0), {}
    placed: list[Placed] = []
    for index, (head, offset) in enumerate(channel.heads):
        counts = channel.rows(offset, theirs), channel.rows(offset, mine)
        placed.append((head, channel.first_row(offset, mine) - mine[0], *starts))
        rows[head] = (*counts, zeros[index] if zeros else 0)
        starts = (starts[0] + counts[0], starts[1] + counts[1])
    at = mine[0] - shards.starts[rank]
    shape = (channel.branch, 0, samples, at, 1, mine[1] - mine[0], channel.dilation)
    found = []
    for run in head_runs(placed, lambda head: rows[head], group):
        their_count, my_count, filled = rows[run.first[0]]
        block = Block(*shape, *run.shape(), my_count, channel.start - shards.starts[rank], filled)
        (_, _, their_start, my_start), (_, _, their_step, my_step) = run.first, run.steps
        found.append(
            Lane(block, PackedRows(their_count, their_start, their_step), PackedRows(my_count, my_start, my_step))
        )
    return tuple(found)


class Piece(NamedTuple):
    """Equal segments in a row, or the part of one that lies on a rank. Tokens count from the shard."""

    start: int
    segments: int
    length: int
    segment_start: int
    whole_length: int  # of the segment, on all ranks together


def _pieces(pattern: DilatedPattern, branch: int, shards: Shards, rank: int) -> list[Piece]:
    first, last, tokens = shards.starts[rank], shards.starts[rank + 1], shards.tokens
    width = min(pattern.segment_lengths[branch], tokens)
    found = []
    at = first
    if first % width:  # the end of a segment that began before the shard
        start = first - first % width
        at = min(start + width, last)
        found.append(Piece(0, 1, at - first, start - first, min(width, tokens - start)))
    whole, rest = divmod(last - at, width)
    if whole:
        found.append(Piece(at - first, whole, width, at - first, width))
    if rest:
        at += whole * width
        found.append(Piece(at - first, 1, rest, at - first, min(width, tokens - at)))
    return found


def _blocks(
    pattern: DilatedPattern,
    branch: int,
    heads: list[tuple[int, int]],
    piece: Piece,
    samples: int,
    shards: Shards,
    rank: int,
    group: int,
    fold: bool,
    first: bool,
) -> list[Block]:
    dilation = pattern.dilation_rates[branch]
    shift = piece.start - piece.segment_start
    placed: list[Placed] = []
    counts = {}
    for head, offset in heads:
        shifted = (offset - shift) % dilation
        rows = rows_at_offset(piece.length, dilation, shifted)
        if rows:
            placed.append((head, shifted))
            counts[head] = rows, pattern.zeros_in_segment(branch, piece.whole_length, offset, shards.tokens)
    tokens = shards.starts[rank + 1] - shards.starts[rank]
    # samples and segments are one batch only if their strides chain; else the shorter of the two is a loop
    if piece.segments == 1 or samples == 1 or (fold and piece.segments * piece.length == tokens):
        parts = [(0, samples, 0, piece.segments)]
    elif piece.segments < samples:
        parts = [(0, samples, i * piece.length, 1) for i in range(piece.segments)]
    else:
        parts = [(i, 1, 0, piece.segments) for i in range(samples)]
    found = []
    for run in head_runs(placed, lambda head: counts[head], group):
        rows, zeros = counts[run.first[0]]
        for sample, many, at, some in parts:
            shape = (branch, sample, many, piece.start + at, some, piece.length, dilation)
            found.append(Block(*shape, *run.shape(), rows, piece.segment_start + at, zeros, first))
    return found


Placed = tuple[int, ...]  # head, offset, and where else its rows begin


class Run(NamedTuple):
    """Key/value heads that one view takes: head, offset and whatever else advance by constant steps."""

    first: Placed
    heads: int
    steps: tuple[int, ...]

    def shape(self) -> tuple[int, int, int, int, int]:
        """As in `Block`: head, heads, head_step, offset, offset_step."""
        return self.first[0], self.heads, self.steps[0], self.first[1], self.steps[1]

    def singles(self) -> list[Run]:
        nowhere = (1, *(0 for _ in self.steps[1:]))
        return [Run(_advanced(self.first, self.steps, i), 1, nowhere) for i in range(self.heads)]


def head_runs(placed: list[Placed], alike: Callable[[int], Hashable], group: int) -> list[Run]:
    """Heads dealt into the fewest views; the heads of a view are alike: they have equally many rows."""
    straight = _lanes(placed, lambda head, offset: (offset, alike(head)))
    if group > 1:
        # the query heads of several key/value heads are one stride only where those are neighbours at one offset
        return [one for run in straight for one in ([run] if run.steps[0] == 1 else run.singles())]
    turn: dict[int, int] = {}  # how often an offset came before: heads of one turn have offsets in steps of one

    def diagonal_lane(head: int, offset: int) -> Hashable:
        turn[offset] = turn.get(offset, -1) + 1
        return turn[offset], alike(head)

    return min(straight, _lanes(placed, diagonal_lane), key=len)


def _lanes(placed: list[Placed], lane_of: Callable[[int, int], Hashable]) -> list[Run]:
    """Deal heads into lanes and cut each lane into stretches with constant steps."""
    lanes: dict[Hashable, list[Placed]] = {}
    for one in placed:
        lanes.setdefault(lane_of(one[0], one[1]), []).append(one)
    runs = []
    for lane in lanes.values():
        while lane:
            first, count = lane[0], 1
            alone = steps = (1, *(0 for _ in first[1:]))
            if len(lane) > 1 and lane[1][1] >= first[1]:  # a stride cannot be negative
                steps = tuple(after - before for before, after in zip(first, lane[1], strict=True))
            while count < len(lane) and lane[count] == _advanced(first, steps, count):
                count += 1
            runs.append(Run(first, count, steps if count > 1 else alone))
            lane = lane[count:]
    return runs


def _advanced(first: Placed, steps: tuple[int, ...], count: int) -> Placed:
    return tuple(x + count * step for x, step in zip(first, steps, strict=True))
