"""What every rank sends, receives, holds and computes in each exchange, counted for all ranks at once.

Each segment that lies on several ranks is counted once; where several are cut alike by the shards, once for all.
Members of a segment are the ranks that hold rows of it, for some of the heads.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dilated_attention.call import Call
from dilated_attention.context_parallel import EXCHANGES
from dilated_attention.pattern import rows_at_offset
from dilated_attention.ring.packing import Travelling, part_bytes
from dilated_attention.ring.routes import bundles
from dilated_attention.ring.shards import Shards, SharedSegment, split_by_members

# Places in a list of numbers: bytes forward and backward; pairs of a query and a key; bytes of float32 sums, and of
# received rows beside them at one time, the most of four times.
SENT, RECEIVED, PAIRS, SUMS, HELD, NUMBERS = 0, 2, 4, 5, 6, 10


@dataclass(slots=True)
class Tally:
    """What one exchange comes to on one rank."""

    steps: int = 0  # in which blocks leave or come,
    came: int = 0  # and in which they come; then sums leave
    home: set[int] = field(default_factory=set)  # steps in which sums of its own rows come home
    numbers: list[int] = field(default_factory=lambda: [0] * NUMBERS)

    def add(self, steps: int, came: int, home: set[int], numbers: list[int]) -> None:
        self.steps, self.came = max(self.steps, steps), max(self.came, came)
        self.home |= home
        self.numbers = list(map(operator.add, self.numbers, numbers))

    @property
    def all(self) -> list[int]:
        """The hops, forward and backward, and the numbers."""
        return [self.steps, self.steps + self.came + sum(step > self.came for step in self.home), *self.numbers]


Tallies = defaultdict[tuple[str, int], Tally]  # by exchange and rank


def count(call: Call, shards: Shards) -> Tallies:
    """``call``: of all tokens."""
    tallies: Tallies = defaultdict(Tally)
    for branch, width in enumerate(call.dilated.segment_lengths):
        pairs = _pairs_before(call, shards, branch)
        for rank, exchange in itertools.product(range(shards.ranks), EXCHANGES):
            tallies[exchange, rank].numbers[PAIRS] += pairs[rank + 1] - pairs[rank]
        known: dict[tuple[int, ...], Tallies] = {}
        for start, stop, _ in {shards.segment(at, width) for at in shards.starts if 0 < at < shards.tokens}:
            ranks = shards.holders(start, stop)
            cut = tuple(last - first for first, last in (shards.piece(rank, start, stop) for rank in ranks))
            if cut not in known:
                known[cut] = _of_segment(call, branch, Shards.of(cut))
            for (name, place), tally in known[cut].items():
                tallies[name, ranks[place]].add(tally.steps, tally.came, tally.home, tally.numbers)
    return tallies


def _pairs_before(call: Call, shards: Shards, branch: int) -> list[int]:
    """(query, key) pairs of a branch whose query is before each rank's first token, and all of them."""
    width, rate = call.dilated.branches[branch]
    heads, borders = Counter(offset for _, offset in call.placed(branch)), shards.cu_seqlens

    @functools.cache
    def pairs(tokens: int, length: int) -> int:
        """Of the first tokens of a segment."""
        total = 0
        for offset, some in heads.items():
            queries = rows_at_offset(tokens, rate, offset)
            later = 0 if call.is_causal else rows_at_offset(length, rate, offset) - queries
            total += some * _seen(call, queries, later)
        return total

    def pairs_in(tokens: int, length: int) -> int:
        """Of the first tokens of a sequence."""
        whole, rest = divmod(tokens, width)
        return whole * pairs(width, width) + pairs(rest, min(width, length - whole * width))

    sizes = [end - begin for begin, end in itertools.pairwise(borders)]
    earlier = list(itertools.accumulate((pairs_in(size, size) for size in sizes), initial=0))
    at = [min(bisect.bisect_right(borders, token), len(sizes)) - 1 for token in shards.starts]
    return [
        earlier[index] + pairs_in(token - borders[index], sizes[index])
        for index, token in zip(at, shards.starts, strict=True)
    ]


def _seen(call: Call, queries: int, others: int) -> int:
    """Pairs of so many rows among themselves, and with other keys that all of them see."""
    return queries * (queries + 1) // 2 + queries * others if call.is_causal else queries * (queries + others)


