"""Where attention goes, exactly and without an N × N matrix: one query's weights, and their way through all layers.

Legend: x (1, N, C), the class token first; q, k, v (1, N, H, D); counts (H, N): how often a head shows each key.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from dilated_attention import functional
from dilated_attention.models.layers import Layer, SelfAttention
from dilated_attention.pattern import DilatedPattern

Query = int | str  # a tile's index or "cls"; a rollout also takes "mean"


class AttentionMap(NamedTuple):
    """Attention weights of one query, which sum to 1; all are 0 in a head in which no branch has the query.

    The leading dimensions (...) are (layers, heads). A call that chose one layer leaves out the first, and a call that
    chose one head the second.

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
    if query == "cls":
        return 0
    if isinstance(query, bool) or not isinstance(query, SupportsIndex) or not 0 <= operator.index(query) < tiles:
        raise ValueError(f"query must be 'cls' or the index of one of {tiles} tiles, got {query!r}")
    return operator.index(query) + 1


def chosen(name: str, index: int | None, size: int) -> list[int]:
    """All indices for None, otherwise the one given, which may count from the end."""
    if index is None:
        return list(range(size))
    if isinstance(index, bool) or not isinstance(index, SupportsIndex) or not -size <= operator.index(index) < size:
        raise ValueError(f"{name} must be from {-size} to {size - 1}, or None for all, got {index!r}")
    return [operator.index(index) % size]


def key_counts(pattern: DilatedPattern, row: int, tokens: int, heads: int, device: torch.device) -> Tensor:
    """(H, N): how many branches show each key to the query ``row``."""
    counts = torch.zeros(heads, tokens, dtype=torch.int64, device=device)
    for branch in pattern.branches_for(heads):
        first = row - row % branch.length
        last = min(first + branch.length, tokens)
        for head in branch.heads:
            offset = branch.offset(head)
            if (row - first) % branch.rate == offset:
                counts[head, first + offset : last : branch.rate] += 1
    return counts


def row_weights(attention: SelfAttention, x: Tensor, row: int) -> AttentionMap:
    """The weights of one query in all heads of a layer, from the layer's normalised inputs."""
    q, k, _ = attention.project(x)
    tokens, heads, dim = k.shape[1:]
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("hd,nhd->hn", q[0, row].to(wide), k[0].to(wide)) / math.sqrt(dim)
    counts = key_counts(attention.pattern, row, tokens, heads, x.device)
    zeros = torch.tensor(
        [attention.pattern.zero_keys(row, head, num_tokens=tokens, num_heads=heads) for head in range(heads)],
        device=x.device,
    )
    logits = torch.cat([scores + counts.to(wide).log(), zeros.to(wide).log().unsqueeze(1)], dim=1)
    sees = (counts.sum(1) + zeros > 0).unsqueeze(1)
    weights = logits.softmax(-1).masked_fill(~sees, 0.0)  # a row that sees no key at all has no weights
    return AttentionMap(weights[:, 1:tokens], weights[:, 0], weights[:, tokens])


def attention_map(
    layers: Sequence[Layer], states: Sequence[Tensor], query: Query, layer: int | None, head: int | None
) -> AttentionMap:
    """``states``: the inputs of each layer."""
    row = row_of(query, states[0].shape[1] - 1)
    which = chosen("layer", layer, len(layers))
    heads = chosen("head", head, layers[0].self_attn.num_heads)
    found = [
        row_weights(layers[index].self_attn, layers[index].self_attn_layer_norm(states[index]), row) for index in which
    ]
    stacked = [torch.stack(parts)[:, heads] for parts in zip(*found, strict=True)]
    if head is not None:
        stacked = [x[:, 0] for x in stacked]
    return AttentionMap(*(x if layer is None else x[0] for x in stacked))


def rollout(layers: Iterable[Layer], states: Sequence[Tensor], start: Tensor) -> AttentionMap:
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
        q, k, v = (part.clone() if part.is_inference() else part.detach() for part in (q, k, v))
        v.requires_grad_()
        out, _ = functional.attend(q, k, v, attention.pattern, warns=False)
        gradient = torch.zeros_like(out)
        gradient[0, :, :, 0] = row.unsqueeze(1) / attention.num_heads  # one channel is enough
        (found,) = torch.autograd.grad(out, v, gradient)
    return found[0, :, :, 0].sum(1)
