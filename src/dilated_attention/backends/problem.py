"""What a backend is given: the tensors of a call, or one dense problem.

Legend: q (b, Lq, h, D); k, v (b, Lk, hk, D); h a multiple of hk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dilated_attention.dropout import Dropout


class Inputs(NamedTuple):
    """The tensors of a call."""

    q: Tensor  # (B, n, H, D)
    k: Tensor  # (B, N, Hk, D)
    v: Tensor
    padding: Tensor | None = None  # (B, N) bool, True = ignore this key
    seed: Tensor | None = None  # () int64, what dropout follows
    positions: Tensor | None = None  # (B,) each sample's first query among the keys, where few queries give a tensor
    cu_seqlens: Tensor | None = None  # (S + 1,) those of the call, on the host: a registered op may have to read them


class Outputs(NamedTuple):
    """What the backward pass is given besides: the merged results, and their gradients."""

    out: Tensor  # (B, n, H, D)
    lse: Tensor  # (B, n, H)
    dout: Tensor
    dlse: Tensor | None = None  # None: nothing depends on lse


class Limits(NamedTuple):
    """What one call of a backend's kernels takes; blocks are cut to fit."""

    pad: int = 1  # head_dim is padded to a multiple of this
    from_rows: int = 0  # only blocks with at least this many rows per segment are cut by `rows`
    rows: int | None = None  # the most rows of all heads in one part
    batch: int | None = None  # the most problems in one call
    span: int | None = None  # the most bytes from a tensor's first element to its last


Pair = tuple[Tensor, Tensor]  # out, lse
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v


@dataclass(frozen=True, slots=True)
class Problem:
    """One dense problem: its tensors, and how it is scaled, masked and dropped."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    is_causal: bool = False  # query row i sees key rows up to i
    ignored: Tensor | None = None  # (b or 1, hk or 1, Lq or 1, Lk) bool, True = this pair does not count either
    dropout: Dropout | None = None
