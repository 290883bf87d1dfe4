"""Blocks: each is one dense problem on strided views of the tensors of a call, which are never copied.

A branch's rows of one offset are a strided view of (B, n, H, D), whole segments folded into the batch. Heads of
different offsets share a view too when head and offset advance together (a diagonal: one stride per head).

Legend: B samples, n tokens here, H query heads, Hk key/value heads, D head dim; b = samples x segments, L rows.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.branches import Branch
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

    def within(self, whole: View | None) -> View:
        """The same rows in a tensor (b, L, h, ...) that has those of ``whole`` alone, of which they are a part."""
        if whole is None:
            return self
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

    def part(self, samples: range, segments: range, heads: range) -> View:
        return self._replace(
            sample=self.sample + samples.start, samples=len(samples), segments=len(segments), heads=len(heads),
            token=self.token + segments.start * self.segment_step + heads.start * self.token_step,
            head=self.head + heads.start * self.head_step,
        )  # fmt: skip


class Block(NamedTuple):
    """One dense problem: some rows of some heads as queries, and rows as keys, of which they see all or a band."""

    branch: int
    queries: View
    keys: View
    low: int | None  # query row i sees key rows from i + low on; None: from the first on
    high: int | None  # and up to i + high; None: up to the last
    origin: int = 0  # where in the sequence its segment begins; with ``but``, where its sequence does
    zeros: int = 0  # appended zero keys that each row attends to
    is_first: bool = False  # nothing was written to these rows before: write, do not merge
    but: tuple[Branch, ...] = ()  # the pairs that these branches show count elsewhere

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

    def cut(self, rows: int | None = None, heads: int | None = None, batch: int | None = None) -> list[Block]:
        """The block in parts of at most so many rows of all heads together, so many heads, and so much of the batch; at
        least one segment of one head."""
        most_heads = min(self.heads, heads or self.heads)
        most = min(self.batch, batch or self.batch)
        if rows is not None:
            most_heads = max(1, min(most_heads, rows // self.queries.rows))
            most = max(1, min(most, rows // (self.queries.rows * most_heads)))
        if (most_heads, most) == (self.heads, self.batch):
            return [self]
        view = self.queries
        parts = itertools.product(  # each has whole samples, or is inside of one
            _cut(view.samples, max(1, most // view.segments)), _cut(view.segments, most), _cut(self.heads, most_heads)
        )
        return [
            self._replace(
                queries=view.part(*part), keys=self.keys.part(*part),
                origin=self.origin + part[1].start * view.segment_step,
            )
            for part in parts
        ]  # fmt: skip


def _cut(count: int, most: int) -> list[range]:
    return [range(count)[first : first + most] for first in range(0, count, most)]


# --- heads that one view takes ------------------------------------------------------------------------------------


class HeadRun(NamedTuple):
    """Key/value heads that one view takes: the head and where its rows begin advance by constant steps."""

    first: Ints
    heads: int
    steps: Ints

    def entry(self, index: int) -> Ints:
        return tuple(x + index * step for x, step in zip(self.first, self.steps, strict=True))


def head_runs(entries: Iterable[Ints], group: int) -> Iterator[HeadRun]:
    """Heads, each with where its rows begin, in few views."""
    left = dict.fromkeys(entries)
    while left:
        run = _longest(left, group)
        for i in range(run.heads):
            del left[run.entry(i)]
        yield run


def _longest(entries: Collection[Ints], group: int) -> HeadRun:
    """The longest run that begins with the first entry."""
    first, *others = entries
    longest = HeadRun(first, 1, (1, *(0 for _ in first[1:])))
    for second in others:
        run = HeadRun(first, 2, tuple(map(operator.sub, second, first)))
        if run.steps[0] * longest.heads > others[-1][0] - first[0]:
            break  # with larger steps, runs are no longer
        # the query heads of several key/value heads are one stride only where those are neighbours at one offset
        if min(run.steps) >= 0 and (group == 1 or run.steps == longest.steps):
            while run.entry(run.heads) in entries:
                run = run._replace(heads=run.heads + 1)
            longest = max(longest, run, key=lambda run: run.heads)
    return longest
