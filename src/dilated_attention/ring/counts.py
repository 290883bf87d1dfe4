"""What every rank sends, receives, holds and computes in each exchange, counted for all ranks at once.

What the queries of one rank need of others follows from their rectangles, as in `plan.away`. A
dilated branch repeats itself: what queries need is found once for all that lie alike in their segments.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dilated_attention.branches import Dilated
from dilated_attention.branches.base import grouped
from dilated_attention.call import Call
from dilated_attention.checks import Ints
from dilated_attention.plan import joined_spans, with_keys_here
from dilated_attention.ring.alltoall import bundles_of, can_deal, segment_at
from dilated_attention.ring.parallel import Travelling, row_bytes
from dilated_attention.ring.shards import Shards
from dilated_attention.shown import count_pairs, moved_to

# What an exchange comes to, by rank: hops, and bytes that are sent and received, each of them forward and backward; the
# most bytes of received rows at one time; bytes of gradients that are summed in float32; pairs of a query and a key, of
# one sample and one query head of each key/value head.
Tally = Tensor  # (9, ranks)
Pair = tuple[int, int]
T = TypeVar("T", int, Tensor)


def count(call: Call, shards: Shards, pairs: Tensor) -> dict[str, Tally]:
    """``call``: of all tokens; ``pairs``: see `pairs_by_rank`."""
    rows, queries, own = rows_needed(call, shards)
    fields = Travelling.of(call.dtype, call.q_per_kv, call.head_dim, call.has_padding)
    blocks, sums = (call.samples * row_bytes(some) for some in (fields.blocks, fields.sums))
    totals = own * sums + queries * (sums // 2 * call.q_per_kv)  # dk and dv of rows that travel; dq of their readers
    place = torch.arange(shards.ranks, device="cpu")
    rank = place.unsqueeze(1)
    came, gone = rows.gather(1, (rank - place) % len(place)), rows.T.gather(1, (rank + place) % len(place))
    found = {}
    for name, at_once in (("ring", 2), ("allgather", 1)):  # in a ring a step is in use, and the next on its way
        if name == "allgather":
            came, gone = came.sum(1, keepdim=True), gone.sum(1, keepdim=True)
        hops, most = (came + gone > 0).sum(1), came.amax(1)
        held = at_once * (most * blocks + gone.amax(1) * sums), totals + at_once * most * sums
        found[name] = _tally(gone.sum(1), came.sum(1), [(blocks, 0), (blocks, sums)], hops, 2 * hops, *held, pairs)
    if can_deal(call.pattern):
        found["alltoall"] = _dealt(call, shards, fields, pairs)
    return found


def _tally(gone: Tensor, came: Tensor, ways: list[Pair], hops: Tensor, hops_back: Tensor, *others: Tensor) -> Tally:
    """``gone`` and ``came``: rows; ``ways``: the bytes of one there, and of its results back, in each pass."""
    sent, received = ([x * there + y * back for there, back in ways] for x, y in ((gone, came), (came, gone)))
    return torch.stack([hops, hops_back, *sent, *received, *others])


def _dealt(call: Call, shards: Shards, fields: Travelling, pairs: Tensor) -> Tally:
    """Ranks compute bundles of heads whole, instead of their own queries."""
    columns = []
    for rank in range(shards.ranks):
        gone = came = more = 0  # rows, and pairs more than those of its own queries
        for bundle in bundles_of(call, shards, rank):
            whole, own, heads = bundle.block.queries, bundle.members[rank], bundle.block.heads
            is_here, first = bundle.target == rank, (own.token - whole.token) // whole.row_step
            gone += 0 if is_here else heads * own.rows
            came += heads * (whole.rows - own.rows) if is_here else 0
            before, after, every = (_seen(call, x, whole.rows) for x in (first, first + own.rows, whole.rows))
            more += heads * (before - after + (every if is_here else 0))
        columns.append((gone, came, more))
    gone, came, more = torch.tensor(columns, device="cpu").T
    there, back = (fields.inputs, (*fields.rows[1:], *fields.inputs)), (fields.results, fields.gradients)
    ways = [(call.samples * row_bytes(x), call.samples * row_bytes(y)) for x, y in zip(there, back, strict=True)]
    held = torch.stack([x * size for way in ways for x, size in zip((came, gone), way, strict=True)]).amax(0)
    hops = 2 * (gone + came > 0)
    return _tally(gone, came, ways, hops, hops, held, 0 * hops, pairs + more)


# --- rows that queries need -----------------------------------------------------------------------------------------


class Needs(NamedTuple):
    """Of one sample: rows of all heads."""

    rows: Tensor  # (reader, owner) of K, that each rank needs of each other one
    queries: Tensor  # (ranks,) that see them
    own: Tensor  # (ranks,) of K, that others need: the most of one rank before, and the most of one after


def rows_needed(call: Call, shards: Shards) -> Needs:
    rows = torch.zeros(shards.ranks, shards.ranks, dtype=torch.int64, device="cpu")
    queries, own = rows.new_zeros(2, shards.ranks)
    for index in range(len(call.branches)):
        known: dict[Ints, Needs] = {}
        branch = segmented(call, index)
        for zone in shared_zones(shards, branch):
            ranks, cut = shards.cut(*zone)
            if cut not in known:
                known[cut] = _in_segment(call, index, branch, cut) if branch else _in_sequence(call, index, cut)
            here = slice(ranks.start, ranks.stop)
            for x, part in zip((rows[here, here], queries[here], own[here]), known[cut], strict=True):
                x += part
    return Needs(rows, queries, own)


def segmented(call: Call, index: int) -> Dilated | None:
    """The branch, if each of its segments is like a sequence of its own, whatever the other branches."""
    branch = call.branches[index]
    return branch if call.pattern.counts == "sum" and isinstance(branch, Dilated) else None


def shared_zones(shards: Shards, branch: Dilated | None) -> list[Pair]:
    """The sequences, or the segments of the branch, that lie on several ranks: nothing outside of one is seen."""
    inner = {border for border in shards.starts if 0 < border < shards.tokens}
    zones = {segment_at(shards, x, branch.length) if branch else shards.sequence(x) for x in inner}
    return sorted(zone for zone in zones if len(shards.holders(*zone)) > 1)


def _in_segment(call: Call, index: int, branch: Dilated, cut: Ints) -> Needs:
    """A segment that is cut at these tokens: all that hold rows of it, or when causal all before, are needed."""
    offsets, times = _offsets(call, index, branch)
    rows = times * _before(torch.tensor(cut, device="cpu"), offsets, branch.rate).diff()  # (kinds of heads, ranks)
    holds, others = (rows > 0).long(), torch.ones(len(cut) - 1, len(cut) - 1, dtype=torch.int64, device="cpu")
    others = others.tril(-1) if call.is_causal else others.fill_diagonal_(0)
    queries, own = (((holds @ x > 0) * rows).sum(0) for x in (others.T, others))
    return Needs(others * (holds.T @ rows), queries, own)


def _offsets(call: Call, index: int, branch: Dilated) -> tuple[Tensor, ...]:
    """Where the rows of each kind of heads begin, and of how many heads, (kinds, 1)."""
    kinds = [(branch.offset_of(head), times) for head, times in kinds_of_heads(call, index)]
    return torch.tensor(kinds, dtype=torch.int64, device="cpu").view(-1, 2, 1).unbind(1)


def _in_sequence(call: Call, index: int, cut: Ints) -> Needs:
    """A sequence that is cut at these tokens: what the rectangles of each rank's queries say."""
    starts = torch.tensor(cut, device="cpu")
    rows, queries = starts.new_zeros(len(cut) - 1, len(cut) - 1), starts.new_zeros(len(cut) - 1)
    for reader, (first, stop) in enumerate(itertools.pairwise(cut)):
        _, queries[reader], lanes = _of_queries(call, index, first, stop, cut[-1])
        if lanes:
            start, step, length, times = torch.tensor(lanes, device="cpu").T.unsqueeze(2)
            rows[reader] = (times * _before(starts, start, step).minimum(length).diff()).sum(0)
    return Needs(rows, queries, rows.tril().amax(0) + rows.triu().amax(0))


