"""What every rank sends, receives, holds and computes in each exchange, counted for all ranks at once.

What the queries of one rank need of others follows from their rectangles, as in `plan.away`. A dilated branch repeats
itself: what queries need is found once for all that lie alike in their segments.
"""

from __future__ import annotations

import functools
import itertools
import operator

import torch
from torch import Tensor

from dilated_attention.branches import Dilated
from dilated_attention.branches.base import grouped, moved
from dilated_attention.call import Call
from dilated_attention.checks import Ints
from dilated_attention.plan import joined_spans
from dilated_attention.ring.alltoall import can_deal, deal, rows_before, segment_at
from dilated_attention.ring.parallel import Travelling, row_bytes
from dilated_attention.ring.shards import Shards
from dilated_attention.shown import counted, moved_to

# What an exchange comes to, by rank: hops, and bytes that are sent and received, each of them forward and backward; the
# most bytes of received rows at one time; bytes of gradients that are summed in float32. And pairs, of one sample and
# one query head of each key/value head, which may need more than 64 bits.
Tally = tuple[Tensor, list[int]]  # (8, ranks)
# Of one sample and all heads: (reader, owner) rows of K that each rank needs of each other one; and (5, ranks): queries
# that see such rows; own rows that others need, the most of one rank before and the most of one after; in an alltoall,
# rows that go to others and come from them, and pairs more than those of the own queries.
Needs = tuple[Tensor, Tensor]


