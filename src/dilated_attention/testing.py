"""Holding any implementation against the oracle: input makers, one way to run, one rule for tolerances.

The rule: float64 within 1e-12 and float32 within 5e-6 of max(1, max|reference|); lower precision at most twice
(gradients three times) the error of plain PyTorch in the same dtype, which is at least that of rounding once.
Legend as in `functional`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dilated_attention import reference
from dilated_attention.functional import dilated_attention
from dilated_attention.pattern import DilatedPattern

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}


@dataclass(frozen=True)
class Results:
    """Holds what one forward and backward pass gives: out, lse, and the gradients of query, key and value.

    lse is None where an implementation does not return it.

    Examples:
        >>> q, k, v = testing.make_qkv(1, 16, 4, 8)
        >>> found = testing.oracle((q, k, v), da.DilatedPattern.longnet([4, 16], [1, 4]), torch.ones_like(q))
        >>> [name for name, _ in found.items()]
        ['out', 'lse', 'dq', 'dk', 'dv']
    """

    out: Tensor
    lse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def items(self) -> list[tuple[str, Tensor]]:
        """The (name, tensor) pairs, without lse if it is None."""
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, value) for name, value in named if value is not None]


def make_qkv(
    samples: int,
    tokens: int,
    heads: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes random query (samples, tokens, heads, head_dim), key and value (samples, tokens, kv_heads, head_dim).

    ``layout`` is their layout in memory. "contiguous"; "fused": slices of one tensor; "transposed": stored as
    (B, H, N, D); "expanded": one sample and one head, repeated with stride 0; "odd": strided and not aligned.

    Examples:
        >>> query, key, value = testing.make_qkv(2, 100, 8, 16, kv_heads=2, layout="fused")
        >>> key.shape
        torch.Size([2, 100, 2, 16])
    """
    generator = torch.Generator(device).manual_seed(seed)
    kv_heads = heads if kv_heads is None else kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device).to(dtype)

    counts = [heads, kv_heads, kv_heads]
    if layout == "contiguous":
        q, k, v = (normal(samples, tokens, h, head_dim) for h in counts)
    elif layout == "fused":
        q, k, v = torch.split(normal(samples, tokens, sum(counts), head_dim), counts, dim=2)
    elif layout == "transposed":  # stored as (B, H, N, D)
        q, k, v = (normal(samples, h, tokens, head_dim).transpose(1, 2) for h in counts)
    elif layout == "expanded":  # one sample and one head seen many times
        q, k, v = (normal(1, tokens, 1, head_dim).expand(samples, -1, h, -1) for h in counts)
    elif layout == "odd":  # last dimension strided, start not aligned
        q, k, v = (normal(samples, tokens, h, 2 * head_dim + 1)[..., 1::2] for h in counts)
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return q, k, v


def run(attention: Callable[..., Any], qkv: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None = None) -> Results:
    """Runs ``attention(query, key, value)`` and its backward pass.

    Args:
        attention: returns out, or (out, lse).
        qkv: query, key and value.
        dout, dlse: the gradients of out (B, N, H, D) and lse (B, N, H). Where lse is -inf, dlse counts as 0.

    Examples:
        >>> q, k, v = testing.make_qkv(1, 16, 4, 8)
        >>> attention = da.DilatedAttention([4, 16], [1, 4])
        >>> testing.run(attention, (q, k, v), torch.ones_like(q)).dq.shape
        torch.Size([1, 16, 4, 8])
    """
    leaves = [x.detach().requires_grad_() for x in qkv]
    result = attention(*leaves)
    out, lse = result if isinstance(result, tuple) else (result, None)
    outputs, grads = [out], [dout.to(out.dtype)]
    if lse is not None and dlse is not None:
        outputs.append(lse)
        grads.append(dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0))
    dq, dk, dv = torch.autograd.grad(outputs, leaves, grads)
    return Results(out.detach(), None if lse is None else lse.detach(), dq, dk, dv)


def oracle(
    qkv: tuple[Tensor, ...],
    pattern: DilatedPattern,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    dtype: torch.dtype | None = torch.float64,
    **options: Any,
) -> Results:
    """Computes the reference results in float64; with dtype=None those of plain PyTorch in the inputs' own dtype.

    ``options`` are those of `reference.attention`, such as is_causal; the other arguments are those of `run`.

    Examples:
        >>> q, k, v = testing.make_qkv(1, 16, 4, 8)
        >>> expected = testing.oracle((q, k, v), da.DilatedPattern.longnet([4, 16], [1, 4]), torch.ones_like(q))
        >>> expected.out.dtype
        torch.float64
    """
    qkv = tuple(x if dtype is None else x.to(dtype) for x in qkv)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention(query, key, value, pattern, dtype=None, **options)

    return run(attention, qkv, dout, dlse)


