"""What a call over a group of ranks will cost, before there is a group: bytes, hops, memory, operations, and a time.

Every message is counted, those of the forward pass and those of the backward pass (in which K and V travel again).
Bytes and hops of every rank are exact; the time is a model, hops x latency + bytes / bandwidth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dilated_attention.call import Call, checked_cu_seqlens
from dilated_attention.checks import check_int
from dilated_attention.context_parallel import ROUTES, Route
from dilated_attention.pattern import DilatedPattern
from dilated_attention.ring.counts import Spread, Tally, count
from dilated_attention.ring.shards import Shards
from dilated_attention.units import bytes_text, seconds_text

# When two take equally long the first is taken. A ring waits only for the ranks whose rows it needs, holds the least,
# and on gloo its errors name one rank; with two ranks it sends the same messages as an all-gather.
EXCHANGES: tuple[Route, ...] = ROUTES
# Seconds per hop and bytes per second: round figures of today's machines, not measurements. Others count as the first.
LINKS = {"nccl": (10e-6, 50e9), "gloo": (200e-6, 1e9)}
# An exchange may hold this many times what a shard keeps for the backward pass anyway. A ring always may: two blocks.
MOST_HELD = 2
MOST_COUNTED = 2**17  # ranks, each of which has numbers of its own: more would take minutes and gigabytes
MOST_HEADS = 2**26  # of all ranks together, as well


@dataclass(frozen=True, slots=True)
class RankCost:
    """Counts what one rank sends and receives.

    Args:
        hops: the steps of the forward pass in which this rank sends or receives.
        bytes_sent, bytes_received: bytes of the forward pass.
        backward_hops, backward_bytes_sent, backward_bytes_received: the same of the backward pass alone.
    """

    hops: int
    bytes_sent: int
    bytes_received: int
    backward_hops: int
    backward_bytes_sent: int
    backward_bytes_received: int


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Counts what one exchange costs: each number is the largest of any rank, except the totals.

    Args:
        hops, bytes_sent_max, bytes_received_max: steps and bytes of the forward pass.
        bytes_total: bytes that all ranks together receive in the forward pass.
        backward_hops: this and the other ``backward_*`` count the backward pass alone.
        held: the most bytes of received rows that a rank holds at one time, in either pass.
        flops, backward_flops: operations; exact below 2**53.
        seconds, backward_seconds: estimated time of the communication alone.
        compute_seconds: estimated time of the computation, forward and backward.
    """

    hops: int
    bytes_sent_max: int
    bytes_received_max: int
    bytes_total: int
    backward_hops: int
    backward_bytes_sent_max: int
    backward_bytes_received_max: int
    backward_bytes_total: int
    held: int
    flops: float
    backward_flops: float
    seconds: float
    backward_seconds: float
    compute_seconds: float

    @property
    def total_seconds(self) -> float:
        """The estimated time of the communication, forward and backward."""
        return self.seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class Memory:
    """Counts the bytes on the busiest rank.

    Args:
        q, k, v, out, lse: kept from the forward pass to the backward pass; ``saved`` is their sum.
        out_sums: a float32 copy of out while parts are merged; 0 where out has that dtype itself.
        dq, dk, dv: the gradients.
        sums: for each exchange, the most bytes of gradients that are summed up in float32: for this rank's rows that
            were sent, and for other ranks' rows.
        received: for each exchange, its ``ExchangeCost.held``.
    """

    q: int
    k: int
    v: int
    out: int
    lse: int
    out_sums: int
    dq: int
    dk: int
    dv: int
    sums: Mapping[str, int]
    received: Mapping[str, int]

    @property
    def saved(self) -> int:
        """What is kept for the backward pass."""
        return self.q + self.k + self.v + self.out + self.lse