def _before(tokens: Tensor, start: Tensor | int, step: Tensor | int) -> Tensor:
    """How many of start, start + step, ... come before each token."""
    return (-((start - tokens) // step)).clamp(min=0)


# Of some queries in a branch: pairs, queries that see keys before or after all of them, and those keys, each once:
# start, step, length, and of how many heads.
OfQueries = tuple[int, int, list[Ints]]


def _of_queries(call: Call, index: int, first: int, stop: int, n: int) -> OfQueries:
    """Far from the beginning it is the same as near to it."""
    shift, length = moved_to(call.branches[index], call.branches, range(first, stop), n)
    pairs, seeing, lanes = _near(call, index, range(first - shift, stop - shift), length)
    return pairs, seeing, [(start + shift, *others) for start, *others in lanes]


@functools.lru_cache(maxsize=1 << 12)
def _near(call: Call, index: int, queries: range, n: int) -> OfQueries:
    pairs, seeing, lanes = 0, 0, list[Ints]()
    for head, times in kinds_of_heads(call, index) if queries else ():
        parts = list(call.parts(index, head - call.first_head, queries, n))
        rects = [
            one
            for rect, _ in parts
            for elsewhere in ((0, queries.start), (queries.stop, n))
            for part in with_keys_here(rect, *elsewhere)
            for one in part.singles()
            if not one.is_empty
        ]
        pairs += times * count_pairs(parts, head)
        seeing += times * sum(rows.length for rows in {rect.queries for rect in rects})
        by_step = grouped((rect.keys for rect in rects), lambda keys: (keys.step, keys.start % keys.step))
        for (step, _), some in by_step.items():
            spans = joined_spans((keys.start, keys.last + step) for keys in some)
            lanes += [(start, step, (stop - start) // step, times) for start, stop in spans]
    return pairs, seeing, lanes


@functools.lru_cache(maxsize=256)
def kinds_of_heads(call: Call, index: int) -> list[Pair]:
    """One of each kind of heads that see the same in a branch, and how many there are."""
    is_alone = call.pattern.counts == "sum"  # else other branches cut away what they show
    kinds = grouped(call.placed(index), lambda placed: placed[1:] if is_alone else call.looks(placed[0]))
    return [(call.first_head + some[0][0], len(some)) for some in kinds.values()]


# --- pairs ----------------------------------------------------------------------------------------------------------


def pairs_by_rank(call: Call, shards: Shards) -> Tensor:
    """The pairs of each rank's queries, of one sample and one query head for each key/value head."""
    found = torch.zeros(shards.ranks, dtype=torch.int64, device="cpu")
    for zone in itertools.pairwise(shards.cu_seqlens):
        ranks, cut = shards.cut(*zone)
        for index in range(len(call.branches)):
            found[ranks.start : ranks.stop] += _pairs(call, index, cut)
    return found


@functools.lru_cache(maxsize=1 << 12)
def _pairs(call: Call, index: int, cut: Ints) -> Tensor:
    """Of the queries of a sequence, where it is cut at these tokens."""
    tokens, branch = torch.tensor(cut, device="cpu"), segmented(call, index)
    if branch is None:
        each = [_of_queries(call, index, *some, cut[-1])[0] for some in itertools.pairwise(cut)]
        return torch.tensor(each, dtype=torch.int64, device="cpu")
    (offsets, times), width = _offsets(call, index, branch), branch.length
    whole, rest = tokens // width, tokens % width
    length = (cut[-1] - whole * width).clamp(max=width)  # of the segment that each token is in
    full, earlier, every = (_before(x, offsets, branch.rate) for x in (torch.full_like(tokens, width), rest, length))
    return (times * (whole * _seen(call, full, full) + _seen(call, earlier, every)).diff()).sum(0)


def _seen(call: Call, rows: T, every: T) -> T:
    """The pairs of the first rows of a segment, and all of its rows as keys."""
    return rows * (rows + 1) // 2 if call.is_causal else rows * every
