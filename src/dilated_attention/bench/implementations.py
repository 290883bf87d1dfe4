"""Everything that is compared: the yardstick, ours, and the baselines, each with the oracle it is checked against.

Legend: query, key, value (B, N, H, D); x (B, N, E) with E = H * D for the modules that project.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from dilated_attention import blocks
from dilated_attention.backends import choose, triton
from dilated_attention.bench import baselines, multihead, over_ranks
from dilated_attention.bench.run import oracle
from dilated_attention.bench.setting import Implementation, Setting, Subject
from dilated_attention.call import Call
from dilated_attention.compat import (
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    RingAttentionV2Simple,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2Collective,
)
from dilated_attention.functional import dilated_attention
from dilated_attention.nn import (
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
)
from dilated_attention.pattern import RULES, DilatedPattern

BACKENDS = ("auto", "triton", "sdpa", "eager")
RANKS = (2, 4)
DENSE, OVER_HEADS = "dense SDPA", "attention over heads"
GATHER, SLICES = "copy and gather, index_select", "copy and gather, slicing"
RELEASED = "gather-pad-scatter"


def everything() -> list[Implementation]:
    """The yardstick first, then ours, then the baselines."""
    return [Implementation(DENSE, "baseline", "dense", _dense, ours=False), *ours(), *_baselines()]


def named(*names: str) -> list[Implementation]:
    """Those of these names, in this order."""
    found = {one.name: one for one in everything()}
    return [found[name] for name in names]


def ours() -> list[Implementation]:
    return [*_functions(), *_modules(), *_on_ranks()]


def _functions() -> list[Implementation]:
    found = []
    for rule in RULES:
        for backend in BACKENDS:
            why_not, built = partial(_cannot, backend), partial(_ours, rule, backend)
            found.append(Implementation(f"{rule}, {backend}", "function", rule, built, why_not=why_not))
        # one opaque op in a compiled graph, whatever the backend
        compiled, why_not = partial(_compiled, rule), partial(_cannot, "auto", compiled=True)
        found.append(Implementation(f"{rule}, auto, compiled", "function", rule, compiled, why_not=why_not))
    return found


def _modules() -> list[Implementation]:
    ring: tuple[type[RingDilatedAttention], ...]
    ring = (RingDilatedAttention, RingDilatedAttentionV2Collective, RingDilatedAttentionProduction)
    many = (MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention, RingMultiheadDilatedAttention)
    plain: Sequence[type[Any]] = (DilatedAttention, ImprovedDilatedAttention, *ring)
    return [
        *(Implementation(kind.__name__, "module", "head_groups", partial(module, kind)) for kind in plain),
        Implementation(RingAttentionV2Simple.__name__, "module", "dense", _v2_simple),
        *(Implementation(kind.__name__, "multihead", "head_groups", partial(multihead.ours, kind)) for kind in many),
    ]


def _on_ranks() -> list[Implementation]:
    ring = [one for one in _modules() if one.name.startswith("Ring")]
    return [
        one for ranks in RANKS for one in (*(over_ranks.spread(one, ranks) for one in ring), over_ranks.on_mesh(ranks))
    ]


def _baselines() -> list[Implementation]:
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
               "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip
    released = partial(_function, baselines.gather_pad_scatter, "torchscale")
    cudnn = partial(_function, partial(baselines.gather_pad_scatter, kernel="cudnn"), "torchscale")
    found = [
        *(
            Implementation(f"dense {name}", "baseline", "dense", partial(_dense, kernel=kernel), why_not=_cuda_half)
            for name, kernel in kernels.items()
        ),
        Implementation("nn.MultiheadAttention", "multihead", "dense", multihead.torchs),
        Implementation(GATHER, "baseline", "head_groups", partial(_function, baselines.copy_and_gather, "head_groups")),
        Implementation(SLICES, "baseline", "head_groups", partial(_function, baselines.copy_slices, "head_groups")),
        Implementation(RELEASED, "baseline", "torchscale", released, why_not=_half_on_cuda),
        Implementation(f"{RELEASED}, cuDNN", "baseline", "torchscale", cudnn, why_not=_cuda_half),
        Implementation(
            "FlexAttention", "baseline", "head_groups", partial(_function, baselines.flex, "head_groups"),
            why_not=_cuda_half,
        ),
        Implementation(OVER_HEADS, "baseline", "head_groups", partial(_function, baselines.over_heads, "head_groups")),
    ]  # fmt: skip
    return [replace(one, ours=False) for one in found]


# --- what cannot run where --------------------------------------------------------------------------------------


def _cuda_half(setting: Setting) -> str | None:
    """Kernels that are there on CUDA in half precision only."""
    if setting.device.type != "cuda":
        return "it runs on CUDA only"
    return _half_on_cuda(setting)


def _half_on_cuda(setting: Setting) -> str | None:
    if setting.device.type == "cuda" and setting.dtype.itemsize != 2:
        return f"its kernel takes float16 and bfloat16 on CUDA, not {setting.dtype_name}"
    return None


def _cannot(backend: str, setting: Setting, compiled: bool = False) -> str | None:
    if compiled and setting.device.type == "cuda" and not triton.INSTALLED:
        return "torch.compile needs triton on CUDA"
    if backend == "triton":
        x = torch.empty(1, dtype=setting.dtype, device=setting.device).expand(1, 1, 1, setting.head_dim)
        call = Call(DilatedPattern.longnet([1], [1]), setting.causal).of(x, x, None, 0)
        return "; ".join(triton.unsupported(call, False)) or None
    return None


# --- one builder per kind ---------------------------------------------------------------------------------------


def _subject(function: Callable[..., Tensor], pattern: DilatedPattern, setting: Setting) -> Subject:
    exact = oracle(pattern, setting.causal)
    return Subject(function, exact, pattern, setting.qkv(), setting.dout())


def _function(function: Callable[..., Tensor], rule: str, setting: Setting) -> Subject:
    pattern, is_causal = setting.pattern(rule), setting.causal

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function(query, key, value, pattern, is_causal=is_causal)

    return _subject(attention, pattern, setting)


def _ours(rule: str, backend: str, setting: Setting) -> Subject:
    return _function(partial(dilated_attention, backend=backend), rule, setting)


def without_plans() -> Implementation:
    """Every cache of plans is emptied before each call."""
    return Implementation("longnet, sdpa, plans not cached", "function", "longnet", _without_plans)


def _without_plans(setting: Setting) -> Subject:
    planned = _ours("longnet", "sdpa", setting)
    members = [thing for module in (blocks, choose) for thing in vars(module).values()]
    caches = [thing for thing in members if isinstance(thing, functools._lru_cache_wrapper)]

    def attention(*qkv: Tensor) -> Tensor:
        for cache in caches:
            cache.cache_clear()
        return planned.attention(*qkv)

    return replace(planned, attention=attention)


def _compiled(rule: str, setting: Setting) -> Subject:
    plain = _ours(rule, "auto", setting)
    # one graph or an error: a fallback to plain Python would be timed under the wrong name
    compiled = torch.compile(plain.attention, fullgraph=True, dynamic=False)
    return replace(plain, attention=compiled)


def _dense(setting: Setting, kernel: SDPBackend | None = None) -> Subject:
    attention = partial(baselines.dense, is_causal=setting.causal, kernel=kernel)
    return _subject(attention, setting.pattern("dense"), setting)


def module(kind: type[DilatedAttention] | type[RingDilatedAttention], setting: Setting, **options: Any) -> Subject:
    made = kind(*setting.segments("head_groups"), **options)
    return _subject(partial(made, is_causal=setting.causal), made.pattern, setting)


def _v2_simple(setting: Setting) -> Subject:
    attention = partial(RingAttentionV2Simple(), is_causal=setting.causal)
    return _subject(attention, setting.pattern("dense"), setting)