def error(got: Tensor, expected: Tensor) -> float:
    """max|got - expected| / max(1, max|expected|); infinities must agree, and NaN anywhere is infinite."""
    if got.shape != expected.shape or not torch.equal(got.isinf(), expected.isinf()):
        return float("inf")
    if not expected.numel():
        return 0.0
    got, expected = (x.double().masked_fill(x.isinf(), 0.0) for x in (got, expected))
    value = ((got - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()
    return float("inf") if value != value else value


def errors(got: Results, expected: Results) -> dict[str, float]:
    """Computes max|got - expected| / max(1, max|expected|) of each result, by its name.

    It is infinite if shapes or infinities differ, or if there is a NaN.

    Examples:
        >>> q, k, v = testing.make_qkv(1, 16, 4, 8)
        >>> found = testing.run(da.DilatedAttention([4, 16], [1, 4]), (q, k, v), torch.ones_like(q))
        >>> testing.errors(found, found)
        {'out': 0.0, 'dq': 0.0, 'dk': 0.0, 'dv': 0.0}
    """
    wanted = dict(expected.items())
    return {name: error(value, wanted[name]) for name, value in got.items()}


def limits(expected: Results, plain: Results | None, dtype: torch.dtype) -> dict[str, float]:
    """The largest error allowed for each result, by the rule at the top of this file."""
    if dtype in TOLERANCE:
        return {name: TOLERANCE[dtype] for name, _ in expected.items()}
    assert plain is not None, f"{dtype} needs the results of plain PyTorch to compare with"
    wanted = dict(expected.items())
    return {
        name: (3 if name in ("dq", "dk", "dv") else 2) * plain_error(value, wanted[name], dtype)
        for name, value in plain.items()
    }


def plain_error(plain: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """The error of plain PyTorch, or that of rounding the largest value once if it is larger or if plain overflows."""
    largest = expected.masked_fill(expected.isinf(), 0.0).abs().max().item() if expected.numel() else 0.0
    once = torch.finfo(dtype).eps / 2 * min(1.0, largest)
    found = error(plain, expected)
    return max(found, once) if found < math.inf else once


def assert_exact(got: Results, expected: Results, plain: Results | None = None) -> None:
    """Raises AssertionError, which names every result that is too far from the oracle's.

    The limits are 1e-12 in float64 and 5e-6 in float32, times max(1, max|expected|). In half precision ``plain`` is
    needed, the results of plain PyTorch in the same dtype: the limits are twice its error, for gradients three times.

    Examples:
        >>> q, k, v = testing.make_qkv(1, 16, 4, 8)
        >>> got = testing.run(da.DilatedAttention([4, 16], [1, 4]), (q, k, v), torch.ones_like(q))
        >>> expected = testing.oracle((q, k, v), da.DilatedPattern.head_groups([4, 16], [1, 4]), torch.ones_like(q))
        >>> testing.assert_exact(got, expected)
    """
    allowed = limits(expected, plain, got.out.dtype)
    found = errors(got, expected)
    wrong = [f"{name} is off by {found[name]:.2e}, allowed {allowed[name]:.2e}" for name in found
             if not found[name] <= allowed[name]]  # fmt: skip
    assert not wrong, "; ".join(wrong)


def check(
    qkv: tuple[Tensor, ...],
    pattern: DilatedPattern,
    *,
    lse_gradient: bool = True,
    seed: int = 0,
    backend: str = "auto",
    **options: Any,
) -> None:
    """Compares `dilated_attention` on these inputs with the oracle: out, lse and the gradients.

    It returns nothing. It raises AssertionError, with the errors and limits, if one is too far off: see `assert_exact`.

    Args:
        qkv: query, key and value.
        pattern: the :class:`DilatedPattern`.
        lse_gradient: whether lse has a gradient, too.
        seed: for the random gradients of out and lse.
        backend: of `dilated_attention`.
        options: is_causal, scale, key_padding_mask, query_offset or cu_seqlens.

    Examples:
        >>> testing.check(testing.make_qkv(1, 100, 4, 8), da.DilatedPattern.longnet([16, 64], [1, 4]), is_causal=True)
    """
    query = qkv[0]
    generator = torch.Generator(query.device).manual_seed(seed)
    dout = torch.randn(query.shape, generator=generator, device=query.device).to(query.dtype)
    dlse = torch.randn(query.shape[:3], generator=generator, device=query.device) if lse_gradient else None
    fixed: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "backend": backend}

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return dilated_attention(query, key, value, pattern, **fixed, **options)

    got = run(attention, qkv, dout, dlse)
    plain = None if query.dtype in TOLERANCE else oracle(qkv, pattern, dout, dlse, dtype=None, **options)
    assert_exact(got, oracle(qkv, pattern, dout, dlse, **options), plain)
