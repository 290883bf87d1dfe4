"""One door: what a call is, checked once and remembered. Each error is one line that says what to do.

All that is not a number in a tensor makes up a call's signature. A signature that passed the checks leads straight to
its `Call`: a short call would take longer to check than to compute. A compiler sees the checks themselves, since it
guards what they looked at.

Legend: query (B, N, H, D); key, value (B, N, Hk, D). Decoding: query has fewer rows than key.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from dilated_attention.autograd import NO_FORWARD_MODE, is_plain
from dilated_attention.backends.choose import NAMES, Backend, choose
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import DEFAULT_SCALE, ON_DEVICE, Call, CuSeqlens, checked_cu_seqlens, outside, settings
from dilated_attention.checks import Ints, check_flag, check_tensor, checked_probability, checked_scale, is_int, warn
from dilated_attention.pattern import DilatedPattern, Pattern

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Options(NamedTuple):
    """What a caller chooses beside tensors, as in `dilated_attention`, and how the call is to run."""

    pattern: Pattern
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    enable_gqa: bool = False
    backend: Backend = "auto"
    heads: tuple[int, int] | None = None
    query_offset: int | None = None  # one in a tensor is `Inputs.positions`
    return_lse: bool = True
    decodes: bool = True  # query may have fewer rows than key: not over a group
    in_parts: bool = False  # over several ranks
    memory_cap_id: int = 0


def resolve(inputs: Inputs, options: Options) -> Call:
    """The call, or the error that it raises."""
    if is_compiling():  # shapes may be symbols: the op sees the tensors when it runs
        return _checked(inputs, options, None)
    tensors, cu_seqlens = inputs[:3], inputs.cu_seqlens
    numbers = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    can_fail = options.backend != "auto" or options.in_parts  # else some backend can always run
    wants_grad = can_fail and torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)
    signature = _signature(inputs, options, numbers, wants_grad)
    try:
        known = [] if signature is None else _known(signature)
    except TypeError:  # something cannot be hashed, and the checks say what
        known = []
    if not known:
        call = _checked(inputs, options, numbers)
        q, k, has_padding = inputs.q, inputs.k, inputs.padding is not None
        call = call.with_shapes(q.shape, k.shape, call.dtype, q.device, has_padding, call.start)
        if can_fail:  # a refusal must not leave others waiting nor cost a seed
            choose(call)
            if wants_grad:
                choose(call, backward=True)
        known.append(call)
    return known[0]


@functools.lru_cache(maxsize=1024)
def _known(signature: Hashable) -> list[Call]:
    """The call of a signature, once it has passed every check."""
    return []


def _signature(inputs: Inputs, options: Options, numbers: Ints | None, wants_grad: bool) -> Hashable:
    """All that the checks look at, or None where they look at more. The types of options are part of it: True equals
    1.0, and would be taken for it."""
    query, key, value, mask, _, positions, _ = inputs
    if options.heads is not None or forward_ad._current_level >= 0:
        return None
    for x in (query, key, value):
        if not isinstance(x, Tensor) or x.is_nested:
            return None
    dtype, device = query.dtype, query.device
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
    tensors = [
        (x.shape, x.dtype, x.device, x.layout) if isinstance(x, Tensor) else x
        for x in (query, key, value, mask, positions)
    ]
    return options, *map(type, options), numbers, wants_grad, autocast, settings(dtype, device), *tensors


# --- the checks -------------------------------------------------------------------------------------------------


def _checked(inputs: Inputs, options: Options, numbers: Ints | None) -> Call:
    """What the caller chose, once all that can be wrong with it was looked at. ``numbers``: those of ``cu_seqlens``."""
    pattern, first, total = options.pattern, 0, 0
    scale, dropout_p = check_options(options)
    check_tensors(inputs, options)
    heads, kv_heads, tokens = inputs.q.shape[2], inputs.k.shape[2], inputs.k.shape[1]
    if options.heads is None:
        pattern.check_heads(heads, kv_heads)
    else:
        first, total = checked_heads(options.heads, kv_heads)
        pattern.check_heads(heads * total // kv_heads, total)  # as many for each as here
    if inputs.cu_seqlens is not None:
        check_packed(inputs)
    start, dtype = checked_start(inputs, options), computed_dtype(inputs.q)
    packed = () if numbers is None else checked_cu_seqlens(numbers, None if options.in_parts else tokens)
    return Call(
        pattern, options.is_causal, scale, dropout_p, options.backend, dtype=dtype, start=start, first_head=first,
        total_heads=total, cu_seqlens=packed, in_parts=options.in_parts, memory_cap_id=options.memory_cap_id,
    )  # fmt: skip


def check_options(options: Options) -> tuple[float, float]:
    """Raise if something is wrong with what is chosen; return scale and dropout_p as numbers."""
    pattern = options.pattern
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern or a DilatedPattern, got {type(pattern).__name__}")
    check_flag("is_causal", options.is_causal)
    check_flag("enable_gqa", options.enable_gqa)
    check_flag("return_lse", options.return_lse)
    check_backend(options.backend)
    scale = DEFAULT_SCALE if options.scale is None else checked_scale(options.scale)
    dropout_p = checked_probability(options.dropout_p)
    if not pattern.is_exact and (options.in_parts or dropout_p):
        raise ValueError("mixing_gradient='detached' works only on one device and without dropout: use 'exact'")
    return scale, dropout_p


def check_backend(backend: Backend) -> None:
    if backend not in NAMES:
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(NAMES)}")


def computed_dtype(x: Tensor) -> torch.dtype:
    """Under autocast, the dtype that F.scaled_dot_product_attention would compute in; float64 is left alone."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast, and raises when asked
        return x.dtype
    return torch.get_autocast_dtype(device) if x.dtype in DTYPES and x.dtype != torch.float64 else x.dtype


