"""A call as blocks: each is one dense problem on strided views of the tensors, which are never copied.

A branch's rows of one offset are a strided view of (B, n, H, D), whole segments folded into the batch. Heads of
different offsets share a view too when head and offset advance together (a diagonal: one stride per head). A segment
that begins before the queries, or ends after them, is a block of its own.

Legend: B samples, n tokens here, H query heads, Hk key/value heads, D head dim; b = samples x segments, L rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import NamedTuple

from torch import Tensor

from dilated_attention.call import Call
from dilated_attention.pattern import rows_at_offset

NO_STRIDE = 2**62  # as long as torch takes; only dimensions of size 1 have such


class View(NamedTuple):
    """Rows of some heads of a tensor (B, n, H, ...) that one strided view takes."""

    sample: int
    samples: int
    token: int  # of the first head's first row
    segments: int
    segment_step: int  # tokens from one segment to the next
    rows: int  # per segment
    row_step: int  # tokens from one row to the next
    head: int  # the first key/value head
    heads: int
    head_step: int
    token_step: int  # how many tokens later the rows of the next head are; 0: all heads share the offset

    def of(self, x: Tensor, group: int = 1) -> Tensor:
        """The (b, L, h, ...) part of x, never a copy; group query heads per key/value head."""
        per_sample, per_token, per_head = x.stride()[:3]
        per_batch = per_sample if self.segments == 1 and self.samples > 1 else self.segment_step * per_token
        head_stride = per_head if group > 1 else self.head_step * per_head + self.token_step * per_token
        return x.as_strided(
            (self.samples * self.segments, self.rows, self.heads * group, *x.shape[3:]),
            (min(per_batch, NO_STRIDE), min(self.row_step * per_token, NO_STRIDE), head_stride, *x.stride()[3:]),
            x.storage_offset() + self.sample * per_sample + self.token * per_token + self.head * group * per_head,
        )

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
    """One dense problem: the rows of some heads as queries, and rows that all of them see as keys."""

    branch: int
    rate: int  # tokens from one row to the next, in the sequence
    queries: View
    keys: View
    is_causal: bool  # query row i sees key rows up to i; else every row sees all
    query_at: tuple[int, ...]  # each head's first query in the sequence,
    key_at: tuple[int, ...]  # and its first key
    segment: int  # where the first segment begins in the sequence
    zeros: int = 0  # appended zero keys that each row attends to
    is_first: bool = False  # nothing was written to these rows before: write, do not merge
    packed_queries: View | None = None  # in a tensor of this rank's rows alone, where keys are another rank's
    numbers: tuple[int, ...] = ()  # of the key/value heads, where the views are not of the call's own tensors

    @property
    def heads(self) -> int:
        return self.queries.heads

    @property
    def batch(self) -> int:
        return self.queries.samples * self.queries.segments

    @property
    def head_numbers(self) -> tuple[int, ...]:
        """The key/value heads, as the call counts them."""
        view = self.queries
        return self.numbers or tuple(view.head + i * view.head_step for i in range(view.heads))

    def covers(self, call: Call) -> bool:
        """Whether the block is all rows of a call, in their order."""
        view = self.queries
        return (
            view.row_step == 1
            and view.samples == call.samples
            and view.segments * view.rows == call.queries
            and (view.head, view.head_step, view.heads) == (0, 1, call.kv_heads)
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
        if self.queries.samples > 1 < self.queries.segments:  # a part has whole samples, or is inside of one
            segments = self.queries.segments
            most = most - most % segments if most >= segments else most
        return [
            self._part(first, stop, head, min(head + most_heads, self.heads))
            for first, stop in self._stretches(most)
            for head in range(0, self.heads, most_heads)
        ]

    def _stretches(self, most: int) -> Iterator[tuple[int, int]]:
        """The batch in parts of at most so much; samples that are taken apart are taken apart one by one."""
        whole = self.batch if self.queries.segments == 1 or most >= self.queries.segments else self.queries.segments
        for begin in range(0, self.batch, whole):
            for first in range(begin, begin + whole, most):
                yield first, min(first + most, begin + whole)

    def _part(self, first: int, stop: int, head: int, last: int) -> Block:
        segment = 0 if self.queries.segments == 1 else first % self.queries.segments
        shift = segment * self.queries.segment_step
        where = (first, stop - first, head, last - head)
        packed = self.packed_queries
        if packed is not None:
            q_per_kv = packed.heads // self.heads
            packed = packed.part(first, stop - first, head * q_per_kv, (last - head) * q_per_kv)
        return self._replace(
            packed_queries=packed,
            numbers=self.numbers[head:last],
            queries=self.queries.part(*where),
            keys=self.keys.part(*where),
            query_at=tuple(at + shift for at in self.query_at[head:last]),
            key_at=tuple(at + shift for at in self.key_at[head:last]),
            segment=self.segment + shift,
        )


class Plan(NamedTuple):
    """The blocks of a call whose keys are here."""

    blocks: tuple[Block, ...]
    bare: tuple[int, int]  # key/value heads: in all others, blocks that write first cover every row
    merges: bool  # whether some row gets several parts

    def row_counts(self) -> set[int]:
        """Of the blocks, as kernels see them."""
        return {min(block.queries.rows, block.keys.rows) for block in self.blocks}


def folds(*tensors: Tensor) -> bool:
    """Whether (B, n) of all these tensors is one stride, so that segments of many samples are one batch."""
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors)


SegmentHeads = frozenset[tuple[int, int, int]]  # (branch, start of the segment, head)


@functools.lru_cache(maxsize=512)
def plan(
    call: Call, fold: bool = True, sample: int = 0, keys_follow: bool = False,
    computed_remotely: SegmentHeads = frozenset(),
) -> Plan:  # fmt: skip
    """The blocks of a call. ``fold`` as `folds` says; ``sample``: the first one that the blocks are of.

    ``keys_follow``: keys from elsewhere follow, to be merged. ``computed_remotely``: what other ranks compute.
    """
    if not call.samples or not call.queries:
        return Plan((), (0, call.kv_heads), False)
    apart = bool(computed_remotely) or call.is_decode  # then blocks do not write every row, so all are merged
    rates = call.pattern.dilation_rates
    blocks: list[Block] = []
    written: set[int] = set()
    bare = list(range(call.kv_heads)) if apart else []
    for branch in sorted(range(len(rates)), key=rates.__getitem__):
        # densest first: with r = 1 the first branch writes every row and nothing needs filling
        placed = call.placed(branch)
        fresh = {head for head, _ in placed if head not in written and not call.is_decode}
        bare += fresh if rates[branch] > 1 else ()
        for is_first in (True, False):
            for piece in _pieces(call, branch):
                here = [
                    (head, offset)
                    for head, offset in placed
                    if (head in fresh) == is_first and (branch, piece.segment, head) not in computed_remotely
                ]
                blocks += _blocks(call, branch, here, piece, sample, fold, is_first)
        written.update(head for head, _ in placed)
    merges = keys_follow or apart or not all(block.is_first for block in blocks)
    return Plan(tuple(blocks), (min(bare), max(bare) + 1) if bare else (0, 0), merges)


class Piece(NamedTuple):
    """Equal segments at equal distances, or the part of one that holds queries; positions among all tokens."""

    segment: int  # where the (first) segment begins,
    length: int  # and how long it is
    first: int  # the queries of each are [first, stop)
    stop: int
    number: int
    step: int  # tokens from one segment to the next
    sequence: int  # tokens of the sequence that the segment is in

    def joined(self, other: Piece) -> Piece | None:
        """Both as one piece, where a later one continues this one."""
        step = other.segment - self.segment if self.number == 1 else self.step
        fits = other.segment - self.segment == step * self.number and (other.number == 1 or other.step == step)
        return self._replace(number=self.number + other.number, step=step) if fits else None


def _pieces(call: Call, branch: int) -> list[Piece]:
    width = call.pattern.segment_lengths[branch]
    if not call.cu_seqlens:
        return list(_pieces_of(call, width, 0, call.total))
    kinds: dict[Hashable, list[Piece]] = {}  # by kind: equally long, with equally many zero keys
    for begin, end in itertools.pairwise(call.cu_seqlens):
        for piece in _pieces_of(call, width, begin, end):
            at, length, first, stop, _, _, sequence = piece
            alike = kinds.setdefault((length, first - at, stop - at, min(width, sequence)), [])
            joined = alike[-1].joined(piece) if alike else None
            alike[-1:] = [joined] if joined else [*alike[-1:], piece]
    return list(itertools.chain.from_iterable(kinds.values()))


def _pieces_of(call: Call, width: int, begin: int, end: int) -> Iterator[Piece]:
    """Of the sequence that is the tokens [begin, end)."""
    first, last, total = max(call.start, begin), min(call.start + call.queries, end), end - begin
    if first >= last:
        return
    width = min(width, total)
    before = (first - begin) % width
    if before:  # the end of a segment, or a part inside of one
        segment = first - before
        stop = min(segment + width, last)
        yield Piece(segment, min(width, end - segment), first, stop, 1, stop - first, total)
        first = stop
    whole, rest = divmod(last - first, width)
    if whole:
        yield Piece(first, width, first, first + width, whole, width, total)
        first += whole * width
    if rest:
        yield Piece(first, min(width, end - first), first, last, 1, rest, total)


class _Counts(NamedTuple):
    """Of one head in one segment: key rows before the queries, queries, keys in all; and zero keys."""

    before: int
    queries: int
    keys: int
    zeros: int


def _blocks(
    call: Call, branch: int, placed: list[tuple[int, int]], piece: Piece, sample: int, fold: bool, is_first: bool
) -> Iterator[Block]:
    """The blocks of a piece: one for each set of heads that a view takes, and each batch that a view takes."""
    rate, segment = call.pattern.dilation_rates[branch], piece.segment
    key_first = max(segment, call.key_start)
    key_stop = min(segment + piece.length, call.key_start + call.keys)
    counts: dict[int, _Counts] = {}
    starts: list[Placed] = []  # head, first query and first key of each head
    for head, offset in placed:
        upto = [rows_at_offset(x - segment, rate, offset) for x in (key_first, piece.first, piece.stop, key_stop)]
        if upto[2] > upto[1]:
            zeros = 0
            if call.adds_zeros:
                zeros = call.pattern.zeros_in_segment(branch, piece.length, offset, piece.sequence)
            counts[head] = _Counts(upto[1] - upto[0], upto[2] - upto[1], upto[3] - upto[0], zeros)
            starts.append((head, *(segment + offset + rate * rows for rows in (upto[1], upto[0]))))
    for run in head_runs(starts, counts.__getitem__, call.q_per_kv):
        count = counts[run.first[0]]
        for first, samples, skipped, segments in _batches(call, piece, fold):
            shift = skipped * piece.step
            at, key_at = (
                tuple(run.first[i] + shift + head * run.steps[i] for head in range(run.heads)) for i in (1, 2)
            )
            queries, keys = (
                View(
                    sample + first, samples, start - here, segments, piece.step, rows, rate, run.first[0], run.heads,
                    run.steps[0], token_step,
                )
                for start, here, rows, token_step in (
                    (at[0], call.start, count.queries, run.steps[1]),
                    (key_at[0], call.key_start, count.keys, run.steps[2]),
                )
            )  # fmt: skip
            block = Block(
                branch, rate, queries, queries, call.is_causal, at, at, segment + shift,
                count.zeros, is_first,
            )  # fmt: skip
            yield from _with_keys(block, keys, key_at, count, call) if call.is_decode else [block]


def _with_keys(block: Block, keys: View, key_at: tuple[int, ...], count: _Counts, call: Call) -> Iterator[Block]:
    """Few queries with their keys: the whole segment, or when causal the earlier keys and then a triangle."""
    if not call.is_causal:
        yield block._replace(keys=keys, key_at=key_at)
    elif count.queries == 1:
        yield block._replace(keys=keys._replace(rows=count.before + 1), key_at=key_at, is_causal=False)
    else:
        if count.before:
            yield block._replace(keys=keys._replace(rows=count.before), key_at=key_at, is_causal=False)
        yield block._replace(keys=block.queries._replace(token=block.query_at[0] - call.key_start))


def _batches(call: Call, piece: Piece, fold: bool) -> list[tuple[int, int, int, int]]:
    """(first sample, samples, segments skipped, segments): what of a piece is one batch.

    Samples and segments are one only if their strides chain; else the fewer of them are a loop.
    """
    folded = fold and not call.is_decode and piece.number * piece.length == call.queries
    if piece.number == 1 or call.samples == 1 or folded:
        return [(0, call.samples, 0, piece.number)]
    if piece.number < call.samples:
        return [(0, call.samples, at, 1) for at in range(piece.number)]
    return [(sample, 1, 0, piece.number) for sample in range(call.samples)]


# --- heads that one view takes ------------------------------------------------------------------------------------

Placed = tuple[int, ...]  # a head, and where its rows begin


class HeadRun(NamedTuple):
    """Key/value heads that one view takes: the head and where its rows begin advance by constant steps."""

    first: Placed
    heads: int
    steps: tuple[int, ...]

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
    lanes: dict[Hashable, list[Placed]] = {}
    for entry in placed:
        lanes.setdefault(lane_of(*entry[:2]), []).append(entry)
    runs = []
    for lane in lanes.values():
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


def _advanced(first: Placed, steps: tuple[int, ...], count: int) -> Placed:
    return tuple(x + count * step for x, step in zip(first, steps, strict=True))
