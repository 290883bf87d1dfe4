"""Modules over a group of ranks: each is `dilated_attention(..., group=...)` with its settings kept in one place.

The tensors of a call are this rank's contiguous shard of the sequence, and so is the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from dilated_attention.checks import check_int
from dilated_attention.context_parallel import ContextParallel, Exchange, Over
from dilated_attention.nn.core import DilatedAttention, Lengths, ModuleOptions
from dilated_attention.nn.multihead import MultiheadDilatedAttention, MultiheadOptions
from dilated_attention.ring.run import Ranks


class RingDilatedAttention(DilatedAttention):
    """Computes dilated attention over a ring of ranks, each with its shard of the sequence.

    Equals ``dilated_attention(..., enable_gqa=True, group=ContextParallel(group, exchange="ring"))``. Without a process
    group, or with ``ring_size=1``, a call is plain dilated attention: it takes its tensors as the whole sequence. So a
    model needs no change to run on one device. Each step of the exchange has a name in ``torch.profiler``.

    Args:
        segment_lengths, dilation_rates, dropout, softmax_scale, options: see :class:`DilatedAttention`.
        ring_size: the number of ranks that you expect; a group of another size is an error. 1 turns the ring off. None
            (the default): all ranks of the group, or one device if there is no group.
        use_checkpointing: see :class:`ContextParallel`.
        group: a process group, a 1-D DeviceMesh or a :class:`ContextParallel`. None, or a ContextParallel without a
            group: the default process group at the time of the call, or one device if there is none.

    Examples:
        >>> attention = da.RingDilatedAttention(pattern=da.DilatedPattern.longnet([64, 256], [1, 4]), group=group)
        >>> query, key, value = (da.shard_sequence(x, group) for x in torch.randn(3, 2, 256, 4, 16))
        >>> attention(query, key, value).shape == query.shape
        True
    """

    exchange: Exchange = "ring"
    ranks: Ranks

    def __init__(
        self, segment_lengths: Lengths = None, dilation_rates: Lengths = None, dropout: float = 0.0,
        ring_size: int | None = None, use_checkpointing: bool | None = None, *, group: Over = None,
        softmax_scale: float | None = None, **options: Unpack[ModuleOptions],
    ) -> None:  # fmt: skip
        super().__init__(segment_lengths, dilation_rates, softmax_scale, dropout, **options)
        self.ranks = module_ranks(group, ring_size, use_checkpointing, self.exchange, name=type(self).__name__)


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """Computes this rank's shard of :class:`MultiheadDilatedAttention` over the whole sequence.

    Give every rank the same parameters. Compute the loss with :func:`global_mean_for_ddp` and let DDP average the
    gradients: they then equal those of one device. Arguments and state dict are those of
    :class:`MultiheadDilatedAttention`, and arguments those of :class:`RingDilatedAttention`. A :class:`ContextParallel`
    may choose any exchange; "ring" is the default.

    Examples:
        >>> over, pattern = da.ContextParallel(group, total_length=256), da.DilatedPattern.longnet([64, 256], [1, 4])
        >>> attention = da.RingMultiheadDilatedAttention(64, 4, pattern=pattern, group=over)
        >>> out, _ = attention(da.shard_sequence(torch.randn(2, 256, 64), group), is_causal=True)
        >>> loss = da.global_mean_for_ddp(out.square().mean(-1), group)
    """

    exchange: Exchange = "ring"
    ranks: Ranks

    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Lengths = None, dilation_rates: Lengths = None,
        dropout: float = 0.0, bias: bool = True, layer_norm: bool = True, ring_size: int | None = None,
        use_checkpointing: bool | None = None, *, group: Over = None, **options: Unpack[MultiheadOptions],
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, dropout, bias, layer_norm, **options)
        self.ranks = module_ranks(group, ring_size, use_checkpointing, self.exchange)


def module_ranks(
    group: Over, ring_size: int | None, use_checkpointing: bool | None, exchange: Exchange, name: str = ""
) -> Ranks:
    """What the constructor of a module says of ranks. ``name``: that of a class that has no other exchange."""
    parallel = ContextParallel.of(group)
    if name and parallel.exchange not in (None, exchange):
        raise ValueError(f"{name} has the exchange {exchange!r}, and ContextParallel says {parallel.exchange!r}")
    again = parallel.use_checkpointing
    if {use_checkpointing, again} == {True, False}:
        raise ValueError(f"use_checkpointing is {use_checkpointing!r}, and {again!r} in ContextParallel: give it once")
    again = use_checkpointing if again is None else again
    parallel = replace(parallel, exchange=parallel.exchange or exchange, use_checkpointing=again)
    ranks = Ranks(parallel, None if ring_size is None else check_int("ring_size", ring_size))
    ranks.for_call()  # errors now rather than in the first step
    return ranks