def _of_segment(call: Call, branch: int, shards: Shards) -> Tallies:
    """One segment that is cut into such shards, less the pairs of its queries, which are counted already."""
    tallies: Tallies = defaultdict(Tally)
    tokens, rate = shards.tokens, call.dilated.dilation_rates[branch]
    whole = SharedSegment(branch, rate, 0, tokens, tokens, tuple(call.placed(branch)))
    fields = Travelling.of(call.dtype, call.q_per_kv, call.head_dim, call.has_padding)
    for segment in split_by_members(whole, shards):
        rows = {offset: [segment.rows(offset, piece) for piece in segment.pieces] for _, offset in segment.heads}
        packed = [call.samples * sum(some) for some in zip(*(rows[offset] for _, offset in segment.heads), strict=True)]
        _circulate(call, fields, segment.members, packed, tallies)
        _deal(call, fields, segment, rows, tallies)
    return tallies


def _others(call: Call, sizes: Sequence[int]) -> list[int]:
    """For each member the sum over the others; when causal, over those before it."""
    before = list(itertools.accumulate(sizes, initial=0))
    return before[:-1] if call.is_causal else [before[-1] - size for size in sizes]


def _circulate(call: Call, fields: Travelling, members: tuple[int, ...], rows: list[int], tallies: Tallies) -> None:
    """Add what K, V and their sums cost in a ring and in an all-gather."""
    last = len(members) - 1
    blocks, sums = ([part_bytes(some, count) for count in rows] for some in (fields.blocks, fields.sums))
    blocks_in, sums_out = _others(call, blocks), _others(call, sums)
    # of two steps at a time: a block in use and the next; sums just made, and those that leave or their message
    most, most_sums = max(map(operator.add, blocks, sums)), max(sums)
    users = [last - place if call.is_causal else last for place in range(last + 1)]  # of each member's block
    home = [size if count else 0 for size, count in zip(sums, users, strict=True)]
    for place, rank in enumerate(members):
        after, received = (place + 1) % (last + 1), blocks_in[place]
        came, leaving = (place, after) if call.is_causal else (last, last)  # steps in which blocks come, and leave
        own = sums[place] + sums[place] // 2 * call.q_per_kv  # dk and dv, and as many rows of dq for each query head
        back = sums[place] * users[place]  # sums of its own rows that come to it at once
        ring_sums = sums_out[place] - home[place - 1] + home[place]
        for name, steps, last_home, sent, sums_in, held, made in (
            ("ring", (max(came, leaving), came), users[place], blocks_in[after], ring_sums, 2 * most, most_sums),
            ("allgather", (1, 1), 1, blocks[place] * users[place], back, received + back, sums_out[place]),
        ):
            numbers = [sent, sent + sums_out[place], received, received + sums_in, 0, own + 2 * made, held, 0, 0, 0]
            tallies[name, rank].add(*steps, {last_home}, numbers)


def _deal(call: Call, fields: Travelling, segment: SharedSegment, rows: dict[int, list[int]], tallies: Tallies) -> None:
    """Add what it costs in an all-to-all that members compute bundles of heads whole, instead of their own queries."""
    hops = (fields.inputs, fields.results, (*fields.rows, *fields.inputs), fields.gradients)  # in both passes
    numbers_of = {rank: tallies["alltoall", rank].numbers for rank in segment.members}
    for rank in segment.members:
        tallies["alltoall", rank].steps = 2
    for _, offset in segment.heads:
        for numbers, mine, others in zip(numbers_of.values(), rows[offset], _others(call, rows[offset]), strict=True):
            numbers[PAIRS] -= _seen(call, mine, others)
    for dealt, target in bundles((segment,), call.has_padding and call.q_per_kv > 1):
        counts, heads = rows[dealt.heads[0][1]], len(dealt.heads)
        numbers_of[target][PAIRS] += heads * _seen(call, sum(counts), 0)
        for turn, some in enumerate(hops):
            size_of = {count: part_bytes(some, call.samples * heads * count) for count in set(counts)}
            way, is_back = divmod(turn, 2)
            for (rank, numbers), count in zip(numbers_of.items(), counts, strict=True):
                source, sink = (numbers_of[target], numbers) if is_back else (numbers, numbers_of[target])
                if rank != target:
                    source[SENT + way] += size_of[count]
                    sink[RECEIVED + way] += size_of[count]
                if rank != target or not is_back:  # of its own rows the results need no message
                    sink[HELD + turn] += size_of[count]
