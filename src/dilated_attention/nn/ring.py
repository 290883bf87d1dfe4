"""Modules over a group of ranks: each is `dilated_attention(..., group=...)` with its settings kept in one place.

The tensors of a call are this rank's contiguous shard of the sequence, and so is the result.

Legend: query (B, n, H, D); key, value (B, n, Hk, D), where Hk divides H; padding (B, n), True = ignore.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from dilated_attention.backends.blockwise import Limit
from dilated_attention.backends.choose import Backend
from dilated_attention.checks import checked_probability
from dilated_attention.context_parallel import Exchange
from dilated_attention.distributed.group import Buffers
from dilated_attention.nn.attention import DilatedAttention
from dilated_attention.nn.core import DEFAULT_RULE, Lengths, Options, Over, Ranks
from dilated_attention.nn.multihead import MultiheadDilatedAttention, MultiheadOptions, Prepared
from dilated_attention.pattern import MAX_NUMBER, Rule, whole_number
from dilated_attention.ring.run import tell_others


class RingDilatedAttention(DilatedAttention):
    """Computes dilated attention over a ring of ranks, each with its shard of the sequence.

    Equals ``dilated_attention(..., enable_gqa=True, group=ContextParallel(group, exchange="ring"))``. On one device it
    is the plain function, so a model goes from one device to many without a change: without a process group, or with
    ``ring_size=1``, a call computes on the whole sequence.

    Args:
        segment_lengths, dilation_rates: one of each per branch.
        dropout: the share of (query, key) pairs dropped in training mode.
        ring_size: the number of ranks that must be there; 1: one device, whatever group there is; None: those of the
            group, or one device where there is none.
        use_checkpointing: rows received from other ranks travel again in the backward pass, which is the default;
            False keeps them, which is less to send and more to hold. Neither computes attention twice.
        group: a process group, 1-D DeviceMesh or :class:`ContextParallel`; without a group in it, the default group
            is taken, if one is initialised at the call.
        pattern, rule, backend: see :class:`DilatedAttention`.

    Examples:
        >>> attention = da.RingDilatedAttention([64, 256], [1, 4], group=group)
        >>> query, key, value = (da.shard_sequence(x, group) for x in torch.randn(3, 2, 256, 4, 16))
        >>> attention(query, key, value).shape == query.shape
        True
    """

    exchange: Exchange = "ring"
    ranks: Ranks

    def __init__(
        self,
        segment_lengths: Lengths = None,
        dilation_rates: Lengths = None,
        dropout: float = 0.0,
        ring_size: int | None = None,
        use_checkpointing: bool | None = None,
        *,
        group: Over = None,
        **options: Unpack[Options],
    ) -> None:
        dropout = checked_probability(dropout, "dropout")
        super().__init__(segment_lengths, dilation_rates, attention_dropout=dropout, **options)
        self.ranks = Ranks(group, ring_size, use_checkpointing, self.exchange, only=type(self).__name__)


class RingAttentionV2Simple(RingDilatedAttention):
    """Computes dense attention over a ring of ranks.

    Equals :class:`RingDilatedAttention` of the pattern ``longnet([N], [1])`` on the backend "eager": every token sees
    every other, or every earlier one when causal. Plain matrix products on blocks that go round the ring; the same in
    twenty lines and one process is in docs/scaling.md. The arguments are those that :class:`RingDilatedAttention` has
    of the same names; with a single segment all rules are the same.

    Examples:
        >>> query, key, value = (da.shard_sequence(x, group) for x in torch.randn(3, 2, 64, 4, 16))
        >>> da.RingAttentionV2Simple()(query, key, value, is_causal=True).shape == query.shape
        True
    """

    def __init__(
        self, dropout: float = 0.0, *, rule: Rule = DEFAULT_RULE, backend: Backend = "eager", group: Over = None
    ) -> None:
        super().__init__([MAX_NUMBER], [1], dropout, rule=rule, backend=backend, group=group)


class RingDilatedAttentionV2Collective(RingDilatedAttention):
    """Computes the same as :class:`RingDilatedAttention`, with all rows fetched in one step.

    The exchange is "allgather", the LongNet paper's way. It is one collective, but over gloo a batch of messages, so
    that a missing rank can be named. Fewer steps than a ring, and room for all those rows. Arguments as in
    :class:`RingDilatedAttention`.

    Examples:
        >>> query, key, value = (da.shard_sequence(x, group) for x in torch.randn(3, 2, 64, 4, 16))
        >>> da.RingDilatedAttentionV2Collective([16, 64], [1, 4])(query, key, value).shape == query.shape
        True
    """

    exchange = "allgather"


class RingDilatedAttentionProduction(RingDilatedAttention):
    """Computes the same as :class:`RingDilatedAttention`, with a cap on memory, a second try, and statistics.

    A block whose results would take more than ``max_workspace_bytes`` is computed some heads at a time. A block that
    runs out of memory is computed again with half as many heads at a time, down to one; other ranks only wait a
    little longer. The result is the same. Such tries are logged as warnings of the logger "dilated_attention". Receive
    buffers are kept from step to step and from call to call. Steps have names in ``torch.profiler``.

    The arguments are those of :class:`RingDilatedAttention`, and ``max_workspace_bytes``.

    Examples:
        >>> attention = da.RingDilatedAttentionProduction([16, 64], [1, 4], max_workspace_bytes=2**20)
        >>> query, key, value = (da.shard_sequence(x, group) for x in torch.randn(3, 2, 64, 4, 16))
        >>> out = attention(query, key, value)
        >>> attention.stats()["retries"]
        0
    """

    def __init__(
        self,
        segment_lengths: Lengths = None,
        dilation_rates: Lengths = None,
        dropout: float = 0.0,
        ring_size: int | None = None,
        use_checkpointing: bool | None = None,
        max_workspace_bytes: int | None = None,
        *,
        group: Over = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, dropout, ring_size, use_checkpointing, group=group, **options)
        if max_workspace_bytes is not None:
            max_workspace_bytes = whole_number("max_workspace_bytes", max_workspace_bytes)
        self.ranks.limit, self.ranks.buffers = Limit(max_workspace_bytes), Buffers()

    def stats(self) -> dict[str, float]:
        """What this rank's calls came to so far, backward passes included.

        hops: steps in which it sent or received; bytes_sent, bytes_received; seconds_waited for other ranks;
        peak_bytes: of received messages held at once; retries: blocks that ran out of memory and were tried again.
        """
        stats, limit = self.ranks.stats, self.ranks.limit
        return {
            "hops": stats.hops,
            "bytes_sent": stats.bytes_sent,
            "bytes_received": stats.bytes_received,
            "seconds_waited": stats.seconds_waited,
            "peak_bytes": stats.peak_buffer_bytes,
            "retries": 0 if limit is None else limit.retries,
        }


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """Computes :class:`MultiheadDilatedAttention` of the whole sequence on this rank's shard of it.

    The state dict is the same. Its parameters are to be the same on every rank. With the loss of :func:`sequence_mean`
    their gradients are those of one device once they are averaged over the ranks, as DDP does (or summed, with
    ``gradients="sum"``). Arguments as there and in :class:`RingDilatedAttention`; ``exchange`` in a
    :class:`ContextParallel` is "ring" by default, and may be any.

    Examples:
        >>> attention = da.RingMultiheadDilatedAttention(64, 4, [64, 256], [1, 4], group=da.ContextParallel(group))
        >>> out, _ = attention(da.shard_sequence(torch.randn(2, 256, 64), group), is_causal=True)
        >>> loss = da.sequence_mean(out.square().mean(-1), group)
    """

    exchange: Exchange = "ring"
    ranks: Ranks

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Lengths = None,
        dilation_rates: Lengths = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        ring_size: int | None = None,
        use_checkpointing: bool | None = None,
        *,
        group: Over = None,
        **options: Unpack[MultiheadOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, dropout, bias, layer_norm, **options)
        self.ranks = Ranks(group, ring_size, use_checkpointing, self.exchange)

    def _prepared(self, query: Tensor, *given: Any) -> Prepared:
        try:
            return self._prepared_here(query, *given)
        except Exception as error:  # whatever it is: the other ranks are to know, not to wait
            tell_others(self.ranks.link(), query, error)
            raise

    def _prepared_here(self, query: Tensor, *given: Any) -> Prepared:
        return super()._prepared(query, *given)
