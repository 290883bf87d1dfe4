"""The implementations with projections: ours and torch's, and their oracle written out with the parameters by name.

Legend: x, out (B, N, E) with E = H * D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilated_attention import reference
from dilated_attention.bench.run import Attention
from dilated_attention.bench.setting import Setting, Subject
from dilated_attention.nn import MultiheadDilatedAttention
from dilated_attention.pattern import DilatedPattern

Module = TypeVar("Module", bound=nn.Module)


def ours(kind: type[MultiheadDilatedAttention], setting: Setting) -> Subject:
    module = filled(kind(setting.width, setting.heads, *setting.segments("head_groups")), setting)
    return subject(module, module.pattern, lambda x: module(x, is_causal=setting.causal)[0], setting)


def torchs(setting: Setting) -> Subject:
    """nn.MultiheadAttention, which is dense; when causal, its users hand it the mask, N x N and made once."""
    module = filled(nn.MultiheadAttention(setting.width, setting.heads, batch_first=True), setting)
    mask = None
    if setting.causal:
        mask = nn.Transformer.generate_square_subsequent_mask(setting.tokens, setting.device, setting.dtype)

    def attention(x: Tensor) -> Tensor:
        out: Tensor = module(x, x, x, need_weights=False, attn_mask=mask, is_causal=setting.causal)[0]
        return out

    return subject(module, setting.pattern("dense"), attention, setting)


def filled(module: Module, setting: Setting) -> Module:
    """Random parameters, biases and gains too: at 0 and 1 they would hide mistakes. The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=setting.width**-0.5, generator=generator)
    return module.to(setting.device, setting.dtype)


def subject(
    module: nn.Module, pattern: DilatedPattern, attention: Callable[[Tensor], Tensor], setting: Setting
) -> Subject:
    parameters = dict(module.named_parameters())
    exact = oracle(list(parameters), pattern, setting)
    return Subject(attention, exact, pattern, (setting.qkv()[0].flatten(2),), setting.dout().flatten(2), parameters)


def oracle(names: list[str], pattern: DilatedPattern, setting: Setting) -> Attention:
    """Projections, the reference, the norm where there is one, and the projection of the output."""

    def exact(x: Tensor, *parameters: Tensor) -> Tensor:
        of = dict(zip(names, parameters, strict=True))
        q, k, v = (torch.unflatten(p, -1, (setting.heads, setting.head_dim)) for p in _projected(x, of))
        out = reference.attention(q, k, v, pattern, is_causal=setting.causal, dtype=None)[0].flatten(2)
        if "norm.weight" in of:
            out = F.layer_norm(out, x.shape[-1:], of["norm.weight"], of["norm.bias"])
        return F.linear(out, of["out_proj.weight"], of["out_proj.bias"])

    return exact


def _projected(x: Tensor, of: dict[str, Tensor]) -> tuple[Tensor, ...]:
    for weight, bias in (("qkv_proj.weight", "qkv_proj.bias"), ("in_proj_weight", "in_proj_bias")):
        if weight in of:
            return F.linear(x, of[weight], of[bias]).chunk(3, dim=-1)
    return tuple(F.linear(x, of[f"{p}_proj.weight"], of[f"{p}_proj.bias"]) for p in "qkv")
