"""The operation as two registered ops: one autograd node, opaque to torch.compile, with shapes for fake tensors.

Legend: query (B, N, H, D); key, value (B, N, Hk, D); lse (B, N, H).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention import _engine
from dilated_attention.backends.problem import accumulate_dtype
from dilated_attention.pattern import DilatedPattern


@torch.library.custom_op("dilated_attention::forward", mutates_args=())
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
    rule: str,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool,
    scale: float,
    dropout_p: float,
    backend: str,
    first_head: int = 0,
    total_heads: int = 0,
) -> tuple[Tensor, Tensor]:
    pattern = _pattern(rule, tuple(segment_lengths), tuple(dilation_rates))
    settings = _engine.Settings(pattern, is_causal, scale, dropout_p, backend, first_head, total_heads)
    return _engine.forward(query, key, value, key_padding_mask, seed, settings)


@torch.library.custom_op("dilated_attention::backward", mutates_args=())
def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rule: str,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool,
    scale: float,
    dropout_p: float,
    backend: str,
    first_head: int = 0,
    total_heads: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    pattern = _pattern(rule, tuple(segment_lengths), tuple(dilation_rates))
    settings = _engine.Settings(pattern, is_causal, scale, dropout_p, backend, first_head, total_heads)
    return _engine.backward(dout, dlse, query, key, value, key_padding_mask, seed, out, lse, settings)


@functools.lru_cache(maxsize=256)
def _pattern(rule: str, lengths: tuple[int, ...], rates: tuple[int, ...]) -> DilatedPattern:
    """An op takes no objects, so the pattern travels as numbers; it is checked once."""
    return DilatedPattern(rule, lengths, rates)


@forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=accumulate_dtype(query.dtype))


@backward.register_fake
def _(dout: Tensor | None, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.settings = inputs[5:]
    ctx.set_materialize_grads(False)  # None tells that lse was not used, which spares its pass


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = backward(dout, dlse, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None,) * 11)


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "dilated_attention cannot be differentiated twice: its backward has no derivative. "
        "Drop create_graph=True, or use dilated_attention.reference.attention() for short sequences"
    )


forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(_no_double_backward)
