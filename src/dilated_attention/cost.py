"""What a call over a group of ranks will cost, before there is a group: bytes, hops, memory, operations, and a time.

Every message is counted, those of the forward pass and those of the backward pass (in which K and V travel again), with
sums over vectors of all ranks at once: no tensor has the length of the sequence, and N = 2**40 on 65,536 ranks take
a few seconds. Bytes and hops of every rank are exact; the time is a model, hops x latency + bytes / bandwidth.

Legend: P ranks; a shard is one rank's tokens; a piece is what a rank holds of a segment, n pieces of S segments in a
branch (of each rank the first segment and the last: those between lie inside its shard); heads are key/value heads, and
a kind is the heads with equally many rows in every piece, K of them. rows (K, n).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dilated_attention import _packing
from dilated_attention._packing import Field, Fields
from dilated_attention._shards import Heads, Shards
from dilated_attention.backends.problem import accumulate_dtype
from dilated_attention.pattern import DilatedPattern, rows_at_offset, whole_number

# Seconds a hop and bytes a second: round figures of today's machines, not measurements. Others count as the first.
LINKS = {"nccl": (10e-6, 50e9), "gloo": (200e-6, 1e9)}
# When two take equally long the first is taken. A ring waits only for the ranks whose rows it needs, holds the least,
# and on gloo its errors name one rank; with two ranks it sends the same messages as an all-gather.
EXCHANGES = ("ring", "allgather", "alltoall")
# An exchange may hold this many times what a shard keeps for the backward pass anyway. A ring always may: two blocks.
MOST_HELD = 2
# Rows of so many pieces and heads are counted all at once: there the time goes into calls, not into numbers.
SMALL = 2**15


@dataclass(frozen=True, slots=True)
class RankCost:
    """What one rank sends and receives, as `Transport.stats` counts it; the backward pass comes on top."""

    hops: int
    bytes_sent: int
    bytes_received: int
    backward_hops: int
    backward_bytes_sent: int
    backward_bytes_received: int


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """One exchange: of each number that of the busiest rank, but ``bytes_total``, received by all ranks together."""

    hops: int
    bytes_sent_max: int
    bytes_received_max: int
    bytes_total: int
    backward_hops: int
    backward_bytes_sent_max: int
    backward_bytes_received_max: int
    backward_bytes_total: int
    held: int  # bytes of received rows at one time, at most, in either pass
    flops: float  # forward; exact below 2**53
    backward_flops: float
    seconds: float  # forward: communication alone
    backward_seconds: float
    compute_seconds: float  # forward and backward

    @property
    def total_seconds(self) -> float:
        """Communication, forward and backward."""
        return self.seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the busiest rank. The first five are kept from the forward pass to the backward pass."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    out_sums: int  # out in float32 while parts are merged; 0 where out is that itself
    dq_sums: int  # gradients while they are summed, in float32
    dk_sums: int
    dv_sums: int
    received: Mapping[str, int]  # by exchange: `ExchangeCost.held`

    @property
    def saved(self) -> int:
        return self.q + self.k + self.v + self.out + self.lse


@dataclass(frozen=True)
class PlanCost:
    """The cost of one call; print it for a table."""

    pattern: DilatedPattern
    tokens: int
    ranks: int
    tokens_per_rank: int  # of the longest shard
    memory: Memory
    exchanges: Mapping[str, ExchangeCost]  # ring, allgather, alltoall
    naive_ring_bytes: int  # that a rank receives where all of K and V goes round
    naive_ring_hops: int
    naive_ring_seconds: float  # forward
    best: str  # least communication time, forward and backward, of those that do not hold too much
    _tallies: Mapping[str, _Tally] = field(repr=False, compare=False)

    def of_rank(self, rank: int, exchange: str) -> RankCost:
        """The exact numbers of one rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank} among {self.ranks}: count from 0 to {self.ranks - 1}")
        if exchange not in self._tallies:
            raise ValueError(f"unknown exchange {exchange!r}: use one of {', '.join(EXCHANGES)}")
        tally = self._tallies[exchange]
        return RankCost(*(int(x[way, rank]) for way in (0, 1) for x in (tally.hops, tally.sent, tally.received)))

    def __str__(self) -> str:
        memory, row = self.memory, "{:<12}{:>7}{:>12}{:>12}{:>12}{:>12}{:>12}".format
        sums = memory.dq_sums + memory.dk_sums + memory.dv_sums
        lines = [
            f"{self.tokens:,} tokens on {self.ranks:,} ranks, at most {self.tokens_per_rank:,} on one",
            f"a rank keeps {size(memory.saved)} (q, k, v, out, lse) and sums up out in {size(memory.out_sums)}, "
            f"gradients in {size(sums)}",
            row("", "hops", "received", "time", "+ backward", "computing", "held"),
        ]
        for name, x in self.exchanges.items():
            times = (duration(x.seconds), duration(x.total_seconds), duration(x.compute_seconds))
            lines.append(row(name, x.hops, size(x.bytes_received_max), *times, size(x.held)))
        naive = (size(self.naive_ring_bytes), duration(self.naive_ring_seconds), "", "", "")
        return "\n".join([*lines, row("naive ring", self.naive_ring_hops, *naive).rstrip(), f"best: {self.best}"])


