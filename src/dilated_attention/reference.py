"""The oracle: dense attention with the pattern as a count matrix, in float64. It defines the operation.

    softmax(Q K^T * scale + log(count)) V,   count[h, i, j] = how many branches show key j to query i in head h

Quadratic in N, differentiable by plain autograd, and sharing no code with plans, engine or backends.

Legend: query (B, N, H, D), fewer rows when decoding; key, value (B, N, Hk, D); scores (B, H, N, N).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention.branches import Dilated
from dilated_attention.dropout import Dropout, row_words
from dilated_attention.pattern import DilatedPattern, Pattern


def attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, is_causal: bool = False,
    scale: float | None = None, dropout_p: float = 0.0, seed: Tensor | None = None,
    key_padding_mask: Tensor | None = None, query_offset: int | Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None, sinks: Tensor | None = None, dtype: torch.dtype | None = torch.float64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes (out, lse) of `dilated_attention` as dense attention with a mask of counts.

    Time and memory are quadratic in N. It computes in ``dtype``; None: that of the inputs. ``seed``: an int64 tensor,
    required if dropout_p > 0. The other arguments are those of :func:`dilated_attention`; fewer key/value heads are
    always allowed.

    Examples:
        >>> x = torch.randn(1, 16, 4, 8)
        >>> out, lse = reference.attention(x, x, x, da.DilatedPattern.longnet([4, 16], [1, 4]))
        >>> out.dtype, lse.shape
        (torch.float64, torch.Size([1, 16, 4]))
    """
    query, key, value = (x if dtype is None else x.to(dtype) for x in (query, key, value))
    given: Any = {"is_causal": is_causal, "scale": scale, "key_padding_mask": key_padding_mask, "dtype": None}
    if isinstance(pattern, DilatedPattern) and not pattern.is_exact:  # as released: mixed by weights that are constants
        given |= {"query_offset": query_offset, "cu_seqlens": cu_seqlens}
        alone = map(pattern.alone, range(len(pattern.branches)))
        outs, lses = map(torch.stack, zip(*(attention(query, key, value, x, **given) for x in alone), strict=True))
        mixing = (lses - lses.logsumexp(0)).exp().nan_to_num(0.0).detach()
        return (mixing.unsqueeze(-1) * outs).sum(0), lses.logsumexp(0)
    if query_offset is not None or query.shape[1] != key.shape[1]:  # those rows of a whole query that is 0 elsewhere
        first = torch.as_tensor(key.shape[1] - query.shape[1] if query_offset is None else query_offset)
        sample, row = (torch.arange(n, device=query.device) for n in query.shape[:2])
        rows = sample[:, None], first.to(query.device).view(-1, 1) + row
        query = query.new_zeros(*key.shape[:2], *query.shape[2:]).index_put(rows, query)
        out, lse = attention(query, key, value, pattern, dropout_p=dropout_p, seed=seed, sinks=sinks, **given)
        return out[rows], lse[rows]
    samples, tokens, heads, dim = query.shape
    group = heads // key.shape[2]
    if key_padding_mask is not None:
        key, value = (x.masked_fill(key_padding_mask[:, :, None, None], 0.0) for x in (key, value))
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * (1 / math.sqrt(dim) if scale is None else scale)

    counts, zeros = key_counts(pattern, tokens, heads, key_padding_mask, is_causal, group, query, cu_seqlens)
    count = counts.sum(0)  # (B or 1, H, N, N)
    # keys without a value: zero keys, of score 0, and the learned one
    extra = [zeros.log(), *([] if sinks is None else [sinks.to(scores.dtype)[:, None, None]])]
    extra = [x.expand(*scores.shape[:3], 1) for x in extra]
    scores = torch.cat([scores.masked_fill(count == 0, -torch.inf), *extra], -1)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights, others = torch.split((scores - top).exp(), [tokens, len(extra)], -1)
    total = (count * weights).sum(-1, keepdim=True) + others.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top + total.log()).masked_fill(empty, -torch.inf).squeeze(-1).transpose(1, 2)
    if dropout_p > 0:
        assert seed is not None
        counts = counts * _kept(seed, dropout_p, len(pattern.branches), samples, heads, tokens, counts.dtype)
        count = counts.sum(0)
    out = torch.einsum("bhij,bjhd->bihd", count * weights / total, value)
    return out, lse


def key_counts(
    pattern: Pattern, tokens: int, heads: int, key_padding_mask: Tensor | None, is_causal: bool, group: int,
    like: Tensor, cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Which keys each branch shows, (branches, B or 1, H, N, N), and each row's zero keys, (B or 1, H, N, 1).

    Where a key counts once, it is the first branch that shows it.
    """
    token = torch.arange(tokens, device=like.device)
    borders = torch.tensor([0, tokens] if cu_seqlens is None else list(cu_seqlens), device=like.device)
    after = torch.searchsorted(borders, token, right=True)
    position, ends = token - borders[after - 1], (borders[after] - borders[after - 1])[None]  # in its own sequence
    head = torch.arange(heads, device=like.device) // group
    visible = (after == after[:, None])[None, None]
    if is_causal:
        visible = visible & (token <= token[:, None])
    if key_padding_mask is not None:
        visible = visible & ~key_padding_mask[:, None, None, :]
        ends = torch.where(key_padding_mask, 0, position + 1)
        ends = ends.amax(1, keepdim=True).expand_as(ends) if tokens else ends
    zeros = like.new_zeros(len(ends), heads, tokens, 1)
    counts: list[Tensor] = []
    for branch in pattern.branches_for(heads // group):
        shows = [branch.sees(h, position[:, None], position) & (h in branch.members) for h in head.tolist()]
        shown = torch.stack([x.expand(tokens, tokens) for x in shows])
        count = shown & visible
        for other in counts if pattern.counts == "once" else ():
            count = count & ~other
        counts.append(count)
        if isinstance(branch, Dilated) and pattern.adds_zeros and not is_causal:
            width, rate = branch.length, branch.rate
            # of each row's segment, up to where its sample ends
            real = shown & (after == after[:, None]) & (position < ends.unsqueeze(-1)).unsqueeze(1)
            filled = (ends.clamp(max=width)[:, None] + rate - 1) // rate - real.sum(-1)
            takes_part = shown.diagonal(dim1=1, dim2=2) & (position // width * width < ends)[:, None]
            zeros += (takes_part * filled).unsqueeze(-1)
    return torch.stack(counts).to(like.dtype), zeros


def _kept(seed: Tensor, p: float, branches: int, samples: int, heads: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """(branches, B, H, N, N): 0 where dropout drops, 1 / (1 - p) elsewhere."""
    sample, token, head = (torch.arange(n, device=seed.device) for n in (samples, tokens, heads))
    sample, token = sample[:, None, None], token[:, None].expand(samples, -1, heads)
    drops = [Dropout(p, *row_words(seed, branch, sample, head, token), token) for branch in range(branches)]
    return torch.stack([drop.keep().to(dtype) * drop.factor for drop in drops])
