"""Blocks: each is one dense problem on strided views of the tensors of a call, which are never copied.

A branch's rows of one offset are a strided view of (B, n, H, D), whole segments folded into the batch. Heads of
different offsets share a view too when head and offset advance together (a diagonal: one stride per head).

Legend: B samples, n tokens here, H query heads, Hk key/value heads, D head dim; b = samples x segments, L rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.branches import Branch
from dilated_attention.branches.base import grouped
from dilated_attention.call import Call
from dilated_attention.checks import Ints

NO_STRIDE = 2**62  # as long as torch takes; only dimensions of size 1 have such


class View(NamedTuple):
    """Rows of some heads of a tensor (B, n, H, ...) that one strided view takes."""

    sample: int
    samples: int
    token: int  # of the first head's first row, in the sequence
    segments: int
    segment_step: int  # tokens from one segment to the next
    rows: int  # per segment
    row_step: int  # tokens from one row to the next
    head: int  # the first key/value head
    heads: int
    head_step: int
    token_step: int  # how many tokens later the rows of the next head are; 0: all heads share the offset
    start: int = 0  # where in the sequence the tensor begins

    def of(self, x: Tensor, group: int = 1) -> Tensor:
        """The (b, L, h, ...) part of x, never a copy; group query heads per key/value head."""
        per_sample, per_token, per_head = x.stride()[:3]
        per_batch = per_sample if self.segments == 1 and self.samples > 1 else self.segment_step * per_token
        head_stride = per_head if group > 1 else self.head_step * per_head + self.token_step * per_token
        return x.as_strided(
            (self.samples * self.segments, self.rows, self.heads * group, *x.shape[3:]),
            (min(per_batch, NO_STRIDE), min(self.row_step * per_token, NO_STRIDE), head_stride, *x.stride()[3:]),
            x.storage_offset()
            + self.sample * per_sample
            + (self.token - self.start) * per_token
            + self.head * group * per_head,
        )

    @property
    def numbers(self) -> range:
        """The key/value heads."""
        return range(self.head, self.head + self.heads * self.head_step, self.head_step)

    def positions(self, device: torch.device) -> Tensor:
        """(segments, L, h): where in the sequence the rows are."""
        segment, row, head = (torch.arange(n, device=device) for n in (self.segments, self.rows, self.heads))
        first = self.token + self.segment_step * segment[:, None, None]
        return first + self.row_step * row[:, None] + self.token_step * head

    def some_rows(self, first: int, count: int) -> View:
        return self._replace(token=self.token + first * self.row_step, rows=count)

    def within(self, whole: View) -> View:
        """The same rows in a tensor (b, L, h, ...) that has those of ``whole`` alone, of which they are a part."""
        head = (self.head - whole.head) // whole.head_step
        token = self.token - whole.token - head * whole.token_step
        segment, token = divmod(token, whole.segment_step) if whole.segments > 1 else (0, token)
        samples, segments = self.samples, self.segments
        if whole.segments > 1:
            samples, segments = samples * segments, 1
        sample = (self.sample - whole.sample) * whole.segments + segment
        return View(
            sample, samples, token // whole.row_step, segments, self.segment_step // whole.row_step, self.rows,
            self.row_step // whole.row_step, head, self.heads, self.head_step // whole.head_step, 0,
        )  # fmt: skip

    def part(self, first: int, count: int, head: int, heads: int) -> View:
        """Some of the batch, [first, first + count), and some heads. Whole samples, or segments of one sample."""
        view = self._replace(
            head=self.head + head * self.head_step, heads=heads, token=self.token + head * self.token_step
        )
        if self.segments == 1:
            return view._replace(sample=self.sample + first, samples=count)
        sample, segment = divmod(first, self.segments)
        token = view.token + segment * self.segment_step
        samples, segments = (count // self.segments, self.segments) if count >= self.segments else (1, count)
        return view._replace(sample=self.sample + sample, samples=samples, token=token, segments=segments)


class Block(NamedTuple):
    """One dense problem: some rows of some heads as queries, and rows as keys, of which they see all or a band."""

    branch: int
    queries: View
    keys: View
    low: int | None  # query row i sees key rows from i + low on; None: from the first on
    high: int | None  # and up to i + high; None: up to the last
    segment: int  # where the first segment begins in the sequence
    zeros: int = 0  # appended zero keys that each row attends to
    is_first: bool = False  # nothing was written to these rows before: write, do not merge
    but: tuple[Branch, ...] = ()  # the pairs that these branches show count elsewhere,
    sequence: tuple[int, int] = (0, 0)  # in the sequence that begins and ends here

    @property
    def is_causal(self) -> bool:
        """Query row i sees key rows up to i, of as many."""
        return (self.low, self.high) == (None, 0) and self.queries.rows == self.keys.rows

    @property
    def has_mask(self) -> bool:
        """Whether kernels have to be told which pairs count."""
        return bool(self.but) or not (self.is_causal or self.low is self.high is None)

    @property
    def heads(self) -> int:
        return self.queries.heads

    @property
    def batch(self) -> int:
        return self.queries.samples * self.queries.segments

    @property
    def is_empty(self) -> bool:
        """Whether the band hides all pairs."""
        rows, keys = self.queries.rows, self.keys.rows
        hidden = (self.high is not None and self.high <= -rows) or (self.low is not None and self.low >= keys)
        return hidden or not rows or not keys

    def covers(self, call: Call) -> bool:
        """Whether the block is all rows of a call, in their order."""
        view = self.queries
        return (
            view.row_step == 1
            and view.samples == call.samples
            and view.segments * view.rows == call.queries
            and (view.head, view.head_step, view.heads) == (0, 1, call.kv_heads)
            and self.keys == view
            and not self.has_mask
        )

    def inside(self, first: int, stop: int, key: int, last: int) -> Block:
        """The pairs of some of the query rows with some of the key rows; without limits that always hold."""
        first, key = max(0, first), max(0, key)
        rows, keys = (max(0, x) for x in (min(stop, self.queries.rows) - first, min(last, self.keys.rows) - key))
        low, high = (None if x is None else x + first - key for x in (self.low, self.high))
        return self._replace(
            queries=self.queries.some_rows(first, rows),
            keys=self.keys.some_rows(key, keys),
            low=None if low is None or low <= 1 - rows else low,
            high=None if high is None or high >= keys - 1 else high,
            is_first=self.is_first and (rows, keys) == (self.queries.rows, self.keys.rows),
        )

    def cut(self, rows: int | None = None, heads: int | None = None, batch: int | None = None) -> list[Block]:
        """The block in parts of at most so many rows of all heads together, so many heads, and so much of the batch.

        One segment of one head is the smallest part.
        """
        most_heads = min(self.heads, heads or self.heads)
        most = min(self.batch, batch or self.batch)
        if rows is not None:
            most_heads = max(1, min(most_heads, rows // self.queries.rows))
            most = max(1, min(most, rows // (self.queries.rows * most_heads)))
        if (most_heads, most) == (self.heads, self.batch):
            return [self]
        segments = self.queries.segments
        if self.queries.samples > 1 < segments:  # a part has whole samples, or is inside of one
            if most < segments:
                one_by_one = [self._part(at, at + segments, 0, self.heads) for at in range(0, self.batch, segments)]
                return [part for one in one_by_one for part in one.cut(rows, heads, batch)]
            most -= most % segments
        return [
            self._part(first, min(first + most, self.batch), head, min(head + most_heads, self.heads))
            for first in range(0, self.batch, most)
            for head in range(0, self.heads, most_heads)
        ]

    def _part(self, first: int, stop: int, head: int, last: int) -> Block:
        segment = 0 if self.queries.segments == 1 else first % self.queries.segments
        shift = segment * self.queries.segment_step
        queries, keys = (view.part(first, stop - first, head, last - head) for view in (self.queries, self.keys))
        return self._replace(queries=queries, keys=keys, segment=self.segment + shift)


class Packed(NamedTuple):
    """Which rows tensors have that came from elsewhere; None: those of the call's own."""

    queries: View | None
    keys: View

    def views(self, block: Block) -> tuple[View, View]:
        """Those of a block in these tensors."""
        own = block.queries
        return own if self.queries is None else own.within(self.queries), block.keys.within(self.keys)