def plan_cost(
    pattern: DilatedPattern,
    seq_len: int,
    num_ranks: int,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    is_causal: bool = False,
    has_padding: bool = False,
    lengths: Sequence[int] | None = None,
    latency: float = LINKS["nccl"][0],
    bandwidth: float = LINKS["nccl"][1],
    flops_per_second: float = 400e12,
) -> PlanCost:
    """What ``dilated_attention`` over a group of ``num_ranks`` will send, hold and compute, forward and backward.

    Args:
        seq_len: tokens on all ranks together, cut as ``shard_sequence`` does unless ``lengths`` gives every shard's.
        dtype: what is computed in, and so what travels: float32 for half precision on a CPU without AMX. Likewise
            ``head_dim`` is what the kernels see: on CUDA the next multiple of 8.
        has_padding: whether there is a key_padding_mask.
        latency, bandwidth: seconds a hop and bytes a second into one rank. A hop counts once, however many messages
            it has.
        flops_per_second: how fast a rank computes, for ``compute_seconds`` only.

    Counts are those of ``use_checkpointing=True`` and a loss that does not use lse, in calls that first compare their
    arguments; without that the backward of an alltoall sends a gradient of lse along, whether there is one or not.
    """
    shards = _shards(whole_number("seq_len", seq_len), whole_number("num_ranks", num_ranks), lengths)
    num_heads = whole_number("num_heads", num_heads)
    kv_heads = num_heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads)
    group = pattern.check_heads(num_heads, kv_heads)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point torch.dtype, as of query, key and value, got {dtype!r}")
    for name, value in (("bandwidth", bandwidth), ("flops_per_second", flops_per_second)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, in units a second, got {value!r}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"latency must be the seconds that a hop takes, 0 or more, got {latency!r}")
    head_dim, batch = whole_number("head_dim", head_dim), whole_number("batch", batch)
    call = _Call(pattern, shards, Heads(0, kv_heads, kv_heads), group, head_dim, dtype, batch, is_causal, has_padding)
    tallies = _tallies(call, pairs=True)
    exchanges = {name: _summary(tally, call, latency, bandwidth, flops_per_second) for name, tally in tallies.items()}
    naive = call.bytes_per_token(2 * kv_heads) * batch * (shards.tokens - min(call.lengths))
    return PlanCost(
        pattern, shards.tokens, shards.ranks, max(call.lengths), _memory(call, exchanges), exchanges,
        naive, shards.ranks - 1, (shards.ranks - 1) * latency + naive / bandwidth,
        _fastest(tallies, call, latency, bandwidth), tallies,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def fastest_exchange(
    pattern: DilatedPattern,
    shards: Shards,
    heads: Heads,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    is_causal: bool,
    backend: str,
) -> str:
    """The exchange with the least communication time that does not hold too much. Arguments alone decide: all ranks
    have the same, and so all come to the same."""
    call = _Call(pattern, shards, heads, group, head_dim, dtype, 1, is_causal, False)
    return _fastest(_tallies(call), call, *LINKS.get(backend, LINKS["nccl"]))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000 or unit == "PB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


# --- the call, and sums over its ranks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    pattern: DilatedPattern
    shards: Shards
    heads: Heads
    group: int
    head_dim: int
    dtype: torch.dtype
    batch: int
    is_causal: bool
    has_padding: bool

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in itertools.pairwise(self.shards.starts)]

    def bytes_per_token(self, heads: int) -> int:
        return heads * self.head_dim * self.dtype.itemsize

    @property
    def saved_per_token(self) -> int:
        heads, queries = self.heads.held, self.heads.held * self.group
        return self.bytes_per_token(2 * heads + 2 * queries) + queries * accumulate_dtype(self.dtype).itemsize

    @functools.cached_property
    def fields(self) -> _Fields:
        """What travels, as `_exchange` and `_alltoall` pack it."""
        exact, dim = accumulate_dtype(self.dtype), (self.head_dim,)
        queries, keys, column = Field(self.dtype, self.group, dim), Field(self.dtype, 1, dim), Field(exact, self.group)
        padding = (Field(torch.bool),) if self.has_padding else ()
        inputs = (queries, keys, keys, *padding)
        return _Fields(
            (keys, keys, *padding), (Field(exact, 1, dim),) * 2,
            inputs, (column, queries), (column, queries, queries, *inputs), (queries, keys, keys),
        )  # fmt: skip


