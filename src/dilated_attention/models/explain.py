"""Where attention goes, exactly and without an N × N matrix: one query's weights, and their way through all layers.

Legend: x (1, N, C), the class token first; q, k, v (1, N, H, D).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention import functional
from dilated_attention.backends.problem import Inputs
from dilated_attention.models.layers import SelfAttention
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
    counts = torch.empty(heads, tokens + 1, dtype=torch.long)  # how often heads show each key; zero keys are the last
    for index, counted in enumerate(counts):
        asked = {"query": row, "head": index, "num_tokens": tokens, "num_heads": heads}
        key = torch.tensor(pattern.keys(**asked), dtype=torch.long)
        counted[:-1] = key.bincount(minlength=tokens)
        counted[-1] = pattern.zero_keys(**asked) if pattern.adds_zeros else 0
    parts = [row_weights(layers[number], states[number], row, counts.to(states[0].device)) for number in which]
    weights = torch.stack(parts)[slice(None) if layer is None else 0, some]
    return AttentionMap(weights[..., 1:tokens], weights[..., 0], weights[..., tokens])


def row_weights(layer: Any, x: Tensor, row: int, counts: Tensor) -> Tensor:
    """The weights of one query in all heads of a layer, (H, N + 1). A row that sees no key at all has none."""
    q, k, _ = layer.self_attn.project(layer.self_attn_layer_norm(x))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("hd,nhd->hn", q[0, row].to(wide), k[0].to(wide)) / math.sqrt(k.shape[-1])
    logits = F.pad(scores, (0, 1)) + counts.to(wide).log()  # the score of a zero key is 0
    return logits.softmax(-1).masked_fill(~counts.any(1, keepdim=True), 0.0)


def rollout(layers: Iterable[Any], states: Sequence[Tensor], start: Tensor) -> AttentionMap:
    """The row ``start`` (N,) carried back through all layers: in each, half of it stays and half goes where heads look.

    A row r becomes (r + Aᵀr) / 2, with A the mean of the heads' attention. Aᵀr is the gradient of the attention's
    output with respect to its values, for r as the output's gradient: no matrix A is made.
    """
    row = start
    for layer, x in reversed(list(zip(layers, states, strict=True))):
        row = (row + _transposed(layer.self_attn, layer.self_attn_layer_norm(x), row)) / 2
    return AttentionMap(row[1:], row[0], (start.sum() - row.sum()).clamp(min=0))


def _transposed(attention: SelfAttention, x: Tensor, row: Tensor) -> Tensor:
    q, k, v = (part.to(row.dtype) for part in attention.project(x))
    with torch.inference_mode(False), torch.enable_grad():  # copies: what inference mode made has no gradients
        q, k, v = (part.clone() if part.is_inference() else part for part in (q, k, v))
        v.requires_grad_()
        out, _ = functional.attend(Inputs(q, k, v), Options(attention.pattern), warns=False)
        gradient = torch.zeros_like(out)
        gradient[0, :, :, 0] = row.unsqueeze(1) / attention.num_heads  # one channel is enough
        (found,) = torch.autograd.grad(out, v, gradient)
    return found[0, :, :, 0].sum(1)
