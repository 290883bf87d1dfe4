"""The operation as modules: nothing here computes more than `dilated_attention` and the projections around it."""

from dilated_attention.nn.attention import DilatedAttention, ImprovedDilatedAttention
from dilated_attention.nn.multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention

__all__ = [
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
]
