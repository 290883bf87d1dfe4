"""The classes of an older family, for code that uses their names: see the page on migration. New code needs none.

They have the constructors of that family, and what they compute is computed elsewhere. `sequence_mean` is an old name
of ours.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention.backends.blockwise import MemoryCap
from dilated_attention.checks import MAX_NUMBER, check_flag, check_int, warn
from dilated_attention.context_parallel import Over
from dilated_attention.distributed.sequence import Group, mean_over_ranks
from dilated_attention.nn.core import DilatedAttention, Lengths, ModuleOptions
from dilated_attention.nn.mesh import RingAdvancedDistributedDilatedAttention
from dilated_attention.nn.multihead import MultiheadDilatedAttention
from dilated_attention.nn.ring import RingDilatedAttention

__all__ = [
    "ImprovedDilatedAttention", "ImprovedMultiheadDilatedAttention", "RingAdvancedDistributedDilatedAttention",
    "RingAttentionV2Simple", "RingDilatedAttentionProduction", "RingDilatedAttentionV2Collective", "sequence_mean",
]  # fmt: skip


class ImprovedDilatedAttention(DilatedAttention):
    """Is DilatedAttention with other argument names.

    ``use_tf32`` sets nothing: True or False warns where it differs from PyTorch's own setting.
    """

    shown = (*DilatedAttention.shown, "use_tf32")

    def __init__(
        self, segment_lengths: Lengths = None, dilation_rates: Lengths = None, dropout: float = 0.0,
        use_tf32: bool | None = None, *, softmax_scale: float | None = None, **options: Unpack[ModuleOptions],
    ) -> None:  # fmt: skip
        super().__init__(segment_lengths, dilation_rates, softmax_scale, dropout, **options)
        self.use_tf32 = use_tf32
        if use_tf32 is not None:
            check_flag("use_tf32", use_tf32)
            if use_tf32 != (torch.backends.cuda.matmul.fp32_precision == "tf32"):
                wanted = "tf32" if use_tf32 else "ieee"
                warn(
                    f"use_tf32={use_tf32} sets nothing, and torch's setting differs: for all float32 products of the "
                    f"process, set torch.backends.cuda.matmul.fp32_precision = {wanted!r}"
                )


class ImprovedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """Is MultiheadDilatedAttention with the projections of q, k and v in one matrix, ``qkv_proj``.

    Either class loads the state dict of the other.
    """

    def _add_projections(self, **factory: Any) -> None:
        self.qkv_proj = nn.Linear(self.embed_dim, sum(self._widths()), **factory)

    def _inputs(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        bias, widths = self.qkv_proj.bias, self._widths()
        biases = (None,) * 3 if bias is None else torch.split(bias, widths)
        return tuple(zip(torch.split(self.qkv_proj.weight, widths), biases, strict=True))

    def _project(self, *given: Tensor) -> tuple[Tensor, ...]:
        if all(x is given[0] for x in given):
            return torch.split(self.qkv_proj(given[0]), self._widths(), dim=-1)
        return tuple(F.linear(x, *third) for x, third in zip(given, self._inputs(), strict=True))


class RingOptions(ModuleOptions, total=False):
    """The keywords of RingDilatedAttention."""

    group: Over
    softmax_scale: float | None


class RingAttentionV2Simple(RingDilatedAttention):
    """Is RingDilatedAttention with one segment of rate 1, dense attention, and the backend "eager".

    ``rule`` has no effect, as one segment is the same under all rules.
    """

    def __init__(self, dropout: float = 0.0, **options: Unpack[RingOptions]) -> None:
        options.setdefault("backend", "eager")
        super().__init__([MAX_NUMBER], [1], dropout, **options)


class RingDilatedAttentionV2Collective(RingDilatedAttention):
    """Is RingDilatedAttention with the exchange "allgather": all key and value rows arrive in one step.

    Such a step is one batch of messages, which NCCL sends as it does an all-to-all.
    """

    exchange = "allgather"


class RingDilatedAttentionProduction(RingDilatedAttention):
    """Is RingDilatedAttention with a cap on memory, second tries when memory runs out, and statistics.

    ``max_workspace_bytes`` caps the results of one block: larger blocks are computed some heads at a time.
    """

    def __init__(
        self, segment_lengths: Lengths = None, dilation_rates: Lengths = None, dropout: float = 0.0,
        ring_size: int | None = None, use_checkpointing: bool | None = None, max_workspace_bytes: int | None = None,
        **options: Unpack[RingOptions],
    ) -> None:  # fmt: skip
        super().__init__(segment_lengths, dilation_rates, dropout, ring_size, use_checkpointing, **options)
        if max_workspace_bytes is not None:
            max_workspace_bytes = check_int("max_workspace_bytes", max_workspace_bytes)
        self.ranks.memory_cap = MemoryCap(max_workspace_bytes)

    def stats(self) -> dict[str, float]:
        """Returns statistics of all calls of this module on this rank, with their backward passes.

        hops: steps in which it sent or received; bytes_sent, bytes_received; seconds_waited for other ranks;
        peak_bytes: the most bytes of received messages held at the same time; retries: blocks that ran out of memory
        and were tried again.
        """
        stats, cap = self.ranks.stats, self.ranks.memory_cap
        counted = {x: getattr(stats, x) for x in ("hops", "bytes_sent", "bytes_received", "seconds_waited")}
        return {**counted, "peak_bytes": stats.peak_buffer_bytes, "retries": 0 if cap is None else cap.retries}


def sequence_mean(
    token_losses: Tensor, group: Group, mask: Tensor | None = None, *,
    gradients: Literal["average", "sum"] = "average",
) -> Tensor:  # fmt: skip
    """Is :func:`global_mean_for_ddp`, or with ``gradients="sum"`` :func:`global_mean`."""
    return mean_over_ranks(token_losses, group, mask, gradients)