def count(call: Call, shards: Shards, pairs_too: bool) -> dict[str, Tally]:
    """``call``: of all tokens. Unless ``pairs_too``, only sequences on several ranks are looked at."""
    rows, (queries, own, dealt, taken, more), pairs = rows_needed(call, shards, pairs_too)
    fields = Travelling.of(call.dtype, call.q_per_kv, call.head_dim, call.has_padding)
    fields = fields._replace(rows=(*fields.rows[1:], *fields.inputs))  # without a gradient of lse
    blocks, sums, inputs, results, inputs_again, gradients = (call.samples * row_bytes(some) for some in fields)
    totals = own * sums + queries * (sums // 2 * call.q_per_kv)  # dk and dv of rows that travel; dq of their readers
    place = torch.arange(shards.ranks, device="cpu")
    rank = place.unsqueeze(1)
    came, gone = rows.gather(1, (rank - place) % len(place)), rows.T.gather(1, (rank + place) % len(place))
    tallies = {}
    for name, at_once in (("ring", 2), ("allgather", 1)):  # in a ring a step is in use, and the next on its way
        if name == "allgather":
            came, gone = came.sum(1, keepdim=True), gone.sum(1, keepdim=True)
        most = came.amax(1)
        held = at_once * (most * blocks + gone.amax(1) * sums), totals + at_once * most * sums
        tallies[name] = _tally(gone, came, [(blocks, 0), (blocks, sums)], *held), pairs
    if can_deal(call.pattern):
        ways = [(inputs, results), (inputs_again, gradients)]
        held = torch.stack([taken * max(inputs, inputs_again), dealt * max(results, gradients)]).amax(0), 0 * taken
        tally = _tally(dealt.unsqueeze(1), taken.unsqueeze(1), ways, *held)
        tallies["alltoall"] = tally, [*map(operator.add, pairs, more.tolist())]
    return tallies


def _tally(gone: Tensor, came: Tensor, ways: list[tuple[int, int]], *others: Tensor) -> Tensor:
    """``gone`` and ``came``: (ranks, steps) rows; ``ways``: the bytes of one, and of its results, in each pass."""
    hops, gone, came = (gone + came > 0).sum(1), gone.sum(1), came.sum(1)
    sent, received = ([x * there + y * back for there, back in ways] for x, y in ((gone, came), (came, gone)))
    return torch.stack([*(hops * (1 + (back > 0)) for _, back in ways), *sent, *received, *others])


# --- rows that queries need -----------------------------------------------------------------------------------------


def rows_needed(call: Call, shards: Shards, pairs_too: bool) -> tuple[Tensor, Tensor, list[int]]:
    """As `Needs`, and the pairs of each rank's queries. Nothing outside of a sequence is seen."""
    rows = torch.zeros(shards.ranks, shards.ranks, dtype=torch.int64, device="cpu")
    numbers, pairs = rows.new_zeros(5, shards.ranks), [0] * shards.ranks
    borders = {border for border in shards.starts if 0 < border < shards.tokens}
    for index, branch in enumerate(call.branches):
        needs, zones = _in_sequence, {shards.sequence(x) for x in borders}
        if call.pattern.counts == "sum" and isinstance(branch, Dilated):  # whatever the other branches show
            needs, zones = _in_segment, {segment_at(shards, x, branch.length) for x in borders}
        known: dict[Ints, Needs] = {}
        for zone in zones:
            ranks, cut = shards.cut(*zone)
            if cut not in known:
                known[cut] = needs(call, index, cut)
            here = slice(ranks.start, ranks.stop)
            rows[here, here] += known[cut][0]
            numbers[:, here] += known[cut][1]
        for begin, end in itertools.pairwise(shards.cu_seqlens) if pairs_too else ():
            ranks, cut = shards.cut(begin, end)
            for rank, queries in zip(ranks, itertools.starmap(range, itertools.pairwise(cut)), strict=True):
                shift, length = moved_to(branch, call.branches, queries, cut[-1])
                pairs[rank] += counted(
                    call.pattern, index, moved(queries, -shift), length, call.kv_heads, call.is_causal
                )
    return rows, numbers, pairs


def _in_segment(call: Call, index: int, cut: Ints) -> Needs:
    """A segment that is cut at these tokens: all that hold rows of it, or when causal all before, are needed."""
    rows, targets = deal(call, index, cut)
    holds, others = (rows > 0).long(), torch.ones(len(cut) - 1, len(cut) - 1, dtype=torch.int64, device="cpu")
    others = others.tril(-1) if call.is_causal else others.fill_diagonal_(0)
    seeing = [((holds @ x > 0) * rows).sum(0) for x in (others.T, others)]
    whole, after, is_here = rows.sum(1, keepdim=True), rows.cumsum(1), torch.zeros_like(rows)
    for head, target in targets.items():
        is_here[head, target] = 1
    more = _seen(call, after - rows, whole) - _seen(call, after, whole) + is_here * _seen(call, whole, whole)
    dealt = [x.sum(0) for x in (rows * (1 - is_here), (whole - rows) * is_here, more)]
    return others * (holds.T @ rows), torch.stack([*seeing, *dealt])


def _seen(call: Call, rows: Tensor, every: Tensor) -> Tensor:
    """The pairs of the first rows of a segment, and all of its rows as keys."""
    return rows * (rows + 1) // 2 if call.is_causal else rows * every


def _in_sequence(call: Call, index: int, cut: Ints) -> Needs:
    """A sequence that is cut at these tokens: what the rectangles of each rank's queries say."""
    starts = torch.tensor(cut, device="cpu")
    rows, numbers = starts.new_zeros(len(cut) - 1, len(cut) - 1), starts.new_zeros(5, len(cut) - 1)
    for reader, (first, stop) in enumerate(itertools.pairwise(cut)):
        # queries far from the beginning need as many rows as those a few periods after it
        shift, length = moved_to(call.branches[index], call.branches, range(first, stop), cut[-1])
        numbers[0, reader], lanes = _near(call, index, range(first - shift, stop - shift), length)
        if lanes:
            start, step, most, times = torch.tensor(lanes, device="cpu").T.unsqueeze(2)
            rows[reader] = (times * rows_before(starts - shift, start, step).minimum(most).diff()).sum(0)
    numbers[1] = rows.tril().amax(0) + rows.triu().amax(0)
    return rows, numbers


@functools.lru_cache(maxsize=1 << 12)
def _near(call: Call, index: int, queries: range, n: int) -> tuple[int, list[Ints]]:
    """Of some queries in a branch: those that see keys before or after all of them, and these keys, each once: start,
    step, length, and of how many heads."""
    seeing, lanes = 0, list[Ints]()
    for head, times in kinds_of_heads(call, index) if queries else ():
        rects = [
            single
            for rect, _ in call.parts(index, head, queries, n)
            for elsewhere in ((0, queries.start), (queries.stop, n))
            for part in rect.with_keys(*elsewhere)
            for single in part.singles()
            if not single.is_empty
        ]
        seeing += times * sum(map(len, {rect.queries for rect in rects}))
        by_step = grouped((rect.keys for rect in rects), lambda keys: (keys.step, keys.start % keys.step))
        for (step, _), some in by_step.items():
            spans = joined_spans((keys.start, keys[-1] + step) for keys in some)
            lanes += [(start, step, (stop - start) // step, times) for start, stop in spans]
    return seeing, lanes


@functools.lru_cache(maxsize=256)
def kinds_of_heads(call: Call, index: int) -> list[tuple[int, int]]:
    """One of each kind of heads that see the same in a branch, and how many there are."""
    order = call.pattern.order(call.drops) if call.pattern.counts == "once" else [index]
    known = operator.itemgetter(*order[: order.index(index) + 1])  # earlier branches cut away what they show
    kinds = grouped(call.placed(index), lambda placed: known(call.looks(placed[0])))
    return [(alike[0][0], len(alike)) for alike in kinds.values()]