def check_tensors(inputs: Inputs, options: Options) -> None:
    query, duals = inputs.q, not is_compiling() and forward_ad._current_level >= 0  # inside of forward_ad.dual_level()
    for name, x in zip(("query", "key", "value"), inputs[:3], strict=True):
        rows = f"torch.cat({name}.unbind()).unsqueeze(0)"
        check_tensor(name, x, f"pass {rows}, and where each sequence begins as cu_seqlens")
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, tokens, heads, head_dim), got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {x.dtype}")
        if duals and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(NO_FORWARD_MODE)
        alike = x.dtype is query.dtype or computed_dtype(x) == computed_dtype(query)
        if not alike or x.device != query.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} and query {query.dtype} on {query.device}: give both one dtype and "
                "one device"
            )
    q_shape, k_shape, v_shape = (tuple(x.shape) for x in inputs[:3])
    if k_shape != v_shape:
        raise ValueError(f"key and value must have one shape, got {k_shape} and {v_shape}")
    (samples, tokens, heads, head_dim), (key_samples, key_tokens, key_heads, key_dim) = q_shape, k_shape
    if tokens > key_tokens or (tokens < key_tokens and not options.decodes):
        wanted = "no more queries than keys" if options.decodes else "equal lengths"
        raise ValueError(f"query has {tokens} tokens and key {key_tokens}: self-attention needs {wanted}")
    if samples != key_samples or head_dim != key_dim:
        raise ValueError(f"query and key must agree in batch and head_dim, got {q_shape} and {k_shape}")
    if heads != key_heads and not options.enable_gqa:
        raise ValueError(f"query has {heads} heads and key {key_heads}: make them equal, or set enable_gqa=True")
    if head_dim < 1:
        raise ValueError("head_dim must be 1 or more, got 0")
    if inputs.padding is not None:
        check_padding_mask(inputs.padding, inputs.k)


def check_padding_mask(mask: Tensor, key: Tensor) -> None:
    check_tensor("key_padding_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool with True = ignore this key, got {mask.dtype}")
    if mask.shape != key.shape[:2]:
        raise ValueError(f"key_padding_mask must be (batch, tokens) = {tuple(key.shape[:2])}, got {tuple(mask.shape)}")
    if mask.device != key.device:
        raise ValueError(f"key_padding_mask is on {mask.device} and query on {key.device}: move it")


def checked_heads(heads: tuple[int, int], key_heads: int) -> tuple[int, int]:
    """(first, total) of the key/value heads, of which a call has ``key_heads``."""
    if not isinstance(heads, tuple | list) or [is_int(x) for x in heads] != [True, True]:
        raise TypeError(f"heads must be two whole numbers, (first, total) of the key/value heads, got {heads!r}")
    first, total = heads
    if not 0 <= first <= total - key_heads:
        raise ValueError(f"heads must be (first, total) with 0 <= first <= total - {key_heads}, got {heads}")
    return first, total