class _Fields(NamedTuple):
    blocks: Fields  # ring and allgather: K and V,
    sums: Fields  # and in the backward pass dK and dV
    inputs: Fields  # alltoall, there
    results: Fields  # and back;
    rows: Fields  # in the backward pass there
    gradients: Fields  # and back


@dataclass
class _Tally:
    """By rank; hops, sent, received (2, P): forward, backward."""

    hops: Tensor
    sent: Tensor
    received: Tensor
    held: Tensor  # (P,)
    pairs: Tensor  # (P,) float64: a query with a key

    @staticmethod
    def empty(ranks: int) -> _Tally:
        hops, sent, received = torch.zeros(3, 2, ranks, dtype=torch.int64)
        held, pairs = torch.zeros(ranks, dtype=torch.int64), torch.zeros(ranks, dtype=torch.float64)
        return _Tally(hops, sent, received, held, pairs)


def _bytes(fields: Fields, rows: Tensor) -> Tensor:
    """`_packing.part_bytes` of many parts: its arithmetic is that of tensors, too."""
    return cast(Tensor, cast(Any, _packing.part_bytes)(fields, rows))


def _before(x: Tensor) -> Tensor:
    """(..., n + 1): the sum of all before each place. It may wrap around; the differences that are used do not."""
    found = x.new_zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=torch.int64)
    torch.cumsum(x, -1, out=found[..., 1:])
    return found


def _exact_sum(x: Tensor) -> int:
    """Over all ranks a sum may not fit into 64 bits."""
    return (int((x >> 32).sum()) << 32) + int((x & 0xFFFFFFFF).sum())


def _shards(tokens: int, ranks: int, lengths: Sequence[int] | None) -> Shards:
    if lengths is None:
        return Shards.even(tokens, ranks)
    shortest = min(lengths, default=0)
    if len(lengths) != ranks or sum(lengths) != tokens or shortest < 0:
        raise ValueError(
            f"lengths are {len(lengths)} shards of {sum(lengths)} tokens in all, the shortest of {shortest}: give each "
            f"of {ranks} ranks 0 or more of the {tokens} tokens, or leave lengths out to cut evenly"
        )
    return Shards.of(tuple(lengths))


