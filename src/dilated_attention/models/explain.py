"""Where attention goes, exactly and without an N × N matrix: one query's weights, and their way through all layers.

Legend: x (1, N, C), the class token first; q, k, v (1, N, H, D).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from dilated_attention import functional
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import accumulate_dtype
from dilated_attention.resolve import Options

Query = int | str  # a tile's index or "cls"; a rollout also takes "mean"


class AttentionMap(NamedTuple):
    """Attention weights of one query, which sum to 1; all are 0 in a head in which no branch has the query.

    The leading dimensions (...) are (layers, heads), without that of which a call chose one.

    Args:
        tiles: the weight of each tile, (..., L).
        cls: the weight of the class token, (...).
        zeros: the weight of the zero keys that the rule torchscale adds, (...). In a rollout under another rule, what
            comes from rows that no branch has.

    Examples:
        >>> model = models.SlideEncoder(24, 32, 2, 4, global_pool=False).eval()
        >>> found = model.attention_map(torch.randn(50, 24), torch.randint(0, 100, (50, 2)) * 256)
        >>> found.tiles.shape  # of the last layer: (heads, L)
        torch.Size([4, 50])
    """

    tiles: Tensor
    cls: Tensor
    zeros: Tensor


def row_of(query: Query, tiles: int) -> int:
    """The row of a query: 0 for the class token, 1 + its index for a tile."""
    return 0 if query == "cls" else 1 + _index("query must be 'cls' or", query, 0, tiles)


def _index(said: str, value: Any, least: int, end: int) -> int:
    if not isinstance(value, SupportsIndex) or not least <= operator.index(value) < end:
        raise ValueError(f"{said} from {least} to {end - 1}, got {value!r}")
    return operator.index(value)


def attention_map(
    layers: Sequence[Any], states: Sequence[Tensor], query: Query, layer: int | None, head: int | None
) -> AttentionMap:
    """``states``: the inputs of each layer."""
    attention, tokens = layers[0].self_attn, states[0].shape[1]
    pattern, row, heads = attention.pattern, row_of(query, tokens - 1), attention.num_heads
    which = range(len(layers)) if layer is None else [_index("layer must be", layer, -len(layers), len(layers))]
    some = slice(None) if head is None else _index("head must be", head, -heads, heads)
    zero_keys = torch.zeros(heads, dtype=accumulate_dtype(states[0].dtype), device=states[0].device)
    for index in range(heads) if pattern.adds_zeros else ():
        zero_keys[index] = pattern.zero_keys(row, index, num_tokens=tokens, num_heads=heads)
    one, found = torch.ones_like(zero_keys[:1]), []
    for number in which:
        weights, lse = _weights_of_keys(layers[number], states[number], one, row)
        zeros = (zero_keys * (-lse[0, 0]).exp()).masked_fill(zero_keys == 0, 0.0)  # their score is 0
        found.append(torch.cat((weights, zeros.unsqueeze(1)), 1))
    shares = torch.stack(found)[slice(None) if layer is None else 0, some]
    return AttentionMap(shares[..., 1:tokens], shares[..., 0], shares[..., tokens])


def rollout(layers: Iterable[Any], states: Sequence[Tensor], start: Tensor) -> AttentionMap:
    """The row ``start`` (N,) carried back through all layers: in each, half of it stays and half goes where heads look.

    A row r becomes (r + Aᵀr) / 2, with A the mean of the heads' attention.
    """
    row = start
    for layer, x in reversed(list(zip(layers, states, strict=True))):
        row = (row + _weights_of_keys(layer, x, row)[0].mean(0)) / 2
    return AttentionMap(row[1:], row[0], (start.sum() - row.sum()).clamp(min=0))


def _weights_of_keys(layer: Any, x: Tensor, row: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Aᵀr of each head, (H, N), and the lse, for the row r of queries from ``first`` on.

    It is the gradient of the attention's output with respect to its values, for r as the output's: A is never made.
    """
    attention = layer.self_attn
    q, k, _ = (part.to(row.dtype) for part in attention.project(layer.self_attn_layer_norm(x)))
    with torch.inference_mode(False), torch.enable_grad():  # copies: what inference mode made has no gradients
        q, k = q[:, first : first + len(row)].clone(), k.clone()
        v = torch.zeros_like(k, requires_grad=True)
        out, lse = functional.attend(Inputs(q, k, v), Options(attention.pattern, query_offset=first), warns=False)
        gradient = torch.zeros_like(out)
        gradient[0, :, :, 0] = row.unsqueeze(1)  # one channel is enough
        (found,) = torch.autograd.grad(out, v, gradient)
    return found[0, :, :, 0].T, lse
