"""What dilated attention is compared with: dense attention, and the usual ways of writing dilated attention.

They are written plainly and given PyTorch's own kernels, so that what they lose is what their way costs: copies of
rows on the way in and out, and one set of saved tensors per branch.

Legend: q, k, v, out (B, N, H, D); S segments of w tokens; L rows of a segment; b = B x S.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dilated_attention.branches import Dilated
from dilated_attention.branches.base import Rect
from dilated_attention.pattern import DilatedPattern

aten = torch.ops.aten
compiled_flex = functools.cache(functools.partial(torch.compile, flex_attention, dynamic=False))  # when it is needed


def dense(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, kernel: SDPBackend | None = None) -> Tensor:
    """Every token sees every token: the yardstick, and another operation. Without ``kernel`` torch chooses one."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)


def over_heads(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, *, is_causal: bool = False) -> Tensor:
    """Attention over the wrong axis, as it was published and timed: each token attends to its own heads alone."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def copy_and_gather(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, *, is_causal: bool = False) -> Tensor:
    """Each branch copies its rows out with index_select, attends, and copies them back with index_copy."""
    out = torch.zeros_like(q)
    for heads, rect in _parts(q, pattern):
        index = _rows(rect, q.shape[1], q.device)
        copied = (x[:, :, heads].index_select(1, index) for x in (q, k, v))
        cut = (torch.unflatten(x, 1, (rect.repeats, -1)).flatten(0, 1) for x in copied)
        attended = torch.unflatten(dense(*cut, is_causal=is_causal), 0, (-1, rect.repeats))
        out[:, :, heads].index_copy_(1, index, attended.flatten(1, 2))
    return out


def copy_slices(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, *, is_causal: bool = False) -> Tensor:
    """Each branch copies its rows out with strided slices made contiguous, and back into a slice of zeros."""
    out = torch.zeros_like(q)
    for heads, rect in _parts(q, pattern):
        cut = (_taken(x[:, :, heads], rect).contiguous().flatten(0, 1) for x in (q, k, v))
        attended = torch.unflatten(dense(*cut, is_causal=is_causal), 0, (-1, rect.repeats))
        _taken(out[:, :, heads], rect).copy_(attended)
    return out


def _parts(query: Tensor, pattern: DilatedPattern) -> Iterator[tuple[slice, Rect]]:
    """The heads of each branch on their own: its equal segments, then the shorter last one."""
    if not pattern.head_rule.splits_heads:
        raise ValueError(f"this way deals heads to branches: it needs rule 'head_groups', got {pattern.rule!r}")
    tokens = query.shape[1]
    for branch in pattern.branches_for(query.shape[2]):
        heads = slice(branch.members[0], branch.members[-1] + 1)
        for rect in branch.rects(heads.start, range(tokens), tokens, False):
            if not rect.is_empty:
                yield heads, rect


def _taken(x: Tensor, rect: Rect) -> Tensor:
    """The rows of a branch: (B, S, L, ...), a view of x (B, N, ...)."""
    start, rate, width = rect.queries.start, rect.queries.step, rect.period
    if rect.repeats == 1:
        return x[:, start : rect.queries[-1] + 1 : rate].unsqueeze(1)
    first = start - start % width
    segments = torch.unflatten(x[:, first : first + rect.repeats * width], 1, (rect.repeats, width))
    return segments[:, :, start % width :: rate]


@functools.lru_cache(maxsize=64)
def _rows(rect: Rect, tokens: int, device: torch.device) -> Tensor:
    return _taken(torch.arange(tokens, device=device)[None], rect).flatten()


def gather_pad_scatter(
    q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, *, is_causal: bool = False, kernel: str | None = None
) -> Tensor:
    """All heads run all branches on padded copies; then the branches are mixed by their lse.

    The mixing weights carry no gradient, as in the released LongNet: out is exact, the gradients are not.
    ``kernel`` is "flash" (the default on CUDA) or "cudnn"; a CPU has one only.
    """
    if not pattern.head_rule.adds_zeros:
        raise ValueError(f"gather_pad_scatter attends its padding: it needs rule 'torchscale', got {pattern.rule!r}")
    attention = functools.partial(_with_lse, is_causal=is_causal, kernel=kernel)
    results = [_padded_branch((q, k, v), branch, attention) for branch in pattern.branches_for(q.shape[2])]
    weights = torch.stack([lse for _, lse in results]).softmax(0).detach()
    mixed = torch.zeros_like(q)
    for (out, _), weight in zip(results, weights, strict=True):
        mixed = mixed + out * weight.unsqueeze(-1).to(out.dtype)
    return mixed


def _padded_branch(
    qkv: tuple[Tensor, ...], branch: Dilated, attention: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one branch over all tokens; rows it does not cover get 0 and a lse that weighs nothing."""
    samples, tokens, heads, dim = qkv[0].shape
    width = min(branch.length, tokens)
    segments, extra = -(-tokens // width), -width % branch.rate

    def cut(x: Tensor) -> Tensor:  # (b, w, H, D), w filled up to a multiple of the rate
        x = F.pad(x, (0, 0, 0, 0, 0, segments * width - tokens)).reshape(samples * segments, width, heads, dim)
        return F.pad(x, (0, 0, 0, 0, 0, extra))

    def join(x: Tensor) -> Tensor:
        return x[:, :width].reshape(samples, segments * width, *x.shape[2:])[:, :tokens]

    index = _rows_by_head(branch, width + extra, qkv[0].device).expand(samples * segments, -1, -1)
    rows = index.unsqueeze(-1).expand(-1, -1, -1, dim)
    out, lse = attention(*(cut(x).gather(1, rows) for x in qkv))
    shape = (samples * segments, width + extra, heads)
    out, lse = out.new_zeros(*shape, dim).scatter(1, rows, out), lse.new_full(shape, -1e8).scatter(1, index, lse)
    return join(out), join(lse)


@functools.lru_cache(maxsize=64)
def _rows_by_head(branch: Dilated, width: int, device: torch.device) -> Tensor:
    """(1, L, H): the rows that each head takes of a segment."""
    offset = torch.tensor([branch.offset_of(head) for head in branch.members], device=device)
    return (torch.arange(0, width, branch.rate, device=device)[:, None] + offset).unsqueeze(0)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, kernel: str | None) -> tuple[Tensor, Tensor]:
    """Dense attention (b, L, H, D) and its lse (b, L, H), which the kernels give without a gradient."""
    qkv = [x.transpose(1, 2) for x in (q, k, v)]
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, is_causal)
    elif kernel == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*qkv, None, True, 0.0, is_causal, False)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*qkv, 0.0, is_causal, False)
    return out.transpose(1, 2), lse.view(out.shape[:3]).transpose(1, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, *, is_causal: bool = False) -> Tensor:
    """FlexAttention with the pattern as its mask, which is made once for each shape. On CUDA, compiled."""
    mask = _block_mask(pattern, q.shape[1], q.shape[2], is_causal, q.device)
    out: Tensor = compiled_flex()(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask)
    return out.transpose(1, 2)


@functools.lru_cache(maxsize=8)
def _block_mask(pattern: DilatedPattern, tokens: int, heads: int, is_causal: bool, device: torch.device) -> BlockMask:
    if not pattern.head_rule.splits_heads:  # elsewhere keys count more than once, which a mask cannot say
        raise ValueError(f"a mask says it all under rule 'head_groups' only, got {pattern.rule!r}")
    branches = [(x.length, x.rate, x.offset_of(head)) for x in pattern.branches_for(heads) for head in x.members]
    widths, rates, offsets = torch.tensor(branches, device=device).T

    def sees(_: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        w, r, o = widths[head], rates[head], offsets[head]
        same: Tensor = (query // w == key // w) & (query % w % r == o) & (key % w % r == o)
        return same & (query >= key) if is_causal else same

    # compiled, or the mask is made whole, with a byte for each pair of tokens
    make: Callable[..., BlockMask] = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    return make(sees, None, heads, tokens, tokens, device=device)
