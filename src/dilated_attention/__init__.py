"""Exact, fast dilated attention for long sequences: LongNet's operation and its family, on PyTorch."""

from dilated_attention.functional import dilated_attention, explain
from dilated_attention.nn import (
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
)
from dilated_attention.pattern import DilatedPattern

__version__ = "0.1.0"
__all__ = [
    "DilatedAttention",
    "DilatedPattern",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "dilated_attention",
    "explain",
]
