"""dilated_attention(): check, resolve, apply.

Legend: query (B, N, H, D); key, value (B, N, Hk, D); lse (B, N, H). Decoding: query and lse have fewer rows than key.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling  # by name, like others here: a compiler checks each module on the way

from dilated_attention.autograd import attend as attend_here
from dilated_attention.autograd import attend_plain, attend_traced
from dilated_attention.backends.choose import Backend, choose
from dilated_attention.backends.problem import Inputs
from dilated_attention.call import DEFAULT_SCALE, Call
from dilated_attention.checks import check_flag, checked_probability, checked_scale
from dilated_attention.context_parallel import ContextParallel
from dilated_attention.distributed.sequence import Group
from dilated_attention.ordinary import facts_of, is_right, known_calls, remember
from dilated_attention.pattern import DilatedPattern
from dilated_attention.resolve import (
    check_backend,
    check_tensors,
    check_total_length,
    checked_heads,
    checked_sequences,
    checked_start,
    computed_dtype,
    warn_of_mistakes,
)
from dilated_attention.ring import run as ring
from dilated_attention.ring.run import Ranks


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
    backend: Backend = ...,
    return_lse: Literal[False] = ...,
    group: Group | ContextParallel | None = ...,
    heads: tuple[int, int] | None = ...,
    cu_seqlens: Sequence[int] | Tensor | None = ...,
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
    backend: Backend = ...,
    return_lse: Literal[True],
    group: Group | ContextParallel | None = ...,
    heads: tuple[int, int] | None = ...,
    cu_seqlens: Sequence[int] | Tensor | None = ...,
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
    backend: Backend = "auto",
    return_lse: bool = False,
    group: Group | ContextParallel | None = None,
    heads: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes self-attention in which each head sees the tokens that ``pattern`` gives it.

    A branch is one (segment length, dilation rate) pair of the pattern. A head takes one softmax over the keys of all
    its branches; a key that m branches show counts m times.

    Args:
        query: (B, N, H, D): batch, tokens, heads, channels of a head; any strides. It may have fewer tokens than key
            (decoding): the result is then that of these queries alone, and only the keys that they see are read.
        key, value: (B, N, H, D), or (B, N, Hk, D) with ``enable_gqa``; of the dtype and device of query.
        pattern: which head sees which tokens, see :class:`DilatedPattern`.
        is_causal: a query sees no later token.
        scale: multiplies the scores; 1/sqrt(D) by default.
        dropout_p: the share of (query, key) pairs dropped; give 0 outside training.
        key_padding_mask: (B, N) bool, True = ignore this key, as in ``nn.MultiheadAttention``. The rows of ignored
            tokens still get an output: leave them out of pooling and of the loss.
        query_offset: where in the key sequence the first query stands, as an int, or as an integer tensor (B,) with a
            position for each sample. By default the queries are the last tokens. Not over a ``group``. A position
            outside the key sequence is an error, with one exception: the kernels of "triton" read a tensor on the
            device and cannot raise, so they give out = 0 and lse = -inf for queries outside. Calls with dropout or
            float64, and all backward passes, do not use these kernels: the host then waits to read the tensor, and
            raises.
        enable_gqa: True: allow fewer key/value heads Hk than query heads H; H must be a multiple of Hk. Key/value head
            h serves the query heads h*G to (h+1)*G - 1, with G = H // Hk. False: unequal numbers are an error.
        backend: "auto", "triton" (our kernels), "sdpa" (PyTorch's) or "eager" (matrix products). One asked for by name
            runs or raises.
        return_lse: also return the log-sum-exp of each query's scores, (B, N, H) with the N of query, in float32
            (float64 for float64 inputs). It is differentiable.
        group: a ``torch.distributed`` process group or 1-D ``DeviceMesh``: the tensors, and the result, are then this
            rank's contiguous shard of the sequence. The shards may differ in length, and be empty. All ranks of the
            group make the same call. Not traced by ``torch.compile``. Give a :class:`ContextParallel` instead to choose
            how keys and values are sent (``exchange``, "auto" by default), the timeout, and the checks.
        heads: for tensor parallelism, where this process holds only some of the key/value heads: (index of its first
            one, number of them in the whole model). A head's branches and offsets depend on its index. By default this
            process holds all heads.
        cu_seqlens: borders of sequences that are packed along the tokens; query, key and value are then (1, T, H, D).
            ``[0, ..., T]``: the start of each sequence, then the end of the last, as a list or an integer tensor. Each
            has segments of its own, and none sees another. A tensor on CUDA makes the host wait while it is read, once.
            Over a ``group`` it is that of all ranks' tokens, and sequences may lie on several ranks. Not with a query
            shorter than key, nor with ``key_padding_mask``.

    Returns:
        A tensor shaped like query; with ``return_lse`` a tuple of it and lse. A query that sees no key gets out = 0 and
            lse = -inf.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 1000, 8, 64).unbind(0)  # (batch, tokens, heads, head_dim)
        >>> pattern = da.DilatedPattern.longnet(segment_lengths=[128, 512], dilation_rates=[1, 4])
        >>> da.dilated_attention(query, key, value, pattern, is_causal=True).shape
        torch.Size([2, 1000, 8, 64])
    """
    if return_lse is not True and return_lse is not False:
        with telling(group, query):
            raise TypeError(f"return_lse must be True or False, got {return_lse!r}")
    out, lse = attend(
        query, key, value, pattern, is_causal, scale, dropout_p, key_padding_mask, enable_gqa, backend, heads,
        Ranks.of(group), query_offset=query_offset, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    enable_gqa: bool = False,
    backend: Backend = "auto",
    heads: tuple[int, int] | None = None,
    ranks: Ranks | None = None,
    seed: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    warns: bool = True,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `dilated_attention`; over the ranks of ``ranks`` unless it is None or a single rank.

    ``seed``: what dropout follows, drawn from torch's generator if it is not given. ``warns``: of what users mistake.
    """
    facts = None
    if ranks is None and heads is None and key_padding_mask is None and query_offset is None and cu_seqlens is None:
        if is_compiling():
            if is_right(query, key, value, pattern, is_causal, scale, dropout_p, enable_gqa, backend):
                return attend_traced(query, key, value, pattern, is_causal)
        elif seed is None and backend == "auto":
            facts = facts_of(query, key, value, pattern, is_causal, scale, dropout_p, enable_gqa)
            known = known_calls.get(facts)  # which has no None
            if known is not None:
                seed = drawn_seed(query.device) if dropout_p > 0 else None
                return attend_plain(Inputs(query, key, value, None, seed), known)
    alone = ranks is None or ranks.size == 1
    with ring.telling_ranks(ranks, query):
        call = _checked(
            query, key, value, pattern, is_causal, scale, dropout_p, key_padding_mask, enable_gqa, backend, heads,
            decodes=ranks is None, in_parts=not alone, warns=warns and alone,
            memory_cap=0 if ranks is None or ranks.memory_cap is None else ranks.memory_cap.number,
        )  # fmt: skip
        if not alone:
            ring.check_transforms()
        if ranks is not None and alone:
            check_total_length(ranks.parallel.total_length, (query.shape[1],))
        sequences, borders = checked_sequences(cu_seqlens, query, key, key_padding_mask, in_parts=not alone)
        if sequences:  # asked first, as short calls notice what a copy costs
            call = call._replace(sequences=sequences)
        start = checked_start(query, key, query_offset, is_alone=ranks is None)
        dtype = computed_dtype(query)
        if query.dtype is not dtype:
            query = query.to(dtype)
        if query.shape[1] == key.shape[1] and not (key.dtype is value.dtype is dtype):
            key, value = key.to(dtype), value.to(dtype)  # few queries need few rows of these: they stay as they are
        if not is_compiling() and (backend != "auto" or not alone):
            # a refusal must not leave other ranks waiting nor cost a draw of the seed, and a fake op does not refuse
            named = call.of(query, key, key_padding_mask, start)
            choose(named)
            if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
                choose(named, backward=True)
        if dropout_p > 0 and seed is None:
            seed = drawn_seed(query.device)
        positions = query_offset if isinstance(query_offset, Tensor) else None
        inputs = Inputs(query, key, value, key_padding_mask, seed, positions, borders)
    if facts is not None:
        remember(facts, call.of(query, key, None, start))
    if ranks is None or alone:
        return attend_here(inputs, call, start)
    return ring.attend(inputs, call.of(query, key, key_padding_mask, start), ranks)


def drawn_seed(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def telling(group: Group | ContextParallel | None, x: object) -> AbstractContextManager[None]:
    """An error in here reaches the other ranks of a group, if there is one: they would wait for this rank."""
    return ring.telling_ranks(Ranks.of(group), x)


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
    backend: Backend,
    heads: tuple[int, int] | None,
    *,
    decodes: bool,
    in_parts: bool,
    memory_cap: int,
    warns: bool,
) -> Call:
    """All that can be wrong with a call, before any work."""
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    check_tensors(query, key, value, pattern, key_padding_mask, enable_gqa, whole=heads is None, decodes=decodes)
    first, total = (0, 0) if heads is None else checked_heads(heads, key.shape[2])
    if heads is not None:
        pattern.check_heads(total * (query.shape[2] // key.shape[2]), total)
    scale = DEFAULT_SCALE if scale is None else checked_scale(scale)
    check_backend(backend)
    if not pattern.is_exact and (in_parts or dropout_p):
        raise ValueError("mixing_gradient='detached' works only on one device and without dropout: use 'exact'")
    if warns:  # on one device: a shard or its mask may well be short, or empty
        warn_of_mistakes(query, key, pattern, key_padding_mask)
    return Call(
        pattern, is_causal, scale, checked_probability(dropout_p), backend, first_head=first, total_heads=total,
        in_parts=in_parts, memory_cap=memory_cap,
    )  # fmt: skip