def _check_range(call: _Call) -> None:
    """Raise if a rank's bytes could leave 64 bits."""
    longest, row = max(call.lengths), sum(f.bytes_per_row() for fields in call.fields for f in fields)
    rows = 0
    for branch, (width, rate) in enumerate(call.pattern.branches):
        width = min(width, call.shards.tokens)
        most = max(width // rate + 1, (min(width, longest) // rate + 1) * call.shards.ranks)
        rows += 2 * most * len(call.heads.of_branch(call.pattern, branch))
    if rows * row * call.batch + longest >= 2**62:
        raise ValueError(
            f"up to {rows:,} rows of {row:,} bytes in {call.batch} samples may touch one rank: more than 2**62 bytes "
            "are not counted; ask for a batch of 1, fewer heads or a shorter sequence, and multiply"
        )


# --- the pieces of a branch ---------------------------------------------------------------------------------------


class _Pieces(NamedTuple):
    """Branch after branch, in the order of the tokens; (n,) unless said otherwise."""

    branch: Tensor
    rank: Tensor
    begin: Tensor  # as counted from the segment's start
    end: Tensor
    segment: Tensor
    first: Tensor  # (S,) the segment's first piece,
    stop: Tensor  # (S,) and the one behind its last

    @staticmethod
    def of(starts: Tensor, widths: Sequence[int]) -> _Pieces:
        width = torch.tensor(widths)[:, None, None]
        begin, end = starts[:-1, None], starts[1:, None]
        segment = torch.cat((begin, end - 1), 1) // width  # (branches, P, 2)
        there = (begin < end).repeat(len(widths), 1, 2)
        there[:, :, 1] &= segment[:, :, 1] > segment[:, :, 0]
        at = segment * width
        begin, end = torch.maximum(begin, at) - at, torch.minimum(end, at + width) - at
        branch, rank, _ = there.nonzero(as_tuple=True)
        return _Pieces.in_segments(branch, rank, begin[there], end[there], segment[there] * len(widths) + branch)

    @staticmethod
    def in_segments(branch: Tensor, rank: Tensor, begin: Tensor, end: Tensor, segment: Tensor) -> _Pieces:
        """``segment``: any numbers that tell neighbouring segments apart."""
        _, index, count = torch.unique_consecutive(segment, return_inverse=True, return_counts=True)
        stop = count.cumsum(0)
        return _Pieces(branch, rank, begin, end, index, stop - count, stop)

    def some(self, segments: Tensor) -> _Pieces:
        """Those of some segments, (S,) bool."""
        here = segments[self.segment]
        return _Pieces.in_segments(*(x[here] for x in self[:5]))

    def per_segment(self, x: Tensor) -> Tensor:
        """(..., S): sums of x (..., n)."""
        before = _before(x)
        return before[..., self.stop] - before[..., self.first]


class _Branches(NamedTuple):
    """One or more branches, and which (key/value) head is at which offset in each."""

    widths: list[int]
    rates: Tensor  # (branches, 1)
    offsets: Tensor  # (branches, kinds); a rate or more where the heads do not run the branch
    kinds: Tensor  # (heads,) heads of one kind have equal offsets
    apart: Tensor  # (branches, heads) heads with different numbers are not bundled

    @staticmethod
    def of(call: _Call, some: Sequence[int]) -> _Branches:
        rates = torch.tensor([call.pattern.dilation_rates[branch] for branch in some]).unsqueeze(1)
        offsets = [dict(call.heads.of_branch(call.pattern, branch)) for branch in some]
        columns = [tuple(x.get(head, -1) for x in offsets) for head in sorted({head for x in offsets for head in x})]
        distinct = list(dict.fromkeys(columns))
        kinds = torch.tensor([distinct.index(column) for column in columns], dtype=torch.int64)
        table = torch.tensor(distinct, dtype=torch.int64).view(-1, len(some)).T
        table = torch.where(table < 0, rates, table)
        # the kernels want one padding for all heads of a call if they group heads
        apart = torch.zeros(len(some), len(kinds), dtype=torch.int64)
        if call.has_padding and call.group > 1:
            _, apart = torch.unique(table[:, kinds], return_inverse=True)
        widths = [min(call.pattern.segment_lengths[branch], call.shards.tokens) for branch in some]
        return _Branches(widths, rates, table, kinds, apart)

    def rows_before(self, token: Tensor, pieces: _Pieces, offsets: Tensor) -> Tensor:
        """(kinds, n): how many of each segment's rows come before a token (n,) of it; offsets (branches, kinds)."""
        rows = (token + (self.rates - 1 - offsets).T[:, pieces.branch]) // self.rates.T[0, pieces.branch]
        absent = offsets == self.rates
        return rows.masked_fill_(absent.T[:, pieces.branch], 0) if bool(absent.any()) else rows

    def split(self, pieces: _Pieces) -> Iterator[tuple[_Pieces, bool]]:
        """Many pieces: the segments in which all heads have equally many rows (True) apart from the others (False),
        which most often are few."""
        if len(pieces.rank) * self.offsets.shape[1] < SMALL:
            yield pieces, False
            return
        # rows before a token differ among heads only if they do between the lowest offset and the highest
        ends = torch.stack((self.offsets.amin(1), self.offsets.amax(1)), 1)
        before = torch.stack([self.rows_before(token, pieces, ends) for token in (pieces.begin, pieces.end)])
        even = pieces.per_segment((before[:, 0] != before[:, 1]).any(0)) == 0
        for some, is_even in ((even, True), (~even, False)):
            if bool(some.any()):
                yield (pieces if bool(some.all()) else pieces.some(some)), is_even


class _Work(NamedTuple):
    """Pieces and the rows in them; a kind is now heads with equally many rows in each of these pieces."""

    pieces: _Pieces
    rows: Tensor  # (K, n)
    kinds: Tensor  # (heads,) the kind of each head
    heads: Tensor  # (K, 1) how many heads are of a kind
    members: Tensor  # (K, S) how many pieces of the segment have rows
    channel: Tensor  # (K, S) the first kind that has rows in the same pieces of the segment
    apart: Tensor  # (branches, heads)

    @staticmethod
    def of(branches: _Branches, pieces: _Pieces, is_even: bool) -> _Work:
        offsets, kinds = branches.offsets[:, : 1 if is_even else None], branches.kinds
        before, after = (branches.rows_before(token, pieces, offsets) for token in (pieces.begin, pieces.end))
        rows = after - before
        if is_even or bool((rows == rows[:1]).all()):
            rows, kinds = rows[:1], torch.zeros_like(kinds)
        heads, has = torch.bincount(kinds).unsqueeze(1), rows > 0
        return _Work(pieces, rows, kinds, heads, pieces.per_segment(has), _alike(has, pieces), branches.apart)

    def channel_rows(self) -> Tensor:
        """(K, n): the rows of all heads of a channel, in the place of its first kind."""
        rows = self.rows * self.heads
        if len(rows) == 1:
            return rows
        return torch.zeros_like(rows).scatter_add_(0, self.channel[:, self.pieces.segment], rows)


def _alike(x: Tensor, pieces: _Pieces) -> Tensor:
    """(K, S): the first kind whose x (K, n) is the same in all pieces of the segment."""
    if bool((x == x[:1]).all()):
        return torch.zeros(len(x), len(pieces.first), dtype=torch.int64)
    at_once = max(1, 128 * SMALL // x.numel())
    same = (pieces.per_segment(some.unsqueeze(1) != x) == 0 for some in torch.split(x, at_once))
    return torch.cat([one.byte().argmax(1) for one in same])  # the first of the ones


def _tallies(call: _Call, pairs: bool = False) -> dict[str, _Tally]:
    """Each exchange's numbers, by rank. ``pairs``: also what each computes."""
    _check_range(call)
    elsewhere = torch.get_default_device().type != "cpu"  # new tensors would go there
    with torch.device("cpu") if elsewhere else contextlib.nullcontext():
        return _count(call, pairs)


def _count(call: _Call, pairs: bool) -> dict[str, _Tally]:
    starts = torch.tensor(call.shards.starts)
    borders = starts[starts < call.shards.tokens]
    ring, allgather, alltoall = (_Tally.empty(call.shards.ranks) for _ in EXCHANGES)
    home_steps: list[Tensor] = []
    bundled = torch.zeros(3, 4, call.shards.ranks, dtype=torch.int64)
    run_here = [bool(call.heads.of_branch(call.pattern, branch)) for branch in range(len(call.pattern.branches))]
    widths = enumerate(call.pattern.segment_lengths)
    some = [branch for branch, width in widths if run_here[branch] and (pairs or bool((borders % width).any()))]
    is_small = 2 * len(borders) * call.heads.held * len(some) < SMALL
    for group in [some] if is_small and some else [[branch] for branch in some]:
        branches = _Branches.of(call, group)
        pieces = _Pieces.of(starts, branches.widths)
        for work in (_Work.of(branches, *x) for x in branches.split(pieces)):
            bundles = _bundles(work)
            home_steps += _circulate(call, work, ring, allgather)
            _deal(call, work, bundles, alltoall, bundled)
            if pairs:
                _compute(call, work, bundles, ring, alltoall)
    if pairs:
        _compute_inside(call, starts, (ring, alltoall))
        allgather.pairs = ring.pairs
    _finish_circulating(ring, allgather, home_steps)
    _finish_dealing(alltoall, *bundled)
    return dict(zip(EXCHANGES, (ring, allgather, alltoall), strict=True))


# --- ring and allgather -------------------------------------------------------------------------------------------


class _Lines(NamedTuple):
    """The ranks that share a channel, channel after channel: (members of all channels,) each."""

    rank: Tensor
    rows: Tensor
    first: Tensor  # the channel's first place,
    stop: Tensor  # and the one behind its last
    line: Tensor  # which channel

    @staticmethod
    def of(rows: Tensor, pieces: _Pieces) -> _Lines:
        kind, piece = rows.nonzero(as_tuple=True)
        _, count = torch.unique_consecutive(kind * len(pieces.first) + pieces.segment[piece], return_counts=True)
        shared = (count > 1).repeat_interleave(count)
        kind, piece, count = kind[shared], piece[shared], count[count > 1]
        line = torch.arange(len(count)).repeat_interleave(count)
        stop = count.cumsum(0)
        return _Lines(pieces.rank[piece], rows[kind, piece], (stop - count)[line], stop[line], line)


class _Flow(NamedTuple):
    """Bytes of each member of each channel."""

    received: Tensor
    passed_on: Tensor  # what a ring's member sends
    fanned_out: Tensor  # what an all-gather's does
    returned: Tensor  # sums that come to a ring's member: those it continues, and its own


def _flow(lines: _Lines, own: Tensor, is_causal: bool) -> _Flow:
    place, before = torch.arange(len(own)), _before(own)
    earlier, total = before[:-1] - before[lines.first], before[lines.stop] - before[lines.first]
    is_first, is_last = place == lines.first, place + 1 == lines.stop
    preceding = own[torch.where(is_first, lines.stop, place) - 1]
    following = own[torch.where(is_last, lines.first, place + 1)]
    if not is_causal:
        return _Flow(total - own, total - following, own * (lines.stop - lines.first - 1), total - preceding)
    continued = earlier - preceding.masked_fill(is_first, 0)
    passed_on = (earlier + own).masked_fill(is_last, 0)
    return _Flow(earlier, passed_on, own * (lines.stop - 1 - place), continued + own.masked_fill(is_last, 0))


def _circulate(call: _Call, work: _Work, ring: _Tally, allgather: _Tally) -> list[Tensor]:
    """Add a branch's messages. When causal, gives the steps in which a rank's own sums come home: rank x P + step."""
    fields, causal = call.fields, call.is_causal
    lines = _Lines.of(work.channel_rows(), work.pieces)
    rank = lines.rank
    if not len(rank):
        return []
    own, own_sums = (_bytes(some, lines.rows * call.batch) for some in (fields.blocks, fields.sums))
    blocks, sums = _flow(lines, own, causal), _flow(lines, own_sums, causal)
    ring.sent.index_add_(1, rank, torch.stack((blocks.passed_on, blocks.passed_on + sums.received)))
    ring.received.index_add_(1, rank, torch.stack((blocks.received, blocks.received + sums.returned)))
    allgather.sent.index_add_(1, rank, torch.stack((blocks.fanned_out, blocks.fanned_out + sums.received)))
    allgather.received.index_add_(1, rank, torch.stack((blocks.received, blocks.received + sums.fanned_out)))
    largest = torch.zeros_like(own).scatter_reduce_(0, lines.line, own + own_sums, "amax")
    ring.held.index_add_(0, rank, 2 * largest[lines.line])

    index, count = torch.arange(len(own)) - lines.first, lines.stop - lines.first
    steps = index + (index + 1 < count).long() if causal else count - 1
    ring.hops[0].scatter_reduce_(0, rank, steps, "amax")
    # sums move in as many steps as blocks arrive, and in the one in which the own sum comes home
    ring.hops[1].scatter_reduce_(0, rank, index if causal else steps, "amax")
    allgather.hops[:, rank] = torch.tensor([[1], [2]])
    return [torch.unique(rank * call.shards.ranks + count - 1 - index)] if causal else []


def _finish_circulating(ring: _Tally, allgather: _Tally, home_steps: list[Tensor]) -> None:
    if home_steps:  # those that are not among the steps in which sums move anyway
        ranks = ring.hops.shape[1]
        home = torch.unique(torch.cat(home_steps))
        rank, step = home // ranks, home % ranks
        ring.hops[1] += torch.bincount(rank[step > ring.hops[1][rank]], minlength=ranks)
    ring.hops[1] += ring.hops[0]
    allgather.held = allgather.received[1]


# --- alltoall -----------------------------------------------------------------------------------------------------


class _Bundles(NamedTuple):
    """Heads with equally many rows that one rank computes in one segment: (bundles,) each."""

    target: Tensor  # the piece of the rank that computes them
    kind: Tensor
    heads: Tensor  # how many


def _bundles(work: _Work) -> _Bundles:
    """Every channel's heads dealt to its members as `routes.share` does."""
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
    member = (((at + 1) * members - 1) // heads)[head, place]  # the one whose share the head is in
    has = (work.rows > 0).flatten()
    earlier = _before(has)[kind * count + pieces.first[segment]]
    target = has.nonzero().squeeze(1)[earlier + member] % count
    alike, numbers = _alike(work.rows, pieces)[kind, segment], work.apart.numel()
    bundle = (target * kinds + alike) * numbers + work.apart[pieces.branch[target], head]
    bundle, heads = torch.unique(bundle, return_counts=True)
    return _Bundles(bundle // (kinds * numbers), bundle // numbers % kinds, heads)


def _deal(call: _Call, work: _Work, bundles: _Bundles, tally: _Tally, bundled: Tensor) -> None:
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
    parts = torch.stack([_bytes(some, rows) for some in call.fields[2:]])  # (4, pieces of all alike bundles)
    before = _before(parts)
    every, here = (before[:, begin + size] - before[:, begin])[:, index], parts[:, bundles.target - shift[index]]
    gathered.index_add_(1, rank, every - here)
    whole.index_add_(1, rank, every)
    spread.index_add_(1, pieces.rank[piece], parts * count[line]).index_add_(1, rank, -here)
    tally.hops[:, pieces.rank[piece[rows > 0]]] = 2


def _finish_dealing(tally: _Tally, gathered: Tensor, spread: Tensor, whole: Tensor) -> None:
    tally.received = gathered[::2] + spread[1::2]
    tally.sent = spread[::2] + gathered[1::2]
    tally.held = torch.maximum(whole[::2], spread[1::2]).amax(0)


# --- computing, and summing up ------------------------------------------------------------------------------------


def _alone(call: _Call, rows: Tensor) -> Tensor:
    """The pairs of so many rows among themselves."""
    return rows * (rows + 1) / 2 if call.is_causal else rows * rows


def _compute_inside(call: _Call, starts: Tensor, tallies: Iterable[_Tally]) -> None:
    """Add the pairs of the segments inside a shard but its first and last, which are pieces."""
    for branch, (width, rate) in enumerate(call.pattern.branches):
        segments = ((starts[1:] - 1) // width - starts[:-1] // width - 1).clamp_(min=0)
        offsets = [offset for _, offset in call.heads.of_branch(call.pattern, branch)]
        rows = torch.tensor([rows_at_offset(width, rate, offset) for offset in offsets], dtype=torch.float64)
        for tally in tallies:
            tally.pairs += segments * _alone(call, rows).sum()


def _compute(call: _Call, work: _Work, bundles: _Bundles, ring: _Tally, alltoall: _Tally) -> None:
    """Add the pairs of pieces."""
    pieces, rows = work.pieces, work.rows.double()
    all_rows, before = pieces.per_segment(work.rows), _before(work.rows)
    if call.is_causal:
        others = before[:, :-1] - before[:, pieces.first[pieces.segment]]
    else:
        others = all_rows[:, pieces.segment] - work.rows
    mine = _alone(call, rows)
    ring.pairs.index_add_(0, pieces.rank, ((mine + rows * others) * work.heads).sum(0))
    # in an alltoall what several ranks share is whole on one of them
    mine = mine.masked_fill(work.members[:, pieces.segment] > 1, 0.0)
    alltoall.pairs.index_add_(0, pieces.rank, (mine * work.heads).sum(0))
    dealt = _alone(call, all_rows[bundles.kind, pieces.segment[bundles.target]].double()) * bundles.heads
    alltoall.pairs.index_add_(0, pieces.rank[bundles.target], dealt)


def _summary(tally: _Tally, call: _Call, latency: float, bandwidth: float, speed: float) -> ExchangeCost:
    hops, sent, received = (x.amax(1).tolist() for x in (tally.hops, tally.sent, tally.received))
    total, backward_total = (_exact_sum(x) for x in tally.received)
    seconds, backward_seconds = _seconds(tally, latency, bandwidth)
    flops, backward_flops = (call.head_dim * call.group * call.batch * float(tally.pairs.max()) * x for x in (4, 10))
    return ExchangeCost(
        hops[0], sent[0], received[0], total, hops[1], sent[1], received[1], backward_total,
        int(tally.held.max()), flops, backward_flops, seconds, backward_seconds, (flops + backward_flops) / speed,
    )  # fmt: skip


def _seconds(tally: _Tally, latency: float, bandwidth: float) -> list[float]:
    """Forward, backward."""
    return [int(tally.hops[way].max()) * latency + int(tally.received[way].max()) / bandwidth for way in (0, 1)]


def _fastest(tallies: Mapping[str, _Tally], call: _Call, latency: float, bandwidth: float) -> str:
    most = MOST_HELD * call.saved_per_token * max(call.lengths) * call.batch
    fitting = [name for name in EXCHANGES if name == "ring" or int(tallies[name].held.max()) <= most]
    return min(fitting, key=lambda name: sum(_seconds(tallies[name], latency, bandwidth)))


def _memory(call: _Call, exchanges: Mapping[str, ExchangeCost]) -> Memory:
    tokens, exact = max(call.lengths) * call.batch, accumulate_dtype(call.dtype)
    heads, queries = call.heads.held, call.heads.held * call.group
    q, k = tokens * call.bytes_per_token(queries), tokens * call.bytes_per_token(heads)
    sums = exact if call.shards.ranks > 1 else call.dtype
    q_sums, k_sums = (tokens * count * call.head_dim * sums.itemsize for count in (queries, heads))
    out_sums = 0 if exact is call.dtype else tokens * queries * call.head_dim * exact.itemsize
    held = {name: cost.held for name, cost in exchanges.items()}
    return Memory(q, k, k, q, tokens * queries * exact.itemsize, out_sums, q_sums, k_sums, k_sums, held)
