"""explain(): which backend and kernel a call would run, and why no other. Computes nothing.

Legend as in `functional`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from dilated_attention import _decode_ops
from dilated_attention._decode import stretches
from dilated_attention._plan import plan
from dilated_attention._settings import Settings
from dilated_attention._shards import Heads, Shards
from dilated_attention.backends import choose, triton
from dilated_attention.backends.choose import Backend
from dilated_attention.checks import (
    check_backend,
    check_flag,
    check_tensors,
    checked_probability,
    checked_scale,
    computed_dtype,
)
from dilated_attention.context_parallel import ContextParallel
from dilated_attention.distributed.sequence import Group
from dilated_attention.pattern import DilatedPattern


@dataclass(frozen=True, slots=True)
class Explanation:
    """Tells what a call would run, and for everything else why it does not.

    Examples:
        >>> x = torch.randn(1, 64, 4, 8)
        >>> told = da.explain(x, x, x, da.DilatedPattern.longnet([16, 64], [1, 4]), backend="eager")
        >>> told.backend
        'eager'
        >>> told.why_not["triton"]
        [...]
    """

    backend: Backend
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
    query_offset: int | Tensor | None = None,
    enable_gqa: bool = False,
    backend: Backend = "auto",
    group: Group | ContextParallel | None = None,
) -> Explanation:
    """Tells which backend and kernel `dilated_attention` with these arguments runs, and why no other.

    It computes nothing. The forward and the backward pass may run different ones; the reasons are those of the forward
    pass. Over a ``group`` it speaks of this rank, and asks no other.

    Examples:
        >>> x = torch.randn(1, 64, 4, 8)
        >>> print(da.explain(x, x, x, da.DilatedPattern.longnet([16, 64], [1, 4])))
        runs: ...
    """
    ranks = 1 if group is None else ContextParallel.of(group).process_group().size()
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    check_tensors(query, key, value, pattern, key_padding_mask, enable_gqa, decodes=group is None)
    query = query.to(computed_dtype(query))
    check_backend(backend)
    scale = 1.0 if scale is None else checked_scale(scale)
    settings = Settings(pattern, is_causal, scale, checked_probability(dropout_p), backend)
    masked = key_padding_mask is not None
    if group is not None:
        _decode_ops.check_alone(query_offset)
    elif query_offset is not None or query.shape[1] != key.shape[1]:
        _decode_ops.check(query, key, value, key_padding_mask, query_offset, settings)
        return _decoding(query, key, masked, query_offset, settings)
    if ranks > 1:
        request = request_back = settings.request(query, masked)
    else:
        request, request_back = (settings.whole_request(query, masked, backward) for backward in (False, True))
    choice, back = choose.choose(backend, request), choose.choose(backend, request_back)
    samples, tokens, heads, _ = query.shape
    kv_heads = key.shape[2]
    shards = Shards.of((tokens,))
    blocks = plan(pattern, samples, shards, 0, Heads(0, kv_heads, kv_heads), heads // kv_heads, True).blocks
    rows = {block.rows for block in blocks}
    kernel, back_kernel = (one.module.describe(one.kernels, rows) for one in (choice, back))
    return Explanation(
        cast(Backend, choice.name), kernel, choose.why_not(choice, request), f"{back.name}, kernel: {back_kernel}"
    )


def _decoding(query: Tensor, key: Tensor, masked: bool, offset: int | Tensor | None, settings: Settings) -> Explanation:
    """Of a call with few queries, which has a kernel of its own forward. Positions that a tensor holds are not read."""
    (samples, queries, heads, _), (_, tokens, kv_heads, _) = query.shape, key.shape
    first, on_device = offset if isinstance(offset, int) else tokens - queries, isinstance(offset, Tensor)
    split = (samples, first, queries, tokens, settings.heads(key), heads // kv_heads, settings.is_causal)
    rows = {stretch.queries.rows for stretch in stretches(settings.pattern, 0, *split)} or {queries}
    request, backend = settings.request(query, masked), settings.backend
    backward = "none: its decoding has no backward pass"
    if backend != "triton":
        back = choose.choose(backend, request)
        backward = f"{back.name}, kernel: {back.module.describe(back.kernels, rows)}"
    if _decode_ops.runs_kernel(query, on_device, settings):
        choice = choose.Choice("triton", triton, ("one launch for few queries",))
        return Explanation("triton", choice.kernels[0], choose.why_not(choice, request), backward)
    why_not = choose.why_not(back, request)
    why_not["triton"] = _decode_ops.unsupported(query, settings) or (
        [f"its decoding is for up to {_decode_ops.FEW_QUERIES} queries, unless positions are on the device"]
        if backend == "auto"
        else [f"backend {backend!r} was asked for"]
    )
    return Explanation(cast(Backend, back.name), back.module.describe(back.kernels, rows), why_not, backward)
