"""What is asked of every implementation (`Setting`), and what an implementation is.

Legend: query, key, value, dout (B, N, H, D), x (B, N, E) with E = H * D; N tokens, B samples, H heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dilated_attention.bench.results import DIRECTIONS
from dilated_attention.bench.run import Attention, Call, forward, forward_backward
from dilated_attention.pattern import DilatedPattern, Rule
from dilated_attention.testing import make_qkv

FORWARD, BOTH = DIRECTIONS
CHECK_CUT = 16  # segments are this much shorter where implementations are checked against the oracle,
CHECK_TOKENS = 512  # and tokens at most so many, as the oracle is quadratic


@dataclass(frozen=True)
class Setting:
    """Sizes, segments (without ``lengths``, those that `suggest` gives) and where they live. It has no rule."""

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
        return self.heads * self.head_dim

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def checks(self) -> list[Setting]:
        """Where implementations are checked against the oracle: odd in every way, and this setting made smaller."""
        few = replace(self, samples=min(self.samples, 2))
        odd = replace(few, tokens=275, lengths=(37, 64, 201), rates=(1, 2, 5))
        lengths, rates = self.segments("head_groups")  # this rule has the fewest branches, which all rules can have
        tokens, *shorter = (max(1, number // CHECK_CUT) for number in (self.tokens, *lengths))
        return [odd, replace(few, tokens=min(tokens, CHECK_TOKENS), lengths=tuple(shorter), rates=rates)]

    def segments(self, rule: str = "longnet") -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.lengths:
            return self.lengths, self.rates
        found = DilatedPattern.suggest(self.tokens, self.heads, rule=cast(Rule, "longnet" if rule == "dense" else rule))
        return found.segment_lengths, found.dilation_rates

    def pattern(self, rule: str) -> DilatedPattern:
        """Of a rule by name; "dense" is one segment of all tokens, for which the oracle is the dense oracle."""
        if rule == "dense":
            return DilatedPattern.longnet([self.tokens], [1])
        return DilatedPattern(cast(Rule, rule), *self.segments(rule))

    def flops(self, rule: str, direction: str) -> int:
        """That no way of computing the attention can do without."""
        size, backward = (self.tokens, self.heads, self.head_dim), direction == BOTH
        return self.samples * self.pattern(rule).flops(*size, is_causal=self.causal, backward=backward)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - `release` of `runners` clears it
    def inputs(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Query, key and value, and the gradient of out: one set for all implementations, which only read it."""
        shape = (self.samples, self.tokens, self.heads, self.head_dim)
        qkv, (dout, *_) = (make_qkv(*shape, dtype=self.dtype, device=self.device, seed=seed) for seed in (0, 1))
        return qkv, dout

    def __str__(self) -> str:
        lengths, rates = (",".join(map(str, numbers)) for numbers in self.segments())
        shape = f"B={self.samples} N={self.tokens:,} H={self.heads} D={self.head_dim} w={lengths} r={rates}"
        return f"{shape} {self.dtype_name}{', causal' * self.causal}"


@dataclass(frozen=True)
class Subject:
    attention: Attention  # of the inputs
    exact: Attention  # of the inputs and the parameters, in any dtype
    pattern: DilatedPattern
    inputs: tuple[Tensor, ...]
    dout: Tensor
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    group: ProcessGroup | None = None  # whose ranks have the other tokens

    def call(self, direction: str) -> Call:
        if direction == FORWARD:
            return forward(self.attention, self.inputs)
        return forward_backward(self.attention, self.inputs, self.dout, self.parameters.values())


Build = Callable[[Setting], Subject]


@dataclass(frozen=True)
class Implementation:
    """One line of the comparison. ``build`` is pickled for ranks, so it is a partial of module-level functions."""

    name: str
    kind: str  # function, module, multihead, ring, baseline
    rule: str  # head_groups, longnet, torchscale, dense
    build: Build
    ours: bool = True
    ranks: int = 1
    whole: Build | None = None  # over ranks: the same on one device, against which they are checked
    why_not: Callable[[Setting], str | None] = lambda setting: None  # a sentence where it cannot run

    def identity(self) -> dict[str, Any]:
        return {"implementation": self.name, **{x: getattr(self, x) for x in ("kind", "ours", "rule", "ranks")}}
