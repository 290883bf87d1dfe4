"""What is asked of every implementation: sizes, segments, precision and where the tensors live.

Legend: query, key, value, dout (B, N, H, D); N tokens, B samples, H heads, D head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from dilated_attention.pattern import DilatedPattern, Rule
from dilated_attention.testing import make_qkv

CHECK_CUT = 16  # segments are this much shorter where implementations are checked against the oracle,
CHECK_TOKENS = 512  # and tokens at most so many, as the oracle is quadratic


@dataclass(frozen=True)
class Setting:
    """Sizes, segments and where they live; the rule belongs to the implementation."""

    tokens: int
    lengths: tuple[int, ...]
    rates: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype = torch.float32
    samples: int = 1
    heads: int = 8
    head_dim: int = 64
    causal: bool = False

    @property
    def width(self) -> int:
        """E = H * D, what the modules with projections take."""
        return self.heads * self.head_dim

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.samples, self.tokens, self.heads, self.head_dim)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def checks(self) -> list[Setting]:
        """Where implementations are checked against the oracle: odd in every way, and this setting made smaller."""
        few = replace(self, samples=min(self.samples, 2))
        odd = replace(few, tokens=275, lengths=(37, 64, 201), rates=(1, 2, 5))
        lengths = tuple(max(1, w // CHECK_CUT) for w in self.lengths)
        small = replace(few, tokens=max(1, min(self.tokens // CHECK_CUT, CHECK_TOKENS)), lengths=lengths)
        return [odd, small]

    def pattern(self, rule: str) -> DilatedPattern:
        """Of a rule by name; "dense" is one segment of all tokens, for which the oracle is the dense oracle."""
        if rule == "dense":
            return DilatedPattern.longnet([self.tokens], [1])
        return DilatedPattern(cast(Rule, rule), self.lengths, self.rates)

    def qkv(self) -> tuple[Tensor, ...]:
        return _inputs(self)[:3]

    def dout(self) -> Tensor:
        return _inputs(self)[3]

    def __str__(self) -> str:
        shape = f"B={self.samples} N={self.tokens:,} H={self.heads} D={self.head_dim}"
        causal = ", causal" if self.causal else ""
        return f"{shape} w={_list(self.lengths)} r={_list(self.rates)} {self.dtype_name}{causal}"


def _list(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@functools.lru_cache(maxsize=2)
def _inputs(setting: Setting) -> tuple[Tensor, ...]:
    """One set for all implementations, which only read it."""
    device, dtype = setting.device, setting.dtype
    generator = torch.Generator(device).manual_seed(1)
    dout = torch.randn(setting.shape, generator=generator, device=device).to(dtype)
    return *make_qkv(*setting.shape, dtype=dtype, device=device), dout


def forget_inputs() -> None:
    """Give back the memory of the last settings."""
    _inputs.cache_clear()
