"""What travels in each exchange, added up by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dilated_attention.cost.call import Call
from dilated_attention.cost.pieces import Pieces, Work, sums_before
from dilated_attention.ring import packing as _packing
from dilated_attention.ring.packing import Fields


@dataclass
class Tally:
    """By rank; hops, sent, received (2, P): forward, backward."""

    hops: Tensor
    sent: Tensor
    received: Tensor
    held: Tensor  # (P,) received rows at one time, at most
    sums: Tensor  # (P,) float32 sums of rows that travel, beside those received: at most
    pairs: Tensor  # (P,) float64: a query with a key

    @staticmethod
    def empty(ranks: int) -> Tally:
        hops, sent, received = torch.zeros(3, 2, ranks, dtype=torch.int64)
        held, sums = torch.zeros(2, ranks, dtype=torch.int64)
        return Tally(hops, sent, received, held, sums, torch.zeros(ranks, dtype=torch.float64))


def part_bytes(fields: Fields, rows: Tensor) -> Tensor:
    """`_packing.part_bytes` of many parts: its arithmetic is that of tensors, too."""
    return cast(Tensor, _packing.part_bytes(fields, cast(int, rows)))


# --- ring and allgather -------------------------------------------------------------------------------------------


class Lines(NamedTuple):
    """The ranks that share a channel, channel after channel: (members of all channels,) each."""

    rank: Tensor
    rows: Tensor
    first: Tensor  # the channel's first place,
    stop: Tensor  # and the one behind its last
    line: Tensor  # which channel

    @staticmethod
    def of(rows: Tensor, pieces: Pieces) -> Lines:
        kind, piece = rows.nonzero(as_tuple=True)
        _, count = torch.unique_consecutive(kind * len(pieces.first) + pieces.segment[piece], return_counts=True)
        shared = (count > 1).repeat_interleave(count)
        kind, piece, count = kind[shared], piece[shared], count[count > 1]
        line = torch.arange(len(count)).repeat_interleave(count)
        stop = count.cumsum(0)
        return Lines(pieces.rank[piece], rows[kind, piece], (stop - count)[line], stop[line], line)


class Flow(NamedTuple):
    """Bytes of each member of each channel."""

    received: Tensor
    passed_on: Tensor  # what a ring's member sends
    fanned_out: Tensor  # what an all-gather's does
    returned: Tensor  # sums that come to a ring's member: those it continues, and its own

    @staticmethod
    def of(lines: Lines, own: Tensor, is_causal: bool) -> Flow:
        """``own``: of the member's own rows."""
        place, before = torch.arange(len(own)), sums_before(own)
        earlier, total = before[:-1] - before[lines.first], before[lines.stop] - before[lines.first]
        is_first, is_last = place == lines.first, place + 1 == lines.stop
        preceding = own[torch.where(is_first, lines.stop, place) - 1]
        following = own[torch.where(is_last, lines.first, place + 1)]
        if not is_causal:
            return Flow(total - own, total - following, own * (lines.stop - lines.first - 1), total - preceding)
        continued = earlier - preceding.masked_fill(is_first, 0)
        passed_on = (earlier + own).masked_fill(is_last, 0)
        return Flow(earlier, passed_on, own * (lines.stop - 1 - place), continued + own.masked_fill(is_last, 0))


def circulate(call: Call, work: Work, ring: Tally, allgather: Tally) -> list[Tensor]:
    """Add what K, V and their sums cost. When causal, gives the steps in which a rank's own sums come home:
    rank x P + step."""
    lines = Lines.of(work.channel_rows(), work.pieces)
    rank, causal = lines.rank, call.is_causal
    if not len(rank):
        return []
    own, own_sums = (part_bytes(some, lines.rows * call.batch) for some in (call.fields.blocks, call.fields.sums))
    blocks, sums = Flow.of(lines, own, causal), Flow.of(lines, own_sums, causal)
    ring.sent.index_add_(1, rank, torch.stack((blocks.passed_on, blocks.passed_on + sums.received)))
    ring.received.index_add_(1, rank, torch.stack((blocks.received, blocks.received + sums.returned)))
    allgather.sent.index_add_(1, rank, torch.stack((blocks.fanned_out, blocks.fanned_out + sums.received)))
    allgather.received.index_add_(1, rank, torch.stack((blocks.received, blocks.received + sums.fanned_out)))

    # at most two steps at a time: a block in use and the next; sums just made, and those that leave or their message
    pair = torch.stack((own + own_sums, own_sums))
    largest = 2 * torch.zeros_like(pair).scatter_reduce_(1, lines.line.expand(2, -1), pair, "amax")[:, lines.line]
    ring.held.index_add_(0, rank, largest[0])
    home = own_sums + own_sums // 2 * call.group  # dk and dv, and as many rows of dq for each query head
    ring.sums.index_add_(0, rank, home + largest[1])
    allgather.sums.index_add_(0, rank, home + 2 * sums.received)

    index, count = torch.arange(len(own)) - lines.first, lines.stop - lines.first
    steps = index + (index + 1 < count).long() if causal else count - 1
    ring.hops[0].scatter_reduce_(0, rank, steps, "amax")
    # sums move in as many steps as blocks arrive, and in the one in which the own sum comes home
    ring.hops[1].scatter_reduce_(0, rank, index if causal else steps, "amax")
    allgather.hops[:, rank] = torch.tensor([[1], [2]])
    return [torch.unique(rank * call.shards.ranks + count - 1 - index)] if causal else []


