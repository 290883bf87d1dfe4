"""Modules without parameters: `dilated_attention` with its settings kept in one place.

Legend: query (B, N, H, D); key, value (B, N, Hk, D), where Hk divides H; padding (B, N), True = ignore.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from dilated_attention.functional import check_backend, checked_probability, checked_scale, dilated_attention
from dilated_attention.pattern import DilatedPattern


class DilatedAttention(nn.Module):
    """Equals ``dilated_attention(..., scale=softmax_scale, enable_gqa=True)`` with the pattern made here.

    ``backend="eager"`` pins the plain matrix products, which can be followed step by step in a debugger.

    Args:
        segment_lengths, dilation_rates: one of each per branch.
        softmax_scale: multiplies the scores; 1/sqrt(D) by default.
        attention_dropout: the share of (query, key) pairs dropped in training mode; kept as ``dropout``.
        rule: "head_groups", "longnet" or "torchscale", see :class:`DilatedPattern`.
        backend: see :func:`dilated_attention`.
    """

    def __init__(
        self,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        rule: str = "head_groups",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.pattern = DilatedPattern.of(rule, segment_lengths, dilation_rates)
        # the default depends on D, which only the tensors know
        self.softmax_scale = None if softmax_scale is None else checked_scale(softmax_scale, "softmax_scale")
        self.dropout = checked_probability(attention_dropout, "attention_dropout")
        self.backend = backend

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
        return dilated_attention(
            query,
            key,
            value,
            self.pattern,
            is_causal=is_causal,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            key_padding_mask=key_padding_mask,
            enable_gqa=True,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        scale = "" if self.softmax_scale is None else f"softmax_scale={self.softmax_scale}, "
        return f"{self.pattern}, {scale}dropout={self.dropout}, backend={self.backend!r}"


class ImprovedDilatedAttention(DilatedAttention):
    """Equals ``dilated_attention(..., enable_gqa=True)`` with the pattern made here, on the fastest backend.

    The same function as :class:`DilatedAttention`; the two differ in their arguments only.

    Args:
        segment_lengths, dilation_rates: one of each per branch.
        dropout: the share of (query, key) pairs dropped in training mode.
        use_tf32: kept, and changes nothing: float32 kernels, this library's too, follow torch's own setting
            (``torch.backends.cuda.matmul.fp32_precision``), which is never written.
        rule: "head_groups", "longnet" or "torchscale", see :class:`DilatedPattern`.
        backend: "auto" takes the fastest one that can run the call; see :func:`dilated_attention`.
    """

    def __init__(
        self,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        dropout: float = 0.0,
        use_tf32: bool = True,
        *,
        rule: str = "head_groups",
        backend: str = "auto",
    ) -> None:
        dropout = checked_probability(dropout, "dropout")
        super().__init__(segment_lengths, dilation_rates, attention_dropout=dropout, rule=rule, backend=backend)
        if not isinstance(use_tf32, bool):
            raise TypeError(f"use_tf32 must be True or False, got {use_tf32!r}")
        self.use_tf32 = use_tf32

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, use_tf32={self.use_tf32}"
