"""What every rank sends, receives, holds and computes in each exchange, counted for all ranks at once.

What the queries of one rank need of others follows from their rectangles, as in `plan.away`. A
dilated branch repeats itself: what queries need is found once for all that lie alike in their segments.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.branches import Dilated
from dilated_attention.branches.base import Rows
from dilated_attention.branches.union import Part, count_pairs, moved_to
from dilated_attention.call import Call
from dilated_attention.checks import Ints
from dilated_attention.plan import together, with_keys_here
from dilated_attention.ring.alltoall import bundles_of, can_deal, peers_of, segment_at
from dilated_attention.ring.messages import Travelling, row_bytes, sizes_of
from dilated_attention.ring.shards import Shards

# What an exchange comes to, by rank: hops, and bytes that are sent and received, each of them forward and backward; the
# most bytes of received rows at one time; bytes of gradients that are summed in float32; pairs of a query and a key, of
# one sample and one query head of each key/value head.
RECEIVED = slice(4, 6)
Tally = Tensor  # (9, ranks)


def count(call: Call, shards: Shards, pairs: Tensor) -> dict[str, Tally]:
    """``call``: of all tokens; ``pairs``: see `pairs_by_rank`."""
    rows, queries, own = rows_needed(call, shards)
    fields = Travelling.of(call.dtype, call.q_per_kv, call.head_dim, call.has_padding)
    blocks, sums = (call.samples * row_bytes(some) for some in (fields.blocks, fields.sums))
    totals = own * sums + queries * (sums // 2 * call.q_per_kv)  # dk and dv of rows that travel; dq of their readers
    size = shards.ranks
    rank, place = torch.arange(size, device="cpu").unsqueeze(1), torch.arange(1, size, device="cpu")
    came, gone = rows.gather(1, (rank - place) % size), rows.T.gather(1, (rank + place) % size)
    found = {}
    for name, at_once in (("ring", 2), ("allgather", 1)):  # in a ring a step is in use, and the next on its way
        if name == "allgather":
            came, gone = came.sum(1, keepdim=True), gone.sum(1, keepdim=True)
        hops, received, sent = ((came > 0) | (gone > 0)).sum(1), came.sum(1), gone.sum(1)
        most, most_sent = (x.amax(1) if x.shape[1] else hops for x in (came, gone))
        found[name] = torch.stack([
            hops, 2 * hops, sent * blocks, sent * blocks + received * sums, received * blocks,
            received * blocks + sent * sums, at_once * (most * blocks + most_sent * sums),
            totals + at_once * most * sums, pairs,
        ])  # fmt: skip
    if can_deal(call.pattern):
        found["alltoall"] = _dealt(call, shards, fields, pairs)
    return found


# --- rows that queries need -----------------------------------------------------------------------------------------


class Needs(NamedTuple):
    """Of one sample: rows of all heads."""

    rows: Tensor  # (reader, owner) of K, that each rank needs of each other one
    queries: Tensor  # (ranks,) that see them
    own: Tensor  # (ranks,) of K, that others need: the most of one rank before, and the most of one after


def rows_needed(call: Call, shards: Shards) -> Needs:
    size = shards.ranks
    rows = torch.zeros(size, size, dtype=torch.int64, device="cpu")
    needs = Needs(rows, rows.new_zeros(size), rows.new_zeros(size))
    for index in range(len(call.branches)):
        known: dict[Ints, Needs] = {}
        branch = segmented(call, index)
        for zone in shared_zones(shards, branch):
            ranks, cut = shards.cut(*zone)
            if cut not in known:
                known[cut] = _in_segment(call, index, branch, cut) if branch else _in_sequence(call, index, cut)
            here = slice(ranks.start, ranks.stop)
            for x, part in zip((rows[here, here], needs.queries[here], needs.own[here]), known[cut], strict=True):
                x += part
    return needs


def segmented(call: Call, index: int) -> Dilated | None:
    """The branch, if each of its segments is like a sequence of its own, whatever the other branches."""
    branch = call.branches[index]
    return branch if call.pattern.counts == "sum" and isinstance(branch, Dilated) else None


def shared_zones(shards: Shards, branch: Dilated | None) -> list[tuple[int, int]]:
    """The sequences, or the segments of the branch, that lie on several ranks: nothing outside of one is seen."""
    inner = {border for border in shards.starts if 0 < border < shards.tokens}
    zones = {segment_at(shards, x, branch.length) if branch else shards.sequence(x) for x in inner}
    return sorted(zone for zone in zones if len(shards.holders(*zone)) > 1)


def _in_segment(call: Call, index: int, branch: Dilated, cut: Ints) -> Needs:
    """A segment that is cut at these tokens: all that hold rows of it, or when causal all before, are needed."""
    starts, size = torch.tensor(cut, device="cpu"), len(cut) - 1
    needs = Needs(starts.new_zeros(size, size), *starts.new_zeros(2, size))
    others = torch.ones(size, size, dtype=torch.bool, device="cpu")
    others = others.tril(-1) if call.is_causal else others.fill_diagonal_(False)
    alike: dict[tuple[bool, ...], Tensor] = {}  # the rows of all heads that lie on the same ranks
    for head, times in kinds_of_heads(call, index):
        rows = times * _before(starts, branch.offset_of(head), branch.rate).clamp(min=0).diff()
        holds = tuple((rows > 0).tolist())
        alike[holds] = alike.get(holds, 0) + rows
    for rows in alike.values():
        reads = others & (rows > 0).unsqueeze(1) & (rows > 0)
        needs.rows.add_(reads * rows)
        needs.queries.add_(reads.any(1) * rows)
        needs.own.add_(reads.any(0) * rows)
    return needs


def _in_sequence(call: Call, index: int, cut: Ints) -> Needs:
    """A sequence that is cut at these tokens: what the rectangles of each rank's queries say."""
    shards, n = Shards(cut, (0, cut[-1])), cut[-1]
    starts = torch.tensor(cut, device="cpu")
    needs = Needs(starts.new_zeros(len(cut) - 1, len(cut) - 1), *starts.new_zeros(2, len(cut) - 1))
    for reader, (first, stop) in enumerate(itertools.pairwise(cut)):
        _, needs.queries[reader], lanes = _of_queries(call, index, first, stop, n)
        if lanes:
            held = shards.holders(min(lane[0] for lane in lanes), max(Rows(*lane[:3]).last for lane in lanes) + 1)
            start, step, length, times = torch.tensor(lanes, device="cpu").T.unsqueeze(2)
            before = _before(starts[held.start : held.stop + 1], start, step).clamp(min=0).minimum(length)
            needs.rows[reader, held.start : held.stop] = (times * before.diff(dim=1)).sum(0)
    return needs._replace(own=needs.rows.tril().amax(0) + needs.rows.triu().amax(0))


