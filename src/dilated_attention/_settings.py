"""Everything about a call that is no tensor, and what it asks of a backend.

Legend: query (B, N, H, D); key (B, N, Hk, D); padding (B, N), True = ignore.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention._courses import form_of
from dilated_attention._shards import Heads
from dilated_attention.backends.problem import Request, Whole
from dilated_attention.pattern import DilatedPattern


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything about a call that is no tensor."""

    pattern: DilatedPattern
    is_causal: bool
    scale: float
    dropout_p: float
    backend: str
    first_head: int = 0  # of the key/value heads here, where heads too are split over processes,
    total_heads: int = 0  # and how many there are in all; 0: those that are here
    switched_off: tuple[str, ...] | None = None  # kernels of torch, for the backward pass too; None: as they are then

    def heads(self, key: Tensor) -> Heads:
        return Heads(self.first_head, key.shape[2], self.total_heads or key.shape[2])

    def request(self, query: Tensor, has_padding: bool) -> Request:
        """What is asked of a backend for one block at a time."""
        return self._request(query, has_padding, None)

    def whole_request(self, query: Tensor, has_padding: bool, backward: bool = False) -> Request:
        """The same for a whole call on one device."""
        whole = Whole.of(query, form_of(self.pattern, self.is_causal, self.dropout_p > 0), backward)
        return self._request(query, has_padding, whole)

    def _request(self, query: Tensor, has_padding: bool, whole: Whole | None) -> Request:
        dtype, drops = compute_dtype(query), self.dropout_p > 0
        return Request.of(query, dtype, self.is_causal, has_padding, drops, whole, self.switched_off)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Half precision is computed in float32 on a CPU without instructions for it: far faster, and nearer."""
    if x.device.type != "cpu" or x.dtype not in (torch.float16, torch.bfloat16):
        return x.dtype
    # with AMX, bfloat16 is faster than float32; no CPU was found where float16 is
    return x.dtype if x.dtype is torch.bfloat16 and _has_amx() else torch.float32


@functools.cache
def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def sample_ends(padding: Tensor, start: int = 0) -> Tensor:
    """(B,) one more than the last position that is not padding, 0 where all is; the first token is at ``start``."""
    count = torch.arange(start + 1, start + padding.shape[1] + 1, device=padding.device)
    if not len(count):
        return padding.new_zeros(padding.shape[0], dtype=torch.int64)
    return torch.where(padding, 0, count).amax(1)
