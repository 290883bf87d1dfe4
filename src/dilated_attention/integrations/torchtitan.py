"""Dilated attention as the ``inner_attention`` of torchtitan's attention modules (torchtitan 0.3.0).

    config.layers[i].attention.inner_attention = DilatedAttention.Config(pattern=da.Pattern([da.Window(1023), ...]))

It is a kind of torchtitan's VarlenAttention, so torchtitan gives it the borders of packed documents: segments begin
anew in each document. It does not work with torchtitan's context parallelism, and raises there.

Legend: q (B, N, H, D), k, v (B, N, Hk, D), as in the library; torchtitan writes B, L, N, H for these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from dilated_attention.functional import dilated_attention
from dilated_attention.pattern import DilatedPattern, Pattern, Rule


class DilatedAttention(VarlenAttention):
    """Causal dilated attention of packed documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pattern: Pattern | None = None  # or that of a rule and two lists:
        segment_lengths: tuple[int, ...] = ()
        dilation_rates: tuple[int, ...] = ()
        rule: Rule = "longnet"

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # VarlenAttention's own would choose a flash attention for the whole process
        if tuple(config.window_size) != (-1, 0):
            raise ValueError(f"dilated attention has no window_size, got {config.window_size}: its pattern replaces it")
        lists = config.segment_lengths, config.dilation_rates
        if config.pattern is not None and any(lists):
            raise ValueError(f"pattern={config.pattern} says segment_lengths and dilation_rates: leave these out")
        self.pattern = config.pattern or DilatedPattern.of(config.rule, *lists)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, scale: float | None = None, **options: Any
    ) -> Tensor:
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(f"attention_masks must be VarlenMetadata, got {type(attention_masks).__name__}")
        if isinstance(q, DTensor):
            raise TypeError("dilated attention got a DTensor: it does not work with torchtitan's context parallelism")
        borders = attention_masks.cu_seq_q if attention_masks.cu_seq_q_host is None else attention_masks.cu_seq_q_host
        shape, (q, k, v) = q.shape, (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        out, lse = dilated_attention(
            q, k, v, self.pattern, is_causal=True, scale=scale, enable_gqa=True, cu_seqlens=borders, return_lse=True
        )
        if (transform := options.get("out_transform")) is not None:
            out = transform(out.view(shape), lse.view(shape[:3]))
        return out.view(shape)
