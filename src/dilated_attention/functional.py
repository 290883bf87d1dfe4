"""dilated_attention(): check, resolve, apply.

Legend: query (B, N, H, D); key, value (B, N, Hk, D); lse (B, N, H). Decoding: query and lse have fewer rows than key.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilated_attention import _decode_ops, _ops, _parallel
from dilated_attention._parallel import EXCHANGES, VERIFY, Link
from dilated_attention._settings import Settings
from dilated_attention.backends import choose
from dilated_attention.backends.problem import switched_off
from dilated_attention.distributed.group import LONGEST_TIMEOUT
from dilated_attention.distributed.sequence import Group, process_group
from dilated_attention.pattern import DilatedPattern

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@overload
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    key_padding_mask: Tensor | None = ...,
    query_offset: int | Tensor | None = ...,
    enable_gqa: bool = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
    group: Group | None = ...,
    exchange: str = ...,
    use_checkpointing: bool = ...,
    timeout: float = ...,
    verify: str | None = ...,
    debug: bool = ...,
    heads: tuple[int, int] | None = ...,
) -> Tensor: ...


@overload
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    key_padding_mask: Tensor | None = ...,
    query_offset: int | Tensor | None = ...,
    enable_gqa: bool = ...,
    backend: str = ...,
    return_lse: Literal[True],
    group: Group | None = ...,
    exchange: str = ...,
    use_checkpointing: bool = ...,
    timeout: float = ...,
    verify: str | None = ...,
    debug: bool = ...,
    heads: tuple[int, int] | None = ...,
) -> tuple[Tensor, Tensor]: ...


def dilated_attention(
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
    backend: str = "auto",
    return_lse: bool = False,
    group: Group | None = None,
    exchange: str = "auto",
    use_checkpointing: bool = True,
    timeout: float = 60.0,
    verify: str | None = None,
    debug: bool = False,
    heads: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention in which each head sees the tokens of ``pattern``: one exact softmax over all its branches.

    Args:
        query, key, value: (B, N, H, D), any strides; with ``enable_gqa`` key and value may have fewer heads. Query may
            have fewer rows than key: the result is then that of these rows alone, and only what they see is read.
        pattern: which head sees which tokens, see :class:`DilatedPattern`. A key seen by m branches counts m times.
        is_causal: a query sees no later token.
        scale: multiplies the scores; 1/sqrt(D) by default.
        dropout_p: the share of (query, key) pairs dropped; give 0 outside training.
        key_padding_mask: (B, N) bool, True = ignore this key, as in ``nn.MultiheadAttention``. The rows of ignored
            tokens still get an output: leave them out of pooling and of the loss.
        query_offset: where in the key sequence the first query stands, as an int, or as an integer tensor (B,) with a
            position for each sample. By default the queries are the last tokens. Not over a ``group``. Positions
            outside the key sequence are an error; but our CUDA kernel reads a tensor on the device, so that the host
            does not wait, and gives 0 and -inf in such rows. Dropout, float64 and a backward pass read it on the host.
        enable_gqa: key/value head h serves the query heads h*G to (h+1)*G - 1, G = H // Hk.
        backend: "auto", "triton" (our kernels), "sdpa" (PyTorch's) or "eager" (matrix products). One asked for by name
            runs or raises.
        return_lse: also return the log-sum-exp of each row's scores, (B, N, H), differentiable.
        group: a ``torch.distributed`` process group or 1-D ``DeviceMesh``: the tensors, and the result, are then this
            rank's contiguous shard of the sequence. The shards may differ in length, and be empty. All ranks of the
            group make the same call. Not traced by ``torch.compile``.
        exchange: how rows of other ranks come here. "ring": from neighbour to neighbour, two blocks at a time;
            "allgather": all of them in one step; "alltoall": whole segments for a share of the heads; "auto":
            the one with the least modelled time that holds at most twice what a shard keeps for its backward pass.
            Without a ``group`` only "auto"; what follows does nothing there.
        use_checkpointing: received rows travel again in the backward pass; False keeps them.
        timeout: seconds to wait for another rank before an error that names it (gloo; NCCL has its own).
        verify: "always": every call first compares its arguments over the ranks; "first": only the first 64 checks of
            a group, forward and backward, as long as its shards keep their lengths. By default "always" where the
            group has gloo for the host ("gloo", "cpu:gloo,cuda:nccl"), else "first", as reading the answer makes the
            host wait for the device.
        debug: wait on the host in every hop, so that an error comes from where it happened.
        heads: (first, total) of the key/value heads, where this process holds some of them (tensor parallelism).

    Returns:
        As query, or that and lse. A row with no key to see gets 0 and -inf.
    """
    link = None
    if group is not None:
        link = Link(process_group(group), exchange, use_checkpointing, timeout, verify, debug)
    elif (exchange, use_checkpointing, timeout, verify, debug) != ("auto", True, 60.0, None, False):
        check_link(exchange, use_checkpointing, timeout, verify, debug)
        if exchange != "auto":
            raise ValueError(f"exchange={exchange!r} is between ranks, and no group was given: pass group= as well")
    out, lse = attend(
        query, key, value, pattern, is_causal, scale, dropout_p, key_padding_mask, enable_gqa, backend, heads, link,
        query_offset=query_offset,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    key_padding_mask: Tensor | None,
    enable_gqa: bool,
    backend: str,
    heads: tuple[int, int] | None,
    link: Link | None,
    seed: Tensor | None = None,
    query_offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `dilated_attention`; over the ranks of ``link`` unless it is None or of a single rank.

    ``seed``: what dropout follows, drawn from torch's generator if it is not given.
    """
    alone = link is None or link.size == 1
    try:
        if link is not None:
            check_link(*link.options)
            _decode_ops.check_alone(query_offset)
            _parallel.check_transforms()
        settings = _checked(
            query, key, value, pattern, is_causal, scale, dropout_p, key_padding_mask, enable_gqa, backend, heads,
            decodes=link is None,
        )  # fmt: skip
        if query_offset is not None or query.shape[1] != key.shape[1]:
            query = query.to(computed_dtype(query))  # of key and value few rows are needed: they stay as they are
            _decode_ops.check(query, key, value, key_padding_mask, query_offset, settings)
            seed = drawn_seed(query.device) if settings.dropout_p > 0 and seed is None else seed
            return _decode_ops.attend(query, key, value, key_padding_mask, seed, query_offset, settings)
        dtype = computed_dtype(query)
        if not (query.dtype is key.dtype is value.dtype is dtype):
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        named = backend != "auto" and (settings.dropout_p > 0 or not _ops.is_plain(query, key, value))
        if (named or not alone) and not torch.compiler.is_compiling():
            # a refusal must not leave other ranks waiting nor cost a draw of the seed, and a fake op does not refuse
            ask = settings.whole_request if alone else settings.request
            choose.choose(backend, ask(query, key_padding_mask is not None))
        if settings.dropout_p > 0 and seed is None:
            seed = drawn_seed(query.device)
    except Exception as error:
        _parallel.tell_others(link, query, error)
        raise
    if link is not None and (not alone or link.limit is not None):
        out, lse = _parallel.attend(query, key, value, key_padding_mask, seed, settings, link)
        return out, lse
    return _ops.attend(query, key, value, key_padding_mask, seed, settings)


def drawn_seed(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def check_link(exchange: str, use_checkpointing: bool, timeout: float, verify: str | None, debug: bool) -> None:
    """Raise if no call can go over a group in this way."""
    if exchange not in EXCHANGES:
        raise ValueError(f"unknown exchange {exchange!r}: use one of {', '.join(EXCHANGES)}")
    if verify is not None and verify not in VERIFY:
        raise ValueError(f"unknown verify {verify!r}: use one of {', '.join(VERIFY)}, or None")
    for name, flag in (("use_checkpointing", use_checkpointing), ("debug", debug)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    if not isinstance(timeout, Real) or not 0 < timeout <= LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout must be a positive number of seconds, at most {LONGEST_TIMEOUT} (a year), got {timeout!r}"
        )


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    key_padding_mask: Tensor | None,
    enable_gqa: bool,
    backend: str,
    heads: tuple[int, int] | None,
    *,
    decodes: bool,
) -> Settings:
    """All that can be wrong with a call, before any work."""
    first, total = (0, 0) if heads is None else heads
    check_tensors(query, key, value, pattern, key_padding_mask, enable_gqa, total, decodes=decodes)
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    if heads is not None and not 0 <= first <= total - key.shape[2]:
        raise ValueError(f"heads must be (first, total) with the {key.shape[2]} key heads given inside, got {heads}")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else checked_scale(scale)
    check_backend(backend)
    off = None if torch.compiler.is_compiling() else switched_off()
    return Settings(pattern, is_causal, scale, checked_probability(dropout_p), backend, first, total, off)


def computed_dtype(x: Tensor) -> torch.dtype:
    """Under autocast, the dtype that F.scaled_dot_product_attention would compute in; float64 is left alone."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast, and raises when asked
        return x.dtype
    return torch.get_autocast_dtype(device) if x.dtype in DTYPES and x.dtype != torch.float64 else x.dtype


def check_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    key_padding_mask: Tensor | None,
    enable_gqa: bool,
    total_heads: int = 0,
    *,
    decodes: bool = False,
) -> None:
    """``decodes``: query may have fewer rows than key."""
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}: make one with .longnet(...)")
    duals = not torch.compiler.is_compiling() and forward_ad._current_level >= 0  # inside of forward_ad.dual_level()
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_nested:
            raise ValueError(f"{name} is a nested tensor: pad it, and pass key_padding_mask")
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, tokens, heads, head_dim), got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {x.dtype}")
        if duals and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(_ops.NO_FORWARD_MODE)
        alike = x.dtype is query.dtype or computed_dtype(x) == computed_dtype(query)
        if not alike or x.device != query.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} and query {query.dtype} on {query.device}: make them alike"
            )
    q_shape, k_shape = query.shape, key.shape  # asking a tensor takes longer than all that is compared here
    if k_shape != value.shape:
        raise ValueError(f"key and value must have one shape, got {tuple(k_shape)} and {tuple(value.shape)}")
    samples, tokens, heads, head_dim = q_shape
    key_samples, key_tokens, key_heads, key_dim = k_shape
    if tokens > key_tokens or (tokens < key_tokens and not decodes):
        wanted = "no more queries than keys" if decodes else "equal lengths"
        raise ValueError(
            f"query has {tokens} tokens and key {key_tokens}: dilated attention is self-attention and needs {wanted}"
        )
    if samples != key_samples or head_dim != key_dim:
        raise ValueError(f"query and key must agree in batch and head_dim, got {tuple(q_shape)} and {tuple(k_shape)}")
    if heads != key_heads and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key {key_heads}: give them equally many, or set enable_gqa=True")
    if head_dim < 1:
        raise ValueError("head_dim must be 1 or more, got 0")
    group = pattern.check_heads(heads, key_heads, whole=not total_heads)
    if total_heads:
        pattern.check_heads(total_heads * group, total_heads)
    if key_padding_mask is not None:
        check_padding_mask(key_padding_mask, key)


def check_padding_mask(mask: Tensor, key: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_padding_mask must be a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool with True = ignore this key, got {mask.dtype}")
    if mask.shape != key.shape[:2]:
        raise ValueError(f"key_padding_mask must be (batch, tokens) = {tuple(key.shape[:2])}, got {tuple(mask.shape)}")
    if mask.device != key.device:
        raise ValueError(f"key_padding_mask is on {mask.device} and query on {key.device}: move it")


def check_backend(backend: str) -> None:
    if backend not in choose.NAMES:
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(choose.NAMES)}")


def checked_probability(p: float, name: str = "dropout_p") -> float:
    if not isinstance(p, Real) or not 0.0 <= p <= 1.0:  # false for NaN too
        raise ValueError(f"{name} must be a number in [0, 1], got {p!r}")
    return float(p)


def checked_scale(scale: float, name: str = "scale") -> float:
    try:
        number = float(scale) if isinstance(scale, Real) else math.nan
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{name} must be a finite number of 0 or more, got {scale!r}")
    return number
