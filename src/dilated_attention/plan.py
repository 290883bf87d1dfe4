"""A call as blocks, and what its queries see of keys that lie elsewhere.

Whole segments are folded into the batch of a block. A segment that begins before the queries, or ends after them, is a
block of its own.

Legend: B samples, n tokens here, H query heads, Hk key/value heads, D head dim; b = samples x segments, L rows.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from dilated_attention.bands import without_bands
from dilated_attention.blocks import Block, HeadRun, View, head_runs
from dilated_attention.branches import Branch, Dilated
from dilated_attention.branches.base import Rect, grouped
from dilated_attention.call import Call
from dilated_attention.checks import Ints
from dilated_attention.pattern import zeros_beside


class Plan(NamedTuple):
    """The blocks of a call whose keys are here."""

    blocks: tuple[Block, ...]
    merges: bool  # whether some row gets several parts


def folds(*tensors: Tensor) -> bool:
    """Whether (B, n) of all these tensors is one stride, so that segments of many samples are one batch."""
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors)


SegmentHeads = frozenset[tuple[int, int, int]]  # (branch, start of the segment, head)


@functools.lru_cache(maxsize=512)
def plan(
    call: Call, fold: bool = True, keys_follow: bool = False, computed_remotely: SegmentHeads = frozenset()
) -> Plan:
    """The blocks of a call, without bands. ``fold`` as `folds` says; ``keys_follow``: keys from elsewhere follow, to be
    merged; ``computed_remotely``: what other ranks compute."""
    if not call.samples or not call.queries:
        return Plan((), False)
    apart = bool(computed_remotely) or call.is_decode  # then blocks do not write every row, so all are merged
    blocks: list[Block] = []
    left = set(range(0 if call.is_decode else call.kv_heads))  # no row of these heads was written
    for index in call.pattern.order(call.drops):
        branch, heads = call.branches[index], [head for head, _ in call.placed(index)]
        blocks += blocks_of(call, index, heads, fold, () if branch.needs_masks else left, computed_remotely)
        left = left.difference(heads)
    merges = keys_follow or apart or not all(block.is_first for block in blocks)
    return Plan(tuple(blocks), merges)


class Away(NamedTuple):
    """Keys that lie elsewhere, with another rank or in a cache, and the blocks of a call's queries with them."""

    rows: View  # of the tensors there, with the keys of all blocks
    blocks: tuple[Block, ...]