@dataclass(frozen=True)
class PlanCost:
    """Tells what one call costs; print it for a table.

    Args:
        pattern, tokens, ranks: those of the call.
        tokens_per_rank: the length of the longest shard.
        memory: the bytes on the busiest rank.
        exchanges: the cost of each exchange: "ring", "allgather" and "alltoall".
        naive_ring_bytes, naive_ring_hops, naive_ring_seconds: for comparison, what a rank would receive in the forward
            pass of a plain ring, in which all keys and values go round.
        best: the exchange with the shortest ``total_seconds`` that does not hold too much, chosen by the rule of
            "auto" in :class:`ContextParallel`.
    """

    pattern: DilatedPattern
    tokens: int
    ranks: int
    tokens_per_rank: int
    memory: Memory
    exchanges: Mapping[str, ExchangeCost]
    naive_ring_bytes: int
    naive_ring_hops: int
    naive_ring_seconds: float
    best: Route
    _tallies: Mapping[str, Tally] = field(init=False, repr=False, compare=False)

    def of_rank(self, rank: int, exchange: Route) -> RankCost:
        """The exact numbers of one rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank} among {self.ranks}: count from 0 to {self.ranks - 1}")
        if exchange not in self._tallies:
            raise ValueError(f"unknown exchange {exchange!r}: use one of {', '.join(EXCHANGES)}")
        return RankCost(*self._tallies[exchange].messages[:, :, rank].flatten().tolist())

    def __str__(self) -> str:
        memory, row = self.memory, "{:<12}{:>7}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}".format
        lines = [
            f"{self.tokens:,} tokens on {self.ranks:,} ranks, at most {self.tokens_per_rank:,} on one",
            f"a rank holds {bytes_text(memory.saved)} (q, k, v, out, lse), "
            f"{bytes_text(memory.out_sums)} (merging out), "
            f"{bytes_text(memory.dq + memory.dk + memory.dv)} (gradients)",
            row("", "hops", "received", "time", "+ backward", "computing", "held", "sums"),
        ]
        for name, x in self.exchanges.items():
            times = (seconds_text(x.seconds), seconds_text(x.total_seconds), seconds_text(x.compute_seconds))
            received, held, sums = map(bytes_text, (x.bytes_received_max, x.held, memory.sums[name]))
            lines.append(row(name, x.hops, received, *times, held, sums))
        naive = (bytes_text(self.naive_ring_bytes), seconds_text(self.naive_ring_seconds), "", "", "", "")
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
    cu_seqlens: Sequence[int] | None = None,
    latency: float = 10e-6,
    bandwidth: float = 50e9,
    flops_per_second: float = 400e12,
) -> PlanCost:
    """Counts what `dilated_attention` over ``num_ranks`` ranks will send, hold and compute, forward and backward.

    A hop is one step of an exchange, in which ranks send and receive. The counts assume ``use_checkpointing=True`` and
    a loss that does not use lse. They also assume that the ranks compare their arguments (``verify``). In calls that
    skip the comparison, the backward pass of "alltoall" sends a gradient of lse as well.

    Args:
        pattern: the :class:`DilatedPattern` of the call.
        seq_len: the tokens on all ranks together.
        num_ranks: the ranks that share them.
        num_heads, num_kv_heads: the query heads, and the key/value heads, by default as many as query heads.
        head_dim: the shared_segments of a head. On CUDA round it up to a multiple of 8, as the kernels do.
        dtype: the dtype of the computation, which is also that of the messages. On a CPU give float32 for float16, and
            for bfloat16 unless the CPU has AMX.
        batch: the sequences of one call.
        has_padding: whether there is a key_padding_mask.
        lengths: the tokens on each rank; by default those of ``shard_sequence``.
        cu_seqlens: the start of each packed sequence, then the end of the last.
        latency: seconds per hop, however many messages it has.
        bandwidth: bytes per second into one rank.
        flops_per_second: how fast a rank computes, for ``compute_seconds`` only.

    Examples:
        >>> pattern = da.DilatedPattern.longnet([2048, 32768, 1048576], [1, 16, 512])
        >>> cost = da.plan_cost(pattern, 1_048_576, 8, num_heads=12, head_dim=64)
        >>> cost.best
        'alltoall'
        >>> cost.exchanges["ring"].hops
        7
    """
    shards = shards_of(check_int("seq_len", seq_len), check_int("num_ranks", num_ranks), lengths)
    if cu_seqlens is not None:
        shards = replace(shards, cu_seqlens=checked_cu_seqlens(cu_seqlens, shards.tokens) or shards.cu_seqlens)
    num_heads = check_int("num_heads", num_heads)
    if shards.ranks * num_heads > MOST_HEADS:
        raise ValueError(f"at most {MOST_HEADS:,} heads of all ranks are counted: ask for fewer ranks or heads")
    kv_heads = num_heads if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads)
    pattern.check_heads(num_heads, kv_heads)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point torch.dtype, as of query, key and value, got {dtype!r}")
    for name, value in (("bandwidth", bandwidth), ("flops_per_second", flops_per_second)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, in bytes or operations per second, got {value!r}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"latency must be the seconds that a hop takes, 0 or more, got {latency!r}")
    head_dim, batch = check_int("head_dim", head_dim), check_int("batch", batch)
    call = Call(
        pattern, is_causal, samples=batch, heads=num_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        has_padding=has_padding,
    )  # fmt: skip
    return _plan(Spread(call, shards), latency, bandwidth, flops_per_second)


@functools.lru_cache(maxsize=512)
def fastest_exchange(call: Call, shards: Shards, backend: str) -> Route:
    """The exchange with the least communication time that does not hold too much. Arguments alone decide: all ranks
    have the same, and so all come to the same."""
    return _plan(Spread(call, shards), *LINKS.get(backend, LINKS["nccl"])).best


def shards_of(tokens: int, ranks: int, lengths: Sequence[int] | None) -> Shards:
    """Cut evenly, unless the length of every shard is given."""
    if ranks > MOST_COUNTED:
        raise ValueError(f"at most {MOST_COUNTED:,} ranks are counted, got {ranks:,}: ask for fewer")
    if lengths is None:
        return Shards.even(tokens, ranks)
    shortest = min(lengths, default=0)
    if len(lengths) != ranks or sum(lengths) != tokens or shortest < 0:
        raise ValueError(
            f"lengths are {len(lengths)} shards of {sum(lengths)} tokens in all, the shortest of {shortest}: give each "
            f"of {ranks} ranks 0 or more of the {tokens} tokens, or leave lengths out to cut evenly"
        )
    return Shards.of(tuple(lengths))


def _plan(spread: Spread, latency: float, bandwidth: float, speed: float = 1.0) -> PlanCost:
    call, shards, lengths = spread.call, spread.shards, spread.lengths
    tallies: dict[str, Tally] = dict(zip(EXCHANGES, count(spread), strict=True))
    exchanges = {name: _summary(tally, call, latency, bandwidth, speed) for name, tally in tallies.items()}
    held = {name: exchange.held for name, exchange in exchanges.items()}
    keys = max(lengths) * call.samples * call.kv_heads
    queries = keys * call.q_per_kv
    q, k = (rows * call.head_dim * call.dtype.itemsize for rows in (queries, keys))
    out_sums = 0 if call.exact is call.dtype else queries * call.head_dim * call.exact.itemsize
    sums = {name: int(tally.sums.max()) for name, tally in tallies.items()}
    memory = Memory(q, k, k, q, queries * call.exact.itemsize, out_sums, q, k, k, sums, held)
    fitting = [name for name in EXCHANGES if name == "ring" or held[name] <= MOST_HELD * memory.saved]
    best = min(fitting, key=lambda name: exchanges[name].total_seconds)
    row = 2 * call.kv_heads * call.head_dim * call.dtype.itemsize * call.samples
    naive, hops = row * (shards.tokens - min(lengths)), shards.ranks - 1
    found = PlanCost(
        call.pattern, shards.tokens, shards.ranks, max(lengths), memory, exchanges,
        naive, hops, hops * latency + naive / bandwidth, best,
    )  # fmt: skip
    object.__setattr__(found, "_tallies", tallies)  # not for the caller: `of_rank` reads them
    return found


def _summary(tally: Tally, call: Call, latency: float, bandwidth: float, speed: float) -> ExchangeCost:
    forward, backward = tally.messages.amax(2).tolist()  # hops, sent, received
    totals = [sum(x.tolist()) for x in tally.received]  # may not fit into 64 bits
    seconds = [hops * latency + received / bandwidth for hops, _, received in (forward, backward)]
    flops = [call.head_dim * call.q_per_kv * call.samples * float(tally.pairs.max()) * each for each in (4, 10)]
    numbers = [*forward, totals[0], *backward, totals[1], int(tally.held.max()), *flops, *seconds, sum(flops) / speed]
    return ExchangeCost(*numbers)
