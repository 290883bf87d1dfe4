"""The short way of ordinary calls: one device, one sequence, no mask. Short ones notice what their checks cost.

Plain tensors: the checks look at nothing but the facts of a call. They are made once for all calls with the same facts.

Compilers: whatever a compiler saw, it checks again at every call. Here it sees as little as can be; a call that may be
wrong goes the long way, which says what is wrong.

Legend: query (B, N, H, D); key, value (B, N, Hk, D).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, is_autocast_enabled, strided
from torch.autograd import forward_ad

from dilated_attention.call import Call, settings
from dilated_attention.derivatives import is_plain
from dilated_attention.pattern import DilatedPattern
from dilated_attention.resolve import computed_dtype

MOST_KNOWN = 1024
known_calls: dict[Hashable, Call] = {}  # calls that passed every check, by their facts


def facts_of(query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern, *numbers: Any) -> Hashable:
    """All that the checks of a call on plain tensors look at, or None where they look at more.

    ``numbers``: the other arguments. Their types are among the facts, since True equals 1.0 and would be taken for it.
    """
    if type(pattern) is not DilatedPattern or not is_plain(query, key, value) or forward_ad._current_level >= 0:
        return None
    for x in numbers:
        if type(x) not in (bool, float, int) and x is not None:  # what else may not be hashable
            return None
    for x in (query, key, value):
        if x is None or x.is_nested or x.layout is not strided or x.dim() != 4:
            return None
    shape, dtype, device = query.shape, query.dtype, query.device
    if not (computed_dtype(query) is dtype is key.dtype is value.dtype) or shape[1] < shape[2]:
        return None  # a cast is to be made, or a warning given
    return (
        pattern, numbers, tuple(map(type, numbers)), shape, key.shape, value.shape, dtype, device, key.device,
        value.device, settings(dtype, device),
    )  # fmt: skip


def remember(facts: Hashable, call: Call) -> None:
    if len(known_calls) >= MOST_KNOWN:
        known_calls.clear()
    known_calls[facts] = call


def is_right(
    query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern, is_causal: bool, scale: float | None,
    dropout_p: float, enable_gqa: bool, backend: str,
) -> bool:  # fmt: skip
    """Whether nothing can be wrong with a call that a compiler sees, and nothing is to be done before it.

    It asks what `checks` asks, in fewer names: whatever it does not know for certain is left to them.
    """
    if not isinstance(pattern, DilatedPattern):
        return False
    for x in (query, key, value):
        if not isinstance(x, Tensor) or x.is_nested or x.layout != strided or x.dim() != 4:
            return False
    if key.shape != value.shape or (query.shape[2] != key.shape[2] and enable_gqa is not True):
        return False
    samples, tokens, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    return (
        (samples, tokens, head_dim) == (key.shape[0], key.shape[1], key.shape[3])
        and head_dim > 0
        and kv_heads >= len(pattern.segment_lengths)  # which is enough for every rule
        and heads % kv_heads == 0
        and query.dtype == key.dtype == value.dtype
        and query.dtype.is_floating_point
        and query.dtype.itemsize > 1  # float8 is for matrix products
        and query.device == key.device == value.device
        and not is_autocast_enabled(query.device.type)
        and isinstance(is_causal, bool)  # 1 equals True, and would be taken for it
        and isinstance(enable_gqa, bool)
        and scale is None
        and type(dropout_p) is float
        and dropout_p == 0.0
        and backend == "auto"
    )
