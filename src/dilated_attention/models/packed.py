"""Documents packed into one row of tokens: each has its own grid and its own positions.

Legend: q (1, T, H, D); k, v (1, T, Hk, D); cu_seqlens: where documents begin, and T at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention.functional import dilated_attention
from dilated_attention.pattern import DilatedPattern

Documents = Sequence[int] | Tensor


def bounds(cu_seqlens: Documents, tokens: int) -> list[int]:
    """cu_seqlens as a list, checked: it rises from 0 to the number of tokens."""
    found = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    rises = all(a <= b for a, b in itertools.pairwise(found))
    if len(found) < 2 or found[0] != 0 or found[-1] != tokens or not rises:
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {tokens}, got {found}")
    return found


def positions_of(cu_seqlens: Documents, tokens: int, device: torch.device) -> Tensor:
    """The position of each token in its own document, (T,)."""
    ends = torch.tensor(bounds(cu_seqlens, tokens), device=device)
    lengths = ends.diff()
    return torch.arange(tokens, device=device) - ends[:-1].repeat_interleave(lengths, output_size=tokens)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, cu_seqlens: Documents, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of each document by itself."""
    if q.shape[0] != 1:
        raise ValueError(f"packed documents are one row of tokens, got {q.shape[0]} rows: flatten them into one")
    found = bounds(cu_seqlens, q.shape[1])
    parts = [
        dilated_attention(q[:, a:b], k[:, a:b], v[:, a:b], pattern, return_lse=True, **options)
        for a, b in itertools.pairwise(found)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 1)
