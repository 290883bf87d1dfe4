"""Attention as matrix products, step by step: any device, any dtype, dropout. Tiled, so the scores stay small.

Half precision is computed, and returned, in float32.

Legend: tiles of scores (b, hk, g, i, j): g query heads per key/value head, i query rows, j key rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention.backends.problem import Gradients, Limits, Outputs, Pair, Problem
from dilated_attention.call import Call, accumulate_dtype
from dilated_attention.dropout import Dropout

At = tuple[slice, slice]  # samples, and rows or keys
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


def forward(kernels: tuple[str, ...], x: Problem) -> Pair:
    exact = accumulate_dtype(x.q.dtype)
    out = torch.empty(x.q.shape, dtype=exact, device=x.q.device)
    lse = torch.empty(x.q.shape[:3], dtype=exact, device=x.q.device)
    for rows, keys, _, _, scores in _tiles(x, exact):
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)  # a row without keys: exp(-inf - 0) = 0
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[rows] = (top + total.log()).squeeze(-1).flatten(1, 2).transpose(1, 2)  # (b, i, h)
        if x.dropout is not None:
            weights *= _keep(x.dropout, rows, keys, weights)
        weights /= total.masked_fill_(total == 0, 1.0)
        out[rows] = torch.einsum("bhgij,bjhd->bihgd", weights, x.v[keys].to(exact)).flatten(2, 3)
    return out, lse


def backward(kernels: tuple[str, ...], x: Problem, results: Outputs) -> Gradients:
    out, lse, dout, dlse = results
    exact, heads = lse.dtype, x.k.shape[2]
    dq, dk, dv = (torch.zeros(y.shape, dtype=exact, device=y.device) for y in (x.q, x.k, x.v))
    # d score = weight * (d weight - slope): slope collects what the normalisation and lse give back
    slope = (dout.to(exact) * out.to(exact)).sum(-1)
    if dlse is not None:
        slope -= dlse
    for rows, keys, query, key, scores in _tiles(x, exact):
        weights = scores.sub_(_columns(lse[rows], heads)).exp_()
        grad = _split_heads(dout[rows].to(exact), heads)
        dweights = torch.einsum("bihgd,bjhd->bhgij", grad, x.v[keys].to(exact))
        kept = weights
        if x.dropout is not None:
            keep = _keep(x.dropout, rows, keys, weights)
            kept, dweights = weights * keep, dweights * keep
        dv[keys] += torch.einsum("bhgij,bihgd->bjhd", kept, grad)
        dscores = dweights.sub_(_columns(slope[rows], heads)).mul_(weights).mul_(x.scale)
        dq[rows] = torch.einsum("bhgij,bjhd->bihgd", dscores, key).flatten(2, 3)
        dk[keys] += torch.einsum("bhgij,bihgd->bjhd", dscores, query)
    return dq, dk, dv


def _tiles(x: Problem, exact: torch.dtype) -> Iterator[tuple[At, At, Tensor, Tensor, Tensor]]:
    """Where each tile's query rows and keys are, both tensors, and their scores. Keys after a causal tile's last row
    are left out."""
    (samples, rows, heads, _), keys, device = x.q.shape, x.k.shape[1], x.q.device
    most = TILE_ELEMENTS.get(device.type, TILE_ELEMENTS_ELSEWHERE)
    sample_step = max(1, most // (heads * rows * keys))
    row_step = max(1, most // (sample_step * heads * keys))
    for first, row in itertools.product(range(0, samples, sample_step), range(0, rows, row_step)):
        some, stop = slice(first, min(samples, first + sample_step)), min(rows, row + row_step)
        seen = stop if x.is_causal else keys
        at, there = (some, slice(row, stop)), (some, slice(0, seen))
        query, key = _split_heads(x.q[at].to(exact), x.k.shape[2]), x.k[there].to(exact)
        scores = torch.einsum("bihgd,bjhd->bhgij", query, key).mul_(x.scale)
        if x.is_causal:
            row_numbers = torch.arange(row, stop, device=device).unsqueeze(1)
            scores.masked_fill_(torch.arange(seen, device=device) > row_numbers, -torch.inf)
        if x.ignored is not None:
            ignored = x.ignored.expand(samples, -1, rows, -1)[some, :, row:stop, :seen]
            scores.masked_fill_(ignored.unsqueeze(2), -torch.inf)
        yield at, there, query, key, scores


def _keep(dropout: Dropout, rows: At, keys: At, like: Tensor) -> Tensor:
    """What dropout multiplies the weights of a tile with, (b, hk, g, i, j)."""
    kept = dropout.rows(*rows, keys[1]).keep()
    return kept.reshape(like.shape).to(like.dtype).mul_(dropout.factor)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, i, h, ...) to (b, i, hk, g, ...)."""
    return torch.unflatten(x, 2, (heads, -1))


def _columns(x: Tensor, heads: int) -> Tensor:
    """(b, i, h) to (b, hk, g, i, 1)."""
    return _split_heads(x, heads).permute(0, 2, 3, 1).unsqueeze(-1)