def finish_circulating(ring: Tally, allgather: Tally, home_steps: list[Tensor]) -> None:
    if home_steps:  # those that are not among the steps in which sums move anyway
        ranks = ring.hops.shape[1]
        home = torch.unique(torch.cat(home_steps))
        rank, step = home // ranks, home % ranks
        ring.hops[1] += torch.bincount(rank[step > ring.hops[1][rank]], minlength=ranks)
    ring.hops[1] += ring.hops[0]
    allgather.held = allgather.received[1]


# --- alltoall -----------------------------------------------------------------------------------------------------


class Bundles(NamedTuple):
    """Heads with equally many rows that one rank computes in one segment: (bundles,) each."""

    target: Tensor  # the piece of the rank that computes them
    kind: Tensor
    heads: Tensor  # how many

    @staticmethod
    def of(call: Call, work: Work) -> Bundles:
        """Every channel's heads dealt to its members as `_alltoall.bundles` does."""
        pieces, (kinds, count) = work.pieces, work.rows.shape
        shared = (work.members > 1).any(0).nonzero().squeeze(1)
        members, channel = (x[:, shared][work.kinds] for x in (work.members, work.channel))  # (heads, shared segments)
        at, heads = torch.zeros_like(channel), torch.ones_like(channel)
        for one in range(kinds):
            here = channel == one
            at = torch.where(here, here.cumsum(0) - 1, at)
            heads = torch.where(here, here.sum(0), heads)
        head, place = (members > 1).nonzero(as_tuple=True)
        kind, segment = work.kinds[head], shared[place]
        member = ((at + 1) * members - 1) // heads + work.turn[shared]  # the one whose share the head is in,
        member = (member % members.clamp(min=1))[head, place]  # which is another one in each branch
        has = (work.rows > 0).flatten()
        earlier = sums_before(has)[kind * count + pieces.first[segment]]
        target = has.nonzero().squeeze(1)[earlier + member] % count
        numbers = len(work.offsets) if call.heads_apart else 1
        bundle = (target * kinds + pieces.alike(work.rows)[kind, segment]) * numbers + work.offsets[head] % numbers
        bundle, heads = torch.unique(bundle, return_counts=True)
        return Bundles(bundle // (kinds * numbers), bundle // numbers % kinds, heads)


def deal(call: Call, work: Work, bundles: Bundles, tally: Tally, bundled: Tensor) -> None:
    """Add messages to ``bundled`` (3, 4, P): there and back, forward and backward, what the computing rank has from or
    for others, what others have, and whole segments."""
    pieces, (kinds, segments) = work.pieces, work.members.shape
    gathered, spread, whole = bundled
    rank, segment = pieces.rank[bundles.target], pieces.segment[bundles.target]
    # many ranks compute alike bundles of one segment: their parts are counted once
    alike = (bundles.heads * kinds + bundles.kind) * segments + segment
    alike, index, count = torch.unique(alike, return_inverse=True, return_counts=True)
    heads, kind, segment = alike // (segments * kinds), alike // segments % kinds, alike % segments
    size = (pieces.stop - pieces.first)[segment]
    begin, line = size.cumsum(0) - size, torch.arange(len(size)).repeat_interleave(size)
    shift = pieces.first[segment] - begin
    piece = torch.arange(len(line)) + shift[line]
    rows = work.rows[kind[line], piece] * heads[line] * call.batch
    fields = call.fields
    kinds_of_message = (fields.inputs, fields.results, (*fields.rows, *fields.inputs), fields.gradients)
    parts = torch.stack([part_bytes(some, rows) for some in kinds_of_message])  # (4, pieces of all alike bundles)
    before = sums_before(parts)
    every, here = (before[:, begin + size] - before[:, begin])[:, index], parts[:, bundles.target - shift[index]]
    gathered.index_add_(1, rank, every - here)
    whole.index_add_(1, rank, every)
    spread.index_add_(1, pieces.rank[piece], parts * count[line]).index_add_(1, rank, -here)
    tally.hops[:, pieces.rank[piece[rows > 0]]] = 2


def finish_dealing(tally: Tally, gathered: Tensor, spread: Tensor, whole: Tensor) -> None:
    tally.received = gathered[::2] + spread[1::2]
    tally.sent = spread[::2] + gathered[1::2]
    tally.held = torch.maximum(whole[::2], spread[1::2]).amax(0)
