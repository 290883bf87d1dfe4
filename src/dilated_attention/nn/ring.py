"""Modules over a group of ranks: each is `dilated_attention(..., group=...)` with its settings kept in one place.

The tensors of a call are this rank's contiguous shard of the sequence, and so is the result.

Legend: query (B, n, H, D); key, value (B, n, Hk, D), where Hk divides H; padding (B, n), True = ignore.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention import functional
from dilated_attention.ring.run import Link, tell_others
from dilated_attention.backends.blockwise import Limit
from dilated_attention.distributed.group import Buffers
from dilated_attention.distributed.sequence import Group, process_group
from dilated_attention.distributed.transport import Stats
from dilated_attention.functional import check_backend, check_link, checked_probability
from dilated_attention.nn.multihead import MultiheadDilatedAttention, Prepared
from dilated_attention.pattern import MAX_NUMBER, DilatedPattern, whole_number


class Ranks:
    """Which ranks a module runs over, found anew at each call: a process group can come after the module."""

    def __init__(self, group: Group | None, ring_size: int | None, exchange: str, **settings: Any) -> None:
        self.ring_size = None if ring_size is None else whole_number("ring_size", ring_size)
        self.group = None if group is None else process_group(group)
        self.exchange, self.settings = exchange, settings
        self.limit: Limit | None = None
        self.stats = Stats()
        self.buffers: Buffers | None = None
        check_link(*Link(None, exchange, **settings).options)  # errors now rather than in the first step
        self.link()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """A copy of a module runs over the same ranks, as a process group cannot be copied, and counts on its own."""
        twin = copy.copy(self)
        twin.stats = Stats()
        twin.limit = None if self.limit is None else Limit(self.limit.max_bytes)
        return twin

    def link(self) -> Link | None:
        """How to reach the ranks; None: there is only this one."""
        group = self.group
        if self.ring_size == 1:
            group = None
        elif group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        found = None if group is None else group.size()
        if self.ring_size not in (None, 1) and found != self.ring_size:
            there = "no process group is initialised" if found is None else f"the process group has {found} ranks"
            raise ValueError(
                f"ring_size is {self.ring_size} and {there}: start as many ranks with torchrun, pass a group of that "
                "size, or leave ring_size out"
            )
        if group is None:
            return None if self.limit is None else Link(None, limit=self.limit, stats=self.stats)
        return Link(group, self.exchange, **self.settings, limit=self.limit, stats=self.stats, buffers=self.buffers)

    def __repr__(self) -> str:
        ranks = "default group" if self.group is None else f"{self.group.size()} ranks"
        return f"{self.exchange}, {'one device' if self.ring_size == 1 else ranks}"


class RingDilatedAttention(nn.Module):
    """Equals ``dilated_attention(..., enable_gqa=True, group=group, exchange="ring")`` with the pattern made here.

    On one device it is the plain function, so a model goes from one device to many without a change: without a process
    group, or with ``ring_size=1``, a call computes on the whole sequence.

    Args:
        segment_lengths, dilation_rates: one of each per branch.
        dropout: the share of (query, key) pairs dropped in training mode.
        ring_size: the number of ranks that must be there; 1: one device, whatever group there is; None: those of the
            group, or one device where there is none.
        use_checkpointing: rows received from other ranks travel again in the backward pass; False keeps them, which
            is less to send and more to hold. Neither computes attention twice.
        rule: "head_groups", "longnet" or "torchscale", see :class:`DilatedPattern`.
        backend: see :func:`dilated_attention`.
        group: a process group or 1-D DeviceMesh; None: the default group, if one is initialised at the call.
        timeout, verify, debug: see :func:`dilated_attention`.
    """

    exchange = "ring"

    def __init__(
        self,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        dropout: float = 0.0,
        ring_size: int | None = None,
        use_checkpointing: bool = True,
        *,
        rule: str = "head_groups",
        backend: str = "auto",
        group: Group | None = None,
        timeout: float = 60.0,
        verify: str | None = None,
        debug: bool = False,
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.pattern = DilatedPattern.of(rule, segment_lengths, dilation_rates)
        self.dropout = checked_probability(dropout, "dropout")
        self.backend = backend
        options = {"use_checkpointing": use_checkpointing, "timeout": timeout, "verify": verify, "debug": debug}
        self.ranks = Ranks(group, ring_size, self.exchange, **options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, n, H, D) from this rank's query (B, n, H, D) and key, value (B, n, Hk, D)."""
        dropout_p = self.dropout if self.training else 0.0
        out, _ = functional.attend(
            query, key, value, self.pattern, is_causal, None, dropout_p, key_padding_mask, True, self.backend, None,
            self.ranks.link(),
        )  # fmt: skip
        return out

    def extra_repr(self) -> str:
        return f"{self.pattern}, dropout={self.dropout}, backend={self.backend!r}, {self.ranks}"


