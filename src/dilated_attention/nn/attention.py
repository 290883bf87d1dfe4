"""The module without parameters: `dilated_attention` with its settings kept in one place."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from dilated_attention.checks import checked_scale
from dilated_attention.nn.core import Core, Lengths, ModuleOptions


class DilatedAttention(Core):
    """Stores the settings of `dilated_attention` and calls it, as a module without parameters.

    Equals ``dilated_attention(..., scale=softmax_scale, enable_gqa=True)``.

    Args:
        segment_lengths, dilation_rates: one of each per branch, in tokens.
        softmax_scale: multiplies the scores; 1/sqrt(D) by default.
        attention_dropout: the share of (query, key) pairs dropped in training mode; stored as ``self.dropout``.
        options: ``pattern``, any :class:`Pattern` instead of the two lists; ``rule``, how the two lists are
            assigned to heads: "head_groups" (the default), "longnet" or "torchscale"; ``backend``, as in
            :func:`dilated_attention`.

    Examples:
        >>> attention = da.DilatedAttention(pattern=da.DilatedPattern.longnet([64, 256], [1, 4]))
        >>> query, key, value = torch.randn(3, 2, 256, 4, 16).unbind(0)  # (batch, tokens, heads, head_dim)
        >>> attention(query, key, value, is_causal=True).shape
        torch.Size([2, 256, 4, 16])
    """

    shown = ("softmax_scale", *Core.shown)

    def __init__(
        self, segment_lengths: Lengths = None, dilation_rates: Lengths = None, softmax_scale: float | None = None,
        attention_dropout: float = 0.0, **options: Unpack[ModuleOptions],
    ) -> None:  # fmt: skip
        super().__init__(segment_lengths, dilation_rates, attention_dropout, **options)
        self.softmax_scale = None if softmax_scale is None else checked_scale(softmax_scale, "softmax_scale")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, *,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns (B, N, H, D), from query (B, N, H, D) and key, value (B, N, Hk, D).

        Key and value may have fewer heads: each serves H // Hk query heads in a row. ``key_padding_mask`` is
        (B, N) bool, True = ignore this key.
        """
        return self._attend(query, key, value, is_causal, key_padding_mask)