@functools.lru_cache(maxsize=4096)
def away(call: Call, first: int, count: int) -> tuple[Away, ...]:
    """What the queries of a call see of the keys [first, first + count), which are not here. Both ends of a message
    make the same list. A row that several blocks of a branch see is packed once for each head."""

    def lane(block: Block) -> Hashable:
        keys = block.keys  # [7:] says which heads, and how their rows are shifted
        return block.branch, keys.row_step, keys.token % keys.row_step, keys[7:]

    parts: list[Away] = []
    for blocks in grouped(_apart(plan(call._replace(key_start=first, keys=count), False).blocks), lane).values():
        spans = joined_spans(span for block in blocks for span in _spans(block.keys))
        starts = [start for start, _ in spans]
        waiting: list[list[Block]] = [[] for _ in spans]
        for block in blocks:
            places = {bisect.bisect_right(starts, start) for start, _ in _spans(block.keys)}
            for piece in [block] if len(places) == 1 else block.cut(batch=1):
                waiting[bisect.bisect_right(starts, piece.keys.token) - 1].append(piece)
        for (start, stop), some in zip(spans, waiting, strict=True):
            keys = some[0].keys
            rows = keys._replace(token=start, segments=1, segment_step=0, rows=(stop - start) // keys.row_step)
            # of all samples: some blocks have one, others all
            parts.append(Away(rows._replace(sample=0, samples=call.samples), tuple(some)))
    return tuple(parts)


def _apart(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks, with one head each where a head is in views of several kinds, and where segments are not whole rows
    apart."""
    kinds: dict[tuple[int, int], set[Hashable]] = {}
    for block in blocks:
        for head in block.keys.numbers:
            kinds.setdefault((block.branch, head), set()).add(block.keys[7:])
    for block in blocks:
        heads = 1 if any(len(kinds[block.branch, head]) > 1 for head in block.keys.numbers) else None
        batch = 1 if block.keys.segments > 1 and block.keys.segment_step % block.keys.row_step else None
        for piece in block.cut(heads=heads, batch=batch):
            yield piece._replace(keys=piece.keys._replace(head_step=1, token_step=0)) if piece.heads == 1 else piece


def _spans(keys: View) -> list[tuple[int, int]]:
    """The tokens of the first head, segment by segment."""
    starts = (keys.token + index * keys.segment_step for index in range(keys.segments))
    return [(start, start + keys.rows * keys.row_step) for start in starts]


def joined_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches [start, stop) that meet or overlap as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


class Place(NamedTuple):
    """A rectangle of one head, in the tokens of all sequences."""

    rect: Rect
    origin: int  # as of a `Block`
    zeros: int
    but: tuple[Branch, ...]

    @property
    def shape(self) -> Hashable:
        """What heads of one block share."""
        queries, keys, *rest = self.rect
        return len(queries), queries.step, len(keys), keys.step, *rest, self.zeros, self.but


def blocks_of(
    call: Call, index: int, heads: Iterable[int], fold: bool = False, fresh: Collection[int] = (),
    elsewhere: SegmentHeads = frozenset(),
) -> Iterator[Block]:  # fmt: skip
    """The blocks of a branch: heads whose rectangles are alike, and equally far apart, are one. ``fresh``: heads of
    which no row was written."""
    by_kind: dict[Hashable, dict[int, Place]] = {}
    listed: dict[int, dict[int, Place]] = {}
    for head in heads:
        alike = call.looks(head)
        if alike not in by_kind:
            by_kind[alike] = _joined(_places(call, index, head), apart=bool(elsewhere))
        for number, place in by_kind[alike].items():
            if (index, place.origin, head) not in elsewhere:
                listed.setdefault(number, {})[head] = place
    for places in listed.values():
        kinds = grouped(places.items(), lambda item: (item[1].shape, item[0] in fresh, item[1].but and item[0]))
        for (_, is_first, _), some in kinds.items():
            starts = ((head, place.rect.queries.start, place.rect.keys.start) for head, place in some)
            for run in head_runs(starts, call.q_per_kv):
                yield from _of_run(call, index, run, places[run.first[0]], fold, is_first)


def _joined(places: Iterable[Place], apart: bool) -> dict[int, Place]:
    """The places by number, in which heads agree. Unless ``apart``, one that continues another repeats it."""
    kept: dict[int, Place] = {}
    latest: dict[Hashable, int] = {}
    for number, place in enumerate(places):
        rect = place.rect
        if not rect.pairs():
            continue
        kind = place._replace(rect=rect.some(0, 1).moved(-place.origin), origin=0)
        before = kept.get(latest.get(kind, -1))
        joined = before and not (apart or place.but) and before.rect.followed_by(rect)
        if before and joined:
            kept[latest[kind]] = before._replace(rect=joined)
        else:
            kept[number] = place
            latest[kind] = number
    return kept


def _places(call: Call, index: int, head: int) -> Iterator[Place]:
    """The rectangles of a branch and head."""
    branch = call.branches[index]
    for begin, end in itertools.pairwise(_cu_seqlens_here(call)):
        queries, n = range(max(call.start, begin) - begin, min(call.start + call.queries, end) - begin), end - begin
        here = call.key_start - begin, call.key_start + call.keys - begin
        reach = branch.reach(queries) or range(n)
        if reach.stop <= here[0] or here[1] <= reach.start:
            continue
        for rect, but in call.parts(index, head, queries, n):
            origin, zeros = begin, 0
            if isinstance(branch, Dilated) and not but:
                origin += rect.queries.start - rect.queries.start % branch.length
                zeros = zeros_beside(branch, len(rect.keys), n) if call.adds_zeros else 0
            for part in rect.with_keys(*here):
                for even in part.even():
                    for plain in without_bands(even, bool(but)):
                        for single in plain.singles() if but else [plain]:
                            yield Place(single.moved(begin), origin, zeros, but)


def _cu_seqlens_here(call: Call) -> Ints:
    """Those of the sequences that have both queries and keys here."""
    cu_seqlens = call.full_cu_seqlens
    first, stop = max(call.start, call.key_start), min(call.start + call.queries, call.key_start + call.keys)
    return cu_seqlens[bisect.bisect_right(cu_seqlens, first) - 1 : bisect.bisect_left(cu_seqlens, stop) + 1]


def _of_run(call: Call, index: int, run: HeadRun, place: Place, fold: bool, is_first: bool) -> Iterator[Block]:
    """A block for each batch that a view takes: samples and segments are one only if their strides chain; else the
    fewer of them are a loop."""
    rect = place.rect
    folded = fold and not call.is_decode and rect.repeats * rect.period == call.queries
    batches = [(0, call.samples, 0, rect.repeats)]  # (first sample, samples, segments skipped, segments)
    if rect.repeats > 1 < call.samples and not folded:
        of_segments = [(0, call.samples, at, 1) for at in range(rect.repeats)]
        of_samples = [(sample, 1, 0, rect.repeats) for sample in range(call.samples)]
        batches = min(of_samples, of_segments, key=len)
    for first, samples, skipped, segments in batches:
        shift = skipped * rect.period
        queries, keys = (
            View(
                first, samples, run.first[i] + shift, segments, rect.period or len(rows) * rows.step,
                len(rows), rows.step, run.first[0], run.heads, run.steps[0], run.steps[i], start,
            )
            for i, rows, start in ((1, rect.queries, call.start), (2, rect.keys, call.key_start))
        )  # fmt: skip
        yield Block(index, queries, keys, *rect.in_rows(), place.origin + shift, place.zeros, is_first, place.but)
