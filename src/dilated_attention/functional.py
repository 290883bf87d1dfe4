"""dilated_attention(): check, resolve, apply. explain(): which backend and kernel a call would run, and why no other.

Legend: query (B, N, H, D); key, value (B, N, Hk, D); lse (B, N, H). Decoding: query and lse have fewer rows than key.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from dilated_attention import autograd
from dilated_attention.backends.choose import BACKENDS, Backend, choose, why_not
from dilated_attention.backends.problem import Inputs, Pair
from dilated_attention.branches import Dense
from dilated_attention.call import ON_DEVICE, CuSeqlens
from dilated_attention.checks import check_tensor
from dilated_attention.context_parallel import Over
from dilated_attention.pattern import Pattern
from dilated_attention.plan import plan
from dilated_attention.resolve import Options, check_total_length, cu_seqlens_on_host, resolve, warn_of_mistakes
from dilated_attention.ring import run as ring
from dilated_attention.ring.run import Ranks

NO_RANKS = contextlib.nullcontext()  # made once: every call on one device enters it


class CallOptions(TypedDict, total=False):
    """The options of `dilated_attention`, but ``return_lse``."""

    is_causal: bool
    scale: float | None
    dropout_p: float
    key_padding_mask: Tensor | None
    query_offset: int | Tensor | None
    enable_gqa: bool
    backend: Backend
    group: Over
    heads: tuple[int, int] | None
    cu_seqlens: CuSeqlens | None
    sinks: Tensor | None


@overload
def dilated_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, return_lse: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...  # fmt: skip


@overload
def dilated_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> Pair: ...  # fmt: skip


def dilated_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, is_causal: bool = False,
    scale: float | None = None, dropout_p: float = 0.0, key_padding_mask: Tensor | None = None,
    query_offset: int | Tensor | None = None, enable_gqa: bool = False, backend: Backend = "auto",
    return_lse: bool = False, group: Over = None, heads: tuple[int, int] | None = None,
    cu_seqlens: CuSeqlens | None = None, sinks: Tensor | None = None,
) -> Tensor | Pair:  # fmt: skip
    """Computes self-attention in which each head sees the tokens that ``pattern`` gives it.

    A head takes one softmax over the keys of all its branches. In a :class:`Pattern` a key counts once, and in a
    :class:`DilatedPattern` once for each branch that shows it.

    Args:
        query: (B, N, H, D): batch, tokens, heads, channels of a head; any strides. It may have fewer tokens than key
            (decoding): the result is then that of these queries alone, and only the keys that they see are read.
        key, value: (B, N, H, D), or (B, N, Hk, D) with ``enable_gqa``; of the dtype and device of query.
        pattern: which head sees which tokens, see :class:`Pattern` and :class:`DilatedPattern`.
        is_causal: a query sees no later token.
        scale: multiplies the scores; 1/sqrt(D) by default.
        dropout_p: the share of (query, key) pairs dropped; give 0 outside training.
        key_padding_mask: (B, N) bool, True = ignore this key, as in ``nn.MultiheadAttention``. The rows of ignored
            tokens still get an output: leave them out of pooling and of the loss.
        query_offset: where in the key sequence the first query stands: an int, or an integer tensor (B,) with one for
            each sample. By default the queries are the last tokens. Not over a ``group``. A position outside is an
            error, with one exception: the kernels of "triton" read a tensor on the device, and give out = 0 and
            lse = -inf there. With dropout or float64, and in a backward pass, the host waits to read it, and raises.
        enable_gqa: allow fewer key/value heads Hk than query heads H, a multiple of Hk. Key/value head h serves the
            query heads h*G to (h+1)*G - 1, with G = H // Hk.
        backend: "auto", "triton" (our kernels), "sdpa" (PyTorch's) or "eager" (matrix products). One asked for by name
            runs or raises.
        return_lse: also return the log-sum-exp of each query's scores, (B, N, H) with the N of query, in float32
            (float64 for float64 inputs). It is differentiable.
        group: a ``torch.distributed`` process group or 1-D ``DeviceMesh``: the tensors, and the result, are then this
            rank's contiguous shard of the sequence, which may be empty. All ranks make the same call. Not traced by
            ``torch.compile``. A :class:`ContextParallel` also chooses how keys and values are sent (``exchange``,
            "auto" by default), the timeout, and the checks.
        heads: for tensor parallelism, where this process holds only some of the key/value heads: (index of its first
            one, number of them in the whole model). A head's branches and offsets depend on its index.
        cu_seqlens: borders ``[0, ..., T]`` of sequences that are packed along the tokens, as a list or an integer
            tensor; query, key and value are then (1, T, H, D). Each sequence has segments of its own, and none sees
            another. A tensor on CUDA makes the host wait while it is read, once. Over a ``group`` it is that of all
            ranks' tokens. Not with a query shorter than key, nor with ``key_padding_mask``.
        sinks: (H,), one learned score per query head: each softmax has one more key of this score, without a value.

    Returns:
        A tensor shaped like query; with ``return_lse`` a tuple of it and lse. A query that sees no key gets out = 0 and
            lse = -inf.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 1000, 8, 64).unbind(0)  # (batch, tokens, heads, head_dim)
        >>> pattern = da.DilatedPattern.longnet(segment_lengths=[128, 512], dilation_rates=[1, 4])
        >>> da.dilated_attention(query, key, value, pattern, is_causal=True).shape
        torch.Size([2, 1000, 8, 64])
    """
    offset, positions = (None, query_offset) if isinstance(query_offset, Tensor) else (query_offset, None)
    options = Options(pattern, is_causal, scale, dropout_p, enable_gqa, backend, heads, offset, return_lse)
    inputs = Inputs(query, key, value, key_padding_mask, None, positions)
    out, lse = attend(inputs, options, Ranks.of(group), cu_seqlens, sinks=sinks)
    return (out, lse) if return_lse else out


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Pair:
    """The same with one more key for each head, of this score and without a value."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total