# --- heads that one view takes ------------------------------------------------------------------------------------

Placed = Ints  # a head, and where its rows begin


class HeadRun(NamedTuple):
    """Key/value heads that one view takes: the head and where its rows begin advance by constant steps."""

    first: Placed
    heads: int
    steps: Ints

    def singles(self) -> list[HeadRun]:
        still = (1, *(0 for _ in self.steps[1:]))
        return [HeadRun(_advanced(self.first, self.steps, i), 1, still) for i in range(self.heads)]


def head_runs(placed: Collection[Placed], alike: Callable[[int], Hashable], group: int) -> list[HeadRun]:
    """Heads dealt into the fewest views; the heads of a view are alike: they have equally many rows."""
    straight = _lanes(placed, lambda head, start: (start, alike(head)))
    if group > 1:
        # the query heads of several key/value heads are one stride only where those are neighbours at one offset
        return [part for run in straight for part in ([run] if run.steps[0] == 1 else run.singles())]
    turn: dict[int, int] = {}  # how often a start came before: heads of one turn start in steps of one

    def diagonal_lane(head: int, start: int) -> Hashable:
        turn[start] = turn.get(start, -1) + 1
        return turn[start], alike(head)

    return min(straight, _lanes(placed, diagonal_lane), key=len)


def _lanes(placed: Collection[Placed], lane_of: Callable[[int, int], Hashable]) -> list[HeadRun]:
    """Deal heads into lanes and cut each lane into stretches with constant steps."""
    runs = []
    for lane in grouped(placed, lambda entry: lane_of(*entry[:2])).values():
        while lane:
            first, count = lane[0], 1
            alone = steps = (1, *(0 for _ in first[1:]))
            if len(lane) > 1 and all(after >= before for before, after in zip(first, lane[1], strict=True)):
                steps = tuple(after - before for before, after in zip(first, lane[1], strict=True))
            while count < len(lane) and lane[count] == _advanced(first, steps, count):
                count += 1
            runs.append(HeadRun(first, count, steps if count > 1 else alone))
            lane = lane[count:]
    return runs


def _advanced(first: Placed, steps: Ints, count: int) -> Placed:
    return tuple(x + count * step for x, step in zip(first, steps, strict=True))
