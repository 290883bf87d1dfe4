"""explain(): which backend and kernel a call would run, and why no other. Computes nothing.

Legend as in `functional`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dilated_attention._plan import plan
from dilated_attention._settings import Settings
from dilated_attention._shards import Heads, Shards
from dilated_attention.backends import choose
from dilated_attention.functional import (
    check_backend,
    check_tensors,
    checked_probability,
    checked_scale,
    computed_dtype,
)
from dilated_attention.pattern import DilatedPattern


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call would run, and for everything else why it does not."""

    backend: str
    kernel: str
    why_not: dict[str, list[str]]
    backward: str  # the backend and kernel of the backward pass

    def __str__(self) -> str:
        lines = [f"runs: {self.backend}, kernel: {self.kernel}", f"backward: {self.backward}"]
        lines += [f"not {name}: {'; '.join(reasons)}" for name, reasons in self.why_not.items()]
        return "\n".join(lines)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    enable_gqa: bool = False,
    backend: str = "auto",
) -> Explanation:
    """Which backend and kernel `dilated_attention` with the same arguments runs, and why no other. Computes nothing."""
    check_tensors(query, key, value, pattern, key_padding_mask, enable_gqa)
    query = query.to(computed_dtype(query))
    check_backend(backend)
    scale = 1.0 if scale is None else checked_scale(scale)
    settings = Settings(pattern, is_causal, scale, checked_probability(dropout_p), backend)
    request = settings.whole_request(query, key_padding_mask is not None)
    choice = choose.choose(backend, request)
    back = choose.choose(backend, settings.whole_request(query, key_padding_mask is not None, backward=True))
    samples, tokens, heads, _ = query.shape
    kv_heads = key.shape[2]
    shards = Shards.of((tokens,))
    blocks = plan(pattern, samples, shards, 0, Heads(0, kv_heads, kv_heads), heads // kv_heads, True).blocks
    rows = {block.rows for block in blocks}
    kernel, back_kernel = (one.module.describe(one.kernels, rows) for one in (choice, back))
    return Explanation(choice.name, kernel, choose.why_not(choice, request), f"{back.name}, kernel: {back_kernel}")
