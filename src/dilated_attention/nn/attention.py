"""Modules without parameters: `dilated_attention` with its settings kept in one place.

Legend: query (B, N, H, D); key, value (B, N, Hk, D), where Hk divides H; padding (B, N), True = ignore.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from dilated_attention.checks import check_flag, checked_probability, checked_scale
from dilated_attention.nn.core import Core, Lengths, Options
from dilated_attention.notice import warn


class DilatedAttention(Core):
    """Computes dilated attention with its settings kept, as a module without parameters.

    Equals ``dilated_attention(..., scale=softmax_scale, enable_gqa=True)``. ``backend="eager"`` pins the plain matrix
    products, which can be followed step by step in a debugger.

    Args:
        segment_lengths, dilation_rates: one of each per branch.
        softmax_scale: multiplies the scores; 1/sqrt(D) by default.
        attention_dropout: the share of (query, key) pairs dropped in training mode; kept as ``dropout``.
        pattern: a :class:`DilatedPattern`, instead of the two lists.
        rule: of the two lists: "head_groups" (the default), "longnet" or "torchscale", see :class:`DilatedPattern`.
        backend: see :func:`dilated_attention`.

    Examples:
        >>> attention = da.DilatedAttention([64, 256], [1, 4], rule="longnet")
        >>> query, key, value = torch.randn(3, 2, 256, 4, 16).unbind(0)  # (batch, tokens, heads, head_dim)
        >>> attention(query, key, value, is_causal=True).shape
        torch.Size([2, 256, 4, 16])
    """

    def __init__(
        self,
        segment_lengths: Lengths = None,
        dilation_rates: Lengths = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        dropout = checked_probability(attention_dropout, "attention_dropout")
        super().__init__(segment_lengths, dilation_rates, dropout, **options)
        self.softmax_scale = None if softmax_scale is None else checked_scale(softmax_scale, "softmax_scale")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, N, H, D) from query (B, N, H, D) and key, value (B, N, Hk, D).

        Key and value may have fewer heads: each serves H // Hk query heads in a row. ``key_padding_mask`` is
        (B, N) bool, True = ignore this key.
        """
        return self._attend(query, key, value, is_causal, key_padding_mask)

    def extra_repr(self) -> str:
        scale = "" if self.softmax_scale is None else f"softmax_scale={self.softmax_scale}, "
        return f"{scale}{super().extra_repr()}"


class ImprovedDilatedAttention(DilatedAttention):
    """Computes the same as :class:`DilatedAttention`, and takes other arguments.

    Args:
        segment_lengths, dilation_rates: one of each per branch.
        dropout: the share of (query, key) pairs dropped in training mode.
        use_tf32: None, or what you expect of ``torch.backends.cuda.matmul.fp32_precision``, which float32 kernels
            follow. This class never sets it, and warns if it is set otherwise.
        others: see :class:`DilatedAttention`.

    Examples:
        >>> attention = da.ImprovedDilatedAttention([64, 256], [1, 4], dropout=0.1).eval()
        >>> query, key, value = torch.randn(3, 2, 256, 4, 16).unbind(0)
        >>> attention(query, key, value).shape
        torch.Size([2, 256, 4, 16])
    """

    def __init__(
        self,
        segment_lengths: Lengths = None,
        dilation_rates: Lengths = None,
        dropout: float = 0.0,
        use_tf32: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        dropout = checked_probability(dropout, "dropout")
        super().__init__(segment_lengths, dilation_rates, attention_dropout=dropout, **options)
        if use_tf32 is not None:
            check_flag("use_tf32", use_tf32)
            setting = torch.backends.cuda.matmul
            if use_tf32 != (setting.fp32_precision == "tf32"):
                wanted = "tf32" if use_tf32 else "ieee"
                warn(
                    f"use_tf32={use_tf32} sets nothing, and torch's setting differs: for all float32 products of the "
                    f"process, set torch.backends.cuda.matmul.fp32_precision = {wanted!r}"
                )
        self.use_tf32 = use_tf32

    def extra_repr(self) -> str:
        shown = "" if self.use_tf32 is None else f", use_tf32={self.use_tf32}"
        return f"{super().extra_repr()}{shown}"
