"""Modules over a group of ranks: each is `dilated_attention(..., group=...)` with its settings kept in one place.

The tensors of a call are this rank's contiguous shard of the sequence, and so is the result.

Legend: query (B, n, H, D); key, value (B, n, Hk, D), where Hk divides H; padding (B, n), True = ignore.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from dilated_attention.backends.blockwise import MemoryCap
from dilated_attention.backends.choose import Backend
from dilated_attention.checks import MAX_NUMBER, check_int, checked_probability
from dilated_attention.context_parallel import ContextParallel, Exchange
from dilated_attention.distributed.group import Buffers
from dilated_attention.distributed.sequence import Group
from dilated_attention.nn.attention import DilatedAttention
from dilated_attention.nn.core import module_ranks
from dilated_attention.nn.multihead import MultiheadDilatedAttention, MultiheadOptions, Prepared
from dilated_attention.pattern import DilatedPattern, Rule
from dilated_attention.ring.run import Ranks, telling_ranks


class RingDilatedAttention(DilatedAttention):
    """Computes dilated attention over a ring of ranks, each with its shard of the sequence.

    Equals ``dilated_attention(..., enable_gqa=True, group=ContextParallel(group, exchange="ring"))``. Without a process
    group, or with ``ring_size=1``, a call is plain dilated attention: it takes its tensors as the whole sequence. So a
    model needs no change to run on one device. Each step of the exchange has a name in ``torch.profiler``.

    Args:
        segment_lengths, dilation_rates: one of each per branch, in tokens.
        dropout: the share of (query, key) pairs dropped in training mode.
        ring_size: the number of ranks that you expect; a group of another size is an error. 1 turns the ring off. None
            (the default): all ranks of the group, or one device if there is no group.
        use_checkpointing: True (the default): key and value rows received from other ranks are dropped after the
            forward pass, and sent again in the backward pass. False keeps them: less to send, more memory. In both
            cases attention is computed once.
        group: a process group, a 1-D DeviceMesh or a :class:`ContextParallel`. None, or a ContextParallel without a
            group: the default process group at the time of the call, or one device if there is none.
        pattern, rule, backend, softmax_scale: see :class:`DilatedAttention`.

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
        segment_lengths: Iterable[int] | None = None,
        dilation_rates: Iterable[int] | None = None,
        dropout: float = 0.0,
        ring_size: int | None = None,
        use_checkpointing: bool | None = None,
        *,
        group: Group | ContextParallel | None = None,
        pattern: DilatedPattern | None = None,
        rule: Rule | None = None,
        backend: Backend = "auto",
        softmax_scale: float | None = None,
    ) -> None:
        dropout = checked_probability(dropout, "dropout")
        super().__init__(
            segment_lengths, dilation_rates, softmax_scale, dropout, pattern=pattern, rule=rule, backend=backend
        )
        self.ranks = module_ranks(group, ring_size, use_checkpointing, self.exchange, only=type(self).__name__)


