"""What a backend is asked: the kind of call (to say whether it can run) and the masks of one dense problem.

A backend is a module with
    unsupported(request) -> list of sentences, empty when it can run
    kernels(request) -> the kernels that can run it, first choice first
    describe(kernels, rows) -> which of them run blocks of so many rows, for people
    forward(kernels, q, k, v, masking) -> (out, lse)
    backward(kernels, dout, q, k, v, out, lse, dlse, masking) -> (dq, dk, dv)
where out and lse in the backward are the final merged ones, which makes each block's gradients exact, and lse is
+inf for rows without keys: their weights exp(s - inf) are then 0 instead of NaN. The kernels of `triton` take whole
calls instead of blocks: `_fused` has their forward and backward.

Legend: q, out (b, Lq, h, D); k, v (b, Lk, hk, D); lse, dlse (b, Lq, h); h a multiple of hk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.attention
from torch import Tensor

from dilated_attention.dropout import Dropout

FEW_ROWS = 1 << 18  # large tiles of fewer would leave processors idle: an H200 has 132, which take two or three each


class Whole(NamedTuple):
    """What a call on one device has to do at once, as the measured choice sees it."""

    rows: int  # of queries: samples x tokens x heads
    form: str  # "dense", "nested", "apart" or "", see `_courses.form_of`
    backward: bool

    @classmethod
    def of(cls, query: Tensor, form: str, backward: bool) -> Whole:
        samples, tokens, heads, _ = query.shape
        return cls(samples * tokens * heads, form, backward)

    @property
    def short(self) -> bool:
        return self.rows < FEW_ROWS


class Request(NamedTuple):
    """The properties of a call, and the torch settings at its time, that decide which backend can run it."""

    device: torch.device
    dtype: torch.dtype  # the one computed in
    head_dim: int
    is_causal: bool
    has_padding: bool
    has_dropout: bool
    deterministic: bool
    switched_off: tuple[str, ...]  # kernels that the user switched off, as sdpa_kernel(...) does
    flash: str | None  # the flash implementation that the user activated in torch
    whole: Whole | None = None  # None: one block at a time is asked for

    @classmethod
    def of(
        cls,
        x: Tensor,
        dtype: torch.dtype,
        is_causal: bool,
        has_padding: bool,
        has_dropout: bool,
        whole: Whole | None = None,
        off: tuple[str, ...] | None = None,
    ) -> Request:
        off = switched_off() if off is None else off
        flash = torch.nn.attention.current_flash_attention_impl() if x.device.type == "cuda" else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(x.device, dtype, x.shape[-1], is_causal, has_padding, has_dropout, deterministic, off, flash, whole)


_SWITCHES: dict[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
}


def switched_off() -> tuple[str, ...]:
    """The kernels of torch that are switched off now."""
    return tuple(name for name, is_on in _SWITCHES.items() if not is_on())


@dataclass(frozen=True, slots=True)
class Masking:
    """How one dense problem is scaled, masked and dropped."""

    scale: float
    is_causal: bool = False  # query row i sees key rows up to i
    padding: Tensor | None = None  # (b, Lk, hk) bool, True = ignore this key
    dropout: Dropout | None = None

    def rows_without_keys(self, rows: int) -> Tensor | None:
        """(b, rows, hk or 1) bool, True where every visible key is ignored; None when no key ever is."""
        if self.padding is None:
            return None
        if self.is_causal:
            return (~self.padding).cumsum(1) == 0
        return self.padding.all(1, keepdim=True).expand(-1, rows, -1)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of sums: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32
