"""The operation as modules: nothing here computes more than `dilated_attention` and the projections around it."""

from dilated_attention.nn.core import DilatedAttention
from dilated_attention.nn.multihead import MultiheadDilatedAttention
from dilated_attention.nn.ring import RingDilatedAttention, RingMultiheadDilatedAttention

__all__ = ["DilatedAttention", "MultiheadDilatedAttention", "RingDilatedAttention", "RingMultiheadDilatedAttention"]