class RingAttentionV2Simple(RingDilatedAttention):
    """Computes dense attention over a ring of ranks.

    Every token sees all tokens, or all earlier ones when causal. It is :class:`RingDilatedAttention` with one segment
    of rate 1 and the backend "eager"; docs/scaling.md shows the algorithm in twenty lines. The name is that of a class
    in the DarcStar fork of dilated-attention-pytorch.

    Args:
        dropout, backend, group: see :class:`RingDilatedAttention`.
        rule: has no effect, as one segment is the same under all rules.

    Examples:
        >>> query, key, value = (da.shard_sequence(x, group) for x in torch.randn(3, 2, 64, 4, 16))
        >>> da.RingAttentionV2Simple()(query, key, value, is_causal=True).shape == query.shape
        True
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        rule: Rule = "head_groups",
        backend: Backend = "eager",
        group: Group | ContextParallel | None = None,
    ) -> None:
        super().__init__([MAX_NUMBER], [1], dropout, rule=rule, backend=backend, group=group)


class RingDilatedAttentionV2Collective(RingDilatedAttention):
    """Computes the same as :class:`RingDilatedAttention`, but receives all key and value rows in one step.

    The exchange is "allgather", as in the LongNet paper. It takes fewer steps than a ring, but needs memory for all
    rows that this rank needs. On NCCL it is one collective. On gloo it is a batch of messages, so that an error can
    name a missing rank. Arguments are those of :class:`RingDilatedAttention`. The name is that of a class in the
    DarcStar fork of dilated-attention-pytorch; new code can call :func:`dilated_attention` with a
    :class:`ContextParallel`, which takes every exchange.

    Examples:
        >>> query, key, value = (da.shard_sequence(x, group) for x in torch.randn(3, 2, 64, 4, 16))
        >>> da.RingDilatedAttentionV2Collective([16, 64], [1, 4])(query, key, value).shape == query.shape
        True
    """

    exchange = "allgather"


class RingDilatedAttentionProduction(RingDilatedAttention):
    """Computes the same as :class:`RingDilatedAttention`, with a cap on memory, a second try, and statistics.

    A block is the part of a segment that one step computes. A block that runs out of memory is computed again with half
    as many heads at a time, down to one. The result is the same; other ranks only wait a little longer. The logger
    "dilated_attention" warns of such tries. Receive buffers are kept from step to step and from call to call. The name
    is that of a class in the DarcStar fork of dilated-attention-pytorch.

    Args:
        max_workspace_bytes: the most bytes that the results of one block may take. Larger blocks are computed some
            heads at a time. None (the default): no limit.
        segment_lengths, dilation_rates, dropout, ring_size, use_checkpointing: see :class:`RingDilatedAttention`.
        group, pattern, rule, backend, softmax_scale: see :class:`RingDilatedAttention`.

    Examples:
        >>> attention = da.RingDilatedAttentionProduction([16, 64], [1, 4], max_workspace_bytes=2**20)
        >>> query, key, value = (da.shard_sequence(x, group) for x in torch.randn(3, 2, 64, 4, 16))
        >>> out = attention(query, key, value)
        >>> attention.stats()["retries"]
        0
    """

    def __init__(
        self,
        segment_lengths: Iterable[int] | None = None,
        dilation_rates: Iterable[int] | None = None,
        dropout: float = 0.0,
        ring_size: int | None = None,
        use_checkpointing: bool | None = None,
        max_workspace_bytes: int | None = None,
        *,
        group: Group | ContextParallel | None = None,
        pattern: DilatedPattern | None = None,
        rule: Rule | None = None,
        backend: Backend = "auto",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__(
            segment_lengths, dilation_rates, dropout, ring_size, use_checkpointing,
            group=group, pattern=pattern, rule=rule, backend=backend, softmax_scale=softmax_scale,
        )  # fmt: skip
        if max_workspace_bytes is not None:
            max_workspace_bytes = check_int("max_workspace_bytes", max_workspace_bytes)
        self.ranks.memory_cap, self.ranks.buffers = MemoryCap(max_workspace_bytes), Buffers()

    def stats(self) -> dict[str, float]:
        """Returns statistics of all calls of this module on this rank, with their backward passes.

        hops: steps in which it sent or received; bytes_sent, bytes_received; seconds_waited for other ranks;
        peak_bytes: the most bytes of received messages held at the same time; retries: blocks that ran out of memory
        and were tried again.
        """
        stats, cap = self.ranks.stats, self.ranks.memory_cap
        return {
            "hops": stats.hops,
            "bytes_sent": stats.bytes_sent,
            "bytes_received": stats.bytes_received,
            "seconds_waited": stats.seconds_waited,
            "peak_bytes": stats.peak_buffer_bytes,
            "retries": 0 if cap is None else cap.retries,
        }


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """Computes this rank's shard of :class:`MultiheadDilatedAttention` over the whole sequence.

    Give every rank the same parameters; the state dict is that of :class:`MultiheadDilatedAttention`. Compute the loss
    with :func:`sequence_mean` and let DDP average the gradients: they then equal those of one device. If you sum
    gradients instead, pass ``gradients="sum"`` to :func:`sequence_mean`. Arguments are those of
    :class:`MultiheadDilatedAttention` and :class:`RingDilatedAttention`. A :class:`ContextParallel` may choose any
    exchange; "ring" is the default.

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
        segment_lengths: Iterable[int] | None = None,
        dilation_rates: Iterable[int] | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        ring_size: int | None = None,
        use_checkpointing: bool | None = None,
        *,
        group: Group | ContextParallel | None = None,
        **options: Unpack[MultiheadOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, dropout, bias, layer_norm, **options)
        self.ranks = module_ranks(group, ring_size, use_checkpointing, self.exchange)

    def _prepared(self, query: Tensor, *given: Any) -> Prepared:
        with telling_ranks(self.ranks.for_call(), query):
            return self._prepared_here(query, *given)

    def _prepared_here(self, query: Tensor, *given: Any) -> Prepared:
        return super()._prepared(query, *given)
