"""Modules without parameters: `dilated_attention` with its settings kept in one place.

Legend: query (B, N, H, D); key, value (B, N, Hk, D), where Hk divides H; padding (B, N), True = ignore.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dilated_attention.backends.choose import Backend
from dilated_attention.checks import check_flag, checked_probability, checked_scale, warn
from dilated_attention.nn.core import Core
from dilated_attention.pattern import DilatedPattern, Rule


class DilatedAttention(Core):
    """Stores the settings of `dilated_attention` and calls it, as a module without parameters.

    Equals ``dilated_attention(..., scale=softmax_scale, enable_gqa=True)``. It takes no keywords but those below.

    Args:
        segment_lengths, dilation_rates: one of each per branch, in tokens.
        softmax_scale: multiplies the scores; 1/sqrt(D) by default.
        attention_dropout: the share of (query, key) pairs dropped in training mode; stored as ``self.dropout``.
        pattern: a :class:`DilatedPattern`, instead of the two lists.
        rule: how the two lists are assigned to heads: "head_groups" (the default here), "longnet" or "torchscale", see
            :class:`DilatedPattern`. The command line and ``DilatedPattern.suggest`` use "longnet" by default.
        backend: see :func:`dilated_attention`; "auto" by default. "eager" is plain matrix products, through which you
            can step with a debugger.

    Examples:
        >>> attention = da.DilatedAttention([64, 256], [1, 4], rule="longnet")
        >>> query, key, value = torch.randn(3, 2, 256, 4, 16).unbind(0)  # (batch, tokens, heads, head_dim)
        >>> attention(query, key, value, is_causal=True).shape
        torch.Size([2, 256, 4, 16])
    """

    def __init__(
        self,
        segment_lengths: Iterable[int] | None = None,
        dilation_rates: Iterable[int] | None = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        pattern: DilatedPattern | None = None,
        rule: Rule | None = None,
        backend: Backend = "auto",
    ) -> None:
        dropout = checked_probability(attention_dropout, "attention_dropout")
        super().__init__(segment_lengths, dilation_rates, dropout, pattern, rule, backend)
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
        """Returns (B, N, H, D), from query (B, N, H, D) and key, value (B, N, Hk, D).

        Key and value may have fewer heads: each serves H // Hk query heads in a row. ``key_padding_mask`` is
        (B, N) bool, True = ignore this key.
        """
        return self._attend(query, key, value, is_causal, key_padding_mask)

    def extra_repr(self) -> str:
        scale = "" if self.softmax_scale is None else f"softmax_scale={self.softmax_scale}, "
        return f"{scale}{super().extra_repr()}"


class ImprovedDilatedAttention(DilatedAttention):
    """Computes the same as :class:`DilatedAttention`, equally fast, and has other argument names.

    It is for code written for the DarcStar fork of dilated-attention-pytorch, which has a class of this name.

    Args:
        segment_lengths, dilation_rates: one of each per branch, in tokens.
        dropout: the share of (query, key) pairs dropped in training mode.
        use_tf32: changes nothing. True or False: warn if PyTorch's own setting, ``fp32_precision == "tf32"`` in
            ``torch.backends.cuda.matmul``, differs. None (the default): do not look. Turn TF32 on or off in PyTorch.
        pattern, rule, backend, softmax_scale: see :class:`DilatedAttention`.

    Examples:
        >>> attention = da.ImprovedDilatedAttention([64, 256], [1, 4], dropout=0.1).eval()
        >>> query, key, value = torch.randn(3, 2, 256, 4, 16).unbind(0)
        >>> attention(query, key, value).shape
        torch.Size([2, 256, 4, 16])
    """

    def __init__(
        self,
        segment_lengths: Iterable[int] | None = None,
        dilation_rates: Iterable[int] | None = None,
        dropout: float = 0.0,
        use_tf32: bool | None = None,
        *,
        pattern: DilatedPattern | None = None,
        rule: Rule | None = None,
        backend: Backend = "auto",
        softmax_scale: float | None = None,
    ) -> None:
        dropout = checked_probability(dropout, "dropout")
        super().__init__(
            segment_lengths, dilation_rates, softmax_scale, dropout, pattern=pattern, rule=rule, backend=backend
        )
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
