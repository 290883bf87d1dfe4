"""What a call over a group of ranks will cost, before there is a group: bytes, hops, memory, operations, and a time.

Every message is counted, those of the forward pass and those of the backward pass (in which K and V travel again).
Bytes and hops of every rank are exact; the time is a model, hops x latency + bytes / bandwidth.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dilated_attention.call import Call, checked_cu_seqlens
from dilated_attention.checks import check_int
from dilated_attention.context_parallel import EXCHANGES, Exchange
from dilated_attention.pattern import Pattern
from dilated_attention.ring.counts import Tally, count
from dilated_attention.ring.shards import Shards
from dilated_attention.units import bytes_text, flops_text, seconds_text

# Seconds per hop and bytes per second: round figures of today's machines, not measurements. Others count as the first.
LINKS = {"nccl": (10e-6, 50e9), "gloo": (200e-6, 1e9)}
# An exchange may hold this many times what a shard keeps for the backward pass anyway. A ring always may: two blocks.
MOST_HELD = 2
MOST_COUNTED = 2**12  # ranks: there is a number for every two of them
ROWS = (
    ("hops", "{:,}".format, "hops"),
    ("received", bytes_text, "bytes_received"),
    ("time to send", seconds_text, "seconds"),
    ("received by all ranks", bytes_text, "bytes_total"),
    ("received and held", bytes_text, "held"),
    ("sums in float32", bytes_text, "sums"),
    ("operations", flops_text, "flops"),
    ("time to compute", seconds_text, "compute_seconds"),
)
SENT_ROUND = ("hops", "bytes_received", "seconds")  # what is told of a naive ring


@dataclass(frozen=True, slots=True)
class PassCost:
    """Counts what one pass costs, forward or backward.

    Args:
        hops: the steps in which a rank sends or receives.
        bytes_sent, bytes_received: the bytes of its messages.
        flops: the operations of its computation.
        seconds: the estimated time of the communication alone.
    """

    hops: int
    bytes_sent: int
    bytes_received: int
    flops: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Counts what one exchange costs: each number is the largest of any rank, except the total.

    Args:
        forward, backward: the cost of each pass.
        bytes_total: bytes that all ranks together receive, forward and backward.
        held: the most bytes of received rows that a rank holds at one time, in either pass.
        sums: the most bytes of gradients that are summed up in float32: for this rank's rows that were sent, and for
            other ranks' rows.
        compute_seconds: estimated time of the computation, forward and backward.
    """

    forward: PassCost
    backward: PassCost
    bytes_total: int
    held: int
    sums: int
    compute_seconds: float

    @property
    def total_seconds(self) -> float:
        """The estimated time of the communication, forward and backward."""
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True, slots=True)
class Memory:
    """Counts the bytes on the busiest rank.

    Args:
        q: those of q; out and the gradients of both have as many.
        k: those of k; v and the gradients of both have as many.
        lse: those of the log-sum-exp.
        out_sums: a float32 copy of out while parts are merged; 0 where out has that dtype itself.
    """

    q: int
    k: int
    lse: int
    out_sums: int

    @property
    def saved(self) -> int:
        """What is kept for the backward pass: q, k, v, out and lse."""
        return 2 * (self.q + self.k) + self.lse

    @property
    def gradients(self) -> int:
        """Those of q, k and v."""
        return self.q + 2 * self.k