def checked_start(inputs: Inputs, options: Options) -> int:
    """Where among the keys the first query is. Positions in a tensor are looked at where they are used:
    on CUDA the host would wait for them."""
    query, key, positions, offset = inputs.q, inputs.k, inputs.positions, options.query_offset
    last = key.shape[1] - query.shape[1]
    if offset is None and positions is None:
        return last
    if not options.decodes:
        raise ValueError("query_offset is for one device: it cannot be given together with a group")
    if positions is not None:
        if positions.dtype not in (torch.int32, torch.int64) or positions.shape != query.shape[:1]:
            wanted = f"an int, or an int32 or int64 tensor of shape (batch,) = {tuple(query.shape[:1])}"
            got = f"{positions.dtype} of shape {tuple(positions.shape)}"
            raise ValueError(f"query_offset must be {wanted}, got {got}")
        if positions.device != query.device:
            raise ValueError(f"query_offset is on {positions.device} and query on {query.device}: move it")
        return ON_DEVICE
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise TypeError(f"query_offset must be an int or a tensor, got {offset!r}")
    if not 0 <= offset <= last:
        raise ValueError(outside("query_offset", offset, query.shape[1], key.shape[1]))
    return offset


def check_packed(inputs: Inputs) -> None:
    """``cu_seqlens`` is given."""
    query, key = inputs.q, inputs.k
    if query.shape[1] != key.shape[1]:
        counts = f"{query.shape[1]} queries and {key.shape[1]} keys"
        raise ValueError(f"cu_seqlens needs as many queries as keys, got {counts}: pass whole sequences")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seqlens is for one row, (1, tokens, heads, head_dim), got a batch of {query.shape[0]}")
    if inputs.padding is not None:
        raise ValueError("cu_seqlens takes no key_padding_mask: leave ignored tokens out of the packed row instead")


def cu_seqlens_on_host(given: CuSeqlens, name: str = "cu_seqlens") -> Tensor:
    """``cu_seqlens`` as a tensor on the host; its numbers are not looked at."""
    wanted = f"{name} must be a list of whole numbers, or an integer tensor of one dimension"
    if isinstance(given, Tensor):
        if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{wanted}, got {given.dtype} of shape {tuple(given.shape)}")
        return given.cpu()
    if not isinstance(given, Sequence) or not all(is_int(x) or isinstance(x, torch.SymInt) for x in given):
        raise TypeError(f"{wanted}, got {given!r}")
    return torch.tensor(given, dtype=torch.int64)


def check_cu_seqlens_end(cu_seqlens: Ints, tokens: int) -> None:
    """Raise if packed sequences do not end where the shards of all ranks end."""
    if cu_seqlens and cu_seqlens[-1] != tokens:
        raise ValueError(f"cu_seqlens ends with {cu_seqlens[-1]}, and all ranks together have {tokens} tokens")


def check_total_length(total: int | None, lengths: Ints) -> None:
    """Raise if shards of these lengths do not make up a sequence of ``total`` tokens."""
    if total is not None and sum(lengths) != total:
        whole = "every rank seems to have passed the whole sequence: " if set(lengths) == {total} else ""
        raise ValueError(
            f"the ranks have {', '.join(map(str, lengths))} tokens, {sum(lengths)} in all, and total_length is "
            f"{total}: {whole}cut each tensor once, with shard_sequence()"
        )


def warn_of_mistakes(inputs: Inputs, pattern: Pattern) -> None:
    """Warn of what is exact, and probably not meant. Nothing is read that the host would have to wait for."""
    if is_compiling():
        return
    mask, (_, tokens, heads, _) = inputs.padding, inputs.q.shape
    shortest = min(pattern.segment_lengths) if isinstance(pattern, DilatedPattern) else 0
    if heads > tokens == inputs.k.shape[1] > 1 and tokens < shortest:
        warn(
            f"query has shape {tuple(inputs.q.shape)}, read as (batch, tokens, heads, head_dim): it has more heads "
            "than tokens, and every segment is longer than the sequence. If it is (batch, heads, tokens, head_dim), "
            "pass query.transpose(1, 2)"
        )
    if mask is not None and mask.device.type == "cpu" and mask.numel() and is_plain(mask) and mask.all():
        warn(
            "key_padding_mask ignores every key of every sample, so all outputs are 0: True = ignore, as in "
            "nn.MultiheadAttention; pass ~mask if True means keep"
        )