def attention_mass(
    query: Tensor, key: Tensor, pattern: Pattern, *, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Tells how much of dense attention's weight falls on the keys that ``pattern`` shows: from 0, none, to 1, all.

    That is exp(lse of the pattern - lse of dense attention), where a key counts once and zero keys do not count. The
    mass of a union is that of all its keys together: it is not the sum of its branches' masses, which may overlap.
    Memory is linear in N; time is that of one dense call. The arguments are those of :func:`dilated_attention`.

    Returns:
        (B, N, H), in float32 (float64 for float64 inputs); 0 where a query sees no key. It is differentiable.

    Examples:
        >>> query, key = torch.randn(2, 1, 1000, 8, 64).unbind(0)
        >>> mass = da.attention_mass(query, key, da.Pattern([da.Window(127), da.Prefix(4)]), is_causal=True)
        >>> mass.shape, bool((mass > 0).all() and (mass <= 1).all())
        (torch.Size([1, 1000, 8]), True)
    """
    # outputs are not needed, and no kernel leaves them out: keys serve as values, which takes no memory
    inputs, options = Inputs(query, key, key), Options(pattern, is_causal, scale, enable_gqa=enable_gqa)
    resolve(inputs, options)
    once = Pattern(pattern.branches_for(key.shape[2]))
    seen, every = (attend(inputs, options._replace(pattern=x), warns=False)[1] for x in (once, Pattern([Dense()])))
    return (seen - every).exp().clamp(max=1)  # rounding may go beyond


def attend(
    inputs: Inputs, options: Options, ranks: Ranks | None = None, cu_seqlens: CuSeqlens | None = None, *,
    sinks: Tensor | None = None, warns: bool = True,
) -> Pair:  # fmt: skip
    """(out, lse) of `dilated_attention`; over ``ranks`` unless it is None or a single rank. ``warns``: of what users
    mistake. Dropout follows ``inputs.seed``, or a seed that is drawn here."""
    alone = ranks is None or ranks.size == 1
    with NO_RANKS if ranks is None else ring.errors_reach_ranks(ranks, inputs.q):
        if not alone:
            ring.check_transforms()
        if ranks is not None:
            cap = 0 if ranks.memory_cap is None else ranks.memory_cap.number
            options = options._replace(decodes=False, in_parts=not alone, memory_cap_id=cap)
        if cu_seqlens is not None:
            inputs = inputs._replace(cu_seqlens=cu_seqlens_on_host(cu_seqlens))
        call = resolve(inputs, options)
        query, key, value = inputs[:3]
        if sinks is not None:
            check_tensor("sinks", sinks)
            if sinks.shape != query.shape[2:3] or not sinks.is_floating_point():
                wanted = f"a float tensor of shape ({call.heads},), one per query head"
                raise ValueError(f"sinks must be {wanted}, got {sinks.dtype} of shape {tuple(sinks.shape)}")
        if ranks is not None and alone:
            check_total_length(ranks.parallel.total_length, (query.shape[1],))
        if warns and alone and (call.queries < call.heads or inputs.padding is not None):
            warn_of_mistakes(inputs, options.pattern)  # of a shard or its mask, neither says much
        dtype = call.dtype
        if not (query.dtype is key.dtype is value.dtype is dtype):
            if query.shape[1] == key.shape[1]:  # decoding reads few rows of key and value: they stay as they are
                key, value = key.to(dtype), value.to(dtype)
            inputs = inputs._replace(q=query.to(dtype), k=key, v=value)
        if call.drops and inputs.seed is None:
            inputs = inputs._replace(seed=drawn_seed(query.device))
    if ranks is None or alone:
        found = autograd.attend(inputs, call)
    else:
        found = ring.attend_over_ranks(inputs, call, ranks, sinks is not None)
    return found if sinks is None else with_sinks(*found, sinks)


def drawn_seed(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def errors_reach_group(group: Over, x: object) -> contextlib.AbstractContextManager[None]:
    """An error in here reaches the other ranks of a group, if there is one: they would wait for this rank."""
    return ring.errors_reach_ranks(Ranks.of(group), x)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Tells what a call would run, and for everything else why it does not.

    Args:
        backend: the backend of the forward pass.
        kernel: its kernel, in words.
        why_not: for each other backend, the reasons why it does not run.
        backward: the backend and kernel of the backward pass, or "none: ..." with the reasons.

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
    backward: str

    def __str__(self) -> str:
        lines = [f"runs: {self.backend}, kernel: {self.kernel}", f"backward: {self.backward}"]
        lines += [f"not {name}: {'; '.join(reasons)}" for name, reasons in self.why_not.items()]
        return "\n".join(lines)


def explain(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, is_causal: bool = False,
    scale: float | None = None, dropout_p: float = 0.0, key_padding_mask: Tensor | None = None,
    query_offset: int | Tensor | None = None, enable_gqa: bool = False, backend: Backend = "auto",
    group: Over = None, cu_seqlens: CuSeqlens | None = None,
) -> Explanation:  # fmt: skip
    """Tells which backend and kernel `dilated_attention` with these arguments runs, and why no other.

    It takes the arguments of :func:`dilated_attention`, except ``heads``, ``sinks`` and ``return_lse``. The forward and
    the backward pass may run different ones; the reasons are those of the forward pass. Over a ``group`` it speaks of
    this rank, and asks no other.

    Examples:
        >>> x = torch.randn(1, 64, 4, 8)
        >>> print(da.explain(x, x, x, da.DilatedPattern.longnet([16, 64], [1, 4])))
        runs: ...
    """
    ranks = Ranks.of(group)
    offset, positions = (None, query_offset) if isinstance(query_offset, Tensor) else (query_offset, None)
    options = Options(
        pattern, is_causal, scale, dropout_p, enable_gqa, backend, query_offset=offset, decodes=group is None,
        in_parts=ranks is not None and ranks.size > 1,
    )  # fmt: skip
    packed = None if cu_seqlens is None else cu_seqlens_on_host(cu_seqlens)
    call = resolve(Inputs(query, key, value, key_padding_mask, None, positions, packed), options)
    choice = choose(call)
    # kernels that do not take short blocks take no masks, so only a DilatedPattern has to be planned; positions that a
    # tensor holds are not read: the last ones are used instead
    placed = call._replace(start=call.keys - call.queries) if call.start == ON_DEVICE else call
    blocks = () if pattern.needs_masks else plan(placed).blocks
    rows = {min(block.queries.rows, block.keys.rows) for block in blocks} or {call.queries}
    reasons = BACKENDS[backend].unsupported(call, True) if backend != "auto" and call.is_decode else []
    if reasons:
        backward = f"none: {'; '.join(reasons)}"
    else:
        after = choose(call, backward=True)
        backward = f"{after.name}, kernel: {after.describe(rows)}"
    return Explanation(cast(Backend, choice.name), choice.describe(rows), why_not(choice, call), backward)