def _before(tokens: Tensor, start: Tensor | int, step: Tensor | int) -> Tensor:
    """How many of start, start + step, ... come before each token."""
    return -((start - tokens) // step)


class OfQueries(NamedTuple):
    """What some queries do in a branch."""

    pairs: int
    seeing: int  # queries that see keys before or after all of them
    lanes: list[Ints]  # and those keys, each once: start, step, length, and of how many heads


def _of_queries(call: Call, index: int, first: int, stop: int, n: int) -> OfQueries:
    """Far from the beginning it is the same as near to it."""
    shift, length = moved_to(call.branches[index], call.branches, range(first, stop), n)
    found = _near(call, index, range(first - shift, stop - shift), length)
    return found._replace(lanes=[(start + shift, *others) for start, *others in found.lanes])


@functools.lru_cache(maxsize=1 << 12)
def _near(call: Call, index: int, queries: range, n: int) -> OfQueries:
    pairs, seeing, lanes = 0, 0, list[Ints]()
    for head, times in kinds_of_heads(call, index) if queries else ():
        parts = list(call.parts(index, head - call.first_head, queries, n))
        here, keys = _beyond(parts, queries, n)
        pairs += times * count_pairs(parts, head)
        seeing += times * here
        lanes += [(*rows, times) for rows in keys]
    return OfQueries(pairs, seeing, lanes)


def _beyond(parts: list[Part], queries: range, n: int) -> tuple[int, list[Rows]]:
    """How many of these queries see keys before or after all of them, and those keys, each once."""
    seeing: set[Rows] = set()
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for rect, _ in parts:
        for first, stop in ((0, queries.start), (queries.stop, n)) if not rect.is_empty else ():
            for part in with_keys_here(rect, first, stop) if first < stop else ():
                for one in part.singles() if not part.is_empty else ():
                    start, step, _ = one.keys
                    seeing.add(one.queries)
                    lanes[step, start % step].append((start, one.keys.last + step))
    found = [
        Rows(start, step, (stop - start) // step)
        for (step, _), spans in lanes.items()
        for start, stop in together(spans)
    ]
    return sum(rows.length for rows in seeing), found


@functools.lru_cache(maxsize=256)
def kinds_of_heads(call: Call, index: int) -> tuple[tuple[int, int], ...]:
    """One of each kind of heads that see the same in a branch, and how many there are."""
    first: dict[Ints, int] = {}
    found: Counter[int] = Counter()
    for head, offset in call.placed(index):
        is_alone = call.pattern.counts == "sum"  # else other branches cut away what they show
        looks = (offset,) if is_alone else call.looks(head)
        found[first.setdefault(looks, call.first_head + head)] += 1
    return tuple(found.items())


# --- pairs ----------------------------------------------------------------------------------------------------------


def pairs_by_rank(call: Call, shards: Shards) -> Tensor:
    """The pairs of each rank's queries, of one sample and one query head for each key/value head."""
    found = torch.zeros(shards.ranks, dtype=torch.int64, device="cpu")
    for start, stop in itertools.pairwise(shards.cu_seqlens):
        ranks, cut = shards.cut(start, stop)
        for index in range(len(call.branches)):
            branch = segmented(call, index)
            pairs = _pairs_in_segments(call, index, branch, cut) if branch else _pairs(call, index, cut)
            found[ranks.start : ranks.stop] += pairs
    return found


@functools.lru_cache(maxsize=1 << 12)
def _pairs(call: Call, index: int, cut: Ints) -> Tensor:
    """Of the queries of a sequence, where it is cut at these tokens."""
    each = [_of_queries(call, index, *some, cut[-1]).pairs for some in itertools.pairwise(cut)]
    return torch.tensor(each, dtype=torch.int64, device="cpu")


@functools.lru_cache(maxsize=1 << 12)
def _pairs_in_segments(call: Call, index: int, branch: Dilated, cut: Ints) -> Tensor:
    """The same, of a branch whose segments are like sequences of their own."""
    tokens = torch.tensor(cut, device="cpu")
    width, found = branch.length, tokens.new_zeros(len(cut) - 1)
    whole, rest = tokens // width, tokens % width
    length = (cut[-1] - whole * width).clamp(max=width)  # of the segment that each token is in
    for head, times in kinds_of_heads(call, index):
        full, earlier, every = (
            _before(x, branch.offset_of(head), branch.rate).clamp(min=0) for x in (width + 0 * tokens, rest, length)
        )
        if call.is_causal:
            before = whole * (full * (full + 1) // 2) + earlier * (earlier + 1) // 2
        else:
            before = whole * full * full + earlier * every
        found += times * before.diff()
    return found


# --- whole segments -------------------------------------------------------------------------------------------------


def _dealt(call: Call, shards: Shards, fields: Travelling, pairs: Tensor) -> Tally:
    """Ranks compute bundles of heads whole, instead of their own queries."""
    ways = fields.inputs, (*fields.rows, *fields.inputs), fields.results, fields.gradients
    columns, more = [], [0] * shards.ranks  # pairs, more than of its own queries
    for rank in range(shards.ranks):
        bundles = bundles_of(call, shards, rank)
        out, come = (
            [sum(sizes_of(peers, some).values()) for some in ways] for peers in peers_of(bundles, rank)
        )  # if this rank's rows, or those of others, went each way: there forward and backward, and back
        for bundle in bundles:
            rows = [view.rows for view in bundle.members.values()] if bundle.target == rank else []
            earlier = itertools.accumulate(rows, initial=0)
            for member, count, before in zip(bundle.members, rows, earlier, strict=False):
                seen = count * (count + 1) // 2 + count * before if call.is_causal else count * sum(rows)
                more[member] -= len(bundle.heads) * seen
                more[rank] += len(bundle.heads) * seen
        hops = 2 if bundles else 0
        sent, received = ((x[0] + y[2], x[1] + y[3]) for x, y in ((out, come), (come, out)))
        columns.append((hops, hops, *sent, *received, max(*come[:2], *out[2:]), 0))
    return torch.cat([torch.tensor(columns, device="cpu").T, (pairs + torch.tensor(more, device="cpu")).unsqueeze(0)])
