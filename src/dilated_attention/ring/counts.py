"""What every rank sends, receives, holds and computes in each exchange, counted for all ranks at once.

Shards and segments cut the tokens into pieces; whole segments inside a shard are one piece together. Heads with equally
many rows in every piece of a segment are a column of it, and an entry is a piece in which a column has rows. Columns
with rows on the same ranks are a common, as in `shards`. No tensor is as long as the sequence.

Legend: P ranks, n pieces, C columns, E entries, H key/value heads of a branch in the order of their offsets.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dilated_attention.call import Call
from dilated_attention.ring.packing import Fields, Travelling, part_bytes
from dilated_attention.ring.shards import Shards

AT_ONCE = 2**21  # pieces x heads that are counted together, unless one segment has more: memory grows with it


class Spread(NamedTuple):
    """A call and how its sequence is spread over ranks."""

    call: Call  # of all tokens
    shards: Shards

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in itertools.pairwise(self.shards.starts)]

    @property
    def fields(self) -> Travelling:
        call = self.call
        return Travelling.of(call.dtype, call.q_per_kv, call.head_dim, call.has_padding)

    def check_range(self) -> None:
        """Raise if the bytes of one rank might not fit into 64 bits."""
        row, longest, rows = sum(x.bytes_per_row() for fields in self.fields for x in fields), max(self.lengths), 0
        for branch, (width, rate) in enumerate(self.call.pattern.branches):
            width = min(width, self.shards.tokens)
            most = max(width // rate + 1, (min(width, longest) // rate + 1) * self.shards.ranks)
            rows += 2 * most * len(self.call.placed(branch))
        if rows * row * self.call.samples + longest >= 2**62:
            raise ValueError(
                f"up to {rows:,} rows of {row:,} bytes in {self.call.samples} samples may touch one rank: more than "
                "2**62 bytes are not counted; ask for a batch of 1, fewer heads or a shorter sequence, and multiply"
            )

    def bytes(self, fields: Fields, rows: Tensor) -> Tensor:
        """`part_bytes` of many parts: its arithmetic works for tensors, too."""
        return cast(Tensor, part_bytes(fields, cast(int, rows * self.call.samples)))

    def pairs(self, rows: Tensor) -> Tensor:
        """(query, key) pairs of so many rows among themselves."""
        rows = rows.double()
        return rows * (rows + 1) / 2 if self.call.is_causal else rows * rows


class Tally:
    """What one exchange comes to, by rank."""

    def __init__(self, ranks: int) -> None:
        self.messages = torch.zeros(2, 3, ranks, dtype=torch.int64)  # forward, backward
        self.hops, self.sent, self.received = self.messages.unbind(1)
        self.held = torch.zeros(4, ranks, dtype=torch.int64)  # received rows at one time: the most of these four times
        self.sums = torch.zeros(ranks, dtype=torch.int64)  # float32 sums of rows that travel, beside those received
        self.pairs = torch.zeros(ranks, dtype=torch.float64)  # of a query and a key


class Ragged:
    """Lists of given sizes, laid end to end."""

    def __init__(self, sizes: Tensor) -> None:
        self.sizes, self.first = sizes, sizes.cumsum(0) - sizes  # of each list
        self.line = torch.repeat_interleave(sizes)  # which list an item is in,
        self.place = torch.arange(len(self.line)) - self.first[self.line]  # and where in the list

    def sums(self, x: Tensor) -> Tensor:
        return torch.zeros_like(self.sizes).index_add_(0, self.line, x)

    def of_others(self, x: Tensor, is_causal: bool) -> Tensor:
        """For each item the sum over the others in its list; when causal, over those before it."""
        if not is_causal:
            return self.sums(x)[self.line] - x
        before = x.cumsum(0) - x  # may wrap around; the differences do not
        return before - before[self.first[self.line]]


@dataclass
class Columns:
    """Heads with equally many rows in every piece of a segment: all that have rows on several ranks."""

    low: Tensor  # (C,) the first head,
    heads: Tensor  # (C,) and how many
    common: Tensor  # (C,)
    commons: Ragged  # of ranks
    entries: Ragged  # of each column
    rank: Tensor  # (E,)
    rows: Tensor  # (E,) of one head

    @classmethod
    def of(cls, spread: Spread, pieces: Tensor, rate: int, offsets: Tensor, pairs: Tensor) -> Columns:
        """``offsets`` (H,) ascending. Adds the pairs of heads with rows on one rank only to ``pairs`` (P,)."""
        rank, begin, end, segment, times = pieces
        _, segment, sizes = torch.unique_consecutive(segment, return_inverse=True, return_counts=True)
        # Up to a token all heads have equally many rows, but from this head on it is one row fewer.
        cut = torch.searchsorted(offsets, (end - 1) % rate + 1) % len(offsets)
        cuts = torch.unique(torch.cat((segment * len(offsets), segment * len(offsets) + cut)))
        segment, low = cuts // len(offsets), cuts % len(offsets)
        heads = torch.where(low.roll(-1) > 0, low.roll(-1), len(offsets)) - low
        every = Ragged(sizes[segment])
        piece = (sizes.cumsum(0) - sizes)[segment][every.line] + every.place
        shift = (rate - 1 - offsets)[low][every.line]
        rows = (end[piece] + shift) // rate - (begin[piece] + shift) // rate
        there = rows > 0
        members = every.sums(there.long())

        alone = (members == 1)[every.line] & there
        local = spread.pairs(rows[alone]) * times[piece[alone]] * heads[every.line[alone]]
        pairs.index_add_(0, rank[piece[alone]], local)

        shared = members > 1
        there &= shared[every.line]
        # A sum of random numbers stands for a set of ranks: two sets have the same sum once in 2**64 times.
        number = torch.randint(-(2**63), 2**63 - 1, rank.shape, generator=torch.Generator().manual_seed(0))
        sums, common = torch.unique(every.sums(number[piece] * there)[shared], return_inverse=True)
        members = members[shared]
        commons = Ragged(torch.zeros_like(sums).scatter_(0, common, members))
        return cls(low[shared], heads[shared], common, commons, Ragged(members), rank[piece[there]], rows[there])


def count(spread: Spread) -> tuple[Tally, Tally, Tally]:
    """The numbers of a ring, an all-gather and an all-to-all."""
    spread.check_range()
    with torch.device("cpu"):  # whatever device new tensors go to by default
        starts, borders = torch.tensor(spread.shards.starts), torch.tensor(spread.shards.cu_seqlens)
        ranks = spread.shards.ranks
        ring, allgather, alltoall = Tally(ranks), Tally(ranks), Tally(ranks)
        home_steps = [torch.zeros(0, dtype=torch.int64)]
        for branch, (width, rate) in enumerate(spread.call.pattern.branches):
            heads = spread.call.placed(branch)
            if not heads:
                continue
            offsets, order = torch.tensor([offset for _, offset in heads]).sort(stable=True)
            local = torch.zeros(ranks, dtype=torch.float64)
            for pieces in _pieces(starts, borders, min(width, max(1, spread.shards.tokens)), AT_ONCE // len(heads)):
                columns = Columns.of(spread, pieces, rate, offsets, local)
                if len(columns.rank):
                    home_steps.append(_circulate(spread, columns, ring, allgather))
                    _deal(spread, branch, columns, offsets, order, alltoall)
            for tally in (ring, allgather, alltoall):
                tally.pairs += local
        home = torch.unique(torch.cat(home_steps))
        later = home[home % ranks > ring.hops[1][home // ranks]]
        ring.hops[1] += torch.bincount(later // ranks, minlength=ranks) + ring.hops[0]
    return ring, allgather, alltoall


def _pieces(starts: Tensor, borders: Tensor, width: int, most: int) -> tuple[Tensor, ...]:
    """(5, n): each piece's rank, its begin and end counted from the segment's start, its segment, and how many such
    segments it is. In parts of whole segments with about so many pieces at most."""

    def segments(tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where the segments of these tokens begin and end."""
        after = torch.searchsorted(borders, tokens, right=True).clamp(max=len(borders) - 1)
        begin = tokens - (tokens - borders[after - 1]) % width
        return begin, torch.minimum(begin + width, borders[after])

    last = borders[:-1] + borders.diff() // width * width  # where each sequence's shorter segment begins
    cuts = torch.unique(torch.cat((starts, *segments(starts), borders, last)))
    begin, size = cuts[:-1], cuts.diff()
    rank, segment = torch.searchsorted(starts, begin, right=True) - 1, segments(begin)[0]
    begin, times = begin - segment, (size // width).clamp(min=1)
    pieces = torch.stack((rank, begin, begin + size.clamp(max=width), segment, times))
    _, index, sizes = torch.unique_consecutive(segment, return_inverse=True, return_counts=True)
    part = (sizes.cumsum(0) - sizes)[index] // max(1, most)
    return torch.split(pieces, torch.unique_consecutive(part, return_counts=True)[1].tolist(), 1)


def _circulate(spread: Spread, columns: Columns, ring: Tally, allgather: Tally) -> Tensor:
    """Add what K, V and their sums cost. Gives the steps in which a rank's own sums come home: rank x P + step."""
    entries, commons, causal = columns.entries, columns.commons, spread.call.is_causal
    entry, heads = commons.first[columns.common][entries.line] + entries.place, columns.heads[entries.line]
    line, place, size = commons.line, commons.place, commons.sizes[commons.line]
    rank = torch.zeros_like(line).scatter_(0, entry, columns.rank)
    rows = torch.zeros_like(line).index_add_(0, entry, columns.rows * heads)
    before, after = (commons.first[line] + (place + step) % size for step in (-1, 1))  # the neighbours in a ring

    block, sums = (spread.bytes(fields, rows) for fields in (spread.fields.blocks, spread.fields.sums))
    # at most two steps at a time: a block in use and the next; sums just made, and those that leave or their message
    most, most_sums = (
        torch.zeros_like(commons.sizes).scatter_reduce_(0, line, x, "amax")[line] for x in (block + sums, sums)
    )
    blocks_of_others, sums_of_others = (commons.of_others(x, causal) for x in (block, sums))
    came, users = (place, size - 1 - place) if causal else (size - 1, size - 1)  # blocks that come; who uses mine
    home = sums * (users > 0)
    own = sums + sums // 2 * spread.call.q_per_kv  # dk and dv, and as many rows of dq for each query head
    pairs = (spread.pairs(columns.rows) + columns.rows.double() * entries.of_others(columns.rows, causal)) * heads
    for tally, sent, sums_received, held, sums_made in (
        (ring, blocks_of_others[after], sums_of_others - home[before] + home, 2 * most, most_sums),
        (allgather, block * users, sums * users, blocks_of_others + sums * users, sums_of_others),
    ):
        tally.sent.index_add_(1, rank, torch.stack((sent, sent + sums_of_others)))
        tally.received.index_add_(1, rank, torch.stack((blocks_of_others, blocks_of_others + sums_received)))
        tally.held[0].index_add_(0, rank, held)
        tally.sums.index_add_(0, rank, own + 2 * sums_made)
        tally.pairs.index_add_(0, columns.rank, pairs)
    ring.hops[0].scatter_reduce_(0, rank, torch.maximum(came, came[after]), "amax")
    ring.hops[1].scatter_reduce_(0, rank, came, "amax")  # sums leave in the steps in which blocks came
    allgather.hops[:, rank] = torch.tensor([[1], [2]])
    return rank * spread.shards.ranks + users


def _deal(spread: Spread, branch: int, columns: Columns, offsets: Tensor, order: Tensor, tally: Tally) -> None:
    """Add what it costs to deal every common's heads to its members, as `alltoall.bundles` does."""
    entries, members, common, every = columns.entries, columns.commons.sizes, columns.common, len(order)
    apart = (
        spread.call.has_padding and spread.call.q_per_kv > 1
    )  # kernels that group heads want one padding for all, and so one offset
    # Heads are dealt one by one; where a common has one column only, in as many lots as members get some.
    of_common = torch.zeros_like(members).index_add_(0, common, columns.heads)
    is_single = (columns.heads == of_common[common]) & (not apart)
    lots = Ragged(torch.where(is_single, torch.minimum(members[common], columns.heads), columns.heads))
    head = columns.low[lots.line] + lots.place
    by_common = (common[lots.line] * every + order[head]).argsort()
    head, column = head[by_common], lots.line[by_common]
    dealt = Ragged(torch.zeros_like(members).index_add_(0, common, lots.sizes))
    size, heads, many = (x[dealt.line] for x in (members, of_common, dealt.sizes))
    begin, end = heads * dealt.place // many, heads * (dealt.place + 1) // many
    member = (((begin + 1) * size - 1) // heads + branch) % size  # where heads are few, another one in each branch
    offset = torch.searchsorted(offsets, offsets[head]) if apart else 0
    bundle, index = torch.unique((entries.first[column] + member) * every + offset, return_inverse=True)
    heads = torch.zeros_like(bundle).index_add_(0, index, end - begin)
    entry = bundle // every  # of the rank that computes the bundle

    # Bundles with equally many heads of one column have the same parts, one of each member.
    alike, index, times = torch.unique(
        entries.line[entry] * (every + 1) + heads, return_inverse=True, return_counts=True
    )
    column, heads = alike // (every + 1), alike % (every + 1)
    parts = Ragged(entries.sizes[column])
    part = entries.first[column][parts.line] + parts.place
    rank, rows, target = columns.rank[part], columns.rows[part] * heads[parts.line], columns.rank[entry]
    kept = parts.first[index] + entries.place[entry]  # the part that need not travel
    tally.pairs.index_add_(0, target, (spread.pairs(entries.sums(columns.rows)[column]) * heads)[index])
    tally.hops[:, rank] = 2
    inputs, results, more, gradients = spread.fields[2:]
    for turn, fields in enumerate((inputs, results, (*more, *inputs), gradients)):  # there and back, in both passes
        size = spread.bytes(fields, rows)
        whole, own, all_parts = torch.zeros(3, spread.shards.ranks, dtype=torch.int64)
        whole.index_add_(0, target, parts.sums(size)[index])
        own.index_add_(0, target, size[kept])
        all_parts.index_add_(0, rank, size * times[parts.line])
        way, is_back = divmod(turn, 2)
        tally.sent[way] += (whole if is_back else all_parts) - own
        tally.received[way] += (all_parts if is_back else whole) - own
        tally.held[turn] += all_parts - own if is_back else whole
