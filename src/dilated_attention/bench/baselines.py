"""What dilated attention is compared with: dense attention, and the two usual ways of writing dilated attention.

They are written plainly and given PyTorch's own kernels, so that what they lose is what their way costs: copies of
rows on the way in and out, and one set of saved tensors per branch.

Legend: query, key, value, out (B, N, H, D); S segments of w tokens; L rows of a segment; b = B x S.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from dilated_attention.pattern import DilatedPattern

aten = torch.ops.aten


def dense(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Every token sees every token: the yardstick, and another operation than dilated attention."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2)


def dense_pattern(tokens: int) -> DilatedPattern:
    """Dense attention as a pattern, for which the oracle is the dense oracle."""
    return DilatedPattern.longnet([tokens], [1])


# --- copy and gather: the rule head_groups ----------------------------------------------------------------------


def copy_and_gather(
    query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern, *, is_causal: bool = False
) -> Tensor:
    """Each branch copies its rows out with index_select, attends, and copies them back with index_copy."""
    if pattern.rule != "head_groups":
        raise ValueError(f"copy_and_gather deals heads to branches: it needs rule 'head_groups', got {pattern.rule!r}")
    tokens, heads = query.shape[1:3]
    parts = []
    for branch, width in enumerate(pattern.segment_lengths):
        mine = pattern.heads(branch, heads)
        if not mine:
            continue
        q, k, v = (x[:, :, mine.start : mine.stop] for x in (query, key, value))
        out = torch.zeros_like(q)
        whole = tokens - tokens % width
        for start, length, segments in ((0, width, tokens // width), (whole, tokens - whole, 1)):
            index = _rows(start, length, segments, pattern.dilation_rates[branch], branch, query.device)
            if index.numel():
                out = out.index_copy(1, index, _attend_rows(q, k, v, index, segments, is_causal))
        parts.append(out)
    return torch.cat(parts, dim=2)


@functools.lru_cache(maxsize=64)
def _rows(start: int, length: int, segments: int, rate: int, branch: int, device: torch.device) -> Tensor:
    """The tokens that a branch of head_groups takes from equal segments, all with the offset branch mod rate."""
    row = torch.arange(min(branch % rate, length), length, rate, device=device)
    segment = torch.arange(segments, device=device) * length + start
    return (segment[:, None] + row).flatten()


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, index: Tensor, segments: int, is_causal: bool) -> Tensor:
    samples, _, heads, dim = q.shape
    q, k, v = (x.index_select(1, index).view(samples * segments, -1, heads, dim) for x in (q, k, v))
    return dense(q, k, v, is_causal=is_causal).reshape(samples, -1, heads, dim)


# --- gather, pad, scatter: the rule torchscale ------------------------------------------------------------------


def gather_pad_scatter(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """All heads run all branches on padded copies; then the branches are mixed by their lse.

    The mixing weights carry no gradient, as in the released LongNet: out is exact, the gradients are not.
    ``kernel`` is "flash" (the default on CUDA) or "cudnn"; a CPU has one only.
    """
    if pattern.rule != "torchscale":
        raise ValueError(f"gather_pad_scatter attends its padding: it needs rule 'torchscale', got {pattern.rule!r}")
    results = [_padded_branch(query, key, value, pattern, i, is_causal, kernel) for i in range(len(pattern.branches))]
    weights = torch.stack([lse for _, lse in results]).softmax(0).detach()
    mixed = torch.zeros_like(query)
    for (out, _), weight in zip(results, weights, strict=True):
        mixed = mixed + out * weight.unsqueeze(-1).to(out.dtype)
    return mixed


def _padded_branch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    branch: int,
    is_causal: bool,
    kernel: str | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one branch over all tokens; rows it does not cover get 0 and a lse that weighs nothing."""
    samples, tokens, heads, dim = query.shape
    rate, width = pattern.dilation_rates[branch], min(pattern.segment_lengths[branch], tokens)
    segments, extra = -(-tokens // width), -width % rate

    def cut(x: Tensor) -> Tensor:  # (b, w, H, D), w filled up to a multiple of the rate
        x = F.pad(x, (0, 0, 0, 0, 0, segments * width - tokens)).reshape(samples * segments, width, heads, dim)
        return F.pad(x, (0, 0, 0, 0, 0, extra))

    def join(x: Tensor) -> Tensor:
        return x[:, :width].reshape(samples, segments * width, *x.shape[2:])[:, :tokens]

    q, k, v = cut(query), cut(key), cut(value)
    offset = torch.tensor([pattern.offset(branch, head, heads) for head in range(heads)], device=query.device)
    index = torch.arange(0, width + extra, rate, device=query.device)[:, None] + offset  # (L, H)
    index = index.unsqueeze(0).expand(len(q), -1, -1)
    rows = index.unsqueeze(-1).expand(-1, -1, -1, dim)
    out, lse = _with_lse(q.gather(1, rows), k.gather(1, rows), v.gather(1, rows), is_causal, kernel)
    out = torch.zeros_like(q).scatter(1, rows, out)
    lse = torch.full(q.shape[:3], -1e8, dtype=lse.dtype, device=lse.device).scatter(1, index, lse)
    return join(out), join(lse)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, kernel: str | None) -> tuple[Tensor, Tensor]:
    """Dense attention (b, L, H, D) and its lse (b, L, H), which the kernels give without a gradient."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    elif kernel == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False)
        lse = lse.view(q.shape[:3])
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False)
    return out.transpose(1, 2), lse.transpose(1, 2)