class RingAttentionV2Simple(RingDilatedAttention):
    """Equals ``dilated_attention(..., DilatedPattern.longnet([N], [1]), exchange="ring", backend="eager")``: dense.

    Every token sees every other, or every earlier one when causal. Plain matrix products on blocks that go round the
    ring; the same in twenty lines and one process is in docs/scaling.md. The arguments are those that
    :class:`RingDilatedAttention` has of the same names; with a single segment all rules are the same.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        rule: str = "head_groups",
        backend: str = "eager",
        group: Group | None = None,
        timeout: float = 60.0,
        verify: str | None = None,
        debug: bool = False,
    ) -> None:
        options: dict[str, Any] = {"group": group, "timeout": timeout, "verify": verify, "debug": debug}
        super().__init__([MAX_NUMBER], [1], dropout, rule=rule, backend=backend, **options)


class RingDilatedAttentionV2Collective(RingDilatedAttention):
    """Equals ``dilated_attention(..., enable_gqa=True, group=group, exchange="allgather")`` with the pattern made here.

    The rows of all ranks that share a segment come in one step: the LongNet paper's way. It is one collective, but over
    gloo a batch of messages, so that a missing rank can be named. Fewer steps than a ring, and room for all those rows.
    Arguments as in :class:`RingDilatedAttention`.
    """

    exchange = "allgather"

    def __init__(
        self,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        dropout: float = 0.0,
        *,
        rule: str = "head_groups",
        backend: str = "auto",
        group: Group | None = None,
        timeout: float = 60.0,
        verify: str | None = None,
        debug: bool = False,
    ) -> None:
        options: dict[str, Any] = {"group": group, "timeout": timeout, "verify": verify, "debug": debug}
        super().__init__(segment_lengths, dilation_rates, dropout, rule=rule, backend=backend, **options)


class RingDilatedAttentionProduction(RingDilatedAttention):
    """Equals :class:`RingDilatedAttention`, with a cap on memory, a second try when it runs out, and statistics.

    A block whose results would take more than ``max_workspace_bytes`` is computed some heads at a time. A block that
    runs out of memory is computed again with half as many heads at a time, down to one; other ranks only wait a
    little longer. The result is the same. Such tries are logged as warnings of the logger "dilated_attention". Receive
    buffers are kept from step to step and from call to call. Steps have names in ``torch.profiler``.

    The arguments are those of :class:`RingDilatedAttention`, and ``max_workspace_bytes``.
    """

    def __init__(
        self,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        dropout: float = 0.0,
        ring_size: int | None = None,
        use_checkpointing: bool = True,
        max_workspace_bytes: int | None = None,
        *,
        rule: str = "head_groups",
        backend: str = "auto",
        group: Group | None = None,
        timeout: float = 60.0,
        verify: str | None = None,
        debug: bool = False,
    ) -> None:
        options: dict[str, Any] = {"group": group, "timeout": timeout, "verify": verify, "debug": debug}
        super().__init__(
            segment_lengths,
            dilation_rates,
            dropout,
            ring_size,
            use_checkpointing,
            rule=rule,
            backend=backend,
            **options,
        )
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
    """Equals :class:`MultiheadDilatedAttention` on the whole sequence, computed on this rank's shard of it.

    The state dict is the same. Its parameters are to be the same on every rank. With the loss of :func:`sequence_mean`
    their gradients are those of one device once they are averaged over the ranks, as DDP does (or summed, with
    ``gradients="sum"``). Arguments as there and in :class:`RingDilatedAttention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        ring_size: int | None = None,
        use_checkpointing: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        rule: str = "head_groups",
        backend: str = "auto",
        group: Group | None = None,
        timeout: float = 60.0,
        verify: str | None = None,
        debug: bool = False,
        exchange: str = "ring",
    ) -> None:
        shape: dict[str, Any] = {"layer_norm_eps": layer_norm_eps, "gamma_init": gamma_init}
        super().__init__(
            embed_dim, num_heads, segment_lengths, dilation_rates, dropout, bias, layer_norm,
            device=device, dtype=dtype, rule=rule, backend=backend, **shape,
        )  # fmt: skip
        options = {"use_checkpointing": use_checkpointing, "timeout": timeout, "verify": verify, "debug": debug}
        self.ranks = Ranks(group, ring_size, exchange, **options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, key_padding_mask: Tensor | None) -> Tensor:
        dropout_p = self.dropout if self.training else 0.0
        out, _ = functional.attend(
            q, k, v, self.pattern, is_causal, None, dropout_p, key_padding_mask, False, self.backend, None,
            self.ranks.link(),
        )  # fmt: skip
        return out

    def _prepared(self, query: Tensor, *given: Any) -> Prepared:
        try:
            return self._prepared_here(query, *given)
        except Exception as error:  # the other ranks are to know, not to wait
            tell_others(self.ranks.link(), query, error)
            raise

    def _prepared_here(self, *given: Any) -> Prepared:
        return super()._prepared(*given)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.ranks}"
