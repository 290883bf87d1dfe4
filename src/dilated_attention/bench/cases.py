"""What is compared: the setting, and every implementation with the oracle it is held against.

Legend: query, key, value (B, N, H, D); x (B, N, E) with E = H * D for the modules that project.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention import reference
from dilated_attention.bench import baselines
from dilated_attention.bench.run import Attention, oracle
from dilated_attention.functional import dilated_attention
from dilated_attention.nn import (
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
)
from dilated_attention.pattern import RULES, DilatedPattern
from dilated_attention.testing import make_qkv

BACKENDS = ("sdpa", "eager")
CHECK_CUT = 16  # the pattern is checked this much smaller


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

    @staticmethod
    def of_tokens(tokens: int, device: torch.device, dtype: torch.dtype) -> Setting:
        """Three branches that all see as many keys: a quarter, half and all of the tokens, at rates 1, 2 and 4."""
        if tokens < 4 * CHECK_CUT or tokens % (4 * CHECK_CUT):
            raise ValueError(f"tokens must be a multiple of {4 * CHECK_CUT}, got {tokens}")
        return Setting(tokens, (tokens // 4, tokens // 2, tokens), (1, 2, 4), device, dtype)

    def checks(self) -> list[Setting]:
        """Where implementations are held against the oracle: odd in every way, and this setting made smaller."""
        odd = replace(self, tokens=515, lengths=(67, 129, 401), rates=(1, 2, 5))
        small = replace(
            self, tokens=self.tokens // CHECK_CUT, lengths=tuple(max(1, w // CHECK_CUT) for w in self.lengths)
        )
        return [odd, small]

    def pattern(self, rule: str) -> DilatedPattern:
        return DilatedPattern(rule, self.lengths, self.rates)

    def qkv(self) -> tuple[Tensor, ...]:
        return _qkv(self)


@functools.lru_cache(maxsize=4)
def _qkv(setting: Setting) -> tuple[Tensor, ...]:
    """One set for all implementations, which only read it."""
    shape = (setting.samples, setting.tokens, setting.heads, setting.head_dim)
    return make_qkv(*shape, dtype=setting.dtype, device=setting.device)


@dataclass(frozen=True)
class Subject:
    """An implementation in a setting: what it takes, what it does, and what the oracle says."""

    attention: Attention  # of the inputs
    exact: Attention  # of the inputs and the parameters, in any dtype
    inputs: tuple[Tensor, ...]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    pattern: DilatedPattern | None = None  # where out is attention itself, so that single rows can be checked
    compiled: bool = False

    def dout(self) -> Tensor:
        x = self.inputs[0]
        generator = torch.Generator(x.device).manual_seed(1)
        return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


@dataclass(frozen=True)
class Implementation:
    name: str
    build: Callable[[Setting], Subject]
    ours: bool = True
    timed: bool = True


DENSE = "dense SDPA"


def implementations() -> list[Implementation]:
    """The yardstick first, then ours, then the baselines."""
    scatter = partial(_function, baselines.gather_pad_scatter, "torchscale")
    functions = [
        one
        for rule in RULES
        for backend in BACKENDS
        for one in (
            Implementation(f"{rule}, {backend}", partial(_ours, rule, backend)),
            # the slow backend as one opaque op inside a compiled graph: right or wrong is all there is to learn
            Implementation(f"{rule}, {backend}, compiled", partial(_compiled, rule, backend), timed=backend == "sdpa"),
        )
    ]
    modules = (DilatedAttention, ImprovedDilatedAttention)
    multihead = (MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention)
    return [
        Implementation(DENSE, _dense, ours=False),
        *functions,
        *(Implementation(kind.__name__, partial(_module, kind)) for kind in modules),
        *(Implementation(kind.__name__, partial(_multihead, kind)) for kind in multihead),
        Implementation("copy and gather", partial(_function, baselines.copy_and_gather, "head_groups"), ours=False),
        Implementation("gather-pad-scatter", scatter, ours=False),
    ]


# --- one builder per kind of implementation ---------------------------------------------------------------------


def _function(function: Callable[..., Tensor], rule: str, setting: Setting) -> Subject:
    pattern = setting.pattern(rule)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(query, key, value, pattern)

    return Subject(attention, oracle(pattern), setting.qkv(), pattern=pattern)


def _ours(rule: str, backend: str, setting: Setting) -> Subject:
    return _function(partial(dilated_attention, backend=backend), rule, setting)


def _compiled(rule: str, backend: str, setting: Setting) -> Subject:
    pattern = setting.pattern(rule)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dilated_attention(query, key, value, pattern, backend=backend)

    # one graph or an error: a fallback to plain Python would be timed under the wrong name
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    return Subject(compiled, oracle(pattern), setting.qkv(), pattern=pattern, compiled=True)


def _dense(setting: Setting) -> Subject:
    pattern = baselines.dense_pattern(setting.tokens)
    return Subject(baselines.dense, oracle(pattern), setting.qkv(), pattern=pattern)


def _module(kind: type[DilatedAttention], setting: Setting) -> Subject:
    module = kind(setting.lengths, setting.rates)
    return Subject(module, oracle(module.pattern), setting.qkv(), pattern=module.pattern)


def _multihead(kind: type[MultiheadDilatedAttention], setting: Setting) -> Subject:
    width = setting.heads * setting.head_dim
    generator = torch.Generator().manual_seed(0)
    module = kind(width, setting.heads, setting.lengths, setting.rates)
    for parameter in module.parameters():  # biases and gains too: at 0 and 1 they would hide mistakes
        nn.init.normal_(parameter, std=width**-0.5, generator=generator)
    module.to(setting.device, setting.dtype)
    x = setting.qkv()[0].flatten(2)

    def attention(x: Tensor) -> Tensor:
        out: Tensor = module(x)[0]
        return out

    return Subject(attention, _multihead_oracle(module, setting), (x,), dict(module.named_parameters()))


def _multihead_oracle(module: MultiheadDilatedAttention, setting: Setting) -> Attention:
    """Projections, the reference, norm and projection, written out with the parameters by name."""
    names = [name for name, _ in module.named_parameters()]
    shape = (setting.samples, setting.tokens, setting.heads, setting.head_dim)

    def exact(x: Tensor, *parameters: Tensor) -> Tensor:
        of = dict(zip(names, parameters, strict=True))
        if "qkv_proj.weight" in of:
            projected = F.linear(x, of["qkv_proj.weight"], of["qkv_proj.bias"]).chunk(3, dim=-1)
        else:
            projected = tuple(F.linear(x, of[f"{p}_proj.weight"], of[f"{p}_proj.bias"]) for p in "qkv")
        q, k, v = (p.reshape(shape) for p in projected)
        out = reference.attention(q, k, v, module.pattern, dtype=None)[0].reshape(x.shape)
        out = F.layer_norm(out, x.shape[-1:], of["norm.weight"], of["norm.bias"])
        return F.linear(out, of["out_proj.weight"], of["out_proj.bias"])

    return exact
