"""Attention as matrix products, step by step: any device, any dtype, dropout. Tiled, so the scores stay small.

Half precision is computed, and returned, in float32.

Legend: tiles of scores (b, hk, g, i, j): g query heads per key/value head, i query rows, j key rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention.backends.problem import Gradients, Limits, Masking
from dilated_attention.call import Call, accumulate_dtype

TILE_ELEMENTS = {"cpu": 1 << 22}  # scores held at once: what a cache keeps on a CPU,
TILE_ELEMENTS_ELSEWHERE = 1 << 25  # and what keeps a GPU busy


def unsupported(call: Call, backward: bool) -> list[str]:
    """Eager runs everything."""
    return []


def preference(call: Call, backward: bool) -> tuple[bool, str]:
    """Only where nothing else runs."""
    return False, ""


def kernels(call: Call, backward: bool) -> tuple[str, ...]:
    return ("matmul, softmax, matmul in tiles",)


def limits(call: Call) -> Limits:
    return Limits()


def forward(kernels: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
    exact = accumulate_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=exact, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=exact, device=q.device)
    for samples, rows, keys in _tiles(q, k, masking):
        scores = _scores(q[samples, rows], k[samples, keys], masking, samples, rows, keys)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)  # a row without keys: exp(-inf - 0) = 0
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[samples, rows] = (top + total.log()).squeeze(-1).flatten(1, 2).transpose(1, 2)  # (b, i, h)
        if masking.dropout is not None:
            weights *= _keep(masking, samples, rows, keys, weights)
        weights /= total.masked_fill_(total == 0, 1.0)
        value = v[samples, keys].to(exact)
        out[samples, rows] = torch.einsum("bhgij,bjhd->bihgd", weights, value).flatten(2, 3)
    return out, lse


def backward(
    kernels: tuple[str, ...], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dlse: Tensor | None, masking: Masking,
) -> Gradients:  # fmt: skip
    exact = lse.dtype
    dq = torch.empty(q.shape, dtype=exact, device=q.device)
    dk = torch.zeros(k.shape, dtype=exact, device=k.device)
    dv = torch.zeros(v.shape, dtype=exact, device=v.device)
    heads = k.shape[2]
    # d score = weight * (d weight - slope): slope collects what the normalisation and lse give back
    slope = (dout.to(exact) * out.to(exact)).sum(-1)
    if dlse is not None:
        slope -= dlse
    for samples, rows, keys in _tiles(q, k, masking):
        query, key, value, grad = (
            x.to(exact) for x in (q[samples, rows], k[samples, keys], v[samples, keys], dout[samples, rows])
        )
        scores = _scores(query, key, masking, samples, rows, keys)
        weights = scores.sub_(_columns(lse[samples, rows], heads)).exp_()
        query, grad = _split_heads(query, heads), _split_heads(grad, heads)
        dweights = torch.einsum("bihgd,bjhd->bhgij", grad, value)
        kept = weights
        if masking.dropout is not None:
            keep = _keep(masking, samples, rows, keys, weights)
            kept, dweights = weights * keep, dweights * keep
        dv[samples, keys] += torch.einsum("bhgij,bihgd->bjhd", kept, grad)
        dscores = dweights.sub_(_columns(slope[samples, rows], heads)).mul_(weights).mul_(masking.scale)
        dq[samples, rows] = torch.einsum("bhgij,bjhd->bihgd", dscores, key).flatten(2, 3)
        dk[samples, keys] += torch.einsum("bhgij,bihgd->bjhd", dscores, query)
    return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, masking: Masking) -> Iterator[tuple[slice, slice, slice]]:
    """(samples, query rows, key rows) of each tile; when causal, keys after the tile's last row are left out."""
    samples, rows, heads, _ = q.shape
    keys = k.shape[1]
    most = TILE_ELEMENTS.get(q.device.type, TILE_ELEMENTS_ELSEWHERE)
    sample_step = max(1, most // (heads * rows * keys))
    row_step = max(1, most // (sample_step * heads * keys))
    for first in range(0, samples, sample_step):
        for row in range(0, rows, row_step):
            last_row = min(rows, row + row_step)
            yield (
                slice(first, min(samples, first + sample_step)),
                slice(row, last_row),
                slice(0, last_row if masking.is_causal else keys),
            )


def _scores(query: Tensor, key: Tensor, masking: Masking, samples: slice, rows: slice, keys: slice) -> Tensor:
    exact = accumulate_dtype(query.dtype)
    query = _split_heads(query.to(exact), key.shape[2])
    scores = torch.einsum("bihgd,bjhd->bhgij", query, key.to(exact)).mul_(masking.scale)
    if masking.is_causal:
        row = torch.arange(rows.start, rows.stop, device=query.device).unsqueeze(1)
        scores.masked_fill_(torch.arange(keys.stop, device=query.device) > row, -torch.inf)
    if masking.hidden is not None:
        scores.masked_fill_(masking.hidden[rows, keys], -torch.inf)
    if masking.padding is not None:
        ignored = masking.padding[samples, keys].transpose(1, 2)  # (b, hk, j)
        scores.masked_fill_(ignored[:, :, None, None, :], -torch.inf)
    return scores


def _keep(masking: Masking, samples: slice, rows: slice, keys: slice, like: Tensor) -> Tensor:
    """What dropout multiplies the weights of a tile with, (b, hk, g, i, j)."""
    assert masking.dropout is not None
    dropout = masking.dropout.rows(samples, rows, keys)
    return dropout.keep().reshape(like.shape).to(like.dtype).mul_(dropout.factor)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, i, h, ...) to (b, i, hk, g, ...)."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads, *x.shape[3:])


def _columns(x: Tensor, heads: int) -> Tensor:
    """(b, i, h) to (b, hk, g, i, 1)."""
    return _split_heads(x, heads).permute(0, 2, 3, 1).unsqueeze(-1)