@dataclass(frozen=True)
class PlanCost:
    """Tells what one call costs; print it for a table.

    Args:
        pattern, tokens, ranks: those of the call.
        tokens_per_rank: the length of the longest shard.
        memory: the bytes on the busiest rank.
        exchanges: the cost of each exchange: "ring", "allgather", and for dilated branches that are summed "alltoall".
        naive_ring: for comparison, the forward pass of a plain ring, in which all keys and values go round.
        best: the exchange with the shortest ``total_seconds`` that does not hold too much, chosen by the rule of
            "auto" in :class:`ContextParallel`.
    """

    pattern: Pattern
    tokens: int
    ranks: int
    tokens_per_rank: int
    memory: Memory
    exchanges: Mapping[str, ExchangeCost]
    naive_ring: PassCost
    best: Exchange
    _cost_of: Callable[[str, Iterable[int]], ExchangeCost] = field(repr=False, compare=False)

    def of_rank(self, rank: int, exchange: Exchange) -> tuple[PassCost, PassCost]:
        """The exact numbers of one rank, forward and backward."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank} among {self.ranks}: count from 0 to {self.ranks - 1}")
        if exchange not in self.exchanges:
            raise ValueError(f"unknown exchange {exchange!r}: use one of {', '.join(self.exchanges)}")
        cost = self._cost_of(exchange, [rank])
        return cost.forward, cost.backward

    def rows(self) -> list[list[str]]:
        """A table for people, its head first: a column for each exchange and, over several ranks, the naive ring."""
        rows = [["busiest rank", *self.exchanges, "naive ring"]]
        for title, text, name in ROWS:
            costs = [(x.forward, x.backward) if hasattr(x.forward, name) else (x,) for x in self.exchanges.values()]
            cells = [" + ".join(text(getattr(cost, name)) for cost in some) for some in costs]
            rows.append([title, *cells, text(getattr(self.naive_ring, name)) if name in SENT_ROUND else ""])
        return rows if self.ranks > 1 else [["busiest rank", "one device"], *(row[:2] for row in rows[7:])]

    def notes(self) -> list[str]:
        """What is said beside the table."""
        memory, ranks = self.memory, f" on {self.ranks:,} ranks, at most {self.tokens_per_rank:,} on one"
        notes = [
            f"{self.tokens:,} tokens{ranks if self.ranks > 1 else ''}; two numbers are forward + backward",
            f"kept for the backward pass: {bytes_text(memory.saved)} (q, k, v, out, lse); "
            f"gradients: {bytes_text(memory.gradients)}",
        ]
        return [*notes, f"best exchange: {self.best}"] if self.ranks > 1 else notes

    def __str__(self) -> str:
        rows = self.rows()
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            title.ljust(first) + "".join(cell.rjust(width + 2) for cell, width in zip(cells, widths, strict=True))
            for title, *cells in rows
        ]
        return "\n".join([*(line.rstrip() for line in lines), *self.notes()])


def plan_cost(
    pattern: Pattern, seq_len: int, num_ranks: int, *, num_heads: int, head_dim: int, num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16, batch: int = 1, is_causal: bool = False, has_padding: bool = False,
    lengths: Sequence[int] | None = None, cu_seqlens: Sequence[int] | None = None, latency: float = 10e-6,
    bandwidth: float = 50e9, flops_per_second: float = 400e12,
) -> PlanCost:  # fmt: skip
    """Counts what `dilated_attention` over ``num_ranks`` ranks will send, hold and compute, forward and backward.

    A hop is one step of an exchange, in which ranks send and receive. The counts assume ``use_checkpointing=True`` and
    a loss that does not use lse. They also assume that the ranks compare their arguments (``verify``). In calls that
    skip the comparison, the backward pass of "alltoall" sends a gradient of lse as well.

    Args:
        pattern: that of the call.
        seq_len: the tokens on all ranks together.
        num_ranks: the ranks that share them.
        num_heads, num_kv_heads: the query heads, and the key/value heads, by default as many as query heads.
        head_dim: the channels of a head. On CUDA round it up to a multiple of 8, as the kernels do.
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
        >>> cost.exchanges["ring"].forward.hops
        7
    """
    shards = shards_of(check_int("seq_len", seq_len), check_int("num_ranks", num_ranks), lengths)
    if cu_seqlens is not None:
        shards = replace(shards, cu_seqlens=checked_cu_seqlens(cu_seqlens, shards.tokens) or shards.cu_seqlens)
    num_heads = check_int("num_heads", num_heads)
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
    return _plan(call, shards, True, latency, bandwidth, flops_per_second)


@functools.lru_cache(maxsize=512)
def fastest_exchange(call: Call, shards: Shards, backend: str) -> Exchange:
    """The exchange with the least communication time that does not hold too much. Arguments alone decide: all ranks
    have the same, and so all come to the same."""
    return _plan(call, shards, False, *LINKS.get(backend, LINKS["nccl"])).best


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


def _plan(
    call: Call, shards: Shards, pairs_too: bool, latency: float, bandwidth: float, speed: float = 1.0
) -> PlanCost:  # fmt: skip
    lengths = [stop - start for start, stop in itertools.pairwise(shards.starts)]
    tallies = count(call, shards, pairs_too)
    cost = functools.partial(_cost, call, tallies, latency, bandwidth, speed)
    exchanges = {name: cost(name, range(shards.ranks)) for name in tallies}
    keys, size, exact = max(lengths) * call.samples * call.kv_heads, call.dtype.itemsize, call.sum_dtype.itemsize
    row, rows = call.head_dim * size, keys * call.q_per_kv
    out_sums = 0 if call.sum_dtype is call.dtype else rows * call.head_dim * exact
    memory = Memory(rows * row, keys * row, rows * exact, out_sums)
    # When two take equally long the first is taken. A ring waits only for the ranks whose rows it needs, holds the
    # least, and on gloo its errors name one rank; with two ranks it sends the same messages as an all-gather.
    names = [name for name in EXCHANGES if name in exchanges]
    fitting = [name for name in names if name == "ring" or exchanges[name].held <= MOST_HELD * memory.saved]
    best = min(fitting, key=lambda name: exchanges[name].total_seconds)
    naive, hops = 2 * row * call.kv_heads * call.samples * (shards.tokens - min(lengths)), shards.ranks - 1
    ring = PassCost(hops, naive, naive, exchanges["ring"].forward.flops, hops * latency + naive / bandwidth)
    return PlanCost(call.pattern, shards.tokens, shards.ranks, max(lengths), memory, exchanges, ring, best, cost)


def _cost(
    call: Call, tallies: dict[str, Tally], latency: float, bandwidth: float, speed: float, name: str,
    ranks: Iterable[int],
) -> ExchangeCost:  # fmt: skip
    """The largest numbers of these ranks."""
    tally, pairs = tallies[name]
    numbers = tally[:, [*ranks]].split_with_sizes((2, 2, 2, 2))
    hops, sent, received, (held, sums) = (x.amax(1).tolist() for x in numbers)
    flops = call.head_dim * call.q_per_kv * call.samples * max(pairs[rank] for rank in ranks)
    seconds = [x * latency + y / bandwidth for x, y in zip(hops, received, strict=True)]
    forward, backward = map(PassCost, hops, sent, received, (4 * flops, 10 * flops), seconds)
    return ExchangeCost(forward, backward, int(numbers[2].sum()), held, sums, 14 * flops / speed)
