"""The operation as modules: nothing here computes more than `dilated_attention` and the projections around it."""

from dilated_attention.nn.attention import DilatedAttention, ImprovedDilatedAttention
from dilated_attention.nn.mesh import RingAdvancedDistributedDilatedAttention
from dilated_attention.nn.multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention
from dilated_attention.nn.ring import (
    RingAttentionV2Simple,
    RingDilatedAttention,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2Collective,
    RingMultiheadDilatedAttention,
)

__all__ = [
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "RingAdvancedDistributedDilatedAttention",
    "RingAttentionV2Simple",
    "RingDilatedAttention",
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionV2Collective",
    "RingMultiheadDilatedAttention",
]
