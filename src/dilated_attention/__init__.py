"""Exact, fast dilated attention for long sequences: LongNet's operation and its family, on PyTorch."""

from dilated_attention._explain import Explanation, explain
from dilated_attention.context_parallel import ContextParallel
from dilated_attention.distributed.group import CommunicationError
from dilated_attention.distributed.sequence import gather_sequence, local_positions, sequence_mean, shard_sequence
from dilated_attention.functional import dilated_attention
from dilated_attention.nn import (
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingAdvancedDistributedDilatedAttention,
    RingAttentionV2Simple,
    RingDilatedAttention,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2Collective,
    RingMultiheadDilatedAttention,
)
from dilated_attention.notice import DilatedAttentionWarning
from dilated_attention.pattern import DilatedPattern
from dilated_attention.ring.cost import plan_cost
from dilated_attention.streaming import stream

__version__ = "0.1.0"
__all__ = [
    "CommunicationError",
    "ContextParallel",
    "DilatedAttention",
    "DilatedAttentionWarning",
    "DilatedPattern",
    "Explanation",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "RingAdvancedDistributedDilatedAttention",
    "RingAttentionV2Simple",
    "RingDilatedAttention",
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionV2Collective",
    "RingMultiheadDilatedAttention",
    "dilated_attention",
    "explain",
    "gather_sequence",
    "local_positions",
    "plan_cost",
    "sequence_mean",
    "shard_sequence",
    "stream",
]


def __dir__() -> list[str]:
    return sorted(__all__)
